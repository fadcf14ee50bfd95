"""The command line: parses it, runs its commands, and prints their results and messages."""

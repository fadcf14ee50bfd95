"""Starts a command of the user for each event of a run: it started, stalled, slowed down, ended."""

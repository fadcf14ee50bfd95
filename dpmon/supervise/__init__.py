"""The background process of a run: it starts the command, samples devices, and writes the history."""

"""The supervisor and the directory of a run: start, watch, keep, stop, read back."""

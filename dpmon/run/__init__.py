"""The directory of a run and its processes: create, watch, keep, stop, read."""

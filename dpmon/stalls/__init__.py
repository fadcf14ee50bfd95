"""Finds why a run makes no progress: what each rank does, whether this is plausible, and whom the others wait for."""

"""Conclusions from a run's record: pure functions of the store's answers."""

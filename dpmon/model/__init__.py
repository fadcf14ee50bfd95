"""Conclusions from the queries of a run's store. No module here uses I/O, clocks or threads."""

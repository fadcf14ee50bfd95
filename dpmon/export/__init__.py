"""`dpmon export`: a run's records in the formats that other programs read, a record at a time."""

from dpmon.export.command import ExportError, export

__all__ = ["ExportError", "export"]

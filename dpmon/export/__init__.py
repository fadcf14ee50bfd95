"""`dpmon export`: writes a run's records, one at a time, in formats that other programs read."""

from dpmon.export.command import ExportError, export

__all__ = ["ExportError", "export"]

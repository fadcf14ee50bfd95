"""The state that records fold into: pure data, no clock, no I/O, no threads."""

from dpmon.model.fold import fold
from dpmon.model.state import State

__all__ = ["State", "fold"]

"""What queries of the store return, beside tallies. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["GapRow", "LongRow", "Shape", "TimeRow", "TimeTogether"]


class TimeRow(NamedTuple):
    """What one process did in one stretch of time, in one mode: ns by activity."""

    start_s: int
    width_s: int
    process: int
    mode: str
    spent: Mapping[str, int]


class TimeTogether(NamedTuple):
    """What all processes did in one stretch of time: ns by activity, and the time in which there were processes.

    That is the time of the process that was there longest, since all of them are there up to the run's end.
    """

    covered_ns: int
    spent: Mapping[str, int]


class GapRow(NamedTuple):
    """A time between two steps; `ns` without pauses and waits for input."""

    process: int
    after_step: int
    before_step: int
    mode: str
    begin_ns: int
    end_ns: int
    ns: int


class LongRow(NamedTuple):
    """One of the longest steps, or the longest of some that were deleted: then `step` is None, and its times too."""

    process: int
    step: int | None
    mode: str
    kind: int
    start_ns: int
    wall_ns: int
    phases: Mapping[str, int]
    """ns by phase, without those of its calls."""


class Shape(NamedTuple):
    """Calls in which a layout got and gave the same sizes; numbers refer to the definitions of the process."""

    process: int
    mode: str
    kind: int
    layout: int
    virtual: bool
    inputs: int
    outputs: int
    replicas: tuple[tuple[int, int], ...]
    untimed: int
    """Why a device time is missing: an index of dpmon.record.codec.UNTIMED; 0 if none is."""
    calls: int

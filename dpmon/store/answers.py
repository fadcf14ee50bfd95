"""What queries of the store return, beside tallies. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["GapRow", "LongRow", "Shape", "TimeRow"]


class TimeRow(NamedTuple):
    """What one process did in one stretch of time, in one mode: ns by activity."""

    start_s: int
    width_s: int
    process: int
    mode: str
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
    """Inputs and outputs of each."""
    stages: tuple[tuple[int, int, int], ...]
    """The definition of each stage, its inputs and its outputs (0: it did not end)."""
    untimed: int
    """Why a device time is missing: an index of dpmon.record.codec.UNTIMED; 0 if none is."""
    calls: int

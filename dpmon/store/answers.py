"""What queries of the store return, beside tallies. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["GapRow", "LongRow", "MinuteRow", "Shape", "TimeRow"]


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
    """One of the longest steps, or the longest of some that were deleted (`step` is None).

    Of a deleted one `start_ns` is about when it began, and `phases` has at most one phase: the one that took most of
    it, with the least that this may have been.
    """

    process: int
    step: int | None
    mode: str
    kind: int
    start_ns: int
    wall_ns: int
    phases: Mapping[str, int]
    """ns by phase, without those of its calls."""


class MinuteRow(NamedTuple):
    """One figure of a device (-1: the host) in one minute, or (`start_s` -1) before all minutes that are known."""

    start_s: int
    device: int
    name: str
    samples: int
    total: float
    high: float


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

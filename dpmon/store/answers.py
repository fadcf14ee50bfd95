"""What queries of the store return, beside tallies. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpmon.record.kinds import Collective, bus_factor
from dpmon.record.wire import FAILED, GRAD, TRAINING


class TimeRow(NamedTuple):
    """What one process did in one stretch of time, in one mode: ns by activity."""

    start_s: int
    width_s: int
    process: int
    mode: str
    spent: Mapping[str, int]


class TimeTogether(NamedTuple):
    """What all processes did in one stretch of time: ns by activity."""

    start_s: int
    width_s: int
    longest_ns: int
    """Time of the process that accounts for the most."""
    spent: Mapping[str, int]


class PaceRow(NamedTuple):
    """The columns of a tally that a rate needs; None for an unknown value."""

    start_s: int
    process: int
    mode: str
    kind: int
    steps: int
    first_ns: int | None
    last_ns: int | None
    samples: int | None
    samples_n: int | None
    """Steps that know their samples."""
    wall_ns: int
    """Sum over the steps."""


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
    """Why a device time is missing: an index of dpmon.record.payloads.UNTIMED; 0 if none is."""
    calls: int


class Operation(NamedTuple):
    """The collectives of one operation and one size of process group in the samples of some time."""

    name: str
    size: int
    """Ranks of the group."""
    collectives: int
    bytes: int
    ended: int
    """How many have a known end; the next are of these."""
    timed_bytes: int
    ran_ns: int
    """From when each could begin to its end."""

    @property
    def alg_bytes_s(self) -> float | None:
        """Algorithm bandwidth, of all bytes over all time; None if it is unknown."""
        return self.timed_bytes / self.ran_ns * 1e9 if self.ran_ns and self.timed_bytes else None

    @property
    def bus_bytes_s(self) -> float | None:
        """Bus bandwidth; None if it is unknown."""
        found = self.alg_bytes_s
        return None if found is None else found * bus_factor(self.name, self.size)


class Communicated(NamedTuple):
    """The collectives in the samples of some time."""

    operations: tuple[Operation, ...] = ()
    """Those with most bytes first."""
    samples: int = 0
    """How often a step was sampled, of all processes."""
    launched: int = 0
    """Collectives that were launched in these samples."""
    why: str | None = None
    """Why none can be recorded."""


class LastSample(NamedTuple):
    """The newest time of a process in which every collective was recorded, mostly one step."""

    step: int | None
    start_ns: int
    wall_ns: int
    collectives: tuple[Collective, ...]
    """In order of launch."""


class CallHead(NamedTuple):
    """What is read of a call without its definitions."""

    id: int
    step: int
    layout: int
    mode: str
    flags: int
    end_ns: int
    payload: bytes

    @property
    def evaluates(self) -> bool:
        """Whether it is an evaluation's: neither in training mode nor with gradients."""
        return not self.flags & (TRAINING | GRAD)

    @property
    def failed(self) -> bool:
        """Whether it raised an exception."""
        return bool(self.flags & FAILED)


class Sample(NamedTuple):
    """What the charts show of one sample of a device (-1: of the host); None if it is unknown."""

    id: int
    t_ns: int
    device: int
    util: float | None
    """Per cent of the device, or of the host's processors."""
    mem_used: float | None
    """Bytes, as the next."""
    mem_total: float | None
    power: float | None
    """Watts."""
    run_mem: float | None
    """Bytes of the host's memory that the run's processes have."""

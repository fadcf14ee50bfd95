"""The results of the store's queries, except tallies. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpmon.record.history_rows import CallRow
from dpmon.record.kinds import Collective, Operation


class TimeRow(NamedTuple):
    """Activities of one process in one stretch of time and one mode (ns)."""

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
    """One of the longest steps, or the longest of several deleted steps (`step` is None).

    For a deleted step, `start_ns` is approximate, and `phases` has at most one phase: a lower bound of the time in the
    phase that took most of the step.
    """

    process: int
    step: int | None
    mode: str
    kind: int
    start_ns: int
    wall_ns: int
    phases: Mapping[str, int]
    """ns by phase, without the phases of its calls."""


class MinuteRow(NamedTuple):
    """One figure of a device (-1: the host) in one minute; `start_s` -1: in all time before the kept minutes."""

    start_s: int
    device: int
    name: str
    samples: int
    total: float
    high: float


class Shape(NamedTuple):
    """Calls of one layout with the same sizes of inputs and outputs, all as numbers of the process's definitions."""

    process: int
    mode: str
    kind: int
    layout: int
    virtual: bool
    inputs: int
    outputs: int
    replicas: tuple[tuple[int, int], ...]
    """Inputs and outputs of each replica."""
    stages: tuple[tuple[int, int, int], ...]
    """Definition, inputs and outputs (0: it did not end) of each stage."""
    untimed: int
    """Why a device time is missing: an index of dpmon.record.history_rows.UNTIMED; 0 if none is."""
    calls: int


class Communicated(NamedTuple):
    """The sampled collectives in a stretch of time."""

    operations: tuple[Operation, ...] = ()
    """The operations, those with the most bytes first."""
    samples: int = 0
    """Number of samples of all processes."""
    launched: int = 0
    """Number of collectives launched in these samples."""
    why: str | None = None
    """Why no collectives can be recorded; None if they can."""
    own: tuple[str, ...] = ()
    """The operations that the script called in its own work, outside the phases, sorted; from the newest samples."""


class LastSample(NamedTuple):
    """The newest sample of a process: usually one step, with its first collectives."""

    step: int | None
    start_ns: int
    wall_ns: int
    collectives: tuple[Collective, ...]
    """In order of launch."""


class CallHead(NamedTuple):
    """A call without its definitions."""

    id: int
    row: CallRow


class ChartSample(NamedTuple):
    """The values of one sample of a device (-1: the host) for the charts; None for unknown values."""

    id: int
    t_ns: int
    device: int
    util: float | None
    """Utilisation of the device, or of the host's processors (%)."""
    mem_used: float | None
    """Bytes in use; `mem_total` is also in bytes."""
    mem_total: float | None
    power: float | None
    """Watts."""
    run_mem: float | None
    """Bytes of the host's memory in use by the run's processes."""

"""What findings are found from: the figures of a whole run, or of as much of it as somebody has seen. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dpmon.model.communication import Communication
from dpmon.model.compare import Comparison
from dpmon.model.memory import Held
from dpmon.rates import Rate
from dpmon.store.answers import GapRow
from dpmon.store.figures import Counted, PhaseFigures


class ModeFacts(NamedTuple):
    """The steps of one mode, over all processes; ns. `phases`: of the step, and of its calls (part of forward)."""

    mode: str
    virtual: bool
    steps: int
    median_ns: float | None
    p95_ns: float | None
    rate: Rate | None
    phases: tuple[PhaseFigures, ...]
    early: Mapping[str, float]
    """Medians over the first third of the steps, by phase; `step` for the whole. Empty where there are few."""
    late: Mapping[str, float]
    """The same over the last third."""
    early_p75_ns: float | None = None
    late_p25_ns: float | None = None
    """Of the whole step: where most of the last third lies above most of the first, it is no noise."""
    mean_ns: float | None = None
    """Mean time of the whole step."""
    distributed: str | None = None
    """How its ranks trained one model together (a key of RANK_MODES): with one device each, so neither dp nor
    single."""
    counted: Counted = ()

    def share(self, *names: str) -> float:
        """The part of all step time that phases took together (0 to 1)."""
        return sum(phase.share or 0.0 for phase in self.phases if phase.name in names)

    def phase(self, name: str) -> PhaseFigures | None:
        """The figures of one phase; None if it did not run."""
        return next((phase for phase in self.phases if phase.name == name), None)


class BatchFacts(NamedTuple):
    """The calls of one root under dp: how often devices went without rows."""

    root: str
    devices: int
    calls: int
    idle_calls: int
    """Calls in which fewer replicas than devices received rows."""
    rows: int | None
    """Of the batch, most often among those calls; None if not seen."""
    idle: int
    """Devices without rows, most often among those calls."""


class ReplicaFacts(NamedTuple):
    """One replica in one mode: its rows (most often) and its forward's host time in ns; its device's, where known."""

    mode: str
    root: str
    replica: int
    device: str
    calls: int
    rows: int | None
    median_ns: float | None
    p95_ns: float | None
    virtual: bool
    device_ns: float | None = None
    """Median of what its device took for the forward."""
    device_calls: int = 0
    """In how many calls that is known."""
    untimed: str | None = None
    """Why it is known in none, if the record says."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU over the run; None where it was never known."""

    index: int
    name: str | None
    uuid: str | None
    called: str | None
    """What the run's processes call it, such as cuda:0."""
    of_run: bool | None
    samples: int
    util_median: float | None
    util_samples: int
    mem_used_max: float | None
    mem_run_max: float | None
    mem_total: float | None
    temperature_max: float | None
    power_max: float | None
    throttled: Mapping[str, int]
    """Samples by reason why the clocks were held down."""
    throttle_samples: int
    """Samples that knew whether they were."""


class HostFacts(NamedTuple):
    """The machine's processors over the run: medians of so many samples; None where it was never known."""

    samples: int
    cpus: int
    cpu_pct: float
    """Of all processors."""
    others: float
    """Processors that processes beside this run's kept busy."""
    own: float
    """Processors that the run's did."""
    load: float | None
    """Threads that ran or wanted to."""


class LongStep(NamedTuple):
    """A step among the longest of the run, and the phase that took most of it.

    Of a deleted one (its number is None) it is known how long it took, about when it began, and how much of it at least
    was in that phase; None if no phase took most of it for certain. INPUT: most of it was a wait for a line of input.
    """

    process: int
    step: int | None
    mode: str
    start_ns: int
    wall_ns: int
    phase: str | None
    phase_ns: int


class LoaderStart(NamedTuple):
    """A DataLoader that began to iterate: when, how long that took (ns), and what it is."""

    process: int
    start_ns: int
    took_ns: int
    workers: int | None
    persistent: bool


@dataclass(frozen=True)
class Evidence:
    """A run, as far as findings need it. Times in ns since its start."""

    modes: tuple[ModeFacts, ...] = ()
    batches: tuple[BatchFacts, ...] = ()
    replicas: tuple[ReplicaFacts, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    host: HostFacts | None = None
    memory: tuple[Held, ...] = ()
    longest: tuple[LongStep, ...] = ()
    """The longest steps, the longest first; not all that were long, where there are many."""
    spent: Mapping[str, int] = field(default_factory=dict)
    """Time of the run by activity (dpmon.store.accounting), ns."""
    gaps: tuple[GapRow, ...] = ()
    """The longer times between two steps, the longest first."""
    loaders: tuple[LoaderStart, ...] = ()
    compared: Comparison | None = None
    """dp against single; None where not both modes were seen."""
    communication: Communication | None = None
    """Of ranks; None for one process without a DistributedDataParallel."""
    processes: int = 0
    last_step_ns: int | None = None
    end_ns: int | None = None
    """When the run ended; None while it goes on."""
    raised: str | None = None
    """The exception that ended the run, with the rank and the line of the script."""
    paused_ns: int = 0
    """In pauses of all processes at once, which are in no step."""
    inputs: tuple[tuple[int | None, int, int], ...] = ()
    """Which process waited for a line of input (None: one that does not train), from when to when."""
    paused_after_ns: int = 0
    """The part of it that was after the last step."""

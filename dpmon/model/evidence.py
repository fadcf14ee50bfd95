"""The data behind findings: the figures of a run, or of its recorded part. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dpmon.model.communication import Communication
from dpmon.model.compare import Comparison
from dpmon.model.memory import Held
from dpmon.record.names import CALL_PHASES
from dpmon.store.answers import GapRow
from dpmon.store.figures import Counted, PhaseFigures, Rate


class ModeFacts(NamedTuple):
    """The steps of one process in one mode; times in ns. `phases` includes phases of calls (part of forward)."""

    mode: str
    virtual: bool
    steps: int
    """Number of its steps, which all figures except `rate` cover."""
    median_ns: float | None
    p95_ns: float | None
    rate: Rate | None
    """Of all processes."""
    phases: tuple[PhaseFigures, ...]
    early: Mapping[str, float]
    """Medians over the first third of the steps, by phase; `step`: of the whole step. Empty with too few steps."""
    late: Mapping[str, float]
    """The same over the last third."""
    early_p75_ns: float | None = None
    late_p25_ns: float | None = None
    """Step times: third quartile of the first third, first quartile of the last. They tell a drift from noise."""
    mean_ns: float | None = None
    """Mean time of the whole step."""
    distributed: str | None = None
    """How its ranks trained one model together (a key of RANK_MODES), which is neither dp nor single."""
    counted: Counted = ()
    process: int = 0
    who: str | None = None
    """The name of the process, such as "rank 0"; None if it is the only one."""
    rank: int | None = None
    other_steps: int = 0
    """Number of steps of the other processes in this mode."""
    calls: int = 0

    @property
    def all_steps(self) -> int:
        """Number of steps of all processes in this mode."""
        return self.steps + self.other_steps

    def share(self, *names: str) -> float:
        """The share of all step time that phases took together (0 to 1)."""
        return sum(phase.share or 0.0 for phase in self.phases if phase.name in names)

    def nested_phases(self) -> list[tuple[int, PhaseFigures]]:
        """The phases with their depth: those of the calls are one deeper, below forward, if it ran."""
        calls = [phase for phase in self.phases if phase.name in CALL_PHASES]
        rows: list[tuple[int, PhaseFigures]] = []
        for phase in self.phases:
            if phase.name not in CALL_PHASES:
                rows.append((0, phase))
                rows += [(1, part) for part in calls if phase.name == "forward"]
        return rows if any(depth for depth, _ in rows) else [*rows, *((0, part) for part in calls)]

    def phase(self, name: str) -> PhaseFigures | None:
        """The figures of one phase; None if it did not run."""
        return next((phase for phase in self.phases if phase.name == name), None)


class BatchFacts(NamedTuple):
    """The calls of one root under dp: how often devices received no rows."""

    root: str
    devices: int
    calls: int
    idle_calls: int
    """Calls in which some devices received no rows."""
    rows: int | None
    """The most frequent number of rows of the batch in those calls; None if not seen."""
    idle: int
    """The most frequent number of devices without rows in those calls."""


class ReplicaFacts(NamedTuple):
    """One replica in one mode: its most frequent rows, and its forward's host and device time in ns."""

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
    """Median device time of the forward."""
    device_calls: int = 0
    """Number of calls with a known device time."""
    untimed: str | None = None
    """Why no call has a device time, if the record gives a reason."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU over the run; None for unknown values."""

    index: int
    name: str | None
    uuid: str | None
    called: str | None
    """Its name in the run's processes, such as cuda:0."""
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
    """Number of samples with lowered clocks, by reason."""
    throttle_samples: int
    """Number of samples in which the reasons are known."""


class HostFacts(NamedTuple):
    """The machine's processors over the run: medians of `samples`; None for unknown values."""

    samples: int
    cpus: int
    cpu_pct: float
    """Use of all processors in per cent."""
    others: float
    """Processors kept busy by other processes."""
    own: float
    """Processors kept busy by the run's processes."""
    load: float | None
    """Threads that ran or wanted to run."""


class LongStep(NamedTuple):
    """A step among the longest of the run, and the phase that took most of it.

    A deleted step has no number (None), an approximate start, and a lower bound of the time in that phase. The phase is
    None if no phase certainly took most of the step, and INPUT if a wait for a line of input did.
    """

    process: int
    step: int | None
    mode: str
    start_ns: int
    wall_ns: int
    phase: str | None
    phase_ns: int


class LoaderStart(NamedTuple):
    """A DataLoader that began to iterate: start and duration (ns), and a description."""

    process: int
    start_ns: int
    took_ns: int
    workers: int | None
    persistent: bool
    pinned: bool = False
    start: int = 1
    """The number of this start of the DataLoader object, from 1."""


@dataclass(frozen=True)
class Evidence:
    """The facts of a run that findings need. Times in ns since its start."""

    modes: tuple[ModeFacts, ...] = ()
    """Each mode, by the process that the screen and the report show."""
    others: tuple[ModeFacts, ...] = ()
    """The same modes by each other process, without `early` and `late`."""
    batches: tuple[BatchFacts, ...] = ()
    replicas: tuple[ReplicaFacts, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    host: HostFacts | None = None
    memory: tuple[Held, ...] = ()
    longest: tuple[LongStep, ...] = ()
    """The longest steps, the longest first, up to a limit."""
    spent: Mapping[str, int] = field(default_factory=dict)
    """Time of the run by activity (dpmon.store.accounting), ns."""
    gaps: tuple[GapRow, ...] = ()
    """The longer times between two steps, the longest first."""
    loaders: tuple[LoaderStart, ...] = ()
    compared: Comparison | None = None
    """dp against single; None unless both modes were seen."""
    communication: Communication | None = None
    """The communication of ranks; None for one process without a DistributedDataParallel."""
    processes: int = 0
    """Number of processes that have called a model."""
    names: Mapping[int, str] = field(default_factory=dict)
    """The name of each process with steps, such as "rank 0"; empty if there is only one."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """The process id of each process that has called a model, if known."""
    last_step_ns: int | None = None
    end_ns: int | None = None
    """When the run ended; None while it runs, or if the supervisor did not record the end."""
    newest_ns: int = 0
    """The newest record of a live run."""
    stall: str | None = None
    """Where each process is, or was at the end, if no new phase has begun for long."""
    death: str | None = None
    """The end of a rank that noted no exception, if it is the first failure: "rank 1 was ended by SIGABRT"."""
    paused_ns: int = 0
    """Time in which all processes were paused; it belongs to no step."""
    inputs: tuple[tuple[int | None, int, int], ...] = ()
    """Waits for input: process (None: a process that does not train), start, end."""
    paused_after_ns: int = 0
    """The part of `paused_ns` after the last step."""

"""The state of a run at one time, built by dpmon.model.snapshot_builder.

Times are ns since the run's start; unknown values are None.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from dpmon.model.active_processes import find_training_processes
from dpmon.model.communication import Communication
from dpmon.model.device_memory import DeviceMemory, memory_of_processes
from dpmon.model.epoch_progress import NO_STEP, Progress
from dpmon.model.loss_curves import LossCurve
from dpmon.model.mode_comparison import Comparison
from dpmon.model.nodes import NodeStatus
from dpmon.model.rank_waits import RankWaits
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.slow_steps import SlowSteps, StepUnevenness
from dpmon.model.stragglers import RankTimes, Straggler
from dpmon.record.record_types import Call, Step
from dpmon.record.safe_json import number_member
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.record.schema import TRAINING
from dpmon.record.shared_names import RANK_MODES, node_suffix, rank_name
from dpmon.stalls.run_state import StateInputs
from dpmon.store.collectives import LastSample
from dpmon.store.loss_table import InvalidLoss
from dpmon.store.step_stats import Rate, StepStats, compute_step_stats
from dpmon.store.tally import Tally

MAX_RANKS = 64
"""Most ranks in a snapshot, unless more are requested."""
MAX_FULLY_READ = 128
"""With more processes than this, most values are read less often."""
MAX_LISTED_RANKS, MAX_LEAST_WAITING = 16, 10
"""More ranks than the first are drawn as a map, with the second number of ranks that wait least below it."""
PHASES = tuple(phase.display_name for phase in SCHEMA)
"""Names of the phases on the screen; `forward` is the part outside the phases of its calls."""
NO_STEPS = compute_step_stats("", tally=Tally(), rate=None)
"""The metrics of a time range without steps."""


class SnapshotRequest(NamedTuple):
    """The parts of a snapshot that a reader needs."""

    span_s: int = 120
    """Time range of the histories and metrics (s); 0 is the whole run."""
    first_rank: int = 0
    """The first of the visible ranks."""
    ranks: int = MAX_RANKS
    """Number of visible ranks. The run's first ranks, up to the same number, are also read."""
    over: bool = False
    """Whether the run has ended."""
    process: int | None = None
    """The process that the user has chosen; None for the one that represents the run."""
    slowest: int = 0
    """Number of the longest steps to include."""
    worst: int = 0
    """With many ranks, the number of the slowest ones that are visible; 0: as with few ranks."""
    listed: bool = False
    """Whether the visible ranks are listed, too, if the slowest ones are visible."""
    node: int | None = None
    """The number of the only node to include; None for all."""
    waits: bool = False
    """Whether to include over time which ranks the others waited for."""


class ModeChange(NamedTuple):
    """The reply to a request for a mode, or the mode at the start."""

    process: int
    mode: str
    root: str = ""
    t_ns: int | None = None
    step: int | None = None
    requested_by: str = ""
    devices: tuple[str, ...] = ()
    virtual: bool = False
    reason: str | None = None
    refused: str | None = None


class PauseChange(NamedTuple):
    """The training paused after a step, or resumed."""

    process: int
    t_ns: int
    step: int | None
    paused: bool
    paused_ns: int | None = None
    """Duration of the pause, for a resumption."""
    reason: str | None = None
    """Why the training resumed without a request."""
    refused: str | None = None
    """Why the training did not pause."""


class WarningRecord(NamedTuple):
    """A warning of dpmon, from the tracer (process) or from the supervisor (None)."""

    process: int | None
    t_ns: int | None
    text: str


class DeviceHistory(NamedTuple):
    """The newest sample of a GPU, or of the host, and its histories: one value per second, None if unknown."""

    data: Mapping[str, object] = {}
    t_ns: int | None = None
    second: int = -1
    """Time of the newest value."""
    util: tuple[float | None, ...] = ()
    """Utilization in per cent."""
    mem: tuple[float | None, ...] = ()
    """Used memory in per cent of the total."""
    power: tuple[float | None, ...] = ()
    """Watts."""

    @property
    def mem_pct(self) -> float | None:
        """Used memory in the newest sample, in per cent of the total."""
        used, total = number_member(self.data, "mem_used_bytes"), number_member(self.data, "mem_total_bytes")
        return used / total * 100 if used is not None and total else None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the history: the steps of one mode that ended in a time bucket. Sums in ns."""

    second: int
    """Start of the bucket."""
    mode: str
    count: int = 0
    """Number of steps; 0 if there were none."""
    wall_ns: int = 0
    begin_ns: int = 0
    """Start of its first step."""
    phases: tuple[int, ...] = (0,) * len(PHASES)
    """Sums in the order of PHASES."""
    other_kind: str = ""
    """Word for the kind of the steps if it is not the main kind of the run."""
    stalled: bool = False
    """Whether the run was stalled in this bucket, so that no step ended."""


class TimePercentiles(NamedTuple):
    """Times of one replica or stage in ns: 5th percentile, median, 95th percentile, and the number of calls."""

    low: float
    middle: float
    high: float
    calls: int


@dataclass(frozen=True, slots=True)
class CallTimings:
    """The last call of one root, and its replicas' times in similar calls."""

    last: Call
    times: tuple[TimePercentiles | None, ...] = ()
    """Host times, by replica or stage."""
    device_ns: Mapping[int, float] = field(default_factory=dict)
    """Median device time (ns) by replica or stage, if known."""
    parts: tuple[CallTimings, ...] = ()
    """If a step calls this root several times, the timings of its first call in a step, of its second, and so on."""


class ProcessInfo(NamedTuple):
    """What a training process reported about itself; None if it did not report it."""

    process: int
    rank: int | None = None
    world: int | None = None
    pid: int | None = None
    python: str | None = None
    torch: str | None = None


class ModeRefusal(NamedTuple):
    """A mode that a root refused, on request or at its start."""

    mode: str
    reason: str


class RecentRate(NamedTuple):
    """The last ten seconds of training in the current mode; `rate` is None if there are too few steps."""

    rate: Rate | None = None
    """The rate of all ranks that train together."""
    last_ns: int | None = None
    """The end of the last training step."""
    step_ns: int = 0
    """The mean time of a step, with the time between steps."""


@dataclass(frozen=True, slots=True)
class Process:
    """One training process of the run. Only processes in `RunSnapshot.drawn` have the fields after `memory`."""

    process: int
    rank: int | None = None
    info: ProcessInfo = field(default_factory=lambda: ProcessInfo(-1))
    node: str | None = None
    """The name of its node; None on one machine."""
    has_trained: bool = False
    """Whether it had a training step."""
    began_ns: int = -1
    """Start of its first step or call."""
    seen_ns: int = -1
    """End of its newest step or call."""
    last_step: Step | None = None
    """Its newest step, of any kind."""
    step_number: int = 0
    """Number of its newest training step; if the run never trains, of its newest step of the main kind."""
    mode: str = ""
    virtual: bool = False
    devices: tuple[str, ...] = ()
    mode_reason: str | None = None
    refusals: Mapping[str, ModeRefusal] = field(default_factory=dict)
    """By root, for the roots that refused in their last reply."""
    paused_since_ns: int | None = None
    """Start of its pause; None if it is not paused."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The newest record of the devices' memory."""
    calls: Mapping[tuple[str, str | None], CallTimings] = field(default_factory=dict)
    """By root and its wrapper; the root that was called last comes first."""
    earlier_wrappers: Set[str] = frozenset()
    """In an evaluation, which may call the bare model for long: the wrappers through which it has called models."""
    last_calls: tuple[Call, ...] = ()
    """The calls of its last step."""
    figures: StepStats = NO_STEPS
    """Its steps in the time range, if several processes train; only step, forward and backward."""
    trained: tuple[int, int] = 0, 0
    """Its numbers of training steps and of optimizer updates so far; only if it represents the run."""
    recent: RecentRate = field(default_factory=RecentRate)
    progress: Progress = NO_STEP
    """Its epoch and batch; with the time left only if it represents the run."""
    columns: tuple[Column, ...] = ()
    """The history in the time range, oldest first."""
    column_s: int = 1
    """Seconds per column."""
    ranged: StepStats = NO_STEPS
    """The steps of the current mode in the time range; of the last step's mode if there are none."""
    settled: StepStats = NO_STEPS
    """`ranged` without warm-up steps and without a rate; NO_STEPS if these steps are evaluations."""
    uneven: StepUnevenness | None = None
    """How uneven these steps are, if the median does not represent their speed."""
    whole: StepStats = NO_STEPS
    """The steps of the whole run, once it has ended."""
    mean: Rate | None = None
    """The rate in all modes, once the run has ended; of all processes together if it is one of several ranks."""
    compared: Comparison | None = None
    """Its dp steps against its single steps."""

    @property
    def number(self) -> int:
        """Its rank, or its process index if it has no rank."""
        return self.process if self.rank is None else self.rank

    @property
    def name(self) -> str:
        """Its name: "rank 1", "rank 11 (gpu-3)", "process 1"."""
        if self.rank is None:
            return f"process {self.process}{node_suffix(self.node)}"
        return rank_name(self.rank, self.node)

    @property
    def has_used_dp(self) -> bool:
        """Whether it trains in dp, or has done so."""
        return self.mode == "dp" or (self.compared is not None and "dp" in self.compared.seen)

    @property
    def last_called_root(self) -> CallTimings | None:
        """The timings of the root that was called last; None without a call."""
        return next(iter(self.calls.values()), None)

    @property
    def distributed(self) -> str | None:
        """How it trains one model together with other ranks (a key of RANK_MODES); None if it does not."""
        wrappers = {via for _, via in self.calls} | self.earlier_wrappers
        return next((wrapper for wrapper in RANK_MODES if wrapper in wrappers), None)


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run at one time."""

    processes: Mapping[int, Process] = field(default_factory=dict)
    nodes: tuple[NodeStatus, ...] = ()
    """The nodes of the run; empty if it runs on this machine only, or if the snapshot covers one of several nodes."""
    devices: Mapping[int, DeviceHistory] = field(default_factory=dict)
    host: DeviceHistory = field(default_factory=DeviceHistory)
    mode_changes: tuple[ModeChange, ...] = ()
    """The newest changes, oldest first; `pauses` and `warnings` likewise."""
    mode_change_count: int = 0
    """Number of all changes of mode."""
    pauses: tuple[PauseChange, ...] = ()
    warnings: tuple[WarningRecord, ...] = ()
    stalls: tuple[RecordedStall, ...] = ()
    inputs: tuple[tuple[int | None, int, int], ...] = ()
    """Waits for a line of input (`RunEvents.inputs`)."""
    warning_count: int = 0
    """Number of all warnings."""
    missed: int = 0
    """Number of records that were lost."""
    open_calls: int = 0
    """Calls so far of processes without a step."""
    at_ns: int | None = None
    """The time of the snapshot (ns since the run's start); None: now."""
    newest_ns: int = -1
    """End of the newest step or call."""
    main_kind: int = TRAINING
    """The kind of steps that describes the run (`Store.main_kind`)."""
    kind_words: Mapping[int, str] = field(default_factory=dict)
    """The word for each kind of steps (`Store.kind_words`)."""
    ended: frozenset[int] = frozenset()
    """Processes that have ended, according to a reader of the rings; the history does not have it."""
    over: bool = False
    """Whether the run has ended."""
    chosen: int | None = None
    """The process that the user has chosen to see."""
    communication: Communication | None = None
    """The communication of the ranks over their last steps; None if they do not train together."""
    losses: tuple[LossCurve, ...] = ()
    """The losses of the representative process, over the time of its columns."""
    unfit: InvalidLoss | None = None
    """The first loss of any process that was NaN or infinite."""
    slowest: SlowSteps = field(default_factory=SlowSteps)
    """The longest steps of the current mode in the time range."""
    order: tuple[int, ...] = ()
    """The process indices of `training_processes`, if they were determined already."""
    drawn: tuple[int, ...] = ()
    """The processes with all fields."""
    rank_waits: RankWaits | None = None
    """Which ranks the others waited for in the time range; None if it was not requested, or is unknown."""
    last_sample: LastSample | None = None
    """The newest sampled step of the representative process."""

    @cached_property
    def training_processes(self) -> list[Process]:
        """The processes that train now, by rank, the newest of each: a restarted job has several of one rank."""
        if self.order:
            return [self.processes[number] for number in self.order]
        newest_by_rank: dict[tuple[bool, int], Process] = {}
        for process in find_training_processes(self):
            key = (True, process.process) if process.rank is None else (False, process.rank)
            if key not in newest_by_rank or process.seen_ns > newest_by_rank[key].seen_ns:
                newest_by_rank[key] = process
        return [newest_by_rank[key] for key in sorted(newest_by_rank)]

    @cached_property
    def representative(self) -> Process | None:
        """The process that represents the run: of those that train now, the chosen one or the one of lowest rank.

        Before any process trains, it is the first of all.
        """
        usual = next(iter(self.training_processes), next(iter(self.processes.values()), None))
        if self.chosen is None:
            return usual
        return next((process for process in self.training_processes if process.process == self.chosen), usual)

    def with_histories(self, later: RunSnapshot) -> RunSnapshot:
        """Return a copy of this snapshot with the histories of a later one."""
        processes = {
            number: replace(process, columns=newer_process.columns, column_s=newer_process.column_s)
            if (newer_process := later.processes.get(number)) is not None and newer_process.columns
            else process
            for number, process in self.processes.items()
        }
        devices = {
            index: now._replace(data=self.devices[index].data) if index in self.devices else now._replace(data={})
            for index, now in later.devices.items()
        }
        host = later.host._replace(data=self.host.data)
        curves = {(curve.process, curve.place): curve for curve in later.losses}
        losses = tuple(
            replace(curve, points=newer.points, point_s=newer.point_s)
            if (newer := curves.get((curve.process, curve.place))) is not None
            else curve
            for curve in self.losses
        )
        waits = later.rank_waits
        return replace(self, processes=processes, devices=devices, host=host, losses=losses, rank_waits=waits)

    @cached_property
    def device_memory(self) -> list[DeviceMemory]:
        """The memory of each device, for the processes that trained last; if none did, for those that run."""
        trained = [process for process in self.training_processes if process.has_trained]
        trained = trained or [process for process in self.processes.values() if process.has_trained]
        processes = trained or self.training_processes
        return memory_of_processes(processes, max(processes, key=lambda process: process.seen_ns, default=None))

    @cached_property
    def processes_by_node(self) -> list[dict[int, int]]:
        """The newest process of each rank of each node, by the rank's number, in the order of `nodes`."""
        by_node = []
        for node in self.nodes:
            present = [process for process in node.processes if process in self.processes]
            by_node.append(dict(sorted((self.processes[process].number, process) for process in present)))
        return by_node

    @property
    def current_stall(self) -> RecordedStall | None:
        """The stall that has not ended; None if there is none."""
        last = self.stalls[-1] if self.stalls else None
        return last if last is not None and last.end_ns is None else None

    def state_inputs(
        self, now_ns: int, activities: Mapping[int, tuple[str, int]], paused_ns: int | None, input_ns: int | None
    ) -> StateInputs:
        """Return the facts that decide the word for a live run. `activities`: by process; empty in a playback.

        `paused_ns`, `input_ns`: since when it is paused, or waits for input, if a reader of the rings knows it. As of
        an earlier time, the events say so.
        """
        focus, stall = self.representative, self.current_stall
        if self.at_ns is not None and paused_ns is None and focus is not None:
            paused_ns = focus.paused_since_ns
        if self.at_ns is not None and input_ns is None:
            input_ns = next((start for _, start, end in self.inputs if start <= now_ns < end), None)
        return StateInputs(
            now_ns,
            False,
            paused_ns,
            input_ns,
            None if stall is None else stall.since_ns,
            None if focus is None else focus.last_step,
            self.newest_ns,
            self.open_calls,
            ("", 0) if focus is None else activities.get(focus.process, ("", 0)),
            self.kind_words.get(TRAINING if focus is None or focus.last_step is None else focus.last_step.kind, ""),
        )

    @cached_property
    def step(self) -> int | None:
        """The number of the newest step of the processes that train now; None before the first."""
        return max(
            [process.step_number for process in self.training_processes if process.last_step is not None],
            default=None,
        )

    @cached_property
    def straggler(self) -> Straggler | None:
        """The ranks that the others wait for; None if no rank stands out."""
        return None if self.communication is None else self.communication.straggler

    @property
    def ranks(self) -> tuple[RankTimes, ...]:
        """Mean times of the ranks that train together, over their last steps, by rank; empty for one process."""
        return () if self.communication is None else self.communication.ranks


def toggle_refusal(snapshot: RunSnapshot) -> str | None:
    """Return why no mode switch is possible now, in either direction; None if one may be possible."""
    process = snapshot.representative
    if process is None:
        return "no training process is known yet"
    distributed = process.distributed
    if distributed is not None:
        return f"the ranks train by {distributed}"
    if process.rank is not None and (process.info.world or 1) > 1:
        return "several ranks train, each on its own device"
    return None

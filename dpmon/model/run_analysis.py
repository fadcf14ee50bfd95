"""The analysis of a whole run, for report, summary and findings. Each value is queried once, when first needed.

Medians over several processes describe none of them, so the times of a mode are those of the process that
represents the run. Counts of steps and rates cover all processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dpmon.model.bucket_answers import BucketAnswers
from dpmon.model.communication import Communication, build_communication
from dpmon.model.device_memory import DeviceMemory
from dpmon.model.device_usage import DeviceUsage, DeviceUsageBuilder, HostUsage
from dpmon.model.epoch_progress import Progress, progress_of
from dpmon.model.layouts import (
    CallLayouts,
    IdleDeviceCounts,
    ReplicaStats,
    StageSizes,
    build_replica_stats,
    count_idle_devices,
    most_common,
)
from dpmon.model.loss_curves import LossCurve, read_loss_curves
from dpmon.model.mode_comparison import Comparison, compare_modes, first_with_both
from dpmon.model.mode_stats import ModeStats, RankSummary
from dpmon.model.pauses import (
    Pause,
    PauseTotals,
    Span,
    all_paused_intervals,
    any_paused_intervals,
    build_pauses,
    pause_totals,
)
from dpmon.model.rank_waits import RankWaits, read_rank_waits
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_events import LoaderStart, ProcessInfo, RunEvents, parse_loader_start
from dpmon.model.run_snapshot import DEFAULT_REQUEST, LazyFacts, RunSnapshot, SnapshotRequest
from dpmon.model.step_history import BinnedSteps, bin_steps, column_width_s
from dpmon.model.stragglers import RankTimes, rank_times_in_window
from dpmon.record.schema import SECOND, STALLED, STARTUP, STEP, STEP_PHASES, TRAINING, WARM_UP, device_series, step_kind
from dpmon.record.shared_names import CALL_PHASES
from dpmon.store.activity_times import read_times
from dpmon.store.collectives import read_collective_sums
from dpmon.store.device_rollups import read_device_minutes
from dpmon.store.events import iter_events, read_events
from dpmon.store.gaps import Gap, read_gaps
from dpmon.store.loss_table import InvalidLoss, find_invalid_losses
from dpmon.store.memory_growth import MemoryTrend
from dpmon.store.shapes import read_shapes
from dpmon.store.step_stats import StatsWindow, account_for_elapsed, compute_step_stats
from dpmon.store.steps import StepRow, find_next_step_ns, read_longest_steps, read_steps
from dpmon.store.tally import Tally
from dpmon.store.tally_tables import read_tally_rows
from dpmon.store.time_buckets import WIDTHS

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

MAX_LONG_STEPS = 64
"""Most long steps to read per mode, and to judge in total."""
MAX_GAPS = 10_000
MEMORY_EVENTS = 64
"""Most records of each kind to read for what memory holds; one sample per second."""
MAX_EPOCHS = 10_000
ACTIVE = ("training", "evaluation", "forward_only", "between")
"""The activities in which the training goes on."""
NO_TIME_IN_REPORT = "a report does not estimate it"
_FOREVER_NS = 1 << 62
MIN_STRETCHES = 60
"""Fewest buckets into which a run of a minute or more is divided to find its first and its last third."""
_MIN_STEPS_OF_THIRD = 30
"""Fewest steps in each of the two thirds for a comparison."""


class RunAnalysis(LazyFacts):
    """The analysis of one run, from its start to now or to its end. Times in ns since its start."""

    def __init__(
        self,
        store: Store,
        ended: frozenset[int] = frozenset(),
        end_ns: int | None = None,
        *,
        request: SnapshotRequest = DEFAULT_REQUEST,
        stop_asked_ns: int | None = None,
        death: str | None = None,
        raised: str | None = None,
    ) -> None:
        """`ended`: processes that have ended. `request`: for `state`. `stop_asked_ns`: when a stop was requested."""
        self.store = store
        self.end_ns = end_ns
        """When the run ended; None while it runs, or if the supervisor did not record the end."""
        self._stop_asked_ns = stop_asked_ns
        self.death = death
        """The end of a rank that recorded no exception, if it is the first failure: "rank 1 was ended by SIGABRT"."""
        self.raised = raised
        """The first exception, if the run failed: "rank 1: RuntimeError: no such token (train.py:12)"."""
        self.announced = RunEvents.read(store, read_all=True)
        self.open_calls = store.open_calls
        self.state = snapshot = RunSnapshot(store, request, ended, events=self.announced)
        """Its state as of now, with the metrics of a time range."""
        self._ranks = {number: process.rank for number, process in snapshot.processes.items()}
        self._nodes = {number: process.node for number, process in snapshot.processes.items()}
        self.nodes = snapshot.nodes
        representative = snapshot.representative
        self._focus = 0 if representative is None else representative.process
        self.window = StatsWindow(self.store)
        self.window.ranks = self._ranks
        processes = self.store.processes
        rank_counts = Counter(map(self.rank, processes))
        self.names = {process: self._name(process, rank_counts) for process in processes} if len(processes) > 1 else {}
        """The names of the processes with steps, such as "rank 0"; empty if there is only one."""

    # ------------------------------------------------------------------------------------------ processes

    def rank(self, process: int) -> int | None:
        """Return the rank of a process; None if it has none."""
        return self._ranks.get(process)

    def _name(self, process: int, rank_counts: Mapping[int | None, int]) -> str:
        name = self.state.processes[process].name
        is_ambiguous = self.rank(process) is not None and rank_counts[self.rank(process)] > 1
        return f"{name} (process {process})" if is_ambiguous else name

    @cached_property
    def layouts(self) -> CallLayouts:
        """The layouts and sizes of all calls."""
        shapes = read_shapes(self.store)
        return CallLayouts(shapes, {shape.process: self.store.resolver(shape.process).definitions for shape in shapes})

    @cached_property
    def stages(self) -> list[StageSizes]:
        """The inputs and outputs of each stage of a model on several devices."""
        return self.layouts.stages(self.window.tallies)

    @cached_property
    def batches(self) -> list[IdleDeviceCounts]:
        """The batches of each root under dp."""
        return count_idle_devices(self.layouts)

    @cached_property
    def replicas_by_kind(self) -> list[ReplicaStats]:
        """Each replica with its rows and times, by kind of its calls."""
        return build_replica_stats(self.layouts, self.window.tallies_by_process)

    @cached_property
    def replicas(self) -> list[ReplicaStats]:
        """Each replica with its rows and times in calls of the main kind."""
        return [replica for replica in self.replicas_by_kind if replica.kind == self.layouts.main_kind]

    @cached_property
    def calls(self) -> int:
        """Number of calls, including deleted ones and those outside steps."""
        return self.layouts.all_calls + self.open_calls

    @cached_property
    def processes(self) -> list[int]:
        """The processes with steps or calls, by rank; those without a rank are last."""
        processes = {*self.store.processes, *self.layouts.processes}
        return sorted(processes, key=lambda process: (self.rank(process) is None, self.rank(process) or 0, process))

    @cached_property
    def communication(self) -> Communication | None:
        """The communication of the ranks; None if no ranks train together."""
        rank_of_process = {process: info.rank for process, info in self.announced.info.items()}
        ranks = rank_times_in_window(self.window, rank_of_process, self._nodes)
        steps = sum(self.window.tally(mode).steps for mode in self.window.modes)
        tally, _ = self.window.process_totals(self._representative_trainer)
        collectives = read_collective_sums(self.store)
        return build_communication(ranks, self.announced.wrappers, collectives, steps, tally=tally, lately=False)

    @cached_property
    def rank_waits(self) -> RankWaits:
        """Which ranks the others waited for, over the whole run; for each rank, of its newest process."""
        if self.communication is None or not self.communication.ranks_with_waits:
            return RankWaits()
        ranks = {process.process: process.rank for process in self.state.training_processes if process.rank is not None}
        last_s = (self.last_step_ns or 0) // SECOND
        return read_rank_waits(self.store, BucketAnswers(), ranks, self.first_step_ns // SECOND, last_s + 1)

    @cached_property
    def ranks(self) -> list[RankSummary]:
        """Each process, by rank; empty if there is only one."""
        communication = self.communication
        if len(self.processes) < 2:
            return []
        times = {rank.process: rank for rank in communication.ranks} if communication is not None else {}
        return [self._rank(process, times) for process in self.processes]

    def _rank(self, process: int, times: Mapping[int, RankTimes]) -> RankSummary:
        sizes, (tally, rate) = self.layouts.of_process(process), self.window.process_totals(process)
        info = self.announced.info.get(process, ProcessInfo(process))
        forward = tally.stat(device_series("forward"))
        untimed = next((step.untimed for step in read_steps(self.store, 1, process=process)), None)
        return RankSummary(
            process,
            info.rank,
            info.world,
            *sizes,
            tally.steps,
            tally.median(STEP),
            rate,
            forward.median,
            None if forward.count else untimed or most_common(self.layouts.untimed_reasons(process)),
            times.get(process),
            self._nodes.get(process),
        )

    @cached_property
    def memory(self) -> list[DeviceMemory]:
        """The memory of each device, for the processes that trained last."""
        return self.state.device_memory

    @cached_property
    def memory_trends(self) -> list[MemoryTrend]:
        """Whether memory grows, on the host and on each GPU."""
        return self.state.memory_trends

    @cached_property
    def memory_events(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The newest records, by kind, that say what memory holds and why it was too little."""
        kinds = "growth", "host", "exit"
        return {kind: [event.data for event in read_events(self.store, kind, limit=MEMORY_EVENTS)] for kind in kinds}

    # ------------------------------------------------------------------------------------------ modes

    def representative_process(self, mode: str, kind: int | None = None) -> int:
        """Return the process that represents a mode: the one of the run, or else the lowest rank with a step in it."""
        return next(
            (process for process in (self._focus, *self.processes) if self.window.tally(mode, kind, process).steps),
            self._focus,
        )

    @property
    def _representative_trainer(self) -> int:
        """The process that represents the run; if it only evaluates, the lowest rank that trains."""
        candidates = [self.representative_process(mode) for mode in self.window.modes]
        if self._focus in candidates or not candidates:
            return self._focus
        return candidates[0]

    def mode(self, mode: str, kind: int | None = None, process: int | None = None) -> ModeStats:
        """Return the metrics of a mode for `process`, by default the representative one; `rate` is of all.

        `kind`: the kind of its steps; None for the main kind.
        """
        kind = self.window.main_kind if kind is None else kind
        process = self.representative_process(mode, kind) if process is None else process
        whole = self._mode(mode, kind, process, self.window.tally(mode, kind, process))
        tally = self.window.tally(mode, kind, process, without_warmup=True)
        settled = replace(self._mode(mode, kind, process, tally), warm_up_steps=whole.steps - tally.steps)
        return replace(whole, settled=settled)

    def _mode(self, mode: str, kind: int, process: int, tally: Tally) -> ModeStats:
        stats = compute_step_stats(mode, tally=tally, rate=self.window.rate(mode, kind), kind=kind)
        phases = {phase.name: phase for phase in stats.phases if phase.ran}
        ordered = tuple(phases[name] for name in (*STEP_PHASES, *CALL_PHASES) if name in phases)
        return ModeStats(
            **{**vars(stats), "phases": ordered},
            virtual=self.layouts.virtual and mode == "dp",
            distributed=self.layouts.distributed_by_kind.get(kind) if mode == "single" else None,
            process=process,
            process_name=self.names.get(process),
            other_kind=self.store.other_kind(kind),
        )

    @cached_property
    def other_modes(self) -> list[ModeStats]:
        """Each mode with its steps of another kind than the main kind."""
        return [self.mode(mode, kind) for mode, kind in self.window.other_modes]

    @cached_property
    def modes(self) -> tuple[ModeStats, ...]:
        """Each mode with its steps of the main kind, and the first and the last third of these."""
        return tuple(self._with_thirds(self.mode(mode)) for mode in self.window.modes)

    def _with_thirds(self, stats: ModeStats) -> ModeStats:
        """Add the first and the last third of the steps, if there are enough steps."""
        rows = [
            (start_s, tally)
            for start_s, _, key, tally in read_tally_rows(self.store, process=stats.process, widest=self.bin_s)
            if (key.mode, step_kind(key.kind)) == (stats.mode, stats.kind) and not key.kind & WARM_UP
        ]
        first, last = _first_and_last_third(rows, sum(tally.steps for _, tally in rows))
        if min(first.steps, last.steps) < _MIN_STEPS_OF_THIRD:
            return stats
        return replace(stats, early=first, late=last)

    @cached_property
    def steps(self) -> int:
        """Number of steps of the main kind (see `StatsWindow.step_counts`)."""
        return self.window.step_counts(self.window.main_kind)[0]

    @property
    def slow_start_ns(self) -> int:
        """The longest first step of a process that counts as start-up; 0 if none does."""
        startup_tallies = [tally for key, tally in self.window.left_out.items() if key.kind & STARTUP]
        return max((tally.stat(STEP).total for tally in startup_tallies), default=0)

    @property
    def stalled_steps(self) -> int:
        """Number of steps in which the run stalled; ranks train in the same steps."""
        steps_by_process: Counter[int] = Counter()
        for key, tally in self.window.left_out.items():
            steps_by_process[key.process] += tally.steps * bool(key.kind & STALLED)
        return max(steps_by_process.values(), default=0)

    @cached_property
    def other_process_modes(self) -> tuple[ModeStats, ...]:
        """The same modes by each other process, without `early` and `late`."""
        others = (
            self.mode(stats.mode, process=process)
            for stats in self.modes
            for process in self.store.processes
            if process != stats.process
        )
        return tuple(stats for stats in others if stats.steps)

    @cached_property
    def progress(self) -> Progress:
        """The epochs of the process that represents the training, and its current one."""
        last = next(iter(read_steps(self.store, 1, process=self._representative_trainer)), None)
        return progress_of(self.store, self._representative_trainer, last, limit=MAX_EPOCHS, no_time=NO_TIME_IN_REPORT)

    # ------------------------------------------------------------------------------------------ time

    @cached_property
    def first_step_ns(self) -> int:
        """The start of the first step; 0 without steps."""
        return min((first for first, _ in self.window.step_intervals.values()), default=0)

    @cached_property
    def last_step_ns(self) -> int | None:
        """The end of the last step; None without steps."""
        return max((last for _, last in self.window.step_intervals.values()), default=None)

    @cached_property
    def bin_s(self) -> int:
        """The widest bucket of tallies (s) that divides the time of the steps into MIN_STRETCHES; at least 1 s."""
        seconds = ((self.last_step_ns or 0) - self.first_step_ns) / SECOND
        return max((width for width in WIDTHS if width * MIN_STRETCHES <= seconds), default=1)

    @cached_property
    def until_ns(self) -> int:
        """The end of the run; of a live run, its newest record."""
        return max(self.last_step_ns or 0, self.samples.last_ns) if self.end_ns is None else self.end_ns

    def spent_until(self, until_ns: int) -> Mapping[str, int]:
        """Return the time of each activity (ns) from the run's start to `until_ns`; empty without steps.

        A stall after the last step is "stalled", not "ending".
        """
        if not self.window.step_intervals:
            return {}
        spent = account_for_elapsed(self.window.time_by_activity, until_ns, self.window.alive_intervals)
        stall = final_stall(self.announced.stalls, self.last_step_ns or 0)
        stalled_ns = 0 if stall is None else min(stall.duration_ns(until_ns), spent["ending"])
        return {**spent, "stalled": spent["stalled"] + stalled_ns, "ending": spent["ending"] - stalled_ns}

    @cached_property
    def time_by_activity(self) -> Mapping[str, int]:
        """The time of each activity (dpmon.store.time_accounting) in the whole run, ns."""
        return self.spent_until(self.until_ns)

    @property
    def active_ns(self) -> int:
        """The time of training and evaluation steps, and between them, ns."""
        return sum(self.time_by_activity.get(name, 0) for name in ACTIVE)

    @cached_property
    def spent_by_process(self) -> Mapping[int, Mapping[str, int]]:
        """The time of each activity of each process in the whole run, ns."""
        times: dict[int, Counter[str]] = {}
        for row in self.window.times:
            times.setdefault(row.process, Counter()).update(row.spent)
        return times

    def final_evaluation_ns(self, process: int) -> int:
        """Return the time (ns) of a process's evaluations after its last training step; 0 if it never trained."""
        ends = [
            tally.last_ns or 0
            for key, tally in self.window.tallies.items()
            if key.process == process and step_kind(key.kind) == TRAINING
        ]
        if not ends:
            return 0
        return sum(row.spent["evaluation"] for row in read_times(self.store, max(ends) // SECOND, process=process))

    @cached_property
    def gaps(self) -> list[Gap]:
        """The longest times between two steps, the longest first."""
        return read_gaps(self.store, MAX_GAPS)

    @cached_property
    def loaders(self) -> list[LoaderStart]:
        """The starts of loaders, in order of time."""
        return [parse_loader_start(event.data) for event in read_events(self.store, "loader")]

    @cached_property
    def binned_steps(self) -> BinnedSteps:
        """The steps over time, for the representative process of each mode."""
        if self.last_step_ns is None:
            return BinnedSteps()
        median = max((stats.median_ns for stats in self.modes if stats.median_ns is not None), default=0)
        shown = [*((mode, self.window.main_kind) for mode in self.window.modes), *self.window.other_modes]
        processes = {(mode, kind): self.representative_process(mode, kind) for mode, kind in shown}
        return bin_steps(self.store, self.first_step_ns, self.last_step_ns, median, processes)

    @cached_property
    def pauses(self) -> list[Pause]:
        """All pauses, and refused requests."""
        newest_ns = max((step.start_ns for step in read_steps(self.store, 1)), default=-1)
        return build_pauses(self.announced.pauses, partial(find_next_step_ns, self.store), newest_ns)

    @cached_property
    def pause_totals(self) -> PauseTotals:
        """The totals of the pauses."""
        return pause_totals(self.pauses, self.end_ns)

    @cached_property
    def paused(self) -> list[Span]:
        """The times in which all present processes were paused."""
        return all_paused_intervals(self.pauses, self.window.step_intervals, self.until_ns)

    @property
    def paused_alone_ns(self) -> int:
        """Time (ns) in which one process was paused and another was not."""
        any_paused = any_paused_intervals(self.pauses, self.until_ns)
        return sum(end - start for start, end in any_paused) - sum(end - start for start, end in self.paused)

    # ------------------------------------------------------------------------------------------ losses

    @cached_property
    def losses(self) -> tuple[LossCurve, ...]:
        """The losses of the process that represents the training, over the whole run."""
        end_s = (self.last_step_ns or 0) // SECOND + 1
        return read_loss_curves(self.store, self._representative_trainer, 0, end_s, column_width_s(0, end_s))

    @cached_property
    def first_invalid_losses(self) -> list[InvalidLoss]:
        """The first NaN or infinite loss of each process and line that calls backward, in order of time."""
        return find_invalid_losses(self.store)

    # ------------------------------------------------------------------------------------------ devices

    @cached_property
    def samples(self) -> DeviceUsageBuilder:
        """The samples of GPUs and host."""
        usage = DeviceUsageBuilder(all_paused_intervals(self.pauses, self.window.step_intervals, _FOREVER_NS))
        for row in read_device_minutes(self.store):
            usage.add_rollup(row)
        for event in iter_events(self.store, "device", "host"):
            usage.add_sample(event.kind, event.data)
        return usage

    @cached_property
    def devices(self) -> tuple[DeviceUsage, ...]:
        """Each sampled GPU."""
        return self.samples.gpus()

    @cached_property
    def host(self) -> HostUsage | None:
        """The CPU use of the host; None if it was not sampled."""
        return self.samples.processors()

    # ------------------------------------------------------------------------------------------ long steps

    @cached_property
    def longest_steps(self) -> list[StepRow]:
        """The longest steps of the main kind that still have a row, the longest first.

        A step that was running when the user asked the run to stop lasts until the process ends, so it does not count.
        """
        candidates = [
            step for mode in self.window.modes for step in read_longest_steps(self.store, MAX_LONG_STEPS, mode)
        ]
        stop_ns = -1 if self._stop_asked_ns is None else self._stop_asked_ns
        steps = (step for step in candidates if not step.start_ns <= stop_ns < step.start_ns + step.wall_ns)
        return sorted(steps, key=lambda step: -step.wall_ns)

    @cached_property
    def mode_comparison(self) -> Comparison | None:
        """dp against single; None unless both modes were seen."""
        process = first_with_both(self.window)
        devices, virtual = self.announced.devices_by_mode(process).get("dp", ((), False))
        comparison = compare_modes(self.window, process, devices=devices, virtual=virtual)
        return comparison if len(comparison.sides) > 1 else None


def _first_and_last_third(rows: Sequence[tuple[int, Tally]], steps: int) -> tuple[Tally, Tally]:
    """Return the tallies of the first and the last third of the steps, as exactly as `rows` allow.

    `rows`: tallies in order of time, with any number before each.
    """
    first, last = Tally(), Tally()
    for _, tally in rows:
        if first.steps + tally.steps > steps / 3:
            break
        first.merge(tally)
    for _, tally in reversed(rows):
        if last.steps + tally.steps > steps / 3:
            break
        last.merge(tally)
    return first, last

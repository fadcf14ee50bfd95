"""A run as of a time, and its processes: every fact is queried when it is first needed.

Times are ns since the run's start; unknown values are None. The history must be open when a fact is queried, so
`dpmon.model.snapshot_builder` queries all facts of the processes that are drawn.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from dpmon.model.active_processes import find_training_processes
from dpmon.model.bucket_answers import BucketAnswers
from dpmon.model.communication import Communication, Wrapper, build_communication
from dpmon.model.device_memory import DeviceMemory, memory_of_processes
from dpmon.model.device_usage import DeviceHistory, DeviceSampleCache, mode_starts, read_peaks_by_mode
from dpmon.model.epoch_progress import NO_STEP, OTHER_RANK, OVER, Progress, progress_of
from dpmon.model.loss_curves import LossCurve, read_loss_curves
from dpmon.model.mode_comparison import Comparison, compare_modes
from dpmon.model.nodes import NodeStatus, node_of, read_nodes
from dpmon.model.rank_stats import RANKS_A_SECOND, read_range_stats, read_rank_times
from dpmon.model.rank_waits import RankWaits, choose_ranks_to_show, read_rank_waits
from dpmon.model.recent_calls import CALLS_READ, CallTimings, RecentCalls, Root
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.run_events import (
    ActiveMode,
    ModeRefusal,
    ProcessInfo,
    RunEvents,
)
from dpmon.model.slow_steps import SlowSteps, StepUnevenness, read_slow_steps, read_unevenness
from dpmon.model.step_history import COLUMNS, Column, column_width_s, read_columns, subtract_input_waits
from dpmon.model.stragglers import RankTimes, Straggler, wait_of
from dpmon.model.throughput import MAX_RATES, WINDOW_S, RecentRate, read_recent_rate, sample_unevenly
from dpmon.record.record_types import Call, Step
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.record.schema import SECOND, TRAINING, WARM_UP
from dpmon.record.shared_names import RANK_MODES, node_suffix, rank_name
from dpmon.stalls.run_state import StateInputs
from dpmon.store.collectives import CollectiveSums, LastSample, read_collective_sums, read_last_sample
from dpmon.store.events import newest_event_id, read_newest_memory
from dpmon.store.loss_table import InvalidLoss, find_invalid_losses
from dpmon.store.memory_growth import MemoryTrend, read_memory_trends
from dpmon.store.shapes import read_wrapper_types
from dpmon.store.step_stats import Rate, StatsWindow, StepStats, compute_step_stats
from dpmon.store.steps import find_step_number, read_first_activity_ns, read_newest_activity, read_newest_steps
from dpmon.store.tally import Tally
from dpmon.store.tally_tables import count_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpmon.store.store_queries import Store

MAX_RANKS = 64
"""Most ranks in a snapshot, unless more are requested."""
MAX_FULLY_READ = 128
"""With more processes than this, most values are read less often."""
MAX_LISTED_RANKS = 16
"""More ranks than this are drawn as a map, with the MAX_LEAST_WAITING ranks that wait least below it."""
PHASES = tuple(phase.display_name for phase in SCHEMA)
"""Names of the phases on the screen; `forward` is the part outside the phases of its calls."""
NO_STEPS = compute_step_stats("", tally=Tally(), rate=None)
"""The metrics of a time range without steps."""
MIN_CALLS_READ = 8
COLLECTIVES_S = 300
"""Seconds of sampled collectives to show; only some steps are sampled."""
_MAX_AGE_S = 8
"""With many processes, facts about all of them are at most this old."""
_COMPARISONS_PER_RUN = 60
"""The modes are compared again when the run has become longer by this fraction (1/60) of its duration."""
_MAX_SEARCHED_IDS = 100_000
"""Most ids that are searched for the longest steps."""
_STEPS_SEARCHED_A_SECOND = 1000
"""If more steps than this are searched for the longest ones, they are searched less often."""
_MAX_STALLS = 4
"""Most stalls that are left out of the comparison of ranks: older ones are before its time range."""
_Fact = TypeVar("_Fact")


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


DEFAULT_REQUEST = SnapshotRequest()


class LazyFacts:
    """Facts that are queried when first needed."""

    _derived: ClassVar[tuple[str, ...]] = ()
    """Those that follow from others without a query."""

    def with_facts(self, **facts: Any) -> Self:
        """Return a copy with other facts."""
        changed = copy(self)
        for name in self._derived:
            vars(changed).pop(name, None)
        vars(changed).update(facts)
        return changed

    def query_everything(self) -> None:
        """Query all facts, so that none of them needs the history any more."""
        for name, member in vars(type(self)).items():
            if isinstance(member, cached_property) and not name.startswith("_"):
                getattr(self, name)


class _NewestRecords(NamedTuple):
    """The newest records of a process."""

    step: Step | None = None
    step_number: int = 0
    mode: str = ""
    """The mode of its newest step or call."""
    seen_ns: int = -1
    began_ns: int = -1
    memory: Mapping[str, Any] = {}


_NO_RECORDS = _NewestRecords()


class Process(LazyFacts):
    """One training process of the run. Facts after `memory` are empty for processes outside `RunSnapshot.drawn`."""

    def __init__(
        self,
        process: int,
        run: RunSnapshot,
        newest: _NewestRecords = _NO_RECORDS,
        node: str | None = None,
    ) -> None:
        self._run, self._events, self._at_ns = run, run.events, run.at_ns
        self._newest = newest
        self.process = process
        self.has_trained = process in run.trained_processes
        """Whether it had a training step."""
        self.info = self._events.info.get(process) or ProcessInfo(process)
        rank = run.rank_by_process.get(process)
        self.rank = self.info.rank if rank is None else rank
        self.node = node
        """The name of its node; None on one machine."""
        self.began_ns = newest.began_ns
        """Start of its first step or call."""
        self.seen_ns = newest.seen_ns
        """End of its newest step or call."""
        self.last_step = newest.step
        """Its newest step, of any kind."""
        self.step_number = newest.step_number
        """Number of its newest training step; if the run never trains, of its newest step of the main kind."""
        self.memory = newest.memory
        """The newest record of the devices' memory."""

    def belongs_to(self, run: RunSnapshot) -> bool:
        """Return whether it was read for this snapshot, not for an earlier one."""
        return self._run is run

    def forget_run(self) -> None:
        """Forget the run, which refers to this process: Python frees what refers to each other late."""
        self._run = _NO_RUN
        for name in ("_range", "_whole_run"):
            vars(self).pop(name, None)

    @cached_property
    def _active_mode(self) -> ActiveMode:
        return self._events.active_mode(self.process, self.last_step, self._newest.mode)

    @cached_property
    def mode(self) -> str:
        """The mode in which it trains."""
        return self._active_mode.mode

    @cached_property
    def mode_reason(self) -> str | None:
        """Why it trains in this mode."""
        return self._active_mode.mode_reason

    @cached_property
    def refusals(self) -> Mapping[str, ModeRefusal]:
        """The refused mode by root, for the roots that refused in their last reply."""
        return self._events.refusals_by_root(self.process)

    @cached_property
    def paused_since_ns(self) -> int | None:
        """Start of its pause; None if it is not paused."""
        return self._events.paused_since(self.process, None if self.last_step is None else self.last_step.start_ns)

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

    # ------------------------------------------------------------------------------------------ calls

    @property
    def _is_drawn(self) -> bool:
        return self.process in self._run.drawn

    @property
    def _is_representative(self) -> bool:
        return self._run.representative is self

    def _read_calls(self) -> tuple[Mapping[Root, CallTimings], tuple[Call, ...]]:
        limit, step = MIN_CALLS_READ, self.last_step
        if self._is_representative:  # the calls of one rank are interleaved with those of all others
            rank_count = max(len(self._run.rank_by_process), RANKS_A_SECOND)
            limit = max(CALLS_READ * RANKS_A_SECOND // rank_count, MIN_CALLS_READ)
        recent_calls = RecentCalls(self._run.store, self.process, limit)
        tallies = self._range.tallies if self._is_representative and step is not None else {}
        mode = self.mode if step is None else step.mode
        timings = recent_calls.timings(tallies, mode, timed=self._is_representative)
        return timings, () if step is None else recent_calls.calls_of(step)

    @cached_property
    def _newest_calls(self) -> tuple[Mapping[Root, CallTimings], tuple[Call, ...]]:
        """Its last calls, and those of its last step. Of one of many processes, they are some seconds old."""
        if not self._is_drawn:
            return {}, ()
        age_s = _MAX_AGE_S * (self._run.has_many and not self._is_representative)
        return self._run.read_at_most_every(age_s, ("calls", self.process), self._read_calls)

    @cached_property
    def calls(self) -> Mapping[Root, CallTimings]:
        """The last call by root and its wrapper; the root that was called last comes first.

        Those of the process that represents the run have their times.
        """
        return self._newest_calls[0]

    @cached_property
    def last_calls(self) -> tuple[Call, ...]:
        """The calls of its last step."""
        return self._newest_calls[1]

    @cached_property
    def _last_call_in_mode(self) -> Call | None:
        calls = (timing.last for timing in self.calls.values())
        return next((call for call in calls if call.mode == self.mode and call.devices), None)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices on which it trains."""
        call = self._last_call_in_mode
        return self._active_mode.devices if call is None else call.devices

    @cached_property
    def virtual(self) -> bool:
        """Whether its replicas are virtual."""
        call = self._last_call_in_mode
        return self._active_mode.virtual if call is None else call.virtual

    @cached_property
    def earlier_wrappers(self) -> Set[str]:
        """In an evaluation, which may call the bare model for long: the wrappers through which it has called models."""
        if not self._is_drawn or self.last_step is None or self.last_step.kind == TRAINING:
            return frozenset()
        return read_wrapper_types(self._run.store, self.process)

    @property
    def last_called_root(self) -> CallTimings | None:
        """The timings of the root that was called last; None without a call."""
        return next(iter(self.calls.values()), None)

    @property
    def distributed(self) -> str | None:
        """How it trains one model together with other ranks (a key of RANK_MODES); None if it does not."""
        wrappers = {via for _, via in self.calls} | self.earlier_wrappers
        return next((wrapper for wrapper in RANK_MODES if wrapper in wrappers), None)

    @cached_property
    def progress(self) -> Progress:
        """Its epoch and batch; with the time left only if it represents the run."""
        if not self._is_drawn or (self._is_representative and self.last_step is None):
            return NO_STEP
        if not self._is_representative:
            return progress_of(self._run.store, self.process, self.last_step, limit=1, no_time=OTHER_RANK)
        return progress_of(self._run.store, self.process, self.last_step, no_time=OVER if self._run.over else None)

    @cached_property
    def figures(self) -> StepStats:
        """Its steps in the time range, if several processes are listed; only step, forward and backward."""
        return self._run.range_stats.get(self.process, NO_STEPS)

    # ------------------------------------------------------------------------------------------ of the representative

    @property
    def _is_measured(self) -> bool:
        return self._is_representative and self.last_step is not None

    @cached_property
    def end_s(self) -> int:
        """The second before which its metrics end; they include its newest step.

        As of a time in the past, they include only whole seconds, unless the process has none yet.
        """
        if self.last_step is None:
            return 0
        end_s = (self.last_step.start_ns + self.last_step.wall_ns) // SECOND + 1
        until_s = end_s if self._at_ns is None else self._at_ns // SECOND
        return end_s if until_s <= self.began_ns // SECOND + 1 else min(end_s, until_s)

    @cached_property
    def _whole_run(self) -> StatsWindow:
        return StatsWindow(self._run.store, 0, self.end_s, self.process)

    @cached_property
    def _range(self) -> StatsWindow:
        start_s = max(self.end_s - self._run.request.span_s, 0) if self._run.request.span_s else 0
        return StatsWindow(self._run.store, start_s, self.end_s, self.process) if start_s else self._whole_run

    @cached_property
    def trained(self) -> tuple[int, int]:
        """Its numbers of training steps and of optimizer updates so far."""
        if not self._is_measured:
            return 0, 0
        return StatsWindow(self._run.store, 0, self.end_s, self.process, ("updates",)).step_counts(TRAINING)

    @cached_property
    def recent(self) -> RecentRate:
        """Its last ten seconds of training in the current mode."""
        return self._run.recent_rate if self._is_measured else RecentRate()

    @property
    def _history_s(self) -> int:
        """The length of the history, which ends at `end_s`."""
        span_s = self._run.request.span_s
        return min(2 * span_s, COLUMNS) if span_s else self.end_s - max(self.began_ns, 0) // SECOND + self.column_s

    @cached_property
    def column_s(self) -> int:
        """Seconds per column."""
        if not self._is_measured:
            return 1
        return column_width_s(self._run.request.span_s, self.end_s - max(self.began_ns, 0) // SECOND)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The history in the time range, oldest first."""
        if not self._is_measured:
            return ()
        begin_s = max(self.end_s - self._history_s, 0)
        columns = read_columns(self._run.store, self._run.answers, self.process, begin_s, self.end_s, self.column_s)
        return subtract_input_waits(columns, self._events.input_waits(self.process), self.column_s)

    @cached_property
    def losses(self) -> tuple[LossCurve, ...]:
        """Its losses, in points that match the columns."""
        if not self._is_measured:
            return ()
        begin_s = max(self.end_s - self._history_s, 0)
        return read_loss_curves(self._run.store, self.process, begin_s, self.end_s, self.column_s)

    @cached_property
    def _range_mode(self) -> str:
        """The current mode, or that of the last step if the range has no steps in the current one."""
        assert self.last_step is not None
        return self.mode if any(key.mode == self.mode for key in self._range.tallies) else self.last_step.mode

    def _main_or_other_stats(self, window: StatsWindow) -> StepStats:
        """Return the metrics of the steps of the main kind, else of another kind, else NO_STEPS."""
        kinds = window.main_kind, *(kind for mode, kind in window.other_modes if mode == self._range_mode)
        stats = (window.step_stats(self._range_mode, kind, self.process) for kind in kinds)
        return next((kind_stats for kind_stats in stats if kind_stats.steps), NO_STEPS)

    @cached_property
    def ranged(self) -> StepStats:
        """The steps of the current mode in the time range; of the last step's mode if there are none."""
        return self._main_or_other_stats(self._range) if self._is_measured else NO_STEPS

    @cached_property
    def settled(self) -> StepStats:
        """`ranged` without warm-up steps and without a rate; NO_STEPS if these steps are evaluations."""
        if not self.ranged.steps or self.ranged.kind != self._run.main_kind:
            return NO_STEPS
        if not any(key.kind & WARM_UP for key in self._range.tallies):
            return self.ranged
        tally = self._range.tally(self.ranged.mode, process=self.process, without_warmup=True)
        return compute_step_stats(self.ranged.mode, tally=tally, rate=None, kind=self.ranged.kind)

    @cached_property
    def main_tally(self) -> Tally:
        """The steps of the main kind in the time range; an evaluation may take all of it."""
        return self.ranged.tally if self.ranged.kind == self._run.main_kind else Tally()

    @cached_property
    def uneven(self) -> StepUnevenness | None:
        """How uneven these steps are, if the median does not represent their speed."""
        if not self._is_measured:
            return None
        return read_unevenness(self._run.store, self.process, self.ranged, self._events.input_waits(self.process))

    @cached_property
    def whole(self) -> StepStats:
        """The steps of the whole run, once it has ended."""
        return self._main_or_other_stats(self._whole_run) if self._is_measured and self._run.over else NO_STEPS

    @cached_property
    def mean(self) -> Rate | None:
        """The rate in all modes, once the run has ended; of all processes together if it is one of several ranks."""
        if not self._is_measured or not self._run.over:
            return None
        store = self._run.store
        if self.rank is None:
            return self._whole_run.rate()
        return (StatsWindow(store) if store.until_s is None else StatsWindow(store, 0, store.until_s)).rate()

    @cached_property
    def compared(self) -> Comparison | None:
        """Its dp steps against its single steps. In a long run, the verdict may be minutes old."""
        if not self._is_measured or self.distributed is not None:
            return None
        devices, virtual = self._events.devices_by_mode(self.process).get("dp", ((), False))
        if self.mode == "dp" and self.devices:
            devices, virtual = self.devices, self.virtual
        comparison = self._run.read_at_most_every(
            max(self.end_s // _COMPARISONS_PER_RUN, 1),
            ("comparison", self.process, self.mode, devices, self._run.over),
            lambda: compare_modes(self._whole_run, self.process, devices=devices, virtual=virtual),
        )
        starts = mode_starts(self._events.changes, self.process) or [(self.mode, 0)]
        return replace(comparison, memory=read_peaks_by_mode(self._run.store, self.process, starts))

    @property
    def has_used_dp(self) -> bool:
        """Whether it trains in dp, or has done so."""
        return self.mode == "dp" or (self.compared is not None and "dp" in self.compared.seen)


@dataclass(slots=True)
class SnapshotCaches:
    """What a reader keeps between the snapshots of one run."""

    answers: BucketAnswers = field(default_factory=BucketAnswers)
    samples: DeviceSampleCache = field(default_factory=DeviceSampleCache)
    events: tuple[object, RunEvents] = (None, RunEvents())
    """The events of the last snapshot, and what they depend on."""


class RunSnapshot(LazyFacts):
    """The state of a run at one time."""

    _derived = ("representative", "training_processes", "device_memory", "processes_by_node", "step")
    store: Store

    def __init__(
        self,
        store: Store | None = None,
        request: SnapshotRequest = DEFAULT_REQUEST,
        ended: frozenset[int] = frozenset(),
        caches: SnapshotCaches | None = None,
        events: RunEvents | None = None,
    ) -> None:
        """`ended`: processes that have ended, according to a reader of the rings; the history does not have it.

        `events`: the events up to the time of `store`, if they were read already.
        """
        self.request, self.ended = request, ended
        self._caches = SnapshotCaches() if caches is None else caches
        self.answers = self._caches.answers
        """What was derived from finished time buckets."""
        if store is None:
            vars(self).update(_NOTHING)
        else:
            self._read_from(store)
            events = self._read_events() if events is None else events
        self.events = RunEvents() if events is None else events
        self.mode_changes, self.mode_change_count = self.events.changes, self.events.change_count
        """The newest changes, oldest first, and the number of all; pauses, warnings and stalls likewise."""
        self.warnings, self.warning_count = self.events.warnings, self.events.warning_count
        self.pauses, self.stalls = self.events.pauses, self.events.stalls

    def _read_from(self, store: Store) -> None:
        self.store = store
        self.at_ns: int | None = None if store.until_s is None else store.until_ns
        """The time of the snapshot (ns since the run's start); None: now."""
        self.missed = store.dropped
        """Number of records that were lost."""
        self.open_calls = store.open_calls
        """Calls so far of processes without a step."""
        self.main_kind = store.main_kind
        """The kind of steps that describes the run (`Store.main_kind`)."""
        self.kind_words: Mapping[int, str] = store.kind_words
        """The word for each kind of steps (`Store.kind_words`)."""
        self.rank_by_process: Mapping[int, int | None] = store.ranks
        """The ranks that are known from rings, by process."""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.request.over

    @property
    def chosen(self) -> int | None:
        """The process that the user has chosen to see."""
        return self.request.process

    def query_everything(self) -> None:
        """Query all facts, also those of the processes that are drawn."""
        super().query_everything()
        for number in self.drawn:
            self.processes[number].query_everything()
        for process in self.processes.values():
            process.forget_run()

    def read_at_most_every(self, seconds: int, question: Hashable, read: Callable[[], _Fact]) -> _Fact:
        """Return what `read` returns now, or has returned up to `seconds` ago; as of an earlier time, always read."""
        if seconds <= 1 or self.at_ns is not None:
            return read()
        return self.answers.read_once(question, seconds, read)

    # ------------------------------------------------------------------------------------------ events

    def _read_events(self) -> RunEvents:
        """Return the events up to the time of the snapshot, the newest of each kind."""
        key = newest_event_id(self.store), self.store.pruned, self.store.until_ns, len(self.store.ranks)
        if self._caches.events[0] != key:
            self._caches.events = key, RunEvents.read(self.store)
        return self._caches.events[1]

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
            input_ns = next((start for _, start, end in self.events.inputs if start <= now_ns < end), None)
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

    # ------------------------------------------------------------------------------------------ processes

    @cached_property
    def _all_nodes(self) -> tuple[NodeStatus, ...]:
        return read_nodes(self.store)

    @cached_property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The nodes of the run; empty if it runs on this machine only, or if the snapshot covers one of several."""
        return self._all_nodes if self.request.node is None else ()

    @cached_property
    def _node_names(self) -> Mapping[int, str | None]:
        """The name of its node by process, for all processes of the snapshot; None on one machine."""
        node = self.request.node
        selected = [status for status in self._all_nodes if node is None or status.number == node]
        names: dict[int, str | None] = {process: status.name for status in selected for process in status.processes}
        everyone = names if node is not None else {*self.events.info, *self.store.ranks}
        return {number: names.get(number) for number in sorted(everyone)}

    @cached_property
    def has_many(self) -> bool:
        """Whether there are so many processes that facts about all of them are some seconds old."""
        return len(self._node_names) > MAX_FULLY_READ

    def _read_processes(self, numbers: Sequence[int]) -> dict[int, Process]:
        store = self.store
        steps, newest = read_newest_steps(store, numbers), read_newest_activity(store, numbers)
        memory, starts = read_newest_memory(store, numbers), read_first_activity_ns(store, sorted(newest))
        processes = {}
        for number in numbers:
            records = _NewestRecords(
                steps.get(number),
                find_step_number(store, steps[number]) if number in steps else 0,
                *newest.get(number, ("", -1)),
                starts.get(number, -1),
                memory[number].data if number in memory else {},
            )
            processes[number] = Process(number, self, records, self._node_names[number])
        return processes

    def _read_all_processes(self) -> tuple[dict[int, Process], tuple[int, ...]]:
        processes = self._read_processes([*self._node_names])
        return processes, find_training_processes(processes, self.ended)

    @cached_property
    def _all_processes(self) -> tuple[dict[int, Process], tuple[int, ...]]:
        """All processes, and which of them train; with many, some seconds old unless there was an event."""
        question = "processes", id(self.events), self.ended, self.request.node
        return self.read_at_most_every(_MAX_AGE_S * self.has_many, question, self._read_all_processes)

    @cached_property
    def processes(self) -> dict[int, Process]:
        """The processes by process index. With many, only those that may be drawn are up to date."""
        request, (processes, order) = self.request, self._all_processes
        visible = {*order[: request.ranks], *order[request.first_rank : request.first_rank + request.ranks]}
        if request.process in processes:
            visible.add(request.process)
        return {**processes, **self._read_processes([n for n in visible if not processes[n].belongs_to(self)])}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The process indices of `training_processes`."""
        return self._all_processes[1]

    @cached_property
    def trained_processes(self) -> Set[int]:
        """The processes with training steps."""
        return self.store.trained_processes

    @cached_property
    def newest_ns(self) -> int:
        """End of the newest step or call."""
        return max((process.seen_ns for process in self.processes.values()), default=-1)

    @cached_property
    def training_processes(self) -> list[Process]:
        """The processes that train now, by rank, the newest of each: a restarted job has several of one rank."""
        return [self.processes[number] for number in self.order]

    @cached_property
    def representative(self) -> Process | None:
        """The process that represents the run: of those that train now, the chosen one or the one of lowest rank.

        Before any process trains, it is the first of all.
        """
        usual = next(iter(self.order), next(iter(self.processes), None))
        number = self.request.process if self.request.process in self.order else usual
        return None if number is None else self.processes[number]

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

    @cached_property
    def step(self) -> int | None:
        """The number of the newest step of the processes that train now; None before the first."""
        return max(
            [process.step_number for process in self.training_processes if process.last_step is not None],
            default=None,
        )

    # ------------------------------------------------------------------------------------------ devices, losses

    @cached_property
    def _samples(self) -> DeviceSampleCache:
        node = self.request.node
        self._caches.samples.read(self.store, node_of(self.nodes, self.representative) if node is None else node)
        return self._caches.samples

    @cached_property
    def devices(self) -> Mapping[int, DeviceHistory]:
        """The GPUs by index."""
        return dict(sorted(self._samples.devices().items()))

    @cached_property
    def host(self) -> DeviceHistory:
        """The host; without data if it was not sampled."""
        return self._samples.host_history()

    @cached_property
    def memory_trends(self) -> list[MemoryTrend]:
        """Whether memory grows, on the host and on each GPU; up to some seconds old."""
        return self.read_at_most_every(_MAX_AGE_S, "memory trends", lambda: read_memory_trends(self.store))

    @cached_property
    def losses(self) -> tuple[LossCurve, ...]:
        """The losses of the representative process, over the time of its columns."""
        return () if self.representative is None else self.representative.losses

    @cached_property
    def unfit(self) -> InvalidLoss | None:
        """The first loss of any process that was NaN or infinite."""
        return next(iter(find_invalid_losses(self.store)), None)

    # ------------------------------------------------------------------------------------------ ranks

    @cached_property
    def _other_ranks(self) -> list[Process]:
        """The ranks that train together with the representative process."""
        focus = self.representative
        return [rank for rank in self.training_processes if rank.rank is not None and rank is not focus]

    @cached_property
    def _ranks_on_other_nodes(self) -> list[Process]:
        """The ranks of other nodes, if only one node is requested: one may be the straggler."""
        if self.request.node is None:
            return []
        others = [node for node in self._all_nodes if node.number != self.request.node]
        nodes = {process: node.name for node in others for process in node.processes}
        newest = {rank: process for process, rank in sorted(self.store.ranks.items()) if process in nodes}
        return [Process(process, self, node=nodes[process]) for process in newest.values()]

    @cached_property
    def _wrappers(self) -> list[Wrapper]:
        numbers = {*self.order}
        return [wrapper for wrapper in self.events.wrappers if wrapper.process in numbers]

    @cached_property
    def _rank_times(self) -> tuple[RankTimes, ...]:
        """The mean times of all ranks that train together, shown or not; of many, some seconds old."""
        focus = self.representative
        if focus is None or not self._other_ranks:
            return ()
        # Only the node of the stalled rank leaves the step with the stall out of its tallies.
        stalls = [(item.since_ns, item.end_ns) for item in self.stalls[-_MAX_STALLS:] if item.end_ns is not None]
        stalled = tuple(range(since // SECOND, end // SECOND + 2) for since, end in stalls)
        others = [*self._other_ranks, *self._ranks_on_other_nodes]
        return self.read_at_most_every(
            min(len(others) // RANKS_A_SECOND, _MAX_AGE_S),
            ("rank times", focus.process, *(rank.process for rank in others), stalled),
            lambda: read_rank_times(self.store, focus, others, stalled),
        )

    @cached_property
    def slowest_ranks(self) -> Set[int]:
        """The processes of the ranks that wait least, if only these are requested; else none."""
        known = [rank for rank in self._rank_times if rank.wait_ns is not None and rank.process in self.processes]
        if self.request.worst == 0 or len(known) <= MAX_LISTED_RANKS:
            return frozenset()
        return {rank.process for rank in nsmallest(self.request.worst, known, key=wait_of)}

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The processes with all facts: the representative one first, then those that the request includes."""
        if self.representative is None:
            return ()
        order, request = self.order, self.request
        drawn = [self.representative.process, *(number for number in order if number in self.slowest_ranks)]
        if request.listed or not self.slowest_ranks:
            drawn += [*order[: request.ranks], *order[request.first_rank : request.first_rank + request.ranks]]
        unread = [number for number in dict.fromkeys(drawn) if not self.processes[number].belongs_to(self)]
        self.processes.update(self._read_processes(unread))
        return tuple(dict.fromkeys(drawn))

    @cached_property
    def range_stats(self) -> Mapping[int, StepStats]:
        """The steps of the listed processes in the time range, if there are several; only step, forward, backward."""
        if len(self.drawn) < 2 or self.slowest_ranks:
            return {}
        return read_range_stats(self.store, [self.processes[number] for number in self.drawn], self.request.span_s)

    @cached_property
    def recent_rate(self) -> RecentRate:
        """The rate over the last ten seconds of the processes that train together; with many, some seconds old."""
        focus = self.representative
        if focus is None or focus.last_step is None:
            return RecentRate()
        step, end_s = focus.last_step, focus.end_s
        others = [rank for rank in self._other_ranks if rank.last_step is not None and focus.rank is not None]
        sampled = [focus, *sample_unevenly(others, MAX_RATES)]
        numbers, count = [process.process for process in sampled], 1 + len(others)
        found = self.read_at_most_every(
            min(count // RANKS_A_SECOND, _MAX_AGE_S),
            ("rate", step.mode, focus.process, *(rank.process for rank in others)),
            lambda: read_recent_rate(
                self.store,
                numbers,
                step.mode,
                max(end_s - WINDOW_S - 2, 0),
                max(process.end_s for process in sampled),
                count / len(sampled),
            ),
        )
        if step.kind != self.main_kind or found.last_ns is None:
            return found
        return found._replace(last_ns=max(found.last_ns, step.start_ns + step.wall_ns))

    def _read_sampled(self) -> tuple[CollectiveSums, int, LastSample | None]:
        focus = self.representative
        if focus is None or not self._other_ranks:
            return CollectiveSums(), 0, None
        numbers = [focus.process, *(rank.process for rank in self._other_ranks)]
        end_ns = self.newest_ns + 1
        start_s = max(end_ns // SECOND - COLLECTIVES_S, 0)
        sums = read_collective_sums(self.store, start_s * SECOND, end_ns, numbers)
        if not sums.samples:
            return sums, 0, None
        sample = read_last_sample(self.store, focus.process, start_s * SECOND)
        return sums, count_steps(self.store, start_s, end_ns // SECOND + 1, numbers), sample

    @cached_property
    def sampled(self) -> tuple[CollectiveSums, int, LastSample | None]:
        """The collectives of sampled steps, the number of all steps in their time, and the newest sampled step.

        With many ranks, they are some seconds old.
        """
        return self.read_at_most_every(_MAX_AGE_S * self.has_many, ("collectives", self.order), self._read_sampled)

    @cached_property
    def communication(self) -> Communication | None:
        """The communication of the ranks over their last steps; None if they do not train together."""
        if self.representative is None:
            return None
        collectives, sampled_of, _ = self.sampled
        shown = [rank for rank in self._rank_times if rank.process in self.processes]
        return build_communication(
            shown,
            self._wrappers,
            collectives,
            sampled_of,
            [rank for rank in self._rank_times if rank.process not in self.processes],
            tally=self.representative.main_tally,
            lately=True,
        )

    @cached_property
    def last_sample(self) -> LastSample | None:
        """The newest sampled step of the representative process."""
        return self.sampled[2]

    @property
    def straggler(self) -> Straggler | None:
        """The ranks that the others wait for; None if no rank stands out."""
        return None if self.communication is None else self.communication.straggler

    @property
    def ranks(self) -> tuple[RankTimes, ...]:
        """Mean times of the ranks that train together, over their last steps, by rank; empty for one process."""
        return () if self.communication is None else self.communication.ranks

    @cached_property
    def rank_waits(self) -> RankWaits | None:
        """Which ranks the others waited for in the time range; None if it was not requested, or is unknown."""
        focus, communication = self.representative, self.communication
        if not self.request.waits or focus is None or focus.last_step is None or not self._other_ranks:
            return None
        if communication is None or not communication.ranks_with_waits:
            return None
        rank_of_process = {rank.process: rank.rank for rank in self.training_processes if rank.rank is not None}
        shown, others = list(rank_of_process), list[int]()
        if len(rank_of_process) > MAX_LISTED_RANKS:
            shown, others = choose_ranks_to_show(self.ranks, self.straggler, self.request.process)
        start_s = max(focus.began_ns, 0) // SECOND
        if self.request.span_s:
            start_s = max(focus.end_s - self.request.span_s, 0)
        ranks = {process: rank_of_process[process] for process in (*shown, *others)}
        return read_rank_waits(self.store, self.answers, ranks, start_s, focus.end_s, shown)

    @cached_property
    def slowest(self) -> SlowSteps:
        """The longest steps of the current mode in the time range; of many steps, as they were some seconds ago."""
        focus, limit = self.representative, self.request.slowest
        if not limit or focus is None:
            return SlowSteps()
        age_s = min(focus.ranged.steps * len(self.training_processes) // _STEPS_SEARCHED_A_SECOND, _MAX_AGE_S)
        question = "longest steps", self.request, focus.ranged.mode
        return self.read_at_most_every(age_s, question, lambda: self.read_slow_steps(limit, _MAX_SEARCHED_IDS))

    def read_slow_steps(self, limit: int, max_ids: int | None = None) -> SlowSteps:
        """Return the longest steps of the current mode in the time range, at most `limit`."""
        focus, span_s, inputs = self.representative, self.request.span_s, self.events.inputs
        if focus is None or focus.last_step is None or not focus.ranged.steps:
            return SlowSteps()
        ranks = [rank.process for rank in self.training_processes if rank.rank is not None and rank.last_step]
        start_ns = max(focus.end_s - span_s, 0) * SECOND if span_s else 0
        return read_slow_steps(self.store, ranks or [focus.process], start_ns, focus.ranged, inputs, limit, max_ids)

    # ------------------------------------------------------------------------------------------ another time

    def with_histories(self, later: RunSnapshot) -> RunSnapshot:
        """Return a copy of this snapshot with the histories of a later one."""
        processes = {
            number: process.with_facts(columns=newer_process.columns, column_s=newer_process.column_s)
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
        return self.with_facts(processes=processes, devices=devices, host=host, losses=losses, rank_waits=waits)


_NOTHING: dict[str, Any] = {
    **{name: {} for name in ("processes", "devices", "kind_words", "range_stats", "rank_by_process")},
    **dict.fromkeys(("nodes", "_all_nodes", "order", "losses", "memory_trends", "drawn", "trained_processes"), ()),
    **dict.fromkeys(("at_ns", "unfit", "communication", "rank_waits", "last_sample")),
    **dict.fromkeys(("missed", "open_calls"), 0),
    "host": DeviceHistory(),
    "main_kind": TRAINING,
    "slowest": SlowSteps(),
}
"""The facts of a run without a history."""
_NO_RUN = RunSnapshot()


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

"""A run as of a time: every fact is queried when it is first needed.

Facts of the time range, such as those of `representative` and `communication`, end with the newest step. Those of the
whole run are named so, or come after the heading "the whole run". Medians over several processes describe none of
them, so the times of a mode are those of the process that represents the run. Counts of steps and rates cover all
processes.

Times are ns since the run's start; unknown values are None. The history must be open when a fact is queried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dpmon.model.active_processes import find_training_processes
from dpmon.model.bucket_answers import BucketAnswers
from dpmon.model.communication import Communication, Wrapper, build_communication
from dpmon.model.device_memory import DeviceMemory, memory_of_processes
from dpmon.model.device_usage import DeviceHistory, DeviceSampleCache, DeviceUsage, HostUsage, SampledDevices
from dpmon.model.efficiency import Efficiency, build_efficiency
from dpmon.model.energy import Energy, read_energy
from dpmon.model.epoch_progress import Progress, progress_of
from dpmon.model.layouts import (
    CallLayouts,
    IdleDeviceCounts,
    ReplicaStats,
    StageSizes,
    build_replica_stats,
    count_idle_devices,
)
from dpmon.model.loss_curves import LossCurve, read_loss_curves
from dpmon.model.mode_comparison import Comparison, compare_modes, first_with_both
from dpmon.model.nodes import NodeStatus, node_of, read_nodes
from dpmon.model.pauses import (
    Pause,
    PauseTotals,
    Span,
    all_paused_intervals,
    any_paused_intervals,
    build_pauses,
    pause_totals,
)
from dpmon.model.rank_stats import RANKS_A_SECOND, RankSummary, read_range_stats, read_rank_times
from dpmon.model.rank_waits import RankWaits, choose_ranks_to_show, read_rank_waits
from dpmon.model.recorded_stalls import RecordedStall, final_stall
from dpmon.model.run_events import LoaderStart, ProcessInfo, RunEvents, parse_loader_start
from dpmon.model.run_process import MAX_AGE_S, NO_STEPS, LazyFacts, NewestRecords, Process
from dpmon.model.slow_steps import SlowSteps, read_slow_steps
from dpmon.model.step_history import BinnedSteps, bin_steps, column_width_s
from dpmon.model.stragglers import RankTimes, Straggler, rank_times_in_window
from dpmon.model.throughput import MAX_RATES, WINDOW_S, RecentRate, read_recent_rate, sample_unevenly
from dpmon.record.schema import SECOND, STALLED, STARTUP, STEP, TRAINING, WARM_UP, device_series, step_kind
from dpmon.stalls.run_state import StateInputs
from dpmon.store.activity_times import read_times
from dpmon.store.collectives import CollectiveSums, read_collective_sums
from dpmon.store.events import HOST, newest_event_id, read_events, read_newest_memory
from dpmon.store.gaps import Gap, read_gaps
from dpmon.store.loss_table import InvalidLoss, find_invalid_losses
from dpmon.store.memory_growth import MemoryTrend, read_memory_trends
from dpmon.store.shapes import read_shapes
from dpmon.store.step_stats import Rate, StatsWindow, StepStats, account_for_elapsed, compute_step_stats
from dpmon.store.steps import (
    StepRow,
    find_next_step_ns,
    find_step_number,
    read_first_activity_ns,
    read_longest_steps,
    read_newest_activity,
    read_newest_steps,
    read_steps,
)
from dpmon.store.tally import Tally
from dpmon.store.tally_tables import count_steps, read_tally_rows
from dpmon.store.time_buckets import WIDTHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpmon.store.store_queries import Store

MAX_RANKS = 64
"""The metrics of this many ranks are read together; lists of the first ranks end with it."""
MAX_FULLY_READ = 128
"""With more processes than this, most values are read less often."""
MAX_LISTED_RANKS = 16
"""More ranks than this are drawn as a map, with the MAX_LEAST_WAITING ranks that wait least below it."""
COLLECTIVES_S = 300
"""Seconds of sampled collectives to show; only some steps are sampled."""
LONGEST_STEPS = 8
"""Number of the longest steps that a picture can show."""
_MAX_SEARCHED_IDS = 100_000
"""Most ids that are searched for the longest steps."""
_STEPS_SEARCHED_A_SECOND = 1000
"""If more steps than this are searched for the longest ones, they are searched less often."""
_MAX_STALLS = 4
"""Most stalls that are left out of the comparison of ranks: older ones are before its time range."""
ENERGY_WINDOW_S, ENERGY_AGE_S = 60, 20
"""Time (s) over which the energy of a sample is computed, and after which it is computed again."""
MAX_LONG_STEPS = 64
"""Most long steps to read per mode, and to judge in total."""
MAX_GAPS = 10_000
MEMORY_EVENTS = 64
"""Most records of each kind that findings read; one sample of the host per second."""
_SAMPLES_OF_RANK = 4
"""Further samples of lines for each rank: a finding needs several of one rank."""
MAX_EPOCHS = 10_000
ACTIVE = ("training", "evaluation", "forward_only", "between")
"""The activities in which the training goes on."""
NO_TIME_IN_REPORT = "a report does not estimate it"
_FOREVER_NS = 1 << 62
MIN_STRETCHES = 60
"""Fewest buckets into which a run of a minute or more is divided to find its first and its last third."""
_MIN_STEPS_OF_THIRD = 30
"""Fewest steps in each of the two thirds for a comparison."""
_Fact = TypeVar("_Fact")


class Selection(NamedTuple):
    """The part of a run that a reader has selected."""

    span_s: int = 120
    """Time range of the histories and metrics (s); 0 is the whole run."""
    over: bool = False
    """Whether the run has ended."""
    process: int | None = None
    """The process that the user has chosen; None for the one that represents the run."""
    node: int | None = None
    """The number of the only node to include; None for all."""


EVERYTHING = Selection()


@dataclass(slots=True)
class RunCaches:
    """Answers that a reader keeps from one analysis of a run to the next, because they can no longer change."""

    answers: BucketAnswers = field(default_factory=BucketAnswers)
    samples: DeviceSampleCache = field(default_factory=DeviceSampleCache)
    events: tuple[object, RunEvents] = (None, RunEvents())
    """The events of the last analysis, and what they depend on."""


class RunAnalysis(LazyFacts):
    """A run as of a time, with the metrics of a time range and of the whole run until then."""

    _derived = ("representative", "training_processes", "device_memory", "processes_by_node", "step")
    store: Store
    last_times: Mapping[int, tuple[int, int]] = {}
    """By process: start of its last span, and end of its last loop over a loader (ns); empty without rings."""

    def __init__(
        self,
        store: Store | None = None,
        selection: Selection = EVERYTHING,
        ended: frozenset[int] = frozenset(),
        caches: RunCaches | None = None,
        *,
        end_ns: int | None = None,
        stop_asked_ns: int | None = None,
        death: str | None = None,
        raised: str | None = None,
    ) -> None:
        """`store`: as of the time to analyze; None: nothing is recorded.

        `ended`: processes that have ended, according to a reader of the rings; the history does not have it.
        `stop_asked_ns`: when a stop was requested.
        """
        self.end_ns = end_ns
        """When the run ended; None while it runs, or if the supervisor did not record the end."""
        self._stop_asked_ns = stop_asked_ns
        self.death = death
        """The end of a rank that recorded no exception, if it is the first failure: "rank 1 was ended by SIGABRT"."""
        self.raised = raised
        """The first exception, if the run failed: "rank 1: RuntimeError: no such token (train.py:12)"."""
        self.selection, self.ended = selection, ended
        self._caches = RunCaches() if caches is None else caches
        self.answers = self._caches.answers
        """What was derived from finished time buckets."""
        self._current: set[int] = set()
        """Of many processes, those that are up to date."""
        if store is None:
            vars(self).update(_NOTHING)
        else:
            self._read_from(store)
        self.events = RunEvents() if store is None else self._read_events()
        """The newest events of each kind."""
        self.mode_changes = self.events.changes
        """The newest changes, oldest first; pauses, warnings and stalls likewise."""
        self.warnings, self.warning_count = self.events.warnings, self.events.warning_count
        self.pauses, self.stalls = self.events.pauses, self.events.stalls

    def _read_from(self, store: Store) -> None:
        self.answers.start_read(store)
        self.store = store
        self.at_ns: int | None = None if store.until_s is None else store.until_ns
        """The time to analyze (ns since the run's start); None: now."""
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
        return self.selection.over

    def read_at_most_every(self, seconds: int, question: Hashable, read: Callable[[], _Fact]) -> _Fact:
        """Return what `read` returns now, or has returned up to `seconds` ago; as of an earlier time, always read."""
        if seconds <= 1 or self.at_ns is not None:
            return read()
        return self.answers.read_once(question, seconds, read)

    # ------------------------------------------------------------------------------------------ events

    def _read_events(self) -> RunEvents:
        """Return the events up to that time, the newest of each kind."""
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
        """The nodes of the run; empty if it runs on this machine only, or if one of several is selected."""
        return self._all_nodes if self.selection.node is None else ()

    @cached_property
    def _node_names(self) -> Mapping[int, str | None]:
        """The name of its node by process, for all processes that are selected; None on one machine."""
        node = self.selection.node
        selected = [status for status in self._all_nodes if node is None or status.number == node]
        names: dict[int, str | None] = {process: status.name for status in selected for process in status.processes}
        everyone = names if node is not None else {*self.events.info, *self.store.ranks}
        return {number: names.get(number) for number in sorted(everyone)}

    @cached_property
    def has_many(self) -> bool:
        """Whether facts about all processes are some seconds old, because there are more than MAX_FULLY_READ."""
        return len(self._node_names) > MAX_FULLY_READ

    def _read_newest(self, numbers: Sequence[int]) -> dict[int, NewestRecords]:
        """Return the newest records of processes."""
        store = self.store
        steps, newest = read_newest_steps(store, numbers), read_newest_activity(store, numbers)
        memory, starts = read_newest_memory(store, numbers), read_first_activity_ns(store, sorted(newest))
        return {
            number: NewestRecords(
                steps.get(number),
                find_step_number(store, steps[number]) if number in steps else 0,
                *newest.get(number, ("", -1)),
                starts.get(number, -1),
                memory[number].data if number in memory else {},
            )
            for number in numbers
        }

    def _processes_of(self, newest: Mapping[int, NewestRecords]) -> dict[int, Process]:
        return {number: Process(number, self, records, self._node_names[number]) for number, records in newest.items()}

    def _read_all_newest(self) -> tuple[dict[int, NewestRecords], tuple[int, ...]]:
        newest = self._read_newest([*self._node_names])
        return newest, find_training_processes(self._processes_of(newest), self.ended)

    @cached_property
    def _all_newest(self) -> tuple[dict[int, NewestRecords], tuple[int, ...]]:
        """The newest records of all processes, and which of them train; with many, some seconds old without events."""
        question = "processes", self._caches.events[0], self.ended, self.selection.node
        return self.read_at_most_every(MAX_AGE_S * self.has_many, question, self._read_all_newest)

    @cached_property
    def processes(self) -> dict[int, Process]:
        """The processes by process index. With many, only that which represents the run is up to date."""
        newest, order = self._all_newest
        representative = self._representative_of(order, newest)
        if self.has_many and representative is not None:
            newest = {**newest, **self._read_newest([representative])}
            self._current.add(representative)
        return self._processes_of(newest)

    def current_processes(self, numbers: Iterable[int]) -> list[Process]:
        """Return these processes, up to date also if there are many."""
        numbers = [number for number in numbers if number in self.processes]
        old = [number for number in numbers if self.has_many and number not in self._current]
        if old:
            self.processes.update(self._processes_of(self._read_newest(old)))
            self._current.update(old)
        return [self.processes[number] for number in numbers]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The process indices of `training_processes`."""
        return self._all_newest[1]

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
        number = self._representative_of(self.order, self.processes)
        return None if number is None else self.processes[number]

    def _representative_of(self, order: Sequence[int], processes: Iterable[int]) -> int | None:
        chosen = self.selection.process
        return chosen if chosen in order else next(iter(order), next(iter(processes), None))

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
    def _histories(self) -> Mapping[int, DeviceHistory]:
        node = self.selection.node
        return self._caches.samples.read(self.store, node_of(self.nodes, self.representative) if node is None else node)

    @cached_property
    def devices(self) -> Mapping[int, DeviceHistory]:
        """The GPUs by index."""
        return {index: history for index, history in self._histories.items() if index != HOST}

    @cached_property
    def host(self) -> DeviceHistory:
        """The host; without data if it was not sampled."""
        return self._histories.get(HOST, DeviceHistory())

    @cached_property
    def memory_trends(self) -> list[MemoryTrend]:
        """Whether memory grows, on the host and on each GPU; up to some seconds old."""
        return self.read_at_most_every(MAX_AGE_S, "memory trends", lambda: read_memory_trends(self.store))

    @cached_property
    def losses(self) -> tuple[LossCurve, ...]:
        """The losses of the representative process, over the time of its columns."""
        return () if self.representative is None else self.representative.losses

    @cached_property
    def unfit(self) -> InvalidLoss | None:
        """The first loss of any process that was NaN or infinite."""
        return next(iter(self.first_invalid_losses), None)

    # ------------------------------------------------------------------------------------------ ranks

    @cached_property
    def _other_ranks(self) -> list[Process]:
        """The ranks that train together with the representative process."""
        focus = self.representative
        return [rank for rank in self.training_processes if rank.rank is not None and rank is not focus]

    @cached_property
    def _ranks_on_other_nodes(self) -> list[Process]:
        """The ranks of other nodes, if only one node is requested: one may be the straggler."""
        if self.selection.node is None:
            return []
        others = [node for node in self._all_nodes if node.number != self.selection.node]
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
            min(len(others) // RANKS_A_SECOND, MAX_AGE_S),
            ("rank times", focus.process, *(rank.process for rank in others), stalled),
            lambda: read_rank_times(self.store, focus, others, stalled),
        )

    @cached_property
    def _range_stats(self) -> dict[int, StepStats]:
        """The steps of processes in the time range, as far as they were read."""
        return {}

    def range_stats_of(self, process: int) -> StepStats:
        """Return the steps of a process in the time range, if several train; only step, forward and backward.

        Those of MAX_RANKS processes are read together.
        """
        if process not in self._range_stats and process in self.order and len(self.order) > 1:
            first = self.order.index(process) // MAX_RANKS * MAX_RANKS
            processes = self.current_processes(self.order[first : first + MAX_RANKS])
            self._range_stats.update(read_range_stats(self.store, processes, self.selection.span_s))
        return self._range_stats.get(process, NO_STEPS)

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
            min(count // RANKS_A_SECOND, MAX_AGE_S),
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

    @cached_property
    def efficiency(self) -> Efficiency:
        """How good the last ten seconds of training are, or the last three steps; after the end, the whole run."""
        focus, recent = self.representative, self.recent_rate
        if self.over or focus is None:
            return self.whole_efficiency
        start_s = max(focus.end_s - max(WINDOW_S, 3 * recent.step_ns // SECOND), 0)
        window = StatsWindow(self.store, start_s, focus.end_s, series=("flops", "recomputed_flops"))
        return self.read_at_most_every(
            min(len(self.order) // RANKS_A_SECOND, MAX_AGE_S),
            ("efficiency", focus.process, focus.mode, self.order),
            lambda: self._build_efficiency(window, recent.rate, start_s),
        )

    def _build_efficiency(self, window: StatsWindow, rate: Rate | None, start_s: int = 0) -> Efficiency:
        """Return the efficiency in the current mode. `start_s`: start of the samples of GPUs; 0 for the whole run."""
        focus, efficiency = self.representative, Efficiency(rate)
        if focus is not None and self.events.flops:
            gpus = SampledDevices(self.store, since_ns=start_s * SECOND).gpus if start_s else self.device_usage
            efficiency = build_efficiency([focus, *self._other_ranks], window, rate, self.events.flops, gpus)
        joules = self.read_at_most_every(ENERGY_AGE_S, ("energy", start_s == 0), lambda: self._read_joules(start_s))
        return efficiency._replace(joules_per_sample=joules)

    def _read_joules(self, start_s: int) -> float | None:
        """Return the energy per sample (J) since a minute before `start_s`; of the whole run if that is 0."""
        if start_s == 0:
            return self.whole_energy.joules_per("samples", self.window.tally(None))
        start_s = max(start_s - ENERGY_WINDOW_S, 0)
        window = StatsWindow(self.store, start_s, series=("samples",))
        return read_energy(self.store, start_s).joules_per("samples", window.tally(None))

    def _read_sampled(self) -> tuple[CollectiveSums, int]:
        focus = self.representative
        if focus is None or not self._other_ranks:
            return CollectiveSums(), 0
        numbers = [focus.process, *(rank.process for rank in self._other_ranks)]
        end_ns = self.newest_ns + 1
        start_s = max(end_ns // SECOND - COLLECTIVES_S, 0)
        sums = read_collective_sums(self.store, start_s * SECOND, end_ns, numbers)
        if not sums.samples:
            return sums, 0
        return sums, count_steps(self.store, start_s, end_ns // SECOND + 1, numbers)

    @cached_property
    def sampled(self) -> tuple[CollectiveSums, int]:
        """The collectives of sampled steps and the number of all steps in their time.

        With many ranks, they are some seconds old.
        """
        return self.read_at_most_every(MAX_AGE_S * self.has_many, ("collectives", self.order), self._read_sampled)

    @cached_property
    def communication(self) -> Communication | None:
        """The communication of the ranks over their last steps; None if they do not train together."""
        if self.representative is None:
            return None
        collectives, sampled_of = self.sampled
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
        """Which ranks the others waited for in the time range; None if it is unknown."""
        focus, communication = self.representative, self.communication
        if focus is None or focus.last_step is None or not self._other_ranks:
            return None
        if communication is None or not communication.ranks_with_waits:
            return None
        rank_of_process = {rank.process: rank.rank for rank in self.training_processes if rank.rank is not None}
        shown, others = list(rank_of_process), list[int]()
        if len(rank_of_process) > MAX_LISTED_RANKS:
            shown, others = choose_ranks_to_show(self.ranks, self.straggler, self.selection.process)
        start_s = max(focus.began_ns, 0) // SECOND
        if self.selection.span_s:
            start_s = max(focus.end_s - self.selection.span_s, 0)
        ranks = {process: rank_of_process[process] for process in (*shown, *others)}
        return read_rank_waits(self.store, self.answers, ranks, start_s, focus.end_s, shown)

    @cached_property
    def slowest(self) -> SlowSteps:
        """The LONGEST_STEPS longest steps of the current mode in the time range; of many steps, some seconds old."""
        focus = self.representative
        if focus is None:
            return SlowSteps()
        age_s = min(focus.ranged.steps * len(self.training_processes) // _STEPS_SEARCHED_A_SECOND, MAX_AGE_S)
        question = "longest steps", self.selection, focus.process, self.order, focus.ranged.mode
        return self.read_at_most_every(age_s, question, lambda: self.read_slow_steps(LONGEST_STEPS, _MAX_SEARCHED_IDS))

    def read_slow_steps(self, limit: int, max_ids: int | None = None) -> SlowSteps:
        """Return the longest steps of the current mode in the time range, at most `limit`."""
        focus, span_s, inputs = self.representative, self.selection.span_s, self.events.inputs
        if focus is None or focus.last_step is None or not focus.ranged.steps:
            return SlowSteps()
        ranks = [rank.process for rank in self.training_processes if rank.rank is not None and rank.last_step]
        start_ns = max(focus.end_s - span_s, 0) * SECOND if span_s else 0
        return read_slow_steps(self.store, ranks or [focus.process], start_ns, focus.ranged, inputs, limit, max_ids)

    # ------------------------------------------------------------------------------------------ another time

    def with_histories(self, later: RunAnalysis) -> RunAnalysis:
        """Return a copy with the histories of a later one."""
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

    # ------------------------------------------------------------------------------------------ the whole run

    @cached_property
    def announced(self) -> RunEvents:
        """All events."""
        return RunEvents.read(self.store, read_all=True)

    @cached_property
    def window(self) -> StatsWindow:
        """The steps of all processes, from the start of the run."""
        until_s = self.store.until_s
        window = StatsWindow(self.store) if until_s is None else StatsWindow(self.store, 0, until_s)
        window.ranks = self._ranks
        return window

    @cached_property
    def _ranks(self) -> dict[int, int | None]:
        return {number: process.rank for number, process in self.processes.items()}

    def rank(self, process: int) -> int | None:
        """Return the rank of a process; None if it has none."""
        return self._ranks.get(process)

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the processes with steps, such as "rank 0"; empty if there is only one."""
        numbers = self.store.processes
        rank_counts = Counter(map(self.rank, numbers))
        return {number: self._name(number, rank_counts) for number in numbers} if len(numbers) > 1 else {}

    def _name(self, process: int, rank_counts: Mapping[int | None, int]) -> str:
        name = self.processes[process].name
        is_ambiguous = self.rank(process) is not None and rank_counts[self.rank(process)] > 1
        return f"{name} (process {process})" if is_ambiguous else name

    @property
    def _focus(self) -> int:
        return 0 if self.representative is None else self.representative.process

    @cached_property
    def layouts(self) -> CallLayouts:
        """The layouts and sizes of all calls."""
        shapes = read_shapes(self.store)
        return CallLayouts(shapes, {shape.process: self.store.resolver(shape.process).definitions for shape in shapes})

    @cached_property
    def stages(self) -> list[StageSizes]:
        """The inputs and outputs of each stage of a model on several devices."""
        return self.layouts.stages(self.window.tallies_by_process)

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
    def process_numbers(self) -> list[int]:
        """The processes with steps or calls, by rank; those without a rank are last."""
        processes = {*self.store.processes, *self.layouts.processes}
        return sorted(processes, key=lambda process: (self.rank(process) is None, self.rank(process) or 0, process))

    @cached_property
    def whole_communication(self) -> Communication | None:
        """The communication of the ranks; None if no ranks train together."""
        rank_of_process = {process: info.rank for process, info in self.announced.info.items()}
        ranks = rank_times_in_window(self.window, rank_of_process, self._node_names)
        steps = sum(self.window.tally(mode).steps for mode in self.window.modes)
        tally, _ = self.window.process_totals(self.representative_trainer)
        collectives = read_collective_sums(self.store)
        return build_communication(ranks, self.announced.wrappers, collectives, steps, tally=tally, lately=False)

    @cached_property
    def whole_rank_waits(self) -> RankWaits:
        """Which ranks the others waited for, over the whole run; for each rank, of its newest process."""
        if self.whole_communication is None or not self.whole_communication.ranks_with_waits:
            return RankWaits()
        ranks = {process.process: process.rank for process in self.training_processes if process.rank is not None}
        last_s = (self.last_step_ns or 0) // SECOND
        return read_rank_waits(self.store, BucketAnswers(), ranks, self.first_step_ns // SECOND, last_s + 1)

    @cached_property
    def rank_summaries(self) -> list[RankSummary]:
        """Each process, by rank; empty if there is only one."""
        communication = self.whole_communication
        if len(self.process_numbers) < 2:
            return []
        times = {rank.process: rank for rank in communication.ranks} if communication is not None else {}
        return [self._rank(process, times) for process in self.process_numbers]

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
            None if forward.count else untimed or self.layouts.untimed_reason(process),
            times.get(process),
            self._node_names.get(process),
        )

    @cached_property
    def memory_events(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The newest records that findings read, by kind: samples of what grows, of the host and so on."""
        limits = dict.fromkeys(("growth", "host", "exit", "compiles", "profile"), MEMORY_EVENTS)
        limits |= dict.fromkeys(("loader_lines", "host_syncs"), MEMORY_EVENTS + _SAMPLES_OF_RANK * len(self._ranks))
        return {
            kind: [event.data for event in read_events(self.store, kind, limit=limit)] for kind, limit in limits.items()
        }

    # ------------------------------------------------------------------------------------------ modes

    def representative_process(self, mode: str, kind: int | None = None) -> int:
        """Return the process that represents a mode: the one of the run, or else the lowest rank with a step in it."""
        return next(
            (
                process
                for process in (self._focus, *self.process_numbers)
                if self.window.tally(mode, kind, process).steps
            ),
            self._focus,
        )

    @property
    def representative_trainer(self) -> int:
        """The process that represents the run; if it only evaluates, the lowest rank that trains."""
        candidates = [self.representative_process(mode) for mode in self.window.modes]
        if self._focus in candidates or not candidates:
            return self._focus
        return candidates[0]

    def mode(self, mode: str, kind: int | None = None, process: int | None = None) -> StepStats:
        """Return the metrics of a mode for `process`, by default the representative one; `rate` is of all.

        `kind`: the kind of its steps; None for the main kind.
        """
        kind = self.window.main_kind if kind is None else kind
        process = self.representative_process(mode, kind) if process is None else process
        whole, settled = (
            replace(
                compute_step_stats(
                    mode,
                    tally=self.window.tally(mode, kind, process, without_warmup=without_warmup),
                    rate=self.window.rate(mode, kind),
                    kind=kind,
                ),
                process=process,
                process_name=self.names.get(process),
                other_kind=self.store.other_kind(kind),
                virtual=self.layouts.virtual and mode == "dp",
                distributed=self.layouts.distributed_by_kind.get(kind) if mode == "single" else None,
            )
            for without_warmup in (False, True)
        )
        return replace(whole, settled=replace(settled, warm_up_steps=whole.steps - settled.steps))

    @cached_property
    def other_modes(self) -> list[StepStats]:
        """Each mode with its steps of another kind than the main kind."""
        return [self.mode(mode, kind) for mode, kind in self.window.other_modes]

    @cached_property
    def modes(self) -> tuple[StepStats, ...]:
        """Each mode with its steps of the main kind, and the first and the last third of these."""
        return tuple(self._with_thirds(self.mode(mode)) for mode in self.window.modes)

    def _with_thirds(self, stats: StepStats) -> StepStats:
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
    def other_process_modes(self) -> tuple[StepStats, ...]:
        """The modes of `modes` in every other process, without `early` and `late`."""
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
        last = next(iter(read_steps(self.store, 1, process=self.representative_trainer)), None)
        return progress_of(self.store, self.representative_trainer, last, limit=MAX_EPOCHS, no_time=NO_TIME_IN_REPORT)

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
    def pause_list(self) -> list[Pause]:
        """All pauses, and refused requests."""
        newest_ns = max((step.start_ns for step in read_steps(self.store, 1)), default=-1)
        return build_pauses(self.announced.pauses, partial(find_next_step_ns, self.store), newest_ns)

    @cached_property
    def pause_totals(self) -> PauseTotals:
        """The totals of the pauses."""
        return pause_totals(self.pause_list, self.end_ns)

    @cached_property
    def paused(self) -> list[Span]:
        """The times in which all present processes were paused."""
        return all_paused_intervals(self.pause_list, self.window.step_intervals, self.until_ns)

    @property
    def paused_alone_ns(self) -> int:
        """Time (ns) in which one process was paused and another was not."""
        any_paused = any_paused_intervals(self.pause_list, self.until_ns)
        return sum(end - start for start, end in any_paused) - sum(end - start for start, end in self.paused)

    # ------------------------------------------------------------------------------------------ losses

    @cached_property
    def whole_losses(self) -> tuple[LossCurve, ...]:
        """The losses of the process that represents the training, over the whole run."""
        end_s = (self.last_step_ns or 0) // SECOND + 1
        return read_loss_curves(self.store, self.representative_trainer, 0, end_s, column_width_s(0, end_s))

    @cached_property
    def first_invalid_losses(self) -> list[InvalidLoss]:
        """The first NaN or infinite loss of each process and line that calls backward, in order of time."""
        return find_invalid_losses(self.store)

    # ------------------------------------------------------------------------------------------ devices

    @cached_property
    def samples(self) -> SampledDevices:
        """The samples of GPUs and host."""
        return SampledDevices(
            self.store, all_paused_intervals(self.pause_list, self.window.step_intervals, _FOREVER_NS)
        )

    @cached_property
    def device_usage(self) -> tuple[DeviceUsage, ...]:
        """Each sampled GPU."""
        return self.samples.gpus

    @cached_property
    def host_usage(self) -> HostUsage | None:
        """The CPU use of the host; None if it was not sampled."""
        return self.samples.host

    @cached_property
    def whole_energy(self) -> Energy:
        """The energy that its devices have used so far."""
        return read_energy(self.store)

    @cached_property
    def whole_efficiency(self) -> Efficiency:
        """How good the training is in the mode that it has now, or had at its end."""
        focus = self.representative
        if focus is None:
            return Efficiency()
        rate = self.window.rate(focus.mode, process=focus.process if focus.rank is None else None)
        return self._build_efficiency(self.window, rate)

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


_NOTHING: dict[str, Any] = {
    **{name: {} for name in ("processes", "devices", "kind_words", "rank_by_process")},
    **dict.fromkeys(("nodes", "_all_nodes", "order", "losses", "memory_trends", "trained_processes"), ()),
    **dict.fromkeys(("at_ns", "unfit", "communication", "rank_waits")),
    **dict.fromkeys(("missed", "open_calls"), 0),
    "host": DeviceHistory(),
    "has_many": False,
    "main_kind": TRAINING,
    "slowest": SlowSteps(),
}
"""The facts of a run without a history."""


def toggle_refusal(run: RunAnalysis) -> str | None:
    """Return why no mode switch is possible now, in either direction; None if one may be possible."""
    process = run.representative
    if process is None:
        return "no training process is known yet"
    distributed = process.distributed
    if distributed is not None:
        return f"the ranks train by {distributed}"
    if process.rank is not None and (process.info.world or 1) > 1:
        return "several ranks train, each on its own device"
    return None


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

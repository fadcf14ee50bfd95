"""Builds snapshots of a run from queries: `SnapshotBuilder.build` returns the state as of a time.

A live snapshot is as of now, a playback as of another time, and a finished run as of its end. Data that can no longer
change (finished columns of the history, samples) is cached, but no more than one snapshot needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.communication import Wrapper, build_communication
from dpmon.model.device_usage import DeviceSampleCache, mode_starts, read_peaks_by_mode
from dpmon.model.epoch_progress import NO_STEP, OTHER_RANK, OVER, progress_of
from dpmon.model.loss_curves import LossCurve, read_loss_curves
from dpmon.model.mode_comparison import Comparison, compare_modes
from dpmon.model.nodes import node_of, read_nodes
from dpmon.model.process_selection import (
    choose_other_processes,
    choose_slowest,
    other_ranks,
    ranks_on_other_nodes,
    read_process_table,
    with_processes,
)
from dpmon.model.rank_stats import RANKS_A_SECOND, RankTimesCache, with_range_stats
from dpmon.model.rank_waits import choose_ranks_to_show, read_rank_waits
from dpmon.model.recent_calls import CALLS_READ, RecentCalls
from dpmon.model.run_events import RunEvents
from dpmon.model.run_snapshot import (
    MAX_FULLY_READ,
    MAX_LISTED_RANKS,
    NO_STEPS,
    Process,
    RecentRate,
    RunSnapshot,
    SnapshotRequest,
)
from dpmon.model.slow_steps import INPUT, SlowStepCache, SlowSteps, StepUnevenness, overlap_ns, uneven_steps
from dpmon.model.step_history import COLUMNS, column_width_s, read_columns, subtract_input_waits
from dpmon.model.stragglers import Group, RankTimes
from dpmon.model.throughput import MAX_RATES, WINDOW_S, read_recent_rate, sample_unevenly, stats_until_s
from dpmon.record.schema import SECOND, STEP, TRAINING, WARM_UP
from dpmon.store.bucket_answers import BucketAnswers
from dpmon.store.collectives import read_collective_sums, read_last_sample
from dpmon.store.events import newest_event_id
from dpmon.store.loss_table import find_invalid_losses
from dpmon.store.shapes import read_wrapper_types
from dpmon.store.step_stats import StatsWindow, StepStats, compute_step_stats
from dpmon.store.steps import read_longest_steps
from dpmon.store.tally import Tally
from dpmon.store.tally_tables import count_steps

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

MIN_CALLS_READ = 8
_MAX_RATE_AGE_S = 9
"""A rate of many ranks is at most this old."""
COLLECTIVES_S = 300
"""Seconds of sampled collectives to show; only some steps are sampled."""
_MAX_LONG_STEPS = 64
_MAX_REUSES = 8
"""With more than MAX_FULLY_READ processes, those that are not shown are read once in this many snapshots."""
_COMPARISONS_PER_RUN = 60
"""The modes are compared again when the run has become longer by this fraction (1/60) of its duration."""
_MAX_SEARCHED_IDS = 100_000
"""Most ids that are searched for the longest steps."""
_MAX_STALLS = 4
"""Most stalls that are left out of the comparison of ranks: older ones are before its time range."""
_DEFAULT_REQUEST = SnapshotRequest()


class _Compared(NamedTuple):
    """The last comparison of modes. `key`: what else it depends on; `end_s`: when it was made."""

    key: tuple[object, ...]
    end_s: int
    found: Comparison


class _Last(NamedTuple):
    """The last snapshot of many ranks."""

    key: tuple[object, ...]
    """What else it depends on."""
    pictures: int
    """Number of snapshots since all of its values were read."""
    state: RunSnapshot


class _ReadRate(NamedTuple):
    """The last rate. `key`: its mode and processes; `end_s`: when it was read."""

    key: tuple[object, ...]
    end_s: int
    found: RecentRate


@dataclass(slots=True)
class SnapshotBuilder:
    """Builds the snapshots of one run, one after the other."""

    _samples: DeviceSampleCache = field(default_factory=DeviceSampleCache)
    _answers: BucketAnswers = field(default_factory=BucketAnswers)
    _events: RunEvents = field(default_factory=RunEvents)
    """The events of the last snapshot."""
    _events_key: object = None
    """What `_events` depends on."""
    _compared: _Compared | None = None
    _recent: _ReadRate | None = None
    _last: _Last | None = None
    _times: RankTimesCache = field(default_factory=RankTimesCache)
    _slowest: SlowStepCache = field(default_factory=lambda: SlowStepCache(_MAX_SEARCHED_IDS))

    def build(
        self, store: Store, request: SnapshotRequest = _DEFAULT_REQUEST, ended: frozenset[int] = frozenset()
    ) -> RunSnapshot:
        """Return the state as of the time of `store`. `ended`: processes that are known to have ended.

        With many ranks, most values come from the previous snapshot; waits are always fresh.
        """
        store.remember(self._answers)
        events = self._read_events(store)
        key, last = (request, ended, events), self._last
        if last is None or last.key != key or last.pictures >= _MAX_REUSES or store.until_s is not None:
            last = None
            snapshot = replace(read_process_table(store, events, ended, request.node), chosen=request.process)
        else:
            snapshot = replace(last.state, nodes=read_nodes(store) if last.state.nodes else ())
        if has_many := len(snapshot.processes) > MAX_FULLY_READ:
            representative = [] if snapshot.representative is None else [snapshot.representative.process]
            snapshot = with_processes(
                snapshot, store, events, [*representative, *snapshot.drawn, *snapshot.order[: request.ranks]]
            )
        snapshot = self._with_details(store, snapshot, request, events, None if last is None else last.state)
        self._last = None
        if has_many and store.until_s is None:
            self._last = _Last(key, 1 if last is None else last.pictures + 1, snapshot)
        return snapshot

    def _rank_times(
        self,
        store: Store,
        snapshot: RunSnapshot,
        focus: Process,
        ranks: Sequence[Process],
        request: SnapshotRequest,
        events: RunEvents,
    ) -> tuple[list[Wrapper], tuple[RankTimes, ...]]:
        """Return the wrappers of `focus` and the other ranks, and the times of all ranks, shown or not."""
        processes = {process.process for process in snapshot.training_processes}
        wrappers = [item for item in events.wrappers if item.process in processes]
        if not ranks:
            return wrappers, ()
        # Only the node of the stalled rank leaves the step with the stall out of its tallies.
        stalls = [(item.since_ns, item.end_ns) for item in events.stalls[-_MAX_STALLS:] if item.end_ns is not None]
        stalled = tuple(range(since // SECOND, end // SECOND + 2) for since, end in stalls)
        others = [*ranks, *ranks_on_other_nodes(store, snapshot, request)]
        return wrappers, self._times.read(store, focus, others, wrappers, stalled)

    def _with_details(
        self,
        store: Store,
        base: RunSnapshot,
        request: SnapshotRequest,
        events: RunEvents,
        last: RunSnapshot | None,
    ) -> RunSnapshot:
        """Add the metrics to a snapshot. `last`: the previous snapshot, if most of its metrics may be kept."""
        self._samples.read(
            store,
            request.node if request.node is not None else node_of(base.nodes, base.representative),
        )
        snapshot = replace(
            base,
            devices=dict(sorted(self._samples.devices().items())),
            host=self._samples.host_history(),
            mode_changes=events.changes,
            mode_change_count=events.change_count,
            pauses=events.pauses,
            warnings=events.warnings,
            stalls=events.stalls,
            inputs=events.inputs,
            at_ns=None if store.until_s is None else store.until_ns,
            warning_count=events.warning_count,
            missed=store.dropped,
            open_calls=store.open_calls,
            over=request.over,
        )
        focus = snapshot.representative
        if focus is None:
            return snapshot
        ranks = other_ranks(snapshot, focus)
        detailed = self._with_stats(store, focus, ranks if focus.rank is not None else [], request, events)
        wrappers, times = self._rank_times(store, snapshot, detailed, ranks, request, events)
        slowest = choose_slowest([rank for rank in times if rank.process in snapshot.processes], request)
        others = [other for other in ranks if other.process in slowest]
        if request.listed or not slowest:
            visible = choose_other_processes(snapshot, focus, request)
            others += [other for other in visible if other.process not in slowest]
        if last is not None:  # an earlier picture may have read them
            snapshot = with_processes(snapshot, store, events, [process.process for process in others])
            others = [snapshot.processes[process.process] for process in others]
        snapshot = replace(
            snapshot, losses=_losses(store, detailed, request), unfit=next(iter(find_invalid_losses(store)), None)
        )
        previous = {} if last is None else {number: last.processes[number] for number in last.drawn}
        shown = {
            process.process: _with_calls(store, process, previous=previous.get(process.process)) for process in others
        }
        shown[detailed.process] = detailed
        if others and not slowest:
            shown.update(
                {process.process: process for process in with_range_stats(store, shown.values(), request.span_s)}
            )
        snapshot = replace(snapshot, processes={**snapshot.processes, **shown}, drawn=tuple(shown))
        if request.slowest and last is None:
            longest = slow_steps_of(store, snapshot, request.span_s, request.slowest, events.inputs, self._slowest)
            snapshot = replace(snapshot, slowest=longest)
        if ranks:
            snapshot = with_ranks(store, snapshot, detailed, ranks, wrappers, times, last, self._times.groups)
            return self._with_waits(store, snapshot, detailed, request) if request.waits else snapshot
        communication = build_communication((), wrappers, tally=_main_tally(store, detailed), lately=True)
        return replace(snapshot, communication=communication)

    def _read_events(self, store: Store) -> RunEvents:
        """Return the events up to the time of `store`, cached until there are new ones."""
        key = newest_event_id(store), store.pruned, store.until_ns, len(store.ranks)
        if key != self._events_key:
            self._events_key, self._events = key, RunEvents.read(store)
        return self._events

    def _with_waits(self, store: Store, snapshot: RunSnapshot, focus: Process, request: SnapshotRequest) -> RunSnapshot:
        """Add over time which ranks the others waited for."""
        if focus.last_step is None or snapshot.communication is None or not snapshot.communication.ranks_with_waits:
            return snapshot
        rank_of_process = {
            process.process: process.rank for process in snapshot.training_processes if process.rank is not None
        }
        shown, others = list(rank_of_process), list[int]()
        if len(rank_of_process) > MAX_LISTED_RANKS:
            shown, others = choose_ranks_to_show(snapshot.ranks, snapshot.straggler, request.process)
        end_s = stats_until_s(store, focus)
        start_s = max(end_s - request.span_s, 0) if request.span_s else max(focus.began_ns, 0) // SECOND
        ranks = {process: rank_of_process[process] for process in (*shown, *others)}
        return replace(snapshot, rank_waits=read_rank_waits(store, ranks, start_s, end_s, shown))

    def _with_stats(
        self,
        store: Store,
        process: Process,
        others: Sequence[Process],
        request: SnapshotRequest,
        events: RunEvents,
    ) -> Process:
        """Add metrics and history to the process that represents the run. `others`: the other ranks."""
        step = process.last_step
        if step is None:
            timings = RecentCalls(store, process.process).timings({}, process.mode)
            return _with_devices(replace(process, calls=timings, progress=NO_STEP))
        end_s = stats_until_s(store, process)
        start_s = max(end_s - request.span_s, 0) if request.span_s else 0
        whole_window = StatsWindow(store, 0, end_s, process.process)
        ranged_window = StatsWindow(store, start_s, end_s, process.process) if start_s else whole_window
        mode = process.mode if any(key.mode == process.mode for key in ranged_window.tallies) else step.mode
        waits = events.input_waits(process.process)
        history_s, column_s = _history_range(process, end_s, request)
        columns = read_columns(store, process.process, max(end_s - history_s, 0), end_s, column_s)
        detailed = _with_calls(store, process, ranged_window)
        range_stats = _main_or_other_stats(ranged_window, process.process, mode)
        detailed = replace(
            detailed,
            ranged=range_stats,
            settled=_settled_stats(ranged_window, range_stats, process.process),
            uneven=_uneven(store, range_stats, process.process, waits),
            trained=whole_window.step_counts(TRAINING),
            recent=self._recent_rate(store, process, others, end_s),
            progress=progress_of(store, process.process, step, no_time=OVER if request.over else None),
            columns=subtract_input_waits(columns, waits, column_s),
            column_s=column_s,
        )
        if request.over:
            detailed = replace(
                detailed,
                whole=_main_or_other_stats(whole_window, process.process, mode),
                mean=(whole_window if process.rank is None else _whole_run_window(store)).rate(),
            )
        if detailed.distributed is None:
            detailed = replace(
                detailed, compared=self._comparison(store, whole_window, detailed, end_s, request, events)
            )
        return detailed

    def _recent_rate(self, store: Store, process: Process, others: Sequence[Process], end_s: int) -> RecentRate:
        """Return the rate over the last ten seconds of processes that train together; with many, some seconds old."""
        assert process.last_step is not None
        step, training = process.last_step, [process, *(other for other in others if other.last_step is not None)]
        key, last = (step.mode, *(other.process for other in training)), self._recent
        age_s = end_s - last.end_s if last is not None and last.key == key else -1
        if last is None or not 0 <= age_s < min(len(training) // RANKS_A_SECOND, _MAX_RATE_AGE_S):
            sampled = [process, *sample_unevenly(training[1:], MAX_RATES)]
            until_s = max(stats_until_s(store, other) for other in sampled)
            numbers = [other.process for other in sampled]
            start_s, scale = max(end_s - WINDOW_S - 2, 0), len(training) / len(sampled)
            found = read_recent_rate(store, numbers, step.mode, start_s, until_s, scale)
            last = self._recent = _ReadRate(key, end_s, found)
        if step.kind != store.main_kind or last.found.last_ns is None:
            return last.found
        return last.found._replace(last_ns=max(last.found.last_ns, step.start_ns + step.wall_ns))

    def _comparison(
        self,
        store: Store,
        window: StatsWindow,
        process: Process,
        end_s: int,
        request: SnapshotRequest,
        events: RunEvents,
    ) -> Comparison:
        """Compare the modes over the whole run (`window`). In a long run, the result may be minutes old."""
        process_index = process.process
        devices, virtual = events.devices_by_mode(process_index).get("dp", ((), False))
        if process.mode == "dp" and process.devices:
            devices, virtual = process.devices, process.virtual
        every_s = max(end_s // _COMPARISONS_PER_RUN, 1)
        key = process_index, process.mode, devices, request.over
        if self._compared is not None and self._compared.key == key and 0 <= end_s - self._compared.end_s < every_s:
            comparison = self._compared.found
        else:
            comparison = compare_modes(window, process_index, devices=devices, virtual=virtual)
            self._compared = _Compared(key, end_s, comparison) if every_s > 1 else None
        starts = mode_starts(events.changes, process_index) or [(process.mode, 0)]
        return replace(comparison, memory=read_peaks_by_mode(store, process_index, starts))


# ------------------------------------------------------------------------------------------------ calls


def _with_calls(
    store: Store, process: Process, ranged: StatsWindow | None = None, *, previous: Process | None = None
) -> Process:
    """Return `process` with its newest calls. `ranged`: the time range of their times, if it represents the run.

    `previous`: the process in the previous snapshot, if its calls may be kept.
    """
    if previous is not None:
        kept = ("calls", "earlier_wrappers", "last_calls", "progress", "devices", "virtual")
        return replace(process, **{name: getattr(previous, name) for name in kept})
    mode = process.last_step.mode if process.last_step is not None else process.mode
    if ranged is None:
        calls = RecentCalls(store, process.process, MIN_CALLS_READ)
        timings = calls.timings({}, mode, timed=False)
        progress = progress_of(store, process.process, process.last_step, limit=1, no_time=OTHER_RANK)
        process = replace(process, progress=progress)
    else:
        # The calls of one rank are interleaved with those of all others.
        limit = max(CALLS_READ * RANKS_A_SECOND // max(len(store.ranks), RANKS_A_SECOND), MIN_CALLS_READ)
        calls = RecentCalls(store, process.process, limit)
        timings = calls.timings(ranged.tallies, mode)
    if process.last_step is not None and process.last_step.kind != TRAINING:
        process = replace(process, earlier_wrappers=read_wrapper_types(store, process.process))
    last_calls = () if process.last_step is None else calls.calls_of(process.last_step)
    return _with_devices(replace(process, calls=timings, last_calls=last_calls))


def _with_devices(process: Process) -> Process:
    """Return `process` with the devices of its newest call in the current mode."""
    timings = process.calls.values()
    call = next((timing.last for timing in timings if timing.last.mode == process.mode and timing.last.devices), None)
    return process if call is None else replace(process, devices=call.devices, virtual=call.virtual)


# ------------------------------------------------------------------------------------------------ metrics


def _main_or_other_stats(window: StatsWindow, process: int, mode: str) -> StepStats:
    """Return the metrics of a mode's steps of the main kind, else of another kind, else NO_STEPS."""
    other_kinds = [kind for other_mode, kind in window.other_modes if other_mode == mode]
    stats = (window.step_stats(mode, kind, process) for kind in (window.main_kind, *other_kinds))
    return next((kind_stats for kind_stats in stats if kind_stats.steps), NO_STEPS)


def _main_tally(store: Store, process: Process) -> Tally:
    """Return the steps of the main kind of a process in the time range; an evaluation may take all of it."""
    return process.ranged.tally if process.ranged.kind == store.main_kind else Tally()


def _settled_stats(window: StatsWindow, ranged: StepStats, process: int) -> StepStats:
    """Return the metrics `ranged` without warm-up steps; NO_STEPS if they are not of the main kind."""
    if ranged.kind != window.main_kind or not ranged.steps:
        return NO_STEPS
    if not any(key.kind & WARM_UP for key in window.tallies):
        return ranged
    return compute_step_stats(
        ranged.mode,
        tally=window.tally(ranged.mode, process=process, without_warmup=True),
        rate=None,
        kind=ranged.kind,
    )


def _uneven(store: Store, stats: StepStats, process: int, waits: Sequence[tuple[int, int]]) -> StepUnevenness | None:
    """Return how uneven the steps of these metrics are; None if the median represents them."""
    tally = stats.tally
    if uneven_steps(tally, (), waits) is None:
        return None
    unevenness = uneven_steps(
        tally, read_longest_steps(store, _MAX_LONG_STEPS, stats.mode, process=process, newest_only=True), waits
    )
    if unevenness is not None and unevenness.phase == INPUT:  # count the time of the waits, not of these steps
        waited = overlap_ns(waits, tally.first_ns or 0, tally.last_ns or 0)
        return unevenness._replace(time=min(waited / max(tally.stat(STEP).total, 1), 1.0))
    return unevenness


def _history_range(process: Process, end_s: int, request: SnapshotRequest) -> tuple[int, int]:
    """Return the length (s) of the history, which ends at `end_s`, and the seconds per column."""
    length_s = end_s - max(process.began_ns, 0) // SECOND
    column_s = column_width_s(request.span_s, length_s)
    return min(2 * request.span_s, COLUMNS) if request.span_s else length_s + column_s, column_s


def _losses(store: Store, process: Process, request: SnapshotRequest) -> tuple[LossCurve, ...]:
    """Return the losses of a process, in points that match the columns of its history; empty without steps."""
    if process.last_step is None:
        return ()
    end_s = stats_until_s(store, process)
    history_s, column_s = _history_range(process, end_s, request)
    return read_loss_curves(store, process.process, max(end_s - history_s, 0), end_s, column_s)


def _whole_run_window(store: Store) -> StatsWindow:
    """Return the window over the whole run up to the time of `store`."""
    return StatsWindow(store) if store.until_s is None else StatsWindow(store, 0, store.until_s)


# ------------------------------------------------------------------------------------------------ ranks


def with_ranks(
    store: Store,
    snapshot: RunSnapshot,
    focus: Process,
    others: Sequence[Process],
    wrappers: Sequence[Wrapper],
    times: tuple[RankTimes, ...],
    last: RunSnapshot | None,
    groups: Mapping[int, Group | None],
) -> RunSnapshot:
    """Add the mean times of the ranks, and the collectives of sampled steps, from the `last` snapshot if given."""
    numbers = {process.process for process in (focus, *others)}
    shown_times = tuple(times_of_rank for times_of_rank in times if times_of_rank.process in numbers)
    other_times = tuple(times_of_rank for times_of_rank in times if times_of_rank.process not in numbers)
    if last is not None and (communication := last.communication) is not None:
        return replace(snapshot, communication=communication.with_times(shown_times, wrappers, other_times, groups))
    end_ns = snapshot.newest_ns + 1
    start_s = max(end_ns // SECOND - COLLECTIVES_S, 0)
    collectives = read_collective_sums(store, start_s * SECOND, end_ns, list(numbers))
    steps, sample = 0, None
    if collectives.samples:
        sample = read_last_sample(store, focus.process, start_s * SECOND)
        steps = count_steps(store, start_s, end_ns // SECOND + 1, numbers)
    new_communication = build_communication(
        shown_times, wrappers, collectives, steps, other_times, tally=_main_tally(store, focus), lately=True
    )
    return replace(snapshot, communication=new_communication, last_sample=sample)


def slow_steps_of(
    store: Store,
    snapshot: RunSnapshot,
    range_s: int,
    limit: int,
    waits: Sequence[tuple[int | None, int, int]],
    cache: SlowStepCache,
) -> SlowSteps:
    """Return the longest steps of a snapshot's processes in a time range.

    `range_s`: its length; 0 for the whole run. `waits`: process, start and end (ns) of each wait for input.
    """
    focus = snapshot.representative
    if focus is None or focus.last_step is None or not focus.ranged.steps:
        return SlowSteps()
    ranks = [
        process.process
        for process in snapshot.training_processes
        if process.rank is not None and process.last_step is not None
    ]
    start_ns = max(stats_until_s(store, focus) - range_s, 0) * SECOND if range_s else 0
    return cache.read(store, ranks or [focus.process], start_ns, focus.ranged, waits, limit)

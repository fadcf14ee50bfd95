"""Builds a run's state for one picture from queries: `SnapshotBuilder.build` returns the state as of a time. Pure.

A live picture is as of now, a playback as of another time, and a finished run as of its end. Data that can no longer
change (finished columns of the history, samples) is cached, but no more than a picture shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.communication import Wrapper, build_communication
from dpmon.model.device_memory import HOST
from dpmon.model.device_usage import DeviceSampleCache, HostPeaks, ModePeriod, device_peaks, mode_periods
from dpmon.model.epoch_progress import NO_STEP, OTHER_RANK, OVER, progress_of
from dpmon.model.loss_curves import LossCurve, read_loss_curves
from dpmon.model.mode_comparison import MODES_COMPARED, Comparison, compare_modes
from dpmon.model.nodes import node_of, read_nodes
from dpmon.model.process_selection import (
    choose_other_processes,
    choose_slowest,
    other_ranks,
    ranks_on_other_nodes,
    read_process_table,
    with_processes,
)
from dpmon.model.rank_stats import RANKS_A_SECOND, RankTimesCache, with_recent_stats
from dpmon.model.rank_waits import RankWaitCache, choose_ranks_to_show
from dpmon.model.recent_calls import CALLS_READ, CallCache, build_call_timings
from dpmon.model.run_events import RunEvents
from dpmon.model.run_snapshot import (
    MANY,
    MAPPED,
    NO_STEPS,
    Process,
    RecentRate,
    RunSnapshot,
    SnapshotRequest,
    WarningRecord,
)
from dpmon.model.slow_steps import INPUT, SlowStepCache, SlowSteps, StepUnevenness, overlap_ns, uneven_steps
from dpmon.model.step_history import COLUMNS, HistoryColumnCache, column_width_s
from dpmon.model.stragglers import Group, RankTimes
from dpmon.model.throughput import MOST_RATES, WINDOW_S, metrics_end_s, read_recent_rate, sample_unevenly
from dpmon.record.schema import SECOND, STEP, WARM_UP
from dpmon.store.step_stats import StatsWindow, StepStats, compute_step_stats
from dpmon.store.tally import IncrementalTallies

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

RANK_CALLS_READ = 8
_RATE_AGE_S = 9
"""A rate of many ranks is at most this old."""
COLLECTIVES_S = 300
"""Seconds of sampled collectives to show; only some steps are sampled."""
_LONG_READ = 64
_PICTURES = 8
"""With MANY processes, the facts of those that are not shown are read once in this many pictures."""
_COMPARED_PART = 60
"""The modes are compared again when the run has become longer by this fraction (1/60)."""
_SLOW_IDS = 100_000
"""Most ids that are searched for the longest steps of a picture."""
_STALLS = 4
"""Most stalls that are left out of the comparison of ranks: older ones lie before its time."""
_USUAL = SnapshotRequest()


class _Compared(NamedTuple):
    """The last comparison, what else it depends on, and when it was made (s)."""

    key: tuple[object, ...]
    end_s: int
    found: Comparison


class _Last(NamedTuple):
    """The last picture of many ranks."""

    key: tuple[object, ...]
    """What else it depends on."""
    pictures: int
    """Number of pictures since all of its facts were read."""
    state: RunSnapshot


class _ReadRate(NamedTuple):
    """The last rate, of which processes and mode it is, and when it was read (s)."""

    key: tuple[object, ...]
    end_s: int
    found: RecentRate


@dataclass(slots=True)
class SnapshotBuilder:
    """Builds the states of one run, one after the other."""

    _samples: DeviceSampleCache = field(default_factory=DeviceSampleCache)
    _columns: HistoryColumnCache = field(default_factory=HistoryColumnCache)
    _host_peaks: HostPeaks = field(default_factory=HostPeaks)
    _events: tuple[object, RunEvents] = (None, RunEvents())
    """The events of the last picture, and what they depend on."""
    _compared: _Compared | None = None
    _recent: _ReadRate | None = None
    _last: _Last | None = None
    _times: RankTimesCache = field(default_factory=RankTimesCache)
    _of_run: IncrementalTallies = field(default_factory=IncrementalTallies)
    _of_range: IncrementalTallies = field(default_factory=IncrementalTallies)
    _waits: RankWaitCache = field(default_factory=RankWaitCache)
    _slowest: SlowStepCache = field(default_factory=lambda: SlowStepCache(_SLOW_IDS))

    def build(self, rows: Store, wanted: SnapshotRequest = _USUAL, ended: frozenset[int] = frozenset()) -> RunSnapshot:
        """The state as of the time of `rows`. `ended`: processes that are known to have ended."""
        state = self._build_or_reuse(rows, wanted, ended)
        damage = rows.damaged
        if damage is None:
            return state
        warning = WarningRecord(None, max(state.newest_ns, 0), damage)
        return replace(state, warnings=(*state.warnings, warning), warning_count=state.warning_count + 1)

    def _build_or_reuse(self, rows: Store, wanted: SnapshotRequest, ended: frozenset[int]) -> RunSnapshot:
        """The state. With many ranks, some facts are those of an earlier picture, but the waits are new."""
        events = self._read_events(rows)
        key, last = (wanted, ended, events), self._last
        if last is None or last.key != key or last.pictures >= _PICTURES or rows.until_s is not None:
            last = None
            state = replace(read_process_table(rows, events, ended, wanted.node), chosen=wanted.process)
        else:
            state = replace(last.state, nodes=read_nodes(rows) if last.state.nodes else ())
        if many := len(state.processes) > MANY:
            focus = [] if state.representative is None else [state.representative.process]
            state = with_processes(state, rows, events, [*focus, *state.drawn, *state.order[: wanted.ranks]])
        state = self._with_details(rows, state, wanted, events, None if last is None else last.state)
        self._last = _Last(key, 1 if last is None else last.pictures + 1, state) if many else None
        return state

    def _rank_times(
        self,
        rows: Store,
        state: RunSnapshot,
        focus: Process,
        ranks: Sequence[Process],
        wanted: SnapshotRequest,
        events: RunEvents,
    ) -> tuple[list[Wrapper], tuple[RankTimes, ...]]:
        """The wrappers of `focus` and the other ranks, and the times of all ranks, also of those that are not shown."""
        there = {process.process for process in state.training_processes}
        wrappers = [one for one in events.wrappers if one.process in there]
        if not ranks:
            return wrappers, ()
        # Only the machine of the rank that stood still leaves the step with the stall out of its tallies.
        stalls = [(one.since_ns, one.end_ns) for one in events.stalls[-_STALLS:] if one.end_ns is not None]
        stalled = tuple(range(since // SECOND, end // SECOND + 2) for since, end in stalls)
        others = [*ranks, *ranks_on_other_nodes(rows, state, wanted)]
        return wrappers, self._times.read(rows, focus, others, wrappers, stalled)

    def _with_details(
        self, rows: Store, known: RunSnapshot, wanted: SnapshotRequest, events: RunEvents, last: RunSnapshot | None
    ) -> RunSnapshot:
        """The state with its figures. `last`: the state of the last picture if most of its figures may be kept."""
        self._samples.read(rows, wanted.node if wanted.node is not None else node_of(known.nodes, known.representative))
        state = replace(
            known,
            devices=dict(sorted(self._samples.devices().items())),
            host=self._samples.host_history(),
            mode_changes=events.changes,
            mode_change_count=events.change_count,
            pauses=events.pauses,
            warnings=events.warnings,
            stalls=events.stalls,
            warning_count=events.warning_count,
            missed=rows.dropped,
            open_calls=rows.open_calls,
            over=wanted.over,
        )
        focus = state.representative
        if focus is None:
            return state
        ranks = other_ranks(state, focus)
        found = self._with_stats(rows, focus, ranks if focus.rank is not None else [], wanted, events)
        wrappers, times = self._rank_times(rows, state, found, ranks, wanted, events)
        slowest = choose_slowest([one for one in times if one.process in state.processes], wanted)
        others = [one for one in ranks if one.process in slowest]
        if wanted.listed or not slowest:
            others += [one for one in choose_other_processes(state, focus, wanted) if one.process not in slowest]
        plain = [one.process for one in others if one.last_step is not None and not one.last_step.phases]
        if plain:
            state = with_processes(state, rows, events, plain)
            others = [state.processes[one.process] for one in others]
        state = replace(state, losses=_losses(rows, found, wanted), unfit=next(iter(rows.first_invalid_losses()), None))
        before = {} if last is None else {number: last.processes[number] for number in last.drawn}
        shown = {one.process: _with_calls(rows, one, before=before.get(one.process)) for one in others}
        shown[found.process] = found
        if others and not slowest:
            shown.update({process.process: process for process in with_recent_stats(rows, shown.values())})
        state = replace(state, processes={**state.processes, **shown}, drawn=tuple(shown))
        if wanted.slowest and last is None:
            longest = slow_steps_of(rows, state, wanted.span_s, wanted.slowest, events.inputs, self._slowest)
            state = replace(state, slowest=longest)
        if ranks:
            state = with_ranks(rows, state, found, ranks, wrappers, times, last, self._times.groups)
            return self._with_waits(rows, state, found, wanted) if wanted.waits else state
        return replace(state, communication=build_communication((), wrappers, lately=True))

    def _read_events(self, rows: Store) -> RunEvents:
        """The events up to the time of `rows`; those of the last picture if there are no new ones."""
        key = rows.newest_event(), rows.pruned, rows.until_ns, len(rows.ranks)
        if key != self._events[0]:
            self._events = key, RunEvents.read(rows)
        return self._events[1]

    def _with_waits(self, rows: Store, state: RunSnapshot, focus: Process, wanted: SnapshotRequest) -> RunSnapshot:
        """Add over time which ranks the others waited for."""
        if focus.last_step is None or state.communication is None or not state.communication.ranks_with_waits:
            return state
        numbers = {one.process: one.rank for one in state.training_processes if one.rank is not None}
        shown, others = list(numbers), list[int]()
        if len(numbers) > MAPPED:
            shown, others = choose_ranks_to_show(state.ranks, state.straggler, wanted.process)
        end_s = metrics_end_s(rows, focus)
        begin_s = max(end_s - wanted.span_s, 0) if wanted.span_s else max(focus.began_ns, 0) // SECOND
        ranks = {process: numbers[process] for process in (*shown, *others)}
        return replace(state, rank_waits=self._waits.read(rows, ranks, begin_s, end_s, shown))

    def _with_stats(
        self,
        rows: Store,
        process: Process,
        others: Sequence[Process],
        wanted: SnapshotRequest,
        events: RunEvents,
    ) -> Process:
        """The process that represents the run, with its figures and its history; `others`: the other ranks."""
        step = process.last_step
        if step is None:
            tracks = build_call_timings(CallCache(rows, process.process), {}, (), process.mode)
            return _with_devices(replace(process, calls=tracks, progress=NO_STEP))
        end_s = metrics_end_s(rows, process)
        begin_s = max(end_s - wanted.span_s, 0) if wanted.span_s else 0
        whole = StatsWindow(rows, 0, end_s, process.process, self._of_run)
        ranged = StatsWindow(rows, begin_s, end_s, process.process, self._of_range) if begin_s else whole
        mode = process.mode if any(key.mode == process.mode for key in ranged.by_process) else step.mode
        waits = events.input_waits(process.process)
        shown_s, width = _history_range(process, end_s, wanted)
        found = _with_calls(rows, process, ranged)
        figures = _stats_of_mode(ranged, process.process, mode)
        found = replace(
            found,
            ranged=figures,
            settled=_settled_stats(ranged, figures, process.process),
            uneven=_uneven(rows, figures, process.process, waits),
            recent=self._recent_rate(rows, process, others, end_s),
            progress=progress_of(rows, process.process, step, no_time=OVER if wanted.over else None),
            columns=self._columns.read(rows, process.process, max(end_s - shown_s, 0), end_s, width),
            column_s=width,
        )
        if wanted.over:
            found = replace(
                found,
                whole=_stats_of_mode(whole, process.process, mode),
                mean=(whole if process.rank is None else _whole_run_window(rows)).rate(),
            )
        if found.distributed is None:
            found = replace(found, compared=self._comparison(rows, whole, found, end_s, wanted, events))
        return found

    def _recent_rate(self, rows: Store, process: Process, others: Sequence[Process], end_s: int) -> RecentRate:
        """The last ten seconds of training of processes that train together; with many, a few seconds old."""
        assert process.last_step is not None
        step, there = process.last_step, [process, *(one for one in others if one.last_step is not None)]
        key, before = (step.mode, *(one.process for one in there)), self._recent
        age_s = end_s - before.end_s if before is not None and before.key == key else -1
        if before is None or not 0 <= age_s < min(len(there) // RANKS_A_SECOND, _RATE_AGE_S):
            some = [process, *sample_unevenly(there[1:], MOST_RATES)]
            until_s = max(metrics_end_s(rows, one) for one in some)
            numbers = [one.process for one in some]
            begin_s, times = max(end_s - WINDOW_S - 2, 0), len(there) / len(some)
            found = read_recent_rate(rows, numbers, step.mode, begin_s, until_s, times)
            before = self._recent = _ReadRate(key, end_s, found)
        if step.is_evaluation or before.found.last_ns is None:
            return before.found
        return before.found._replace(last_ns=max(before.found.last_ns, step.start_ns + step.wall_ns))

    def _comparison(
        self,
        rows: Store,
        window: StatsWindow,
        process: Process,
        end_s: int,
        wanted: SnapshotRequest,
        events: RunEvents,
    ) -> Comparison:
        """The comparison of the modes over the whole run (`window`). In a long run, it may be minutes old."""
        number = process.process
        waits = events.input_waits(number)
        devices, virtual = events.devices_by_mode(number).get("dp", ((), False))
        if process.mode == "dp" and process.devices:
            devices, virtual = process.devices, process.virtual
        every_s = max(end_s // _COMPARED_PART, 1)
        key = number, process.mode, devices, wanted.over, wanted.changes, len(waits)
        if self._compared is not None and self._compared.key == key and 0 <= end_s - self._compared.end_s < every_s:
            found = self._compared.found
        else:
            both = {key.mode for key in window.by_process}.issuperset(MODES_COMPARED)
            longest = [
                step
                for mode in (MODES_COMPARED if both else ())
                for step in rows.longest_steps(_LONG_READ, mode, process=number, lately=not wanted.over)
            ]
            found = compare_modes(
                window,
                number,
                devices=devices,
                virtual=virtual,
                longest=longest,
                waits=waits,
                changes=wanted.changes,
            )
            self._compared = _Compared(key, end_s, found) if every_s > 1 else None
        visits = mode_periods(events.changes, number) or [ModePeriod(process.mode, 0, 0)]
        memory = device_peaks(rows, number, visits)
        for mode, peak in self._host_peaks.read(rows, self._samples, visits).items():
            memory.setdefault(mode, {})[HOST] = peak
        return replace(found, memory={mode: peaks for mode, peaks in memory.items() if peaks})


# ------------------------------------------------------------------------------------------------ calls


def _with_calls(
    rows: Store, process: Process, ranged: StatsWindow | None = None, *, before: Process | None = None
) -> Process:
    """`process` with its newest calls; with their times in a time range if it represents the run.

    `before`: the process in the last picture, if its calls may be kept.
    """
    if before is not None:
        kept = {name: getattr(before, name) for name in ("calls", "last_calls", "progress", "devices", "virtual")}
        return replace(process, **kept)
    calls = CallCache(rows, process.process)
    mode = process.last_step.mode if process.last_step is not None else process.mode
    if ranged is None:
        tracks = build_call_timings(calls, {}, (), mode, most=RANK_CALLS_READ, timed=False)
        progress = progress_of(rows, process.process, process.last_step, most=1, no_time=OTHER_RANK)
        process = replace(process, progress=progress)
    else:
        trained = {key.mode for key in ranged.by_process if ranged.ever_trains(key.mode)}
        # The calls of all ranks lie between those of one.
        most = max(CALLS_READ * RANKS_A_SECOND // max(len(rows.ranks), RANKS_A_SECOND), RANK_CALLS_READ)
        tracks = build_call_timings(calls, ranged.by_process, trained, mode, most=most)
    return _with_devices(replace(process, calls=tracks, last_calls=calls.last_step_calls()))


def _with_devices(process: Process) -> Process:
    """`process` with the devices of its newest call in the current mode."""
    tracks = process.calls.values()
    call = next((track.last for track in tracks if track.last.mode == process.mode and track.last.devices), None)
    return process if call is None else replace(process, devices=call.devices, virtual=call.virtual)


# ------------------------------------------------------------------------------------------------ figures


def _stats_of_mode(window: StatsWindow, process: int, mode: str) -> StepStats:
    """The figures of a mode's training steps; of its evaluation steps if there are no others in this time."""
    found = window.figures(mode, process=process)
    if not found.steps and window.ever_trains(mode):
        found = window.figures(mode, True, process)
    return found if found.steps else NO_STEPS


def _settled_stats(window: StatsWindow, ranged: StepStats, process: int) -> StepStats:
    """The figures `ranged` without the settling steps; none if they are of evaluations."""
    if ranged.evaluation or not ranged.steps:
        return NO_STEPS
    if not any(key.kind & WARM_UP for key in window.by_process):
        return ranged
    return compute_step_stats(ranged.mode, False, window.tally(ranged.mode, process=process, settled=True), None)


def _uneven(rows: Store, figures: StepStats, process: int, waits: Sequence[tuple[int, int]]) -> StepUnevenness | None:
    """How uneven the steps of these figures are."""
    tally = figures.tally
    if uneven_steps(tally, (), waits) is None:
        return None
    uneven = uneven_steps(tally, rows.longest_steps(_LONG_READ, figures.mode, process=process, lately=True), waits)
    if uneven is not None and uneven.phase == INPUT:  # count the time of the waits, not of these steps
        waited = overlap_ns(waits, tally.first_ns or 0, tally.last_ns or 0)
        return uneven._replace(time=min(waited / max(tally.stat(STEP).total, 1), 1.0))
    return uneven


def _history_range(process: Process, end_s: int, wanted: SnapshotRequest) -> tuple[int, int]:
    """How many seconds up to `end_s` the history shows, and the seconds per column."""
    length_s = end_s - max(process.began_ns, 0) // SECOND
    width = column_width_s(wanted.span_s, length_s)
    return min(2 * wanted.span_s, COLUMNS) if wanted.span_s else length_s + width, width


def _losses(rows: Store, process: Process, wanted: SnapshotRequest) -> tuple[LossCurve, ...]:
    """The losses of the process that represents the run, in points that match the columns of its history."""
    if process.last_step is None:
        return ()
    end_s = metrics_end_s(rows, process)
    shown_s, width = _history_range(process, end_s, wanted)
    return read_loss_curves(rows, process.process, max(end_s - shown_s, 0), end_s, width)


def _whole_run_window(rows: Store) -> StatsWindow:
    """The window over the whole run until now."""
    return StatsWindow(rows) if rows.until_s is None else StatsWindow(rows, 0, rows.until_s)


# ------------------------------------------------------------------------------------------------ ranks


def with_ranks(
    rows: Store,
    state: RunSnapshot,
    focus: Process,
    others: Sequence[Process],
    wrappers: Sequence[Wrapper],
    times: tuple[RankTimes, ...],
    last: RunSnapshot | None,
    groups: Mapping[int, Group | None],
) -> RunSnapshot:
    """Add the mean times of the ranks, and the collectives of sampled steps: those of a `last` state if it is given."""
    numbers = {process.process for process in (focus, *others)}
    own = tuple(one for one in times if one.process in numbers)
    elsewhere = tuple(one for one in times if one.process not in numbers)
    if last is not None and (before := last.communication) is not None:
        return replace(state, communication=before.with_times(own, wrappers, elsewhere, groups))
    end_ns = state.newest_ns + 1
    begin_s = max(end_ns // SECOND - COLLECTIVES_S, 0)
    found = rows.collective_sums(begin_s * SECOND, end_ns, list(numbers))
    steps, sample = 0, None
    if found.samples:
        sample = rows.last_sample(focus.process, begin_s * SECOND)
        steps = rows.step_count(begin_s, end_ns // SECOND + 1, numbers)
    known = build_communication(own, wrappers, found, steps, elsewhere, lately=True)
    return replace(state, communication=known, last_sample=sample)


def slow_steps_of(
    rows: Store,
    state: RunSnapshot,
    span_s: int,
    most: int,
    waits: Sequence[tuple[int | None, int, int]],
    reader: SlowStepCache,
) -> SlowSteps:
    """The longest steps of the state's processes in its time range. `waits`: for input; `reader`: reads the steps."""
    focus = state.representative
    if focus is None or focus.last_step is None or not focus.ranged.steps:
        return SlowSteps()
    ranks = [one.process for one in state.training_processes if one.rank is not None and one.last_step is not None]
    begin_ns = max(metrics_end_s(rows, focus) - span_s, 0) * SECOND if span_s else 0
    return reader.read(rows, ranks or [focus.process], begin_ns, focus.ranged, waits, most)

"""Builds a run's state for one picture from queries: `Snapshots.take` returns the state as of a time. Pure.

A live picture is as of now, a playback as of another time, and a finished run as of its end. Data that can no longer
change (finished columns of the history, samples) is cached, but no more than a picture shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dpmon.model.active_processes import last_resumption, some_are_silent
from dpmon.model.announced import Announced
from dpmon.model.calls_seen import SeenCalls, call_tracks
from dpmon.model.compare import MODES_COMPARED, Comparison, compare_modes
from dpmon.model.devices import HostPeaks, Samples, Visit, device_peaks, visits_of
from dpmon.model.history import COLUMNS, Columns, width_of_columns
from dpmon.model.inputs import INPUT, waited_ns
from dpmon.model.members import SECOND
from dpmon.model.memory import HOST
from dpmon.model.pace import WINDOW_S, Paces, Trained, rate_together, recent, recent_of_steps
from dpmon.model.process import ModeTrack, Process, Recent, Summary
from dpmon.model.rank_snapshot import rank_figures, together
from dpmon.model.source import Rows, Tallies, Wanted, figures_end_s
from dpmon.model.state import State
from dpmon.model.uneven import uneven_steps
from dpmon.record.schema import STEP
from dpmon.record.wire import RANK_MODES
from dpmon.store.answers import TimeRow, TimeTogether
from dpmon.store.figures import trains
from dpmon.store.tally import ALL, Key, Tally
from dpmon.store.window import Window

RANK_CALLS_READ = 8
_SILENT_S = 40
"""How many seconds back to look for the resumption of a process (dpmon.model.active_processes)."""
_LONG_READ = 64
_COMPARED_PART = 60
"""The modes are compared again when the run has become longer by this fraction (1/60)."""
_NO_SERIES: tuple[str, ...] = ()
_USUAL = Wanted()


class _Compared(NamedTuple):
    """The last comparison, what else it depends on, and when it was made (s)."""

    key: tuple[object, ...]
    end_s: int
    found: Comparison


@dataclass(slots=True)
class Snapshots:
    """Builds the states of one run, one after the other."""

    _samples: Samples = field(default_factory=Samples)
    _columns: Columns = field(default_factory=Columns)
    _host_peaks: HostPeaks = field(default_factory=HostPeaks)
    _paces: Paces = field(default_factory=Paces)
    """Paces of the other ranks."""
    _compared: _Compared | None = None

    def take(self, rows: Rows, tallies: Tallies, wanted: Wanted = _USUAL, ended: frozenset[int] = frozenset()) -> State:
        """The state as of the time of `rows`. `ended`: processes that are known to have ended."""
        events = Announced.read(rows)
        self._samples.read(rows)
        state = replace(
            _processes(rows, tallies, events, ended),
            devices=dict(sorted(self._samples.devices().items())),
            host=self._samples.of_host(),
            mode_changes=events.changes,
            mode_change_count=rows.count("mode"),
            pauses=events.pauses,
            warnings=events.warnings,
            wrappers=events.wrappers,
            warning_count=rows.count("warning"),
            missed=rows.missed,
            open_calls=rows.open_calls,
            over=wanted.over,
            chosen=wanted.process,
        )
        focus = state.focus()
        if focus is None:
            return state
        others = _other_processes(state, focus, wanted)
        ranks = [one for one in state.training() if one.rank is not None and one.process != focus.process]
        found = self._with_figures(rows, tallies, focus, ranks if focus.rank is not None else [], wanted, events)
        shown = {
            process.process: process for process in (found, *(_with_last_calls(rows, process) for process in others))
        }
        if others:
            shown.update({process.process: process for process in rank_figures(rows, tallies, shown.values())})
        state = replace(state, processes={**state.processes, **shown})
        return together(rows, tallies, state, found, ranks) if ranks else state

    def _with_figures(
        self,
        rows: Rows,
        tallies: Tallies,
        process: Process,
        others: Sequence[Process],
        wanted: Wanted,
        events: Announced,
    ) -> Process:
        """The process that represents the run, with its figures and its history; `others`: the other ranks."""
        step = process.last_step
        if step is None:
            tracks, newest = call_tracks(SeenCalls(rows, process.process), {}, (), process.mode)
            return _with_devices(replace(process, calls=tracks, newest=newest))
        end_s = figures_end_s(rows, process)
        begin_s = max(end_s - wanted.span_s, 0) if wanted.span_s else 0
        own = _ProcessTallies(tallies, process.process)
        ranged = Window(own, begin_s, end_s)
        mode = process.mode if any(key.mode == process.mode for key in ranged.by_process) else step.mode
        waits = events.waits_of(process.process)
        visits = visits_of(events.changes, process.process) or [Visit(mode, 0, 0)]
        length_s = end_s - max(process.began_ns, 0) // SECOND
        width = width_of_columns(wanted.span_s, length_s)
        shown_s = min(2 * wanted.span_s, COLUMNS) if wanted.span_s else length_s + width
        found = _called(rows, process, ranged, step.mode)
        found = replace(
            found,
            ranged=_summary(rows, ranged, process.process, mode, waits),
            recent=_recent(rows, tallies, self._paces, process, others, end_s),
            columns=self._columns.read(tallies, process.process, max(end_s - shown_s, 0), end_s, width),
            column_s=width,
            modes=self._modes(rows, found, visits, events),
        )
        if wanted.over:
            whole = Window(own, 0, end_s)
            found = replace(
                found,
                whole=_summary(rows, whole, process.process, mode, waits),
                mean=(whole if process.rank is None else _of_run(rows, tallies)).mean(),
            )
        if not any(via in RANK_MODES for _, via in found.calls):
            found = replace(found, compared=self._comparison(rows, own, found, end_s, wanted, waits))
        return found

    def _modes(self, rows: Rows, process: Process, visits: Sequence[Visit], events: Announced) -> dict[str, ModeTrack]:
        """The devices and the memory of each mode."""
        peaks = device_peaks(rows, process.process, visits)
        host = self._host_peaks.read(rows, self._samples, process.process, visits)
        devices = events.devices_of(process.process)
        if process.devices:
            devices[process.mode] = process.devices, process.virtual
        found = {}
        for mode in {visit.mode for visit in visits}:
            used = {**peaks.get(mode, {}), **({HOST: host[mode]} if mode in host else {})}
            found[mode] = ModeTrack(mode, *devices.get(mode, ((), False)), used)
        return found

    def _comparison(
        self,
        rows: Rows,
        own: _ProcessTallies,
        process: Process,
        end_s: int,
        wanted: Wanted,
        waits: Sequence[tuple[int, int]],
    ) -> Comparison:
        """The comparison of the modes; in a long run it may be minutes old (`_COMPARED_PART`)."""
        number = process.process
        dp = process.modes.get("dp")
        devices, virtual = (dp.devices, dp.virtual) if dp is not None else ((), False)
        every_s = max(end_s // _COMPARED_PART, 1)
        key = number, process.mode, devices, wanted.over, len(waits)
        if self._compared is not None and self._compared.key == key and 0 <= end_s - self._compared.end_s < every_s:
            found = self._compared.found
        else:
            window = Window(own, 0, end_s)
            both = {key.mode for key in window.by_process}.issuperset(MODES_COMPARED)
            longest = [
                step
                for mode in (MODES_COMPARED if both else ())
                for step in rows.longest(number, mode, _LONG_READ, of_all=wanted.over)
            ]
            found = compare_modes(window, number, devices=devices, virtual=virtual, longest=longest, waits=waits)
            self._compared = _Compared(key, end_s, found) if every_s > 1 else None
        peaks = {mode: track.peaks for mode, track in process.modes.items()}
        sides = {mode: side._replace(memory=peaks.get(mode, {})) for mode, side in found.sides.items()}
        return replace(found, sides=sides)


def processes_in(rows: Rows, tallies: Tallies, ended: frozenset[int] = frozenset()) -> State:
    """A state with only the processes, without their figures; parameters as in `Snapshots.take`."""
    return _processes(rows, tallies, Announced.read(rows), ended)


class _ProcessTallies:
    """The tallies of one process, as the source of a Window."""

    def __init__(self, tallies: Tallies, process: int) -> None:
        self._tallies = tallies
        self.processes = [process]
        self._known: dict[tuple[int, int], dict[Key, Tally]] = {}

    def of_all(self, begin_s: int, end_s: int) -> dict[Key, Tally]:
        """The process's tallies, under the process ALL."""
        return {key._replace(process=ALL): tally for key, tally in self.tallies(begin_s, end_s).items()}

    def tallies(self, begin_s: int, end_s: int, *, process: int | None = None) -> dict[Key, Tally]:
        """The process's tallies by key."""
        found = self._known.get((begin_s, end_s))
        if found is None:
            found = self._known[begin_s, end_s] = self._tallies.tallies(begin_s, end_s, process=self.processes[0])
        return found

    def sums(self, begin_s: int, end_s: int) -> dict[Key, Tally]:
        """The process's tallies by key: the sums of one process are its tallies."""
        return self.tallies(begin_s, end_s)

    def tally_rows(
        self, begin_s: int, end_s: int, *, process: int | None = None
    ) -> Iterable[tuple[int, int, Key, Tally]]:
        """The process's tallies in order of time."""
        return self._tallies.tally_rows(begin_s, end_s, process=self.processes[0])

    def time_sums(self, begin_s: int, end_s: int) -> list[TimeRow]:
        """The process's time by activity."""
        return self._tallies.time_rows(begin_s, end_s, process=self.processes[0])

    def times_together(self, begin_s: int, end_s: int) -> list[TimeTogether]:
        """The process's time by activity, in the form of the time of all processes together."""
        return [
            TimeTogether(row.start_s, row.width_s, sum(row.spent.values()), row.spent)
            for row in self.time_sums(begin_s, end_s)
        ]

    def kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all steps so far."""
        return self._tallies.kinds()


# ------------------------------------------------------------------------------------------------ each process


def _processes(rows: Rows, tallies: Tallies, events: Announced, ended: frozenset[int]) -> State:
    """A state with only the processes, without their figures."""
    numbers = {**dict.fromkeys(events.info), **rows.ranks}
    known = {number: _seen(rows, number, events) for number in sorted(numbers)}
    newest_ns = max((process.seen_ns for process in known.values()), default=-1)
    state = State(processes=known, newest_ns=newest_ns, ended=ended)
    return replace(state, processes=_resumed(tallies, state))


def _seen(rows: Rows, number: int, events: Announced) -> Process:
    """The facts of a process without its figures."""
    step = next(iter(rows.steps(number, 1)), None)
    head = next(iter(rows.heads(number, 1)), None)
    ends = [-1 if step is None else step.start_ns + step.wall_ns, -1 if head is None else head.end_ns]
    seen = max(ends)
    began = rows.first_ns(number) if seen >= 0 else None
    memory = rows.memory(number)
    force = events.in_force(number, None if step is None else (step.mode, ends[0]), "" if head is None else head.mode)
    rank = rows.ranks.get(number)
    return Process(
        number,
        rank if rank is not None else events.rank_of(number),
        events.info.get(number, {}),
        began_ns=-1 if began is None else began,
        resumed_ns=-1 if began is None else began,
        seen_ns=seen,
        last_step=step,
        mode=force.mode,
        virtual=force.virtual,
        devices=force.devices,
        mode_reason=force.reason,
        refusals=events.refusals_of(number),
        paused_since_ns=events.paused_since(number, None if step is None else step.start_ns),
        memory=memory.data if memory is not None and isinstance(memory.data.get("devices"), list) else {},
    )


def _resumed(tallies: Tallies, state: State) -> dict[int, Process]:
    """The processes. If some are silent, each has the time at which it last resumed its work."""
    found = dict(state.processes)
    newest_s = state.newest_ns // SECOND
    if some_are_silent(state):
        for number, process in state.processes.items():
            if process.seen_ns >= 0 and process.seen_ns // SECOND >= newest_s - _SILENT_S:
                rows = tallies.tally_rows(
                    newest_s - _SILENT_S, newest_s + 1, process=number, sketches=False, widest=1, series=_NO_SERIES
                )
                spans = [(tally.first_ns, tally.last_ns) for _, _, _, tally in rows]
                resumed = last_resumption(process, (newest_s - _SILENT_S) * SECOND, spans)
                found[number] = replace(process, resumed_ns=resumed)
    return found


def _other_processes(state: State, focus: Process, wanted: Wanted) -> list[Process]:
    """The other training processes that fit in a picture, by rank."""
    training = sorted(state.training(), key=lambda process: (process.rank is None, process.rank or 0))
    shown = [*training[: wanted.ranks], *training[wanted.first_rank : wanted.first_rank + wanted.ranks]]
    return list({process.process: process for process in shown if process.process != focus.process}.values())


def _with_last_calls(rows: Rows, process: Process) -> Process:
    """`process`, which trains beside the one that represents the run, with its newest calls."""
    calls = SeenCalls(rows, process.process)
    mode = process.last_step.mode if process.last_step is not None else process.mode
    tracks, newest = call_tracks(calls, {}, (), mode, most=RANK_CALLS_READ, timed=False)
    return _with_devices(replace(process, calls=tracks, newest=newest, last_calls=calls.of_last_step()))


def _called(rows: Rows, process: Process, ranged: Window, mode: str) -> Process:
    """`process` with its calls, and their times in a time range."""
    calls = SeenCalls(rows, process.process)
    trained = {key.mode for key in ranged.by_process if ranged.trained(key.mode)}
    tracks, newest = call_tracks(calls, ranged.by_process, trained, mode)
    return _with_devices(replace(process, calls=tracks, newest=newest, last_calls=calls.of_last_step()))


def _with_devices(process: Process) -> Process:
    """`process` with the devices of its newest call in the current mode."""
    tracks = [process.calls[process.newest]] if process.newest is not None else []
    tracks += process.calls.values()
    call = next((track.last for track in tracks if track.last.mode == process.mode and track.last.devices), None)
    return process if call is None else replace(process, devices=call.devices, virtual=call.virtual)


# ------------------------------------------------------------------------------------------------ figures


def _summary(rows: Rows, window: Window, process: int, mode: str, waits: Sequence[tuple[int, int]]) -> Summary:
    """The figures of a mode's training steps; of its evaluation steps if there are no others in this time."""
    found = window.figures(mode, process=process)
    if not found.steps and window.trained(mode):
        found = window.figures(mode, True, process)
    if not found.steps:
        return Summary()
    uneven = uneven_steps(found.tally, (), waits)
    if uneven is not None:
        uneven = uneven_steps(found.tally, rows.longest(process, mode, _LONG_READ), waits)
    if uneven is not None and uneven.phase == INPUT:  # the time of these steps is then the time of the waits
        tally = found.tally
        waited = waited_ns(waits, tally.first_ns or 0, tally.last_ns or 0)
        uneven = uneven._replace(time=min(waited / max(tally.stat(STEP).total, 1), 1.0))
    return Summary(found, found.parts, uneven)


def _recent(
    rows: Rows, tallies: Tallies, paces: Paces, process: Process, others: Sequence[Process], end_s: int
) -> Recent:
    """The last ten seconds of training; with fewer than two steps there, the last two steps.

    `others`: processes that train together with this one.
    """
    step = process.last_step
    assert step is not None
    begin_s = max(end_s - WINDOW_S - 2, 0)
    trained = step.mode in trains(tallies.kinds())
    own = _lately(tallies, Paces(), (process.process,), begin_s, end_s, step.mode, trained)[process.process]
    slow = not own.enough
    if slow:
        newest = _two_steps(rows, tallies, process, end_s, step.mode, trained)
        own = newest if newest.enough else own
    last_ns, step_ns = own.tally.last_ns, own.tally.stat(STEP).total // max(own.tally.steps, 1)
    if last_ns is None and trained:
        last_ns = rows.last_training_ns(process.process)
    if not own.enough:
        return Recent(None, last_ns, step_ns)
    side_by_side = {process.process: own}
    stepped = [other for other in others if other.last_step is not None]
    until_s = max((figures_end_s(rows, other) for other in stepped), default=end_s)
    if slow:
        for other in stepped:
            side_by_side[other.process] = _two_steps(rows, tallies, other, until_s, step.mode, trained)
    elif stepped:
        numbers = tuple(other.process for other in stepped)
        side_by_side |= _lately(tallies, paces, numbers, begin_s, until_s, step.mode, trained)
    return Recent(rate_together(side_by_side), last_ns, step_ns)


def _of_run(rows: Rows, tallies: Tallies) -> Window:
    """The window over the whole run until now."""
    return Window(tallies) if rows.until_s is None else Window(tallies, 0, rows.until_s)


def _lately(
    tallies: Tallies,
    paces: Paces,
    processes: tuple[int, ...],
    begin_s: int,
    end_s: int,
    mode: str,
    trained: bool,
) -> dict[int, Trained]:
    """The last ten seconds of processes in one mode."""
    rows = paces.read(tallies, processes, begin_s, end_s)
    spent: dict[int, list[tuple[int, int, int]]] = {process: [] for process in processes}
    for number, start, width, ns in tallies.pace_times(begin_s, end_s, processes, evaluation=not trained, widest=1):
        spent[number].append((start, width, ns))
    return {process: recent(rows[process], spent[process], mode, trained) for process in processes}


def _two_steps(rows: Rows, tallies: Tallies, process: Process, end_s: int, mode: str, trained: bool) -> Trained:
    """The two newest steps of a process."""
    newest = rows.steps(process.process, 2)
    begin_s = newest[-1].start_ns // SECOND
    times = tallies.pace_times(begin_s, end_s, (process.process,), evaluation=not trained)
    return recent_of_steps(newest, [stretch[1:] for stretch in times], mode, trained)

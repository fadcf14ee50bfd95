"""A picture's data, made anew from queries: `Snapshots.take` gives the state of a run as of a time. Pure.

Live is the time now, playback is another time, a run that is over is its end. What cannot change any more (finished
columns of the history, samples) is read once and kept, at most as much as a picture shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from dpmon.model.calls_seen import Calls, CallSource, call_tracks
from dpmon.model.compare import compare_modes
from dpmon.model.devices import HostPeaks, Samples, Source, Visit, device_peaks, visits_of
from dpmon.model.history import COLUMNS, Columns, width_of_columns
from dpmon.model.members import SECOND, number_in, text_in, time_of, whole_in
from dpmon.model.pace import WINDOW_S, mean_rate, recent, recent_of_steps
from dpmon.model.state import (
    HOST,
    MODES_COMPARED,
    CallTrack,
    ModeChange,
    ModeTrack,
    PauseChange,
    Process,
    RankFigures,
    Recent,
    Refusal,
    State,
    Summary,
    WarningText,
)
from dpmon.model.turns import last_resumption
from dpmon.model.uneven import uneven_steps
from dpmon.record.codec import DDP, MODES, Event, Step
from dpmon.record.schema import STEP
from dpmon.store.answers import LongRow, TimeRow
from dpmon.store.figures import elapsed, figures, merged, rate, trains
from dpmon.store.tally import ALL, Key, Tally
from dpmon.store.window import Window

__all__ = ["Rows", "Snapshots", "Tallies", "Wanted"]

END_S = 1 << 40
CHANGES_READ = 500
"""Changes of mode that are looked at; older ones say nothing of what is in force."""
TEXTS_READ = 100
ANSWERING_STEPS = 100
"""Within this many steps every root that is still called has answered a request."""
ROOTS_KEPT = 32
RANKS_FIGURED = 64
"""Processes beside the first one for which figures and the last step are read."""
RANKS_SPAN_S = 120
_LONG_READ = 64
_COMPARED_S = 10
"""Seconds of steps after which the modes are compared again."""
_COMPARED_SOON = 500
"""While a mode has fewer steps than this, its steps are compared each time."""
_RANK_SERIES = (STEP, "forward", "backward")
_NO_SERIES: tuple[str, ...] = ()


class Tallies(Protocol):
    """What a snapshot needs of dpmon.store.queries.Store."""

    processes: list[int]

    def tally_rows(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        process: int | None = None,
        sketches: bool = True,
        finest: int = 1,
        widest: int = ...,
        series: Collection[str] | None = None,
    ) -> Iterator[tuple[int, int, Key, Tally]]:
        """Start, width, key and tally of each row in order of time."""

    def tallies(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        process: int | None = None,
        sketches: bool = True,
        series: Collection[str] | None = None,
    ) -> dict[Key, Tally]:
        """By key, all of the time between two seconds."""

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        finest: int = 1,
        widest: int = ...,
        process: int | None = None,
    ) -> list[TimeRow]:
        """What each process did."""

    def kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all steps so far."""


class Rows(CallSource, Source, Protocol):
    """What a snapshot needs of dpmon.store.as_of.AsOf."""

    ranks: Mapping[int, int | None]
    missed: int
    until_s: int | None

    @property
    def store(self) -> Tallies:
        """Where the figures come from."""

    def first_ns(self, process: int) -> int | None:
        """When the first call or step of a process began."""

    def steps(self, process: int, most: int) -> list[Step]:
        """Its newest steps, the newest first."""

    def long_steps(self, process: int, mode: str, over_ns: int, most: int) -> list[LongRow]:
        """Of its newest steps in a mode those that took longer than a time."""

    def lasting(self, kind: str, newest: int = -1) -> list[Event]:
        """Events of a kind, in their order."""

    def count(self, kind: str) -> int:
        """How many events of a kind there were."""


class Wanted(NamedTuple):
    """What a picture shows, beside what every picture does."""

    span_s: int = 120
    """Time range of the histories and figures; 0 is the whole run."""
    first_rank: int = 0
    """The first of the ranks that are shown."""
    over: bool = False
    """Whether the run is over."""


@dataclass(slots=True)
class Snapshots:
    """Takes pictures of one run, one after the other."""

    _samples: Samples = field(default_factory=Samples)
    _columns: Columns = field(default_factory=Columns)
    _host_peaks: HostPeaks = field(default_factory=HostPeaks)
    _compared: tuple[Any, Any] = (None, None)
    """The comparison that was made last, and what it depends on."""

    def take(self, rows: Rows, wanted: Wanted = Wanted(), ended: frozenset[int] = frozenset()) -> State:
        """The state as of the time of `rows`; `ended`: processes that are known to train no more."""
        events = _Events(rows)
        known = {number: _seen(rows, number, rank, events) for number, rank in rows.ranks.items()}
        for number in events.processes:
            known.setdefault(number, _seen(rows, number, None, events))
        newest = max((process.seen_ns for process in known.values()), default=-1)
        self._samples.read(rows, _now(rows, newest, events))
        state = State(
            processes=dict(sorted(known.items())),
            devices=dict(sorted(self._samples.devices().items())),
            host=self._samples.of_host(),
            mode_changes=tuple(events.changes),
            mode_change_count=rows.count("mode"),
            pauses=tuple(events.pauses),
            warnings=tuple(events.warnings),
            warning_count=rows.count("warning"),
            dropped=events.dropped,
            missed=rows.missed,
            newest_ns=newest,
            ended=ended,
            over=wanted.over,
        )
        state = replace(state, processes=_resumed(rows, state))
        return self._filled(rows, state, wanted, events)

    # ------------------------------------------------------------------------------------------ those that train

    def _filled(self, rows: Rows, state: State, wanted: Wanted, events: _Events) -> State:
        """With what is shown of the processes that train now."""
        focus = state.focus()
        if focus is None:
            return state
        training = sorted(state.training(), key=lambda process: (process.rank is None, process.rank or 0))
        near = [process.process for process in training[:RANKS_FIGURED]]
        near += [process.process for process in training[wanted.first_rank : wanted.first_rank + RANKS_FIGURED]]
        processes = dict(state.processes)
        for process in training:
            number = process.process
            if number == focus.process or number not in near:
                continue
            drawn = _called(rows, process, Calls(rows, number), {})
            processes[number] = replace(drawn, figures=_rank_figures(rows, process))
        whole = self._focus(rows, focus, wanted, events)
        if len(training) > 1:
            whole = replace(whole, figures=_rank_figures(rows, whole))
        processes[focus.process] = whole
        share = _samples_share(rows, whole, training, wanted.over)
        return replace(state, processes=processes, samples_share=share)

    def _focus(self, rows: Rows, process: Process, wanted: Wanted, events: _Events) -> Process:
        """The process that stands for the run, with its figures and its history."""
        number, store = process.process, rows.store
        calls = Calls(rows, number)
        if process.last_step is None:
            return _called(rows, process, calls, {})
        end_ns = process.last_step.start_ns + process.last_step.wall_ns
        end_s = _end_s(rows, end_ns)
        begin_s = max(end_s - wanted.span_s, 0) if wanted.span_s else 0
        kinds = store.kinds()
        ranged = store.tallies(begin_s, end_s, process=number)
        drawn = _called(rows, process, calls, ranged, trains(kinds))
        mode = process.mode if any(key.mode == process.mode for key in ranged) else process.last_step.mode
        visits = visits_of(events.changes, number) or [Visit(mode, 0, 0)]
        length = end_s - max(process.began_ns, 0) // SECOND
        width = width_of_columns(wanted.span_s, length)
        shown = min(2 * wanted.span_s, COLUMNS) if wanted.span_s else length + width
        summary = _summary(rows, number, mode, ranged, kinds, (begin_s, end_s))
        found = replace(
            drawn,
            ranged=_told_apart(rows, summary, number, events.waits(process)),
            recent=_recent(rows, process.last_step, kinds, end_s),
            columns=self._columns.read(store, number, max(end_s - shown, 0), end_s, width),
            column_s=width,
            modes=self._modes(rows, drawn, visits),
        )
        if wanted.over:
            everything = store.tallies(0, end_s, process=number)
            times = store.time_rows(0, end_s, process=number)
            found = replace(
                found,
                whole=_summary(rows, number, mode, everything, kinds, (0, end_s)),
                mean=mean_rate(number, everything, times, kinds),
            )
        if not any(via == DDP for _, via in found.calls):
            found = replace(found, compared=self._comparison(rows, found, end_s, wanted.over, events))
        return found

    def _modes(self, rows: Rows, process: Process, visits: Sequence[Visit]) -> dict[str, ModeTrack]:
        """What was seen in each mode: over which devices it ran, and how much memory it used."""
        peaks = device_peaks(rows, process.process, visits)
        host = self._host_peaks.read(rows, self._samples, process.process, visits)
        found: dict[str, ModeTrack] = {}
        for visit in visits:
            used = {**peaks.get(visit.mode, {}), **({HOST: host[visit.mode]} if visit.mode in host else {})}
            found[visit.mode] = ModeTrack(visit.mode, (), False, used)
        return found

    def _comparison(self, rows: Rows, process: Process, end_s: int, over: bool, events: _Events) -> Any:
        """The modes side by side. Where there are many steps, a few more make little difference."""
        devices = _devices_by_mode(events.changes, process)
        peaks = {mode: track.peaks for mode, track in process.modes.items()}
        key = (process.process, end_s // _COMPARED_S, len(events.changes), over)
        known, found = self._compared
        few = found is None or any(side.seen < _COMPARED_SOON for side in found.sides.values())
        if known != key or few:
            window = Window(_OfOne(rows.store, process.process), 0, end_s)
            over_devices, virtual = devices.get("dp", ((), False))
            longest = [
                step for mode in MODES_COMPARED for step in rows.long_steps(process.process, mode, 0, _LONG_READ)
            ]
            found = compare_modes(
                window,
                process.process,
                devices=over_devices,
                virtual=virtual,
                longest=longest,
                waits=events.waits(process),
            )
            self._compared = key, found
        sides = {mode: side._replace(memory=peaks.get(mode, {})) for mode, side in found.sides.items()}
        return replace(found, sides=sides)

"""The steps of a process over time: columns of equal duration, as the screen draws them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.members import SECOND
from dpmon.model.process import Column, Process
from dpmon.record.schema import EVALUATION, PHASES, REST, STEP
from dpmon.store.figures import trains
from dpmon.store.tally import WIDTHS, Tally

if TYPE_CHECKING:
    from dpmon.store.queries import Store

COLUMNS = 640
"""Most columns to read."""
_NICE = (1, 2, 5, 10, 15, 30, 60)
_WIDTHS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400)
"""Possible durations of a column (s) in a picture of the whole run."""
_OPEN_S = 5
"""The columns of this many seconds before the newest step are read again: steps may still be added to them."""
_SERIES = tuple(REST if phase.name == "forward" else phase.name for phase in PHASES)


def width_of_columns(span_s: int, length_s: int) -> int:
    """Seconds per column. `span_s`: the time range; 0: the whole run, which has lasted `length_s`."""
    if span_s:
        return 1
    return next((width for width in _WIDTHS if length_s <= width * COLUMNS), _WIDTHS[-1])


# ------------------------------------------------------------------------------------------------ reading


@dataclass(slots=True)
class Columns:
    """Reads the columns of one process, and caches the columns that can no longer change."""

    _of: tuple[int, int, int] = (-1, 0, 0)
    """Process, width, and the first second."""
    _closed: list[Column] = field(default_factory=list)
    _trained: frozenset[str] = frozenset()
    """The modes that trained when the columns were read."""
    _until: int = 0
    """All columns before this second are complete."""

    def read(self, store: Store, process: int, begin_s: int, end_s: int, width: int) -> tuple[Column, ...]:
        """The columns from `begin_s` to `end_s` (the second after the newest step), oldest first."""
        begin_s -= begin_s % width
        kept_process, kept_width, kept_begin = self._of
        trained = frozenset(trains(store.kinds()))
        if trained != self._trained:
            self._trained, kept_process = trained, -1
        if (kept_process, kept_width) != (process, width) or begin_s < kept_begin or end_s < self._until:
            self._of, self._closed, self._until = (process, width, begin_s), [], begin_s
        self._of = process, width, begin_s
        self._closed = [column for column in self._closed if column.second >= begin_s]
        fresh = _added(store, process, max(self._until, begin_s), end_s, width, trained)
        until = max((end_s - _OPEN_S) // width * width, self._until)
        self._closed += [column for column in fresh if column.second < until]
        self._until = until
        return (*self._closed, *(column for column in fresh if column.second >= until))


def _added(store: Store, process: int, begin_s: int, end_s: int, width: int, trained: Collection[str]) -> list[Column]:
    widest = max(stored for stored in WIDTHS if width % stored == 0)
    found: dict[tuple[int, str, bool], Column] = {}
    for start, _, key, tally in store.tally_rows(begin_s, end_s, process=process, sketches=False, widest=widest):
        if start >= begin_s and tally.steps:
            place = start // width * width, key.mode, bool(key.kind & EVALUATION) and key.mode in trained
            column = _column(*place, tally)
            found[place] = _both(found[place], column) if place in found else column
    return [found[place] for place in sorted(found)]


def _column(second: int, mode: str, evaluation: bool, tally: Tally) -> Column:
    phases = tuple(tally.stat(name).total for name in _SERIES)
    first = second * SECOND if tally.first_ns is None else tally.first_ns
    return Column(second, mode, tally.steps, tally.stat(STEP).total, first, phases, evaluation)


def _both(one: Column, other: Column) -> Column:
    return replace(
        one,
        count=one.count + other.count,
        wall_ns=one.wall_ns + other.wall_ns,
        begin_ns=min(one.begin_ns, other.begin_ns),
        phases=tuple(a + b for a, b in zip(one.phases, other.phases, strict=True)),
    )


# ------------------------------------------------------------------------------------------------ drawing


class Picture(NamedTuple):
    """A history as the screen draws it: columns of one mode and equal duration, oldest first.

    In the time of a column without steps (count 0), no step ended or was under way.
    """

    columns: Sequence[Column]
    places: int
    """Number of columns for which the chart has room."""
    seconds: int
    """Seconds per column."""


def pictured(process: Process, span_s: int, width: int, over: bool = False) -> Picture:
    """The history for `width` cells: about the last `span_s` seconds, or the whole run for 0.

    Columns keep their place until the space is full; then they become narrower, and at last the oldest fifth goes. So
    columns do not move with every new one. `over`: no columns will follow, so no space is kept free for them.
    """
    if width <= 0 or not process.columns:
        return Picture((), 1, 1)
    if not span_s:
        return _whole(process, width, over)
    began = process.began_ns // SECOND if process.began_ns >= 0 else process.columns[0].second
    # The newest column is not always the last: a damaged time may be later than all that follow.
    last = max(column.second for column in process.columns)
    least = min(span_s * 0.8, last + 2 - began)
    seconds = next((n for n in _NICE if n * width >= least), _NICE[-1])
    room = max(min(span_s // seconds, width), 1)
    origin = began // seconds
    newest = last // seconds - origin
    page = 1 if over else max(room // 5, 1)
    first = -(-(newest + 1 - room) // page) * page if newest >= room else 0
    return _filled(_placed(process.columns, seconds, origin + first)[-room:], seconds, room, over)


def _filled(columns: Sequence[Column], seconds: int, room: int, over: bool) -> Picture:
    """A picture of `columns`, at most `room`; while more follow, up to a fifth of it is free for them."""
    places = len(columns) if over else room
    while len(columns) <= places * 4 // 5:
        places = places * 4 // 5
    return Picture(columns, places, seconds)


def _whole(process: Process, width: int, over: bool) -> Picture:
    seconds = process.column_s
    first = _begin(process.columns[0]) // seconds
    newest = max(column.second for column in process.columns)
    seconds *= -(-(newest // seconds - first + 1) // width)
    placed = _placed(process.columns, seconds, _begin(process.columns[0]) // seconds)[-width:]
    return _filled(placed, seconds, width, over)


def _begin(column: Column) -> int:
    """The second in which the column's first step began."""
    return min(column.begin_ns // SECOND, column.second)


def _placed(columns: Iterable[Column], seconds: int, first: int) -> list[Column]:
    """One column per slot of `seconds`, starting at slot `first`.

    If a slot has training steps and evaluations of a mode, the column shows the training steps, as the figures do. If a
    slot has steps of several modes, the column shows another mode than the previous column, so that every change
    of mode stays visible.
    """
    slots: dict[int, dict[str, Column]] = {}
    for column in columns:
        slot = column.second // seconds
        if slot >= first:
            modes = slots.setdefault(slot, {})
            known = modes.get(column.mode)
            if known is not None and known.evaluation == column.evaluation:
                modes[column.mode] = _both(known, column)
            elif known is None or known.evaluation:
                modes[column.mode] = column
    found: list[Column] = []
    for slot in sorted(slots):
        mode = found[-1].mode if found else ""
        drawn = _of_slot(slots[slot], mode)
        while first + len(found) < slot:
            place = first + len(found)
            if (place + 1) * seconds * SECOND > drawn.begin_ns:  # the column's first step was under way
                found.append(replace(drawn, second=place * seconds))
            else:
                before = found[-1] if found else drawn  # an empty column continues what was before it
                found.append(Column(place * seconds, before.mode, evaluation=before.evaluation))
        found.append(drawn)
    return found


def _of_slot(modes: Mapping[str, Column], before: str) -> Column:
    """The column of a slot: preferably of another mode than the one before."""
    others = sorted((column for mode, column in modes.items() if mode != before), key=lambda column: column.begin_ns)
    return others[0] if others else modes[before]

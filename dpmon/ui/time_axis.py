"""The time axis of a picture: what time its histories cover, and the steps and samples in each part of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from dpmon.model.devices import HISTORY_S
from dpmon.model.state import Column, Process
from dpmon.record.names import RANK_MODES
from dpmon.text.quantities import clock, duration
from dpmon.ui.facts import SECOND, Facts
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, merged, width_of

_FREE = 8
"""While more will come, at most one in this many parts of the axis is free for it."""
_STEPS = 60
_PAGE = 10
"""When the range is full, its oldest tenth goes at once: columns do not move with every new one."""


class TimeAxis(NamedTuple):
    """The time that all histories of a picture cover, in seconds since the run's start."""

    begin_s: int
    end_s: int
    """The first second after it."""
    now_s: int
    """The newest second; what follows is free for the time to come."""
    column_s: int = 1
    """Seconds of one column as it was read."""

    def places(self, most: int) -> int:
        """The number of equal parts in which the axis is drawn, at most `most`."""
        return max(min(most, (self.end_s - self.begin_s) // self.column_s), 1)

    def place(self, second: int, places: int) -> int:
        """The part in which a second lies, of `places`; negative or too large outside the axis."""
        return (second - self.begin_s) // self.column_s * places // ((self.end_s - self.begin_s) // self.column_s)

    def begin_of(self, place: int, places: int) -> int:
        """The first second of a part."""
        columns = (self.end_s - self.begin_s) // self.column_s
        return self.begin_s + -(-place * columns // places) * self.column_s

    def cell(self, second: int, width: int) -> int:
        """The first cell, of `width`, of the part in which a second lies."""
        places = self.places(width)
        return self.place(second, places) * width // places


def axis_of(facts: Facts) -> TimeAxis:
    """The axis of a picture: from the first step (before it, from the run's start) until now, or until the run's end.

    It covers the chosen range once the run has lasted so long.
    """
    process, state = facts.process, facts.state
    began_s = process.began_ns // SECOND if process is not None and process.began_ns >= 0 else 0
    now_ns = max(facts.elapsed_ns if facts.past is None else facts.past.until_ns, state.newest_ns)
    if facts.over and state.newest_ns >= 0:
        now_ns = max(state.newest_ns, *(end for _, end in stalls_of(facts)), 0)
    return fitted(
        began_s, now_ns // SECOND, facts.view.span_s, process.column_s if process is not None else 1, facts.over
    )


def fitted(began_s: int, now_s: int, span_s: int, column_s: int = 1, over: bool = False) -> TimeAxis:
    """The axis from `began_s` to `now_s`, or of the newest `span_s` seconds (0: of all). `over`: no more will come."""
    begin_s = began_s - began_s % column_s
    columns = max((now_s - begin_s) // column_s, 0) + 1
    most = span_s // column_s
    if most and columns > most:
        page = 1 if over else max(most // _PAGE, 1)
        begin_s += -(-(columns - most) // page) * page * column_s
        columns = most
    elif not over:
        step = 1 << max((columns // _FREE).bit_length() - 1, 0)
        columns = -(-columns // step) * step
        columns = min(columns, most) if most else columns
    return TimeAxis(begin_s, begin_s + columns * column_s, now_s, column_s)


def device_axis(facts: Facts) -> TimeAxis:
    """The axis of the devices: that of the picture; of a longer run only the last minutes, which have samples."""
    axis = axis_of(facts)
    return axis if axis.now_s - axis.begin_s < HISTORY_S else fitted(0, axis.now_s, HISTORY_S, 1, facts.over)


def moved(facts: Facts, by: int) -> int:
    """The time (ns) `by` parts of the axis later than that of the picture: a part is a sixtieth, at least a second."""
    axis = axis_of(facts)
    return facts.elapsed_ns + by * max((axis.end_s - axis.begin_s) // _STEPS, 1) * SECOND


def stalls_of(facts: Facts) -> list[tuple[int, int]]:
    """Begin and end of each stall (ns); a stall that goes on ends now."""
    now = facts.elapsed_ns
    return [(one.since_ns, now if one.end_ns is None else min(one.end_ns, now)) for one in facts.state.stalls]


# ------------------------------------------------------------------------------------------------ samples


def sampled(values: Sequence[float | None], second: int, axis: TimeAxis, width: int) -> list[float | None]:
    """A value for each of `width` parts of the axis until now: the mean of its known values; None without one.

    `values`: one a second, the last one of `second`.
    """
    if width <= 0:
        return []
    places = axis.places(width)
    sums, counts = [0.0] * places, [0] * places
    first = second + 1 - len(values)
    for at in range(max(axis.begin_s, first), min(axis.end_s, second + 1)):
        value = values[at - first]
        if value is not None:
            place = axis.place(at, places)
            sums[place] += value
            counts[place] += 1
    last = axis.place(min(max(axis.now_s, second), axis.end_s - 1), places)
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return [
        means[place]
        for place in range(last + 1)
        for _ in range((place + 1) * width // places - place * width // places)
    ]


# ------------------------------------------------------------------------------------------------ steps


class Picture(NamedTuple):
    """A history as the screen draws it: columns of one mode for equal parts of the axis, oldest first, until now.

    In the time of a column without steps (count 0), no step ended or was under way.
    """

    columns: Sequence[Column]
    places: int
    """Number of columns for which the chart has room."""


def pictured(process: Process, axis: TimeAxis, width: int, stalls: Sequence[tuple[int, int]] = ()) -> Picture:
    """The steps of a process on the axis, drawn in `width` cells. `stalls`: begin and end of each stall (ns).

    If a part has training steps and evaluations of a mode, the column shows the training steps, as the figures do. If
    a part has steps of several modes, the column shows another mode than the previous column, so that every change
    of mode stays visible.
    """
    places = axis.places(width)
    if width <= 0 or not process.columns:
        return Picture((), places)
    parts: dict[int, dict[str, Column]] = {}
    for column in process.columns:
        place = axis.place(column.second, places)
        if 0 <= place < places:
            modes = parts.setdefault(place, {})
            known = modes.get(column.mode)
            if known is not None and known.evaluation == column.evaluation:
                modes[column.mode] = _both(known, column)
            elif known is None or known.evaluation:
                modes[column.mode] = column
    found: list[Column] = []

    def fill(until: int, drawn: Column | None) -> None:
        """Add columns without steps; `drawn`: the next column, whose first step may be under way in them."""
        while len(found) < until:
            second = axis.begin_of(len(found), places)
            begin, end = second * SECOND, axis.begin_of(len(found) + 1, places) * SECOND
            stalled = any(begin < until_ns and end > since for since, until_ns in stalls)
            if drawn is not None and not stalled and end > drawn.begin_ns:
                found.append(replace(drawn, second=second))
            else:  # an empty column continues what was before it
                before = found[-1] if found else drawn or process.columns[-1]
                found.append(Column(second, before.mode, evaluation=before.evaluation, stalled=stalled))

    for place in sorted(parts):
        drawn = _of_part(parts[place], found[-1].mode if found else "")
        fill(place, drawn)
        found.append(replace(drawn, second=axis.begin_of(place, places)))
    fill(min(axis.place(axis.now_s, places), places), None)
    return Picture(found, places)


def _both(one: Column, other: Column) -> Column:
    return replace(
        one,
        count=one.count + other.count,
        wall_ns=one.wall_ns + other.wall_ns,
        begin_ns=min(one.begin_ns, other.begin_ns),
        phases=tuple(a + b for a, b in zip(one.phases, other.phases, strict=True)),
    )


def _of_part(modes: Mapping[str, Column], before: str) -> Column:
    """The column of a part: preferably of another mode than the one before."""
    others = sorted((column for mode, column in modes.items() if mode != before), key=lambda column: column.begin_ns)
    return others[0] if others else modes[before]


# ------------------------------------------------------------------------------------------------ the row below


class TimeMark(NamedTuple):
    """What the row below a chart names: an event, or (`end_ns`) a stretch of time. ns since the run's start."""

    begin_ns: int
    end_ns: int | None
    word: str
    style: str


def axis_row(
    axis: TimeAxis,
    picture: Picture,
    width: int,
    look: Look,
    *,
    ranks: str | None,
    word: str,
    marks: Iterable[TimeMark] = (),
    cursor_ns: int | None = None,
) -> Row:
    """The row below a chart: each column's mode by word and colour, and the time at the newest one, after `word`.

    A line marks each change. Columns of evaluations have the word "evaluation", and those of a stall "stalled". A
    stretch of `marks` has its own word; an event has it where no other word is. `ranks`: how ranks train together.
    `cursor_ns`: the time that the picture shows, if it is not the newest one.
    """
    line, change = look.glyphs.frame[4], look.glyphs.frame[5]
    kinds: list[tuple[str, str]] = []
    for index, column in enumerate(picture.columns):
        mode = RANK_MODES[ranks] if ranks else column.mode
        kind = (mode, f"mode.{column.mode}")
        kind = ("stalled", "bad") if column.stalled else ("evaluation", "wait") if column.evaluation else kind
        kinds += [kind] * ((index + 1) * width // picture.places - index * width // picture.places)
    places = [(mark, axis.cell(mark.begin_ns // SECOND, width)) for mark in marks]
    for mark, first in places:
        if mark.end_ns is not None:
            last = max(axis.cell(mark.end_ns // SECOND, width), first + 1)
            for cell in range(max(first, 0), min(last, len(kinds))):
                kinds[cell] = (mark.word, mark.style)
    cells = [(line, style) for _, style in kinds]

    def free(at: int, count: int) -> bool:
        return at >= 0 and at + count <= len(cells) and all(sign == line for sign, _ in cells[at : at + count])

    def put(text: str, at: int, style: str) -> None:
        cells[at : at + len(text)] = [(sign, style) for sign in text]

    for mark, first in places:
        if mark.end_ns is None and free(first, len(mark.word)):
            put(mark.word, first, mark.style)
    begin = 0
    for (name, style), run in groupby(kinds):
        end = begin + sum(1 for _ in run)
        inner, left = begin + (begin > 0), end - len(name) - 1
        if begin and free(begin, 1):
            put(change, begin, style)
        room = next((at for at in range(inner, end - len(name) + 1) if free(at, len(name))), None)
        if room is not None:
            put(f"{name} " if room + len(name) < end and free(room, len(name) + 1) else name, room, style)
        elif not style.startswith("mode.") and free(left - 1, begin - left + 1) and free(inner, end - inner):
            put(change + name, left, style)  # the word ends below its columns
        elif inner < end and free(inner, 1):
            put(name[: end - inner] if free(inner, end - inner) else name[0], inner, style)
        begin = end
    each = (axis.end_s - axis.begin_s) / picture.places
    short = clock(axis.now_s * SECOND).removeprefix("00:")
    end_text = word + short
    texts = [f"{duration(each * SECOND)} a column  {end_text}"] if each >= 2 else []
    texts += [end_text, short]
    fitting = next((text for text in texts if free(len(cells) - len(text) - 1, len(text) + 1)), None)
    if fitting is not None:
        put(f" {fitting}", len(cells) - len(fitting) - 1, "dim")
    elif len(cells) + len(end_text) < width:  # the columns do not fill the chart yet
        cells += [(sign, "dim") for sign in f" {end_text}"]
    if cursor_ns is not None:
        at = min(max(axis.cell(cursor_ns // SECOND, width), 0), width - 1)
        text, pointer = clock(cursor_ns).removeprefix("00:"), look.glyphs.cut_top
        text, first = (pointer + text, at) if at + len(text) < width else (text + pointer, at - len(text))
        cells += [(" ", "")] * (first + len(text) - len(cells))
        put(text, first, "found")
    row = merged(cells)
    return [*row, (" " * (width - width_of(row)), "")]

"""The time axis of a picture: the time that its histories cover, and the steps and samples in each part. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple

from dpmon.model.device_usage import HISTORY_S
from dpmon.model.pauses import build_pauses
from dpmon.model.run_snapshot import Column, Process, RunSnapshot
from dpmon.model.time_marks import EPOCH, PAUSED, TimeMark, epoch_marks, pause_marks, stall_spans
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import RANK_MODES
from dpmon.text.cells import align_right
from dpmon.text.formatting import format_duration, short_clock
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, merge_spans, row_width
from dpmon.ui.terminal_style import TerminalStyle

_MIN_AXIS_S = 16
"""A growing axis is at least this long."""
_GROWTH_DIVISOR = 4
"""A growing axis becomes longer by up to a fourth at once, because each time the whole history is drawn again."""
_LOOK_BACK_PARTS = 60
_SHORT_WORDS = {"evaluation": "eval"}
_MARK_STYLES = {EPOCH: "bold", PAUSED: "wait"}
_RANGE_DIVISOR = 10
"""When the range is full, its oldest tenth goes at once, so that columns do not move with every new one."""


class TimeAxis(NamedTuple):
    """The time that all histories of a picture cover, in seconds since the run's start."""

    start_s: int
    end_s: int
    """The first second after it."""
    now_s: int
    """The newest second; the rest of the axis is free for the time to come."""
    column_s: int = 1
    """Seconds of a column of the history."""

    def part_count(self, most: int) -> int:
        """The number of equal parts in which the axis is drawn, at most `most`."""
        return max(min(most, (self.end_s - self.start_s) // self.column_s), 1)

    def part_at(self, second: int, places: int) -> int:
        """The part of `places` parts in which a second lies; negative or too large outside the axis."""
        return (second - self.start_s) // self.column_s * places // ((self.end_s - self.start_s) // self.column_s)

    def start_of_part(self, place: int, places: int) -> int:
        """The first second of a part."""
        columns = (self.end_s - self.start_s) // self.column_s
        return self.start_s + -(-place * columns // places) * self.column_s

    def cell_at(self, second: int, width: int) -> int:
        """The first of the cells (`width` in all) of the part in which a second lies."""
        places = self.part_count(width)
        return self.part_at(second, places) * width // places


def make_time_axis(facts: ScreenData, least_s: int = 1) -> TimeAxis:
    """The axis of a picture: from the first step, or without one the run's start, until now or the run's end.

    In a longer run, it covers only the chosen range. `least_s`: fewest seconds of a column.
    """
    process, (state, until_ns) = facts.process, _history_end(facts)
    began_s = process.began_ns // SECOND if process is not None and process.began_ns >= 0 else 0
    now_ns = max(until_ns, state.newest_ns)
    if facts.is_over and state.newest_ns >= 0:
        now_ns = max(state.newest_ns, *(end for _, end in stall_intervals(facts)), 0)
    column_s = max(process.column_s if process is not None else 1, least_s)
    return fit_axis(began_s, now_ns // SECOND, facts.view.range_s, column_s, facts.is_over)


def fit_axis(began_s: int, now_s: int, span_s: int, column_s: int = 1, over: bool = False) -> TimeAxis:
    """The axis from `began_s` to `now_s`, or of the newest `span_s` seconds (0: of all). `over`: no more will come."""
    begin_s = began_s - began_s % column_s
    columns = max((now_s - begin_s) // column_s, 0) + 1
    most = span_s // column_s
    if most and columns > most:
        page = 1 if over else max(most // _RANGE_DIVISOR, 1)
        begin_s += -(-(columns - most) // page) * page * column_s
        columns = most
    elif not over:
        columns = max(columns, _MIN_AXIS_S // column_s)
        step = 1 << max((columns // _GROWTH_DIVISOR).bit_length() - 1, 0)
        columns = -(-columns // step) * step
        columns = min(columns, most) if most else columns
    return TimeAxis(begin_s, begin_s + columns * column_s, now_s, column_s)


def make_device_axis(facts: ScreenData) -> TimeAxis:
    """The axis of the devices: that of the picture, or in a longer run the last HISTORY_S, which have samples."""
    axis = make_time_axis(facts)
    return axis if axis.now_s - axis.start_s < HISTORY_S else fit_axis(0, axis.now_s, HISTORY_S, 1, facts.is_over)


def shift_by_parts(facts: ScreenData, by: int) -> int:
    """The time (ns) `by` parts of the axis later than that of the picture: a part is a sixtieth, at least a second."""
    axis = make_time_axis(facts)
    return facts.elapsed_ns + by * max((axis.end_s - axis.start_s) // _LOOK_BACK_PARTS, 1) * SECOND


def _history_end(facts: ScreenData) -> tuple[RunSnapshot, int]:
    """The state and the time (ns) until which the histories go."""
    return (facts.state, facts.elapsed_ns) if facts.past is None else (facts.past.state, facts.past.until_ns)


def stall_intervals(facts: ScreenData) -> list[tuple[int, int]]:
    """Start and end of each stall (ns). A stall that goes on ends now."""
    state, now = _history_end(facts)
    return stall_spans(state.stalls, now)


def choose_marks(facts: ScreenData, axis: TimeAxis, width: int) -> list[TimeMark]:
    """The pauses, and as many starts of epochs as have room on an axis of `width` cells."""
    state, now = _history_end(facts)
    process = state.processes.get(facts.process.process) if facts.process is not None else None
    if process is None:
        return []
    own = (change for change in state.pauses if change.process == process.process)
    pauses = build_pauses(own, lambda _process, _at: None)
    found = pause_marks(pauses, None if process.paused_since_ns is None else now)
    return found + epoch_marks(process.progress.epochs, lambda at: axis.cell_at(at // SECOND, width))


# ------------------------------------------------------------------------------------------------ samples


def resample(values: Sequence[float | None], second: int, axis: TimeAxis, width: int) -> list[float | None]:
    """For each cell of the axis until now (of `width`), the mean of the known values in its part; None without one.

    `values`: one a second; the last one is that of `second`.
    """
    if width <= 0:
        return []
    places = axis.part_count(width)
    sums, counts = [0.0] * places, [0] * places
    first = second + 1 - len(values)
    for at in range(max(axis.start_s, first), min(axis.end_s, second + 1)):
        value = values[at - first]
        if value is not None:
            place = axis.part_at(at, places)
            sums[place] += value
            counts[place] += 1
    last = axis.part_at(min(max(axis.now_s, second), axis.end_s - 1), places)
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return [
        means[place]
        for place in range(last + 1)
        for _ in range((place + 1) * width // places - place * width // places)
    ]


# ------------------------------------------------------------------------------------------------ steps


class ChartColumns(NamedTuple):
    """A history as the screen draws it: a column for each equal part of the axis until now, oldest first.

    Each column has one mode. During a column without steps (count 0), no step ended or was under way.
    """

    columns: Sequence[Column]
    part_count: int
    """Number of columns of the whole axis."""


def build_chart_columns(
    process: Process, axis: TimeAxis, width: int, stalls: Sequence[tuple[int, int]] = ()
) -> ChartColumns:
    """The steps of a process on an axis of `width` cells. `stalls`: start and end of each stall (ns).

    If a part has training steps and evaluations of a mode, the column shows the training steps, as the figures do. If
    a part has steps of several modes, the column shows a mode other than that of the previous column, so that every
    change of mode stays visible.
    """
    places = axis.part_count(width)
    if width <= 0 or not process.columns:
        return ChartColumns((), places)
    parts: dict[int, dict[str, Column]] = {}
    for column in process.columns:
        place = axis.part_at(column.second, places)
        if 0 <= place < places:
            modes = parts.setdefault(place, {})
            known = modes.get(column.mode)
            if known is not None and known.evaluation == column.evaluation:
                modes[column.mode] = _merge_columns(known, column)
            elif known is None or known.evaluation:
                modes[column.mode] = column
    found: list[Column] = []

    def fill(until: int, drawn: Column | None) -> None:
        """Add columns in which no step ended. The first step of the next column (`drawn`) may be under way in them."""
        while len(found) < until:
            second = axis.start_of_part(len(found), places)
            begin, end = second * SECOND, axis.start_of_part(len(found) + 1, places) * SECOND
            stalled = any(begin < until_ns and end > since for since, until_ns in stalls)
            if drawn is not None and not stalled and end > drawn.begin_ns:
                found.append(replace(drawn, second=second))
            else:  # an empty column continues what was before it
                before = found[-1] if found else drawn or process.columns[-1]
                found.append(Column(second, before.mode, evaluation=before.evaluation, stalled=stalled))

    for place in sorted(parts):
        drawn = _column_of_part(parts[place], found[-1].mode if found else "")
        fill(place, drawn)
        second = axis.start_of_part(place, places)
        found.append(drawn if drawn.second == second else replace(drawn, second=second))
    fill(min(axis.part_at(axis.now_s, places), places), None)
    return ChartColumns(found, places)


def _merge_columns(one: Column, other: Column) -> Column:
    return replace(
        one,
        count=one.count + other.count,
        wall_ns=one.wall_ns + other.wall_ns,
        begin_ns=min(one.begin_ns, other.begin_ns),
        phases=tuple(a + b for a, b in zip(one.phases, other.phases, strict=True)),
    )


def _column_of_part(modes: Mapping[str, Column], before: str) -> Column:
    """The column of a part, if possible of another mode than the column before."""
    others = sorted((column for mode, column in modes.items() if mode != before), key=lambda column: column.begin_ns)
    return others[0] if others else modes[before]


# ------------------------------------------------------------------------------------------------ the row below


class _AxisCells:
    """The cells of the row below a chart while words are put on it."""

    def __init__(self, kinds: Sequence[tuple[str, str]], line: str, change: str) -> None:
        self.line_sign, self.change_sign = line, change
        self.cells = [(line if name else " ", style) for name, style in kinds]

    def is_free(self, at: int, count: int) -> bool:
        """Whether cells have no word, mark or gap yet."""
        return at >= 0 and [sign for sign, _ in self.cells[at : at + count]] == [self.line_sign] * count

    def has_space_around(self, at: int, count: int) -> bool:
        """Whether a word in these cells would touch no other word."""
        beside = self.cells[max(at - 1, 0) : at] + self.cells[at + count : at + count + 1]
        return all(sign in (self.line_sign, " ", self.change_sign) for sign, _ in beside)

    def replace_with_text(self, text: str, at: int, style: str) -> None:
        """Put a text over others. Words that it cuts or touches go."""
        end, free = at + len(text), (self.line_sign, " ", self.change_sign)
        separate = text[0] == " " and (at >= len(self.cells) or self.cells[at][0] in free)
        left = [] if separate or at > len(self.cells) else [*reversed(self.cells[:at])]
        for step, beside in ((-1, left), (1, self.cells[end:])):
            word = list(takewhile(lambda cell: cell[0] not in free, beside))
            for index, (_, kept) in enumerate(word):
                self.cells[(at - 1 if step < 0 else end) + step * index] = (self.line_sign, kept)
        self.put_text(text, at, style)

    def put_text(self, text: str, at: int, style: str) -> None:
        """Put a text on the line; the line becomes longer if necessary."""
        self.cells += [(" ", "")] * (at + len(text) - len(self.cells))
        self.cells[at : at + len(text)] = [(sign, style) for sign in text]

    def put_name(self, begin: int, end: int, name: str, style: str) -> None:
        """Mark the change at `begin`, and put the name of the cells from `begin` to `end` where there is room."""
        inner, short = begin + (begin > 0), _SHORT_WORDS.get(name, name)
        name = short if len(short) <= end - inner < len(name) else name
        left = end - len(name) - 1
        if begin and self.is_free(begin, 1):
            self.put_text(self.change_sign, begin, style)
        for at in range(inner, end - len(name) + 1):
            known = at == inner or self.cells[at - 1][0] in (self.line_sign, " ")
            if known and self.is_free(at, len(name)) and self.has_space_around(at, len(name)):
                ends = at + len(name) < end and self.is_free(at + len(name), 1)
                self.put_text(f"{name} " if ends else name, at, style)
                return
        if (
            not style.startswith("mode.")
            and self.is_free(left - 1, begin - left + 1)
            and self.is_free(inner, end - inner)
        ):
            if self.has_space_around(left, end - left):
                self.put_text(self.change_sign + name, left, style)  # the name ends below its columns
        elif inner < end and self.is_free(inner, 1):
            short = name[: end - inner] if self.is_free(inner, end - inner) else name[0]
            if self.has_space_around(inner, len(short)):
                self.put_text(short, inner, style)


def axis_row(
    axis: TimeAxis,
    picture: ChartColumns,
    width: int,
    look: TerminalStyle,
    *,
    ranks: str | None,
    word: str,
    marks: Iterable[TimeMark] = (),
    cursor_ns: int | None = None,
) -> Row:
    """The row below a chart: each column's mode by word and color, and the time at the newest one, after `word`.

    A line marks each change. Columns of evaluations have the word "evaluation", and those of a stall "stalled". The
    line has a gap where no step was under way. Each of `marks` has its own word. `ranks`: how ranks train together.
    `cursor_ns`: the time that the picture shows, if it is not the newest one.
    """
    kinds: list[tuple[str, str]] = []
    for index, column in enumerate(picture.columns):
        first, end = index * width // picture.part_count, (index + 1) * width // picture.part_count
        kind = (RANK_MODES[ranks] if ranks else column.mode, f"mode.{column.mode}")
        kind = ("", "") if not column.count else ("evaluation", "wait") if column.evaluation else kind
        kinds += [("stalled", "bad") if column.stalled else kind] * (end - first)
    events: list[tuple[int, TimeMark]] = []
    for mark in marks:
        first = axis.cell_at(mark.begin_ns // SECOND, width)
        if mark.end_ns is None:
            events.append((first, mark))
            continue
        for cell in range(max(first, 0), min(max(axis.cell_at(mark.end_ns // SECOND, width), first + 1), len(kinds))):
            kinds[cell] = (mark.word, _MARK_STYLES[mark.kind])
    line = _AxisCells(kinds, look.glyphs.frame[4], look.glyphs.frame[5])
    for at, mark in events:
        if line.is_free(at, len(mark.word)) and line.has_space_around(at, len(mark.word)):
            text = f"{mark.word} " if line.is_free(at, len(mark.word) + 1) else mark.word
            line.put_text(text, at, _MARK_STYLES[mark.kind])
    if cursor_ns is not None:
        at = min(max(axis.cell_at(cursor_ns // SECOND, width), 0), width - 1)
        text, pointer = short_clock(cursor_ns), look.glyphs.cut_top
        fits = at + len(text) < width
        line.replace_with_text(pointer + text if fits else text + pointer, at if fits else at - len(text), "found")
    last = len(kinds) - next((sum(1 for _ in run) for _, run in groupby(reversed(kinds))), 0)
    room = len(kinds) - last - len(kinds[-1][0]) - 2 if kinds else 0
    _put_end_time(line, axis, picture.part_count, width, word, len(kinds), room)
    end, before = 0, ""
    for (name, style), run in groupby(kinds):
        begin, end = end, end + sum(1 for _ in run)
        if name not in ("", before):
            line.put_name(begin, end, name, style)
        before = name or before
    row = merge_spans(line.cells)
    return [*row, (" " * (width - row_width(row)), "")]


def axis_below_chart(
    facts: ScreenData, axis: TimeAxis, picture: ChartColumns, gutter: int, room: int, look: TerminalStyle
) -> Row:
    """The axis below a chart of `room` cells; the begin of the time stands in the `gutter` cells before it."""
    process, word, marks = facts.process, "end " if facts.is_over else "now ", choose_marks(facts, axis, room)
    ranks = None if process is None else process.distributed
    cursor = None if facts.past is None else facts.now_ns
    row = axis_row(axis, picture, room, look, ranks=ranks, word=word, marks=marks, cursor_ns=cursor)
    return [(align_right(short_clock(axis.start_s * SECOND), gutter - 1) + " ", "dim"), *row]


def _put_end_time(line: _AxisCells, axis: TimeAxis, places: int, width: int, word: str, drawn: int, room: int) -> None:
    """Put the time of the newest column below this column, which ends at the cell `drawn`, if `room` cells are enough.

    Otherwise the time stands beside the column. It replaces other words, except the cursor's.
    """
    each = (axis.end_s - axis.start_s) / places
    short = short_clock(axis.now_s * SECOND)
    texts = [f"{format_duration(each * SECOND)} a column  {word}{short}"] if each >= 2 else []
    for text in (*texts, word + short, short):
        at = drawn - len(text) - 1
        if len(text) < room and at >= 0 and {sign for sign, _ in line.cells[at:]} <= {line.line_sign, " "}:
            line.put_text(f" {text}", at, "dim")
            return
    text = next((text for text in (f" {word}{short}", f" {short}") if drawn + len(text) <= width), f" {short}")
    at = min(drawn, width - len(text))
    if not any(style == "found" for _, style in line.cells[max(at, 0) :]):
        line.replace_with_text(text, at, "dim")

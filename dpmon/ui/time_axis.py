"""The time axis of a picture: the time that its histories cover, and the steps and samples in each part. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from dpmon.model.device_usage import HISTORY_S
from dpmon.model.pauses import build_pauses
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_process import Process
from dpmon.model.step_history import Column
from dpmon.model.time_marks import EPOCH, PAUSED, SAVE, TimeMark, pause_marks, stall_spans, start_marks
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import RANK_MODES
from dpmon.store.time_buckets import bucket_start
from dpmon.text.cells import align_right
from dpmon.text.formatting import format_duration, format_short_elapsed
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, merge_spans

_MIN_AXIS_S = 16
"""A growing axis is at least this long."""
_GROWTH_DIVISOR = 4
"""A growing axis becomes longer by up to a fourth at once, because each time the whole history is drawn again."""
_LOOK_BACK_PARTS = 60
_SHORT_WORDS = {"evaluation": "eval"}
_MARK_STYLES = {EPOCH: "bold", SAVE: "dim", PAUSED: "wait"}
_RANGE_DIVISOR = 10
"""When the range is full, its oldest tenth goes at once, so that columns do not move with every new one."""


class TimeAxis(NamedTuple):
    """The time range that all histories of a frame cover, in seconds since the run's start."""

    start_s: int
    end_s: int
    """The first second after it."""
    now_s: int
    """The newest second; the rest of the axis is free for the time to come."""
    column_s: int = 1
    """Seconds of a column of the history."""

    def part_count(self, limit: int) -> int:
        """Return the number of equal parts in which the axis is drawn, at most `limit`."""
        return max(min(limit, (self.end_s - self.start_s) // self.column_s), 1)

    def part_at(self, second: int, part_count: int) -> int:
        """Return the part, of `part_count`, in which a second lies; negative or too large outside the axis."""
        return (second - self.start_s) // self.column_s * part_count // ((self.end_s - self.start_s) // self.column_s)

    def start_of_part(self, part: int, part_count: int) -> int:
        """Return the first second of a part."""
        columns = (self.end_s - self.start_s) // self.column_s
        return self.start_s + -(-part * columns // part_count) * self.column_s

    def cell_at(self, second: int, width: int) -> int:
        """Return the first cell, of `width`, of the part in which a second lies."""
        part_count = self.part_count(width)
        return self.part_at(second, part_count) * width // part_count


def make_time_axis(screen: ScreenData, min_column_s: int = 1) -> TimeAxis:
    """Return the axis of a frame: from the first step, or without one the run's start, until now or the run's end.

    In a longer run, it covers only the chosen range. `min_column_s`: the smallest number of seconds per column.
    """
    process, (state, until_ns) = screen.process, _history_end(screen)
    start_s = process.began_ns // SECOND if process is not None and process.began_ns >= 0 else 0
    now_ns = max(until_ns, state.newest_ns)
    if screen.is_over and state.newest_ns >= 0:
        now_ns = max(state.newest_ns, *(end for _, end in stall_intervals(screen)), 0)
    column_s = max(process.column_s if process is not None else 1, min_column_s)
    origin_s = 0 if screen.run_info is None else screen.run_info.origin_s
    first_s = bucket_start(start_s, column_s, origin_s)  # the columns are time buckets
    return fit_axis(first_s, now_ns // SECOND, screen.view.range_s, column_s, screen.is_over)


def fit_axis(start_s: int, now_s: int, range_s: int, column_s: int = 1, is_over: bool = False) -> TimeAxis:
    """Return the axis from `start_s` to `now_s`, or that of the newest `range_s` seconds (0: of all).

    `start_s`: the start of a column. `is_over`: the run has ended, so the axis needs no free columns at its end.
    """
    column_count = max((now_s - start_s) // column_s, 0) + 1
    max_columns = range_s // column_s
    if max_columns and column_count > max_columns:
        page_columns = 1 if is_over else max(max_columns // _RANGE_DIVISOR, 1)
        start_s += -(-(column_count - max_columns) // page_columns) * page_columns * column_s
        column_count = max_columns
    elif not is_over:
        column_count = max(column_count, _MIN_AXIS_S // column_s)
        growth = 1 << max((column_count // _GROWTH_DIVISOR).bit_length() - 1, 0)
        column_count = -(-column_count // growth) * growth
        column_count = min(column_count, max_columns) if max_columns else column_count
    return TimeAxis(start_s, start_s + column_count * column_s, now_s, column_s)


def make_device_axis(screen: ScreenData) -> TimeAxis:
    """Return the axis of the devices: that of the frame, or in a longer run the last HISTORY_S, which have samples."""
    axis = make_time_axis(screen)
    return axis if axis.now_s - axis.start_s < HISTORY_S else fit_axis(0, axis.now_s, HISTORY_S, 1, screen.is_over)


def shift_by_parts(screen: ScreenData, parts: int) -> int:
    """Return the time (ns) that lies `parts` parts of the axis after that of the cursor.

    A part is a sixtieth of the axis, but at least a second. Negative: before it.
    """
    axis = make_time_axis(screen)
    cursor, shift_ns = screen.cursor, parts * max((axis.end_s - axis.start_s) // _LOOK_BACK_PARTS, 1) * SECOND
    if cursor.time_ns is not None:
        return cursor.time_ns + shift_ns
    time_ns = screen.elapsed_ns + shift_ns
    # The clock is ahead of the records: a key that goes back must reach a time before these.
    if not cursor.has_ended and time_ns >= cursor.recorded_ns:
        return cursor.recorded_ns + shift_ns
    return time_ns


def _history_end(screen: ScreenData) -> tuple[RunAnalysis, int]:
    """Return the state of the run and the time (ns) until which the histories go."""
    frozen_ns = screen.cursor.frozen_ns
    if screen.history_state is None or frozen_ns is None:
        return screen.state, screen.elapsed_ns
    return screen.history_state, frozen_ns


def stall_intervals(screen: ScreenData) -> list[tuple[int, int]]:
    """Return start and end of each stall (ns). A stall that is not over ends now."""
    state, now = _history_end(screen)
    return stall_spans(state.stalls, now)


def choose_marks(screen: ScreenData, axis: TimeAxis, width: int) -> list[TimeMark]:
    """Return the pauses, and as many starts of epochs and of saves as have room on an axis of `width` cells."""
    state, now = _history_end(screen)
    process = state.processes.get(screen.process.process) if screen.process is not None else None
    if process is None:
        return []
    changes = (change for change in state.pauses if change.process == process.process)
    pauses = build_pauses(changes, lambda _process, _time: None)
    marks = pause_marks(pauses, None if process.paused_since_ns is None else now)
    saves = state.events.saves(process.process)
    return marks + start_marks(process.progress.epochs, saves, lambda ns: axis.cell_at(ns // SECOND, width))


# ------------------------------------------------------------------------------------------------ samples


def resample(values: Sequence[float | None], second: int, axis: TimeAxis, width: int) -> list[float | None]:
    """Return the mean of the known values in the part of each cell (of `width`) until now; None for a part without one.

    `values`: one per second; the last one is that of `second`.
    """
    if width <= 0:
        return []
    part_count = axis.part_count(width)
    sums, counts = [0.0] * part_count, [0] * part_count
    first_second = second + 1 - len(values)
    for time_s in range(max(axis.start_s, first_second), min(axis.end_s, second + 1)):
        value = values[time_s - first_second]
        if value is not None:
            part = axis.part_at(time_s, part_count)
            sums[part] += value
            counts[part] += 1
    last_part = axis.part_at(min(max(axis.now_s, second), axis.end_s - 1), part_count)
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return [
        means[part]
        for part in range(last_part + 1)
        for _ in range((part + 1) * width // part_count - part * width // part_count)
    ]


# ------------------------------------------------------------------------------------------------ steps


class ChartColumns(NamedTuple):
    """A history as the screen draws it: a column for each equal part of the axis until now, oldest first.

    Each column has one mode. During a column without steps (count 0), no step ended or was running.
    """

    columns: Sequence[Column]
    part_count: int
    """Number of columns of the whole axis."""


def build_chart_columns(
    process: Process, axis: TimeAxis, width: int, stalls: Sequence[tuple[int, int]] = ()
) -> ChartColumns:
    """Return the steps of a process on an axis of `width` cells. `stalls`: start and end of each stall (ns).

    If a part has steps of several kinds of a mode, the column shows those of the main kind, as the metrics do. If a
    part has steps of several modes, the column shows a mode other than that of the previous column, so that every mode
    switch stays visible.
    """
    part_count = axis.part_count(width)
    if width <= 0 or not process.columns:
        return ChartColumns((), part_count)
    columns_by_part: dict[int, dict[str, Column]] = {}
    for column in process.columns:
        part = axis.part_at(column.second, part_count)
        if 0 <= part < part_count:
            column_by_mode = columns_by_part.setdefault(part, {})
            existing = column_by_mode.get(column.mode)
            if existing is not None and existing.other_kind == column.other_kind:
                column_by_mode[column.mode] = _merge_columns(existing, column)
            elif existing is None or existing.other_kind:
                column_by_mode[column.mode] = column
    columns: list[Column] = []

    def fill(end_part: int, next_column: Column | None) -> None:
        """Add columns in which no step ended; the first step of the next column may be running in them."""
        while len(columns) < end_part:
            second = axis.start_of_part(len(columns), part_count)
            start, end = second * SECOND, axis.start_of_part(len(columns) + 1, part_count) * SECOND
            is_stalled = any(start < stall_end and end > stall_start for stall_start, stall_end in stalls)
            if next_column is not None and not is_stalled and end > next_column.begin_ns:
                columns.append(replace(next_column, second=second))
            else:  # an empty column continues what was before it
                previous = columns[-1] if columns else next_column or process.columns[-1]
                columns.append(Column(second, previous.mode, other_kind=previous.other_kind, stalled=is_stalled))

    for part in sorted(columns_by_part):
        chosen = _column_of_part(columns_by_part[part], columns[-1].mode if columns else "")
        fill(part, chosen)
        second = axis.start_of_part(part, part_count)
        columns.append(chosen if chosen.second == second else replace(chosen, second=second))
    fill(min(axis.part_at(axis.now_s, part_count), part_count), None)
    return ChartColumns(columns, part_count)


def _merge_columns(first: Column, second: Column) -> Column:
    return replace(
        first,
        count=first.count + second.count,
        wall_ns=first.wall_ns + second.wall_ns,
        begin_ns=min(first.begin_ns, second.begin_ns),
        phases=tuple(a + b for a, b in zip(first.phases, second.phases, strict=True)),
    )


def _column_of_part(column_by_mode: Mapping[str, Column], previous_mode: str) -> Column:
    """Return the column of a part, if possible of another mode than the column before."""
    others = [column for mode, column in column_by_mode.items() if mode != previous_mode]
    if not others:
        return column_by_mode[previous_mode]
    return min(others, key=lambda column: column.begin_ns)


# ------------------------------------------------------------------------------------------------ the row below


class _AxisLine:
    """The row below a chart while words are put on it, the most important first."""

    def __init__(self, named_cells: Sequence[tuple[str, str]], width: int) -> None:
        self.cells: Row = [("─" if name else " ", style) for name, style in named_cells]
        self.cells += [(" ", "")] * (width - len(self.cells))

    def put(self, text: str, index: int, style: str) -> bool:
        """Put a text on the line, if it covers no other text or change of mode, and touches no text."""
        end, free_signs = index + len(text), ("─", " ")
        before, after = self.cells[max(index - 1, 0) : max(index, 0)], self.cells[end : end + 1]
        is_apart = all(sign in (*free_signs, "│") for sign, _ in (*before, *after))
        if index < 0 or end > len(self.cells) or not is_apart:
            return False
        if any(sign not in free_signs for sign, _ in self.cells[index:end]):
            return False
        self.cells[index:end] = [(sign, style) for sign in text]
        if after and after[0][0] == "─":
            self.cells[end] = (" ", style)
        return True

    def put_name(self, name: str, start: int, end: int, style: str) -> None:
        """Put the name of the columns between two cells where there is room, and mark the change at their start."""
        for word in (name, _SHORT_WORDS.get(name, name)):
            places = list(range(start + (start > 0), end - len(word) + 1))
            if not style.startswith("mode."):
                places.append(end - len(word))  # a name may begin before its columns
            if any(self.put(word, place, style) for place in places):
                break
        if start and self.cells[start][0] == "─":
            self.cells[start] = ("│", style)


def _name_of_column(column: Column, ranks: str | None) -> tuple[str, str]:
    """Return the word below a column and its style; ("", "") if no step ended in it."""
    if column.stalled:
        return "stalled", "bad"
    if not column.count:
        return "", ""
    if column.other_kind:
        return column.other_kind, "wait"
    return RANK_MODES[ranks] if ranks else column.mode, f"mode.{column.mode}"


def axis_row(
    axis: TimeAxis,
    picture: ChartColumns,
    width: int,
    *,
    ranks: str | None,
    word: str,
    marks: Iterable[TimeMark] = (),
    cursor_ns: int | None = None,
) -> Row:
    """Return the row below a chart: the mode of each column by word and color, and the newest time, after `word`.

    A line marks each change. Columns of another kind of steps have its word, and those of a stall "stalled". The line
    has a gap where no step was running, and in a pause. Each of `marks` has its own word if there is room for all of
    it. `ranks`: how ranks train together.
    `cursor_ns`: the time that the screen shows, if it is not the newest one.
    """
    named_cells: list[tuple[str, str]] = []
    for index, column in enumerate(picture.columns):
        start, end = index * width // picture.part_count, (index + 1) * width // picture.part_count
        named_cells += [_name_of_column(column, ranks)] * (end - start)
    placed_marks: list[tuple[int, TimeMark]] = []
    for mark in marks:
        start = axis.cell_at(mark.begin_ns // SECOND, width)
        if mark.end_ns is not None:
            start, end = max(start, 0), max(axis.cell_at(mark.end_ns // SECOND, width), start + 1)
            gap_cells = len(named_cells[start:end])
            named_cells[start:end] = [("", "")] * gap_cells
            start = start + 1 if len(mark.word) + 2 <= gap_cells else -1
        placed_marks.append((start, mark))
    line = _AxisLine(named_cells, width)
    if cursor_ns is not None:
        cell = min(max(axis.cell_at(cursor_ns // SECOND, width), 0), width - 1)
        text, pointer = format_short_elapsed(cursor_ns), "▲"
        if cell + len(text) < width:
            line.put(pointer + text, cell, "found")
        else:
            line.put(text + pointer, cell - len(text), "found")
    for cell, mark in placed_marks:
        line.put(mark.word, cell, _MARK_STYLES[mark.kind])
    runs = [(name, cell_style, sum(1 for _ in run)) for (name, cell_style), run in groupby(named_cells)]
    free_cells = runs[-1][2] - len(runs[-1][0]) - 2 if runs else 0
    _put_end_time(line, axis, picture.part_count, width, word, len(named_cells), free_cells)
    end, previous_name = 0, ""
    for name, cell_style, length in runs:
        start, end = end, end + length
        if name not in ("", previous_name):
            line.put_name(name, start, end, cell_style)
        previous_name = name or previous_name
    return merge_spans(line.cells)


def axis_below_chart(screen: ScreenData, axis: TimeAxis, picture: ChartColumns, gutter: int, width: int) -> Row:
    """Return the axis below a chart of `width` cells; the start time stands in the `gutter` cells before it."""
    ranks = None if screen.process is None else screen.process.distributed
    is_present = screen.cursor.time_ns is None or not screen.cursor.is_playback
    word = "now " if is_present else ""
    if screen.is_over:
        word = "end "
    marks = choose_marks(screen, axis, width)
    cursor_ns = screen.now_ns if screen.cursor.is_looking_back else None
    row = axis_row(axis, picture, width, ranks=ranks, word=word, marks=marks, cursor_ns=cursor_ns)
    return [(align_right(format_short_elapsed(axis.start_s * SECOND), gutter - 1) + " ", "dim"), *row]


def _put_end_time(
    line: _AxisLine, axis: TimeAxis, part_count: int, width: int, word: str, drawn_cells: int, free_cells: int
) -> None:
    """Put the time of the newest column below this column if that is possible, else next to it.

    The column ends at the cell `drawn_cells`; below it, `free_cells` cells are free.
    """
    part_s = (axis.end_s - axis.start_s) / part_count
    short_time = format_short_elapsed(axis.now_s * SECOND)
    texts = [word + short_time, short_time]
    if part_s >= 2:
        texts.insert(0, f"{format_duration(part_s * SECOND)} per column  {word}{short_time}")
    places = [(f" {text}", drawn_cells - len(text) - 1) for text in texts if len(text) < free_cells]
    text = f" {word}{short_time}"
    if drawn_cells + len(text) > width:
        text = f" {short_time}"
    places.append((text, min(drawn_cells, width - len(text))))
    for placed_text, index in places:
        if line.put(placed_text, index, "dim"):
            break

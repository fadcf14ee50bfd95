"""Small drawings in cells: bars, lines of blocks, ranges, and the stacked history of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from dpmon.model.run_process import PHASES
from dpmon.model.step_history import Column
from dpmon.ui.styled_rows import Row, Span, merge_spans, row_width
from dpmon.ui.terminal_style import LETTERS, TerminalStyle

_MIN_PHASE_ROWS = 6
"""Fewest rows in which a history shows the phases of its columns: in fewer, some shares would be 0.15 too large."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The dots of a braille character, by column, from the top (Unicode 15, 2800 to 28FF)."""
_FILLED_DOTS = [[sum(dots[4 - count :]) for count in range(5)] for dots in DOTS]
"""Halves of a braille character with 0 to 4 dots from below."""
BLOCKS = " ▁▂▃▄▅▆▇█"
"""Nine cells from empty to full, filled from below."""
BUSY_SIGNS: tuple[Span, Span, Span] = (("▇", "bar"), ("▤", "phase.sync"), ("░", "dim"))
"""The signs for busy, exposed communication and wait."""
_ROUND_NUMBERS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


def bar(shares: Sequence[float], spans: Sequence[Span], width: int, remainder: Span, min_cells: int = 1) -> Row:
    """Return a bar of `width` cells: each part (a share of the width) in its own sign, then `remainder`.

    A positive part takes at least `min_cells` cells, as far as there is room.
    """
    row: Row = []
    used, share_sum = 0, 0.0
    for share, (sign, style) in zip(shares, spans, strict=False):
        share_sum += share
        end = min(max(round(share_sum * width), used + (min_cells if share > 0 else 0)), width)
        row.append((sign * (end - used), style))
        used = end
    return [*row, (remainder[0] * (width - used), remainder[1])]


def filled_bar(shares: Sequence[float] | None, width: int) -> Row:
    """Return a bar of up to two shares: a full line, a broken line, then a thin line; dots for None."""
    if shares is None:
        return [("·" * width, "dim")]
    return bar(shares, (("━", "bar"), ("╍", "bar")), width, ("─", "dim"))


def busy_bar(parts: Sequence[float], top: float, width: int) -> Row:
    """Return a rank's step as a bar on a scale up to `top` ns. `parts`: busy, communicating, waiting (ns)."""
    return bar([part / top if top > 0 else 0.0 for part in parts], BUSY_SIGNS, width, (" ", ""), min_cells=0)


def block_line(values: Sequence[float | None], width: int) -> str:
    """Return the first `width` values as blocks on a scale up to 100, from the left; unknown values are dots."""
    return filled_area(values, width, 1, 100.0, braille=False)[0]


def _fill_level(value: float, top: float, levels: int) -> int:
    """Return how many of `levels` a value fills on a scale up to `top`: a positive value fills at least one."""
    lowest = 1 if value > 0 else 0
    return min(max(round(value / top * levels), lowest), levels)


def filled_area(values: Sequence[float | None], width: int, height: int, top: float, *, braille: bool) -> list[str]:
    """Return `values` as filled columns on a scale up to `top`, from the left, in `height` rows of `width` cells.

    A cell shows two values with `braille`, else one. An unknown value is a dot on the lowest row.
    """
    values_per_cell = 2 if braille else 1
    shown_values: list[float | None] = list(values)[: max(width, 0) * values_per_cell]
    if len(shown_values) % values_per_cell:
        shown_values.append(0.0)
    levels = 4 if braille else 8
    filled_levels = [None if value is None else _fill_level(value, top, height * levels) for value in shown_values]
    rows = []
    for row in range(height - 1, -1, -1):
        text = ""
        for index in range(0, len(filled_levels), values_per_cell):
            cell = [
                None if level is None else min(max(level - row * levels, 0), levels)
                for level in filled_levels[index : index + values_per_cell]
            ]
            if None in cell:
                text += "·" if row == 0 else " "
            elif braille:
                text += chr(0x2800 + _FILLED_DOTS[0][cell[0] or 0] + _FILLED_DOTS[1][cell[1] or 0])
            else:
                text += BLOCKS[cell[0] or 0]
        rows.append(text.ljust(width))
    return rows


def busy_legend(width: int) -> Row:
    """Return the names of the parts of `busy_bar`, shortened to fit; "step" if even that is too long."""
    for names in (("busy ", "exposed ", "wait"), ("busy ", "exp ", "wait"), ("busy ", "", "wait")):
        named_signs = [(sign, (name, "dim")) for name, sign in zip(names, BUSY_SIGNS, strict=True) if name]
        row = [span for named_sign in named_signs for span in named_sign]
        if row_width(row) <= width:
            return row
    return [("step".ljust(width), "dim")]


def range_bar(low: float, middle: float, high: float, top: float, width: int, base: float = 0.0) -> str:
    """Return a line from `low` to `high` with a sign at `middle`, on a scale from `base` to `top`, in `width` cells."""
    if top <= base or width <= 0:
        return " " * max(width, 0)

    def place(value: float) -> int:
        return min(max(int((value - base) / (top - base) * (width - 1) + 0.5), 0), width - 1)

    low_cell, middle_cell, high_cell = place(low), place(middle), place(high)
    cells = [" "] * width
    for index in range(low_cell, high_cell + 1):
        cells[index] = "─"
    cells[low_cell], cells[high_cell] = "╶", "╴"
    cells[middle_cell] = "●"
    return "".join(cells)


def round_up_nice(value: float) -> float:
    """Return the next round number that is at least `value`, so that a scale stays the same while values change."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(n * scale for n in _ROUND_NUMBERS if value <= n * scale * 1.000001)


def scale_top(columns: Sequence[Column]) -> float:
    """Return the upper end of a history's scale (ns): a round number above 95% of the columns; higher columns are cut.

    Columns of another kind than the main kind count only if there are no others: the metrics next to the history are of
    the main kind. A column after a stall does not count: one of its steps contains the stall.
    """
    pairs = zip(columns, (None, *columns), strict=False)
    usable_columns = [
        column for column, previous in pairs if column.count and not (previous is not None and previous.stalled)
    ]
    totals = sorted(c.wall_ns / c.count for c in [c for c in usable_columns if not c.other_kind] or usable_columns)
    return round_up_nice(totals[max(-(-len(totals) * 95 // 100) - 1, 0)]) if totals else 1.0


def largest_parts(eighths: Sequence[str]) -> tuple[str, str, int]:
    """Return the two largest parts of a cell in order, and how many eighths of the two belong to the first one.

    `eighths`: the phase of each eighth. If there is only one part, it is returned twice.
    """
    if eighths.count(eighths[0]) == len(eighths):
        return eighths[0], eighths[0], 4
    parts = [(phase, len(list(same))) for phase, same in groupby(eighths)]
    largest = sorted(range(len(parts)), key=lambda index: -parts[index][1])[:2]
    (first, first_size), (second, second_size) = parts[min(largest)], parts[max(largest)]
    return first, second, min(max(round(8 * first_size / (first_size + second_size)), 1), 7)


@lru_cache(maxsize=4096)
def _phase_column(phases: tuple[int, ...], count: int, top: float, height: int, mono: bool) -> tuple[Span, ...]:
    """Return one column, its lowest cell first.

    `phases`: sums over `count` steps (ns), stacked in this order.
    """
    scale = height * 8 / top / max(count, 1)
    eighths = [""] * (height * 8)
    total = 0.0
    for name, duration_ns in zip(PHASES, phases, strict=True):
        start = round(total)
        total += duration_ns * scale
        end = min(round(total), len(eighths))
        eighths[start:end] = [name] * (end - start)
    cells = [_phase_cell(eighths[start : start + 8], mono) for start in range(0, len(eighths), 8)]
    if total > len(eighths) + 1:
        _, top_style = cells[-1]
        cells[-1] = ("▲", top_style.partition("/")[0])
    bottom_sign, _ = cells[0]
    if count and bottom_sign == " ":  # a blank would mean "no steps"
        name = _largest_phase(phases)
        cells[0] = (LETTERS[name].lower() if mono else "▁", f"phase.{name}")
    return tuple(cells)


def _one_color_column(column: Column, top: float, height: int, style: str) -> tuple[Span, ...]:
    """Return one column in one color, its lowest cell first.

    In few rows, stacked phases would mislead: a cell would show a small phase as a large one.
    """
    mean = sum(column.phases) / max(column.count, 1)
    filled = max(round(mean / top * height * 8), 1) if column.count else 0
    cells = [BLOCKS[min(max(filled - row * 8, 0), 8)] for row in range(height)]
    if filled > height * 8:
        cells[-1] = "▲"
    return tuple((cell, style if cell != " " else "") for cell in cells)


def _largest_phase(phases: Sequence[int]) -> str:
    """Return the phase with the longest time; "other" if none has any."""
    return PHASES[phases.index(max(phases))] if any(phases) else PHASES[-1]


def _phase_cell(eighths: Sequence[str], mono: bool) -> Span:
    """Return the sign and the style of a cell, given the phases of its eighths from the bottom up."""
    filled = [phase for phase in eighths if phase]
    if not filled:
        return (" ", "")
    largest = max(filled, key=filled.count)
    if mono:
        return (LETTERS[largest], f"phase.{largest}") if len(filled) >= 4 else (" ", "")
    lower, upper, lower_eighths = largest_parts(eighths)
    if len(filled) < 8 or lower == upper:  # the upper part of a cell that is not full needs the background
        return (BLOCKS[len(filled)], f"phase.{largest}")
    return (BLOCKS[lower_eighths], f"phase.{lower}/{upper}")


def _column_cells(column: Column, height: int, top: float, style: TerminalStyle) -> tuple[Span, ...]:
    if column.stalled:
        return (("╱", "dim"),) * height
    if height < _MIN_PHASE_ROWS:
        return _one_color_column(column, top, height, f"phase.{_largest_phase(column.phases)}")
    mono = not style.has_color or style.is_ascii
    return _phase_column(tuple(column.phases), column.count, top, height, mono)


def stacked_columns(
    columns: Sequence[Column],
    width: int,
    height: int,
    top: float,
    style: TerminalStyle,
    column_count: int = 0,
) -> list[Row]:
    """Return a history in `height` rows (the top row first) of `width` cells, on a scale up to `top` ns.

    The width has room for `column_count` columns, by default one per cell. Each column is the mean step of its time
    range. From `_MIN_PHASE_ROWS` rows on, its phases are stacked from below in the order of PHASES, shown by color, or
    by letter without color or in ASCII. In fewer rows, it has the color of its largest phase. Steps too short for the
    scale show the lowest block, or the lower-case letter of their largest phase. Only a column without steps is blank,
    or hatched if the run was stalled.
    """
    column_count = max(column_count or width, 1)
    shown_columns = list(columns)[:column_count]
    edges = [index * width // column_count for index in range(len(shown_columns) + 1)]
    columns_of_cells = [_column_cells(column, height, top, style) for column in shown_columns]
    rows: list[Row] = []
    for row in range(height - 1, -1, -1):
        cells = (column[row] for column in columns_of_cells)
        spans = merge_spans(
            (sign * (end - start), cell_style)
            for (sign, cell_style), start, end in zip(cells, edges, edges[1:], strict=False)
        )
        if edges[-1] < width:
            spans.append((" " * (width - edges[-1]), ""))
        rows.append(spans)
    return rows


def line_chart(
    lines: Sequence[tuple[Sequence[tuple[float, float]], str]],
    crosses: Sequence[float],
    width: int,
    height: int,
    bottom: float,
    top: float,
    style: TerminalStyle,
) -> list[Row]:
    """Return lines through points (x from 0 to 1, value), in `height` rows of `width` cells from `bottom` to `top`.

    `lines`: points and style of each; a cell has the style of the last line in it. Values outside are drawn at the
    edge. `crosses`: the x of each cross on the lowest row.
    """
    dots_across, dots_down = (1, 1) if style.is_ascii else (2, 4)
    cells = [[(" ", "")] * width for _ in range(height)]
    for points, line_style in lines:
        for x, y in _rasterize_line(points, width * dots_across, height * dots_down, bottom, top):
            row, column = y // dots_down, x // dots_across
            if not style.is_ascii:
                sign, _ = cells[row][column]
                dots_before = 0x2800 if sign == " " else ord(sign)
                cells[row][column] = (chr(dots_before | DOTS[x % dots_across][y % dots_down]), line_style)
            else:
                cells[row][column] = ("*", line_style)
    for place in crosses:
        cells[-1][min(max(int(place * width), 0), width - 1)] = ("✗", "bad")
    return [merge_spans(row) for row in cells]


def _rasterize_line(
    points: Sequence[tuple[float, float]], width: int, height: int, bottom: float, top: float
) -> set[tuple[int, int]]:
    """Return the dots (x, y) of a line through `points`, of `width` x `height` dots; (0, 0) is at the top left."""
    dots: set[tuple[int, int]] = set()
    previous: tuple[int, int] | None = None
    for place, value in points:
        height_share = 0.0 if top <= bottom else min(max((value - bottom) / (top - bottom), 0.0), 1.0)
        x, y = min(int(place * width), width - 1), round((1 - height_share) * (height - 1))
        start_x, start_y = previous or (x, y)
        last_y = start_y
        for column in range(start_x, x + 1):
            column_y = y if x == start_x else round(start_y + (y - start_y) * (column - start_x) / (x - start_x))
            dots.update((column, row) for row in range(min(last_y, column_y), max(last_y, column_y) + 1))
            last_y = column_y
        previous = x, y
    return dots

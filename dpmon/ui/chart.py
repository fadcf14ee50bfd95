"""Small drawings in cells: bars, lines of blocks, ranges, and the stacked history of steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dpmon.model.run_snapshot import PHASES, Column
from dpmon.ui.styled_rows import Row, Span, merge_spans, row_width
from dpmon.ui.terminal_style import LETTERS, Glyphs, TerminalStyle

_MIN_PHASE_ROWS = 6
"""Fewest rows in which a history shows the phases of its columns: in fewer, some shares would be 0.15 too large."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The dots of a braille character, by column, from the top (Unicode 15, 2800 to 28FF)."""
_FILLED_DOTS = [[sum(dots[4 - count :]) for count in range(5)] for dots in DOTS]
"""Halves of a braille character with 0 to 4 dots from below."""
_ROUND_NUMBERS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


def bar(parts: Sequence[float], signs: Sequence[Span], width: int, rest: Span, least: int = 1) -> Row:
    """A bar of `width` cells: each part (a share of the width) with its sign, then `rest`.

    A positive part takes at least `least` cells, as far as there is room.
    """
    row: Row = []
    used, total = 0, 0.0
    for part, (sign, style) in zip(parts, signs, strict=False):
        total += part
        end = min(max(round(total * width), used + (least if part > 0 else 0)), width)
        row.append((sign * (end - used), style))
        used = end
    return [*row, (rest[0] * (width - used), rest[1])]


def filled_bar(shares: Sequence[float] | None, width: int, glyphs: Glyphs) -> Row:
    """A full line for the first share, a broken line for the second, a thin line for the rest; dots for None."""
    if shares is None:
        return [(glyphs.middot * width, "dim")]
    signs = ((glyphs.bar[0], "bar"), ("~", "dim") if glyphs.ascii else ("╍", "bar"))
    return bar(shares, signs, width, (glyphs.bar[1], "dim"))


def busy_bar(parts: Sequence[float], top: float, width: int, glyphs: Glyphs) -> Row:
    """A rank's step as a bar on a scale up to `top` ns; `parts`: busy, communicating, waiting (ns)."""
    return bar([part / top if top > 0 else 0.0 for part in parts], busy_signs(glyphs), width, (" ", ""), least=0)


def block_line(values: Sequence[float | None], width: int, glyphs: Glyphs, top: float = 100.0) -> str:
    """The first `width` values as blocks on a scale up to `top`, from the left; unknown values are dots."""
    steps = len(glyphs.blocks) - 1
    text = "".join(
        glyphs.middot if v is None else glyphs.blocks[min(max(round(v / top * steps), 1 if v > 0 else 0), steps)]
        for v in values[: max(width, 0)]
    )
    return text.ljust(width)


def filled_area(values: Sequence[float | None], width: int, height: int, top: float, glyphs: Glyphs) -> list[str]:
    """`values` as filled columns on a scale up to `top`, from the left, in `height` rows of `width` cells.

    Two values per cell if the glyphs have braille, else one. An unknown value is a dot on the lowest row.
    """
    each = 2 if glyphs.braille else 1
    shown: list[float | None] = list(values)[: max(width, 0) * each]
    if len(shown) % each:
        shown.append(0.0)
    levels = 4 if glyphs.braille else len(glyphs.blocks) - 1
    filled = [None if v is None else min(max(round(v / top * height * levels), 1 if v > 0 else 0), height * levels)
              for v in shown]  # fmt: skip
    rows = []
    for row in range(height - 1, -1, -1):
        text = ""
        for at in range(0, len(filled), each):
            cell = [None if f is None else min(max(f - row * levels, 0), levels) for f in filled[at : at + each]]
            if None in cell:
                text += glyphs.middot if row == 0 else " "
            elif glyphs.braille:
                text += chr(0x2800 + _FILLED_DOTS[0][cell[0] or 0] + _FILLED_DOTS[1][cell[1] or 0])
            else:
                text += glyphs.blocks[cell[0] or 0]
        rows.append(text.ljust(width))
    return rows


def busy_legend(width: int, glyphs: Glyphs) -> Row:
    """The names of the parts of `busy_bar`, shortened to fit in `width` cells; "step" if they do not."""
    for names in (("busy ", "exposed ", "wait"), ("busy ", "exp ", "wait"), ("busy ", "", "wait")):
        row: Row = []
        for name, sign in zip(names, busy_signs(glyphs), strict=True):
            row += [sign, (name, "dim")] if name else []
        if row_width(row) <= width:
            return row
    return [("step".ljust(width), "dim")]


def busy_signs(glyphs: Glyphs) -> tuple[Span, Span, Span]:
    """The signs for busy, exposed communication and wait."""
    signs = "#+." if glyphs.ascii else "▇▤░"
    return (signs[0], "bar"), (signs[1], "phase.sync"), (signs[2], "dim")


def range_bar(low: float, middle: float, high: float, top: float, width: int, glyphs: Glyphs, base: float = 0.0) -> str:
    """The positions of low, middle and high between `base` and `top`, in `width` cells."""
    if top <= base or width <= 0:
        return " " * max(width, 0)

    def place(value: float) -> int:
        return min(max(int((value - base) / (top - base) * (width - 1) + 0.5), 0), width - 1)

    first, center, last = place(low), place(middle), place(high)
    cells = [" "] * width
    for index in range(first, last + 1):
        cells[index] = glyphs.span[1]
    cells[first], cells[last] = glyphs.span[0], glyphs.span[3]
    cells[center] = glyphs.span[2]
    return "".join(cells)


def round_up_nice(value: float) -> float:
    """The next round number at or above `value` (positive), so that a scale stays the same while values change."""
    if value <= 0:
        return 1.0
    scale = 1.0
    while value > scale * 10:
        scale *= 10
    while value <= scale:
        scale /= 10
    return next(n * scale for n in _ROUND_NUMBERS if value <= n * scale * 1.000001)


def scale_top(columns: Sequence[Column]) -> float:
    """The upper end of a history's scale (ns): a round number above 95% of the columns; the others are cut.

    Columns of evaluations count only if there are no others: the figures beside the history are of training steps. A
    column after a stall does not count: the stall is in one of its steps.
    """
    pairs = zip(columns, (None, *columns), strict=False)
    there = [column for column, before in pairs if column.count and not (before is not None and before.stalled)]
    totals = sorted(c.wall_ns / c.count for c in [c for c in there if not c.evaluation] or there)
    return round_up_nice(totals[max(-(-len(totals) * 95 // 100) - 1, 0)]) if totals else 1.0


@lru_cache(maxsize=4096)
def _phase_column(
    phases: tuple[int, ...], count: int, top: float, height: int, cut_top: str, mono: bool
) -> tuple[Span, ...]:
    """One column from the bottom up; `phases`: sums over `count` steps, in ns, stacked in their order."""
    scale = height * 8 / top / max(count, 1)
    edges = [0.0]
    for took in phases:
        edges.append(edges[-1] + took * scale)
    total = edges[-1]
    cells: list[Span] = []
    for row in range(height):
        floor = row * 8
        parts = []
        for index, name in enumerate(PHASES):
            inside = min(edges[index + 1], floor + 8) - max(edges[index], floor)
            if inside > 0:
                parts.append((inside, index, name))
        cells.append(_phase_cell(parts, mono))
    if total > height * 8 + 1 and cells[-1][1]:
        style = cells[-1][1].partition("/")[0]
        cells[-1] = (cut_top, style)
    if count and cells and cells[0][0] == " ":
        cells[0] = _tiny_column(phases, mono)
    return tuple(cells)


def _one_color_column(column: Column, top: float, height: int, signs: Glyphs, style: str) -> tuple[Span, ...]:
    """One column of one color, from the bottom up: in few rows, a cell would show a small phase as a large one."""
    steps = len(signs.blocks) - 1
    mean = sum(column.phases) / max(column.count, 1)
    filled = max(round(mean / top * height * steps), 1) if column.count else 0
    cells = [signs.blocks[min(max(filled - row * steps, 0), steps)] for row in range(height)]
    if filled > height * steps:
        cells[-1] = signs.cut_top
    return tuple((cell, style if cell != " " else "") for cell in cells)


def _tiny_column(phases: tuple[int, ...], mono: bool) -> Span:
    """A column too small for a cell, in the color of its largest phase: a blank would say "no steps"."""
    name = PHASES[phases.index(max(phases))] if any(phases) else PHASES[-1]
    return (LETTERS[name].lower() if mono else "▁", f"phase.{name}")


def _phase_cell(parts: list[tuple[float, int, str]], mono: bool) -> Span:
    filled = sum(part[0] for part in parts)
    if not parts or filled < 0.5:
        return (" ", "")
    if mono:
        largest = max(parts)
        return (LETTERS[largest[2]], f"phase.{largest[2]}") if filled >= 4 else (" ", "")
    blocks = " ▁▂▃▄▅▆▇█"
    # One cell can show the two largest parts: the lower one as foreground, the upper one as background.
    two = sorted(sorted(parts, reverse=True)[:2], key=lambda part: part[1])
    if len(two) == 1:
        return (blocks[min(round(filled), 8)], f"phase.{two[0][2]}")
    if filled < 7.5:
        # This cell is not full, so its upper part needs the background: only one phase is drawn, the largest.
        return (blocks[round(filled)], f"phase.{max(parts)[2]}")
    lower = min(max(round(8 * two[0][0] / (two[0][0] + two[1][0])), 1), 7)
    return (blocks[lower], f"phase.{two[0][2]}/{two[1][2]}")


def stacked_columns(
    columns: Sequence[Column],
    width: int,
    height: int,
    top: float,
    look: TerminalStyle,
    places: int = 0,
    *,
    by_mode: bool = False,
) -> list[Row]:
    """`columns` from left to right, in `height` rows (top row first) on a scale up to `top` ns.

    The width has room for `places` columns, by default one per cell.

    Each column is the mean step of its time range. From `_ROWS_OF_PHASES` rows on, its phases are stacked from below in
    the order of PHASES, shown by color, or by letter without color or in ASCII. Steps too short for the scale show
    the lowest block, or the lower-case letter of their largest phase; only a column without steps is blank, or hatched
    if the run was stalled. `by_mode`: columns in the colors of their modes, without phases.
    """
    mono = not look.has_color or look.glyphs.ascii
    places = max(places or width, 1)
    shown = list(columns)[:places]
    edges = [index * width // places for index in range(len(shown) + 1)]
    signs = look.glyphs
    if by_mode or height < _MIN_PHASE_ROWS:
        styles = (f"mode.{column.mode}" if by_mode else "bar" for column in shown)
        drawn = [
            _one_color_column(column, top, height, signs, style) for column, style in zip(shown, styles, strict=True)
        ]
    else:
        drawn = [_phase_column(tuple(c.phases), c.count, top, height, signs.cut_top, mono) for c in shown]
    drawn = [((signs.hatch, "dim"),) * height if c.stalled else d for c, d in zip(shown, drawn, strict=True)]
    rows: list[Row] = []
    for row in range(height - 1, -1, -1):
        cells = (column[row] for column in drawn)
        spans = merge_spans(
            (sign * (end - at), style) for (sign, style), at, end in zip(cells, edges, edges[1:], strict=False)
        )
        if edges[-1] < width:
            spans.append((" " * (width - edges[-1]), ""))
        rows.append(spans)
    return rows


def line_chart(
    lines: Sequence[tuple[Sequence[tuple[float, float]], str]],
    marked: Sequence[float],
    width: int,
    height: int,
    low: float,
    top: float,
    glyphs: Glyphs,
) -> list[Row]:
    """Lines through points (place from 0 to 1, value) from `low` to `top`, in `height` rows of `width` cells.

    `lines`: points and style of each; a cell has the style of the last one in it. Values outside are drawn at the edge.
    `marked`: places with a cross on the lowest row.
    """
    across, up = (2, 4) if glyphs.braille else (1, 1)
    cells = [[(" ", "")] * width for _ in range(height)]
    for points, style in lines:
        for x, y in _rasterize_line(points, width * across, height * up, low, top):
            sign = cells[y // up][x // across][0]
            dot = DOTS[x % across][y % up] if glyphs.braille else 0
            cells[y // up][x // across] = (chr((0x2800 if sign == " " else ord(sign)) | dot) if dot else "*", style)
    for at in marked:
        cells[-1][min(max(int(at * width), 0), width - 1)] = (glyphs.cross, "bad")
    return [merge_spans(row) for row in cells]


def _rasterize_line(
    points: Sequence[tuple[float, float]], width: int, height: int, low: float, top: float
) -> set[tuple[int, int]]:
    """The dots of a line through `points`, of `width` x `height` dots, from the top left."""
    dots: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for at, value in points:
        share = 0.0 if top <= low else min(max((value - low) / (top - low), 0.0), 1.0)
        x, y = min(int(at * width), width - 1), round((1 - share) * (height - 1))
        begin_x, begin_y = before or (x, y)
        last_y = begin_y
        for column in range(begin_x, x + 1):
            here = y if x == begin_x else round(begin_y + (y - begin_y) * (column - begin_x) / (x - begin_x))
            dots.update((column, row) for row in range(min(last_y, here), max(last_y, here) + 1))
            last_y = here
        before = x, y
    return dots

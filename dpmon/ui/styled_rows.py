"""Rows of styled text, measured in cells: the basis of every picture.

A row is a list of spans (text, style name). `dpmon.ui.terminal_style` has the styles. The text is clean
(`dpmon.sanitize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, repeat
from operator import itemgetter

from dpmon.text.cells import align_right, char_width, span_width, wrap_text

Span = tuple[str, str]
Row = list[Span]
_TEXT, _STYLE = map(itemgetter, (0, 1))


def row_width(row: Iterable[Span]) -> int:
    """Return the number of cells that a row takes."""
    total = 0
    for text, _ in row:  # thousands of spans per picture, so ASCII text is measured without a call
        total += len(text) if text.isascii() else span_width(text)
    return total


def plain_text(row: Iterable[Span]) -> str:
    """Return the text of a row without its styles."""
    return "".join(text for text, _ in row)


def merge_spans(cells: Iterable[Span]) -> Row:
    """Return the same text in as few spans as its styles allow."""
    return [("".join(map(_TEXT, same)), style) for style, same in groupby(cells, key=_STYLE)]


def dim_row(row: Iterable[Span]) -> Row:
    """Return the row without its colors."""
    return [("".join(text for text, _ in row), "dim")]


def fit_row(row: Sequence[Span], width: int) -> Row:
    """Return the row in exactly `width` cells: padded with spaces, or truncated and marked."""
    total = row_width(row)
    if total <= width:
        return [*row, (" " * (width - total), "")] if total < width else list(row)
    return [*crop_row(row, 0, width - 1), ("…", "dim")] if width > 0 else []


def row_cells(row: Iterable[Span]) -> Row:
    """Return a cell for each column: a character with its marks; the right half of a wide one is empty.

    No span begins with a mark.
    """
    cells: Row = []
    for text, style in row:
        if text.isascii():
            cells += zip(text, repeat(style))
            continue
        widths = list(map(char_width, text))
        if widths.count(1) == len(widths):
            cells += zip(text, repeat(style))
            continue
        for char, width in zip(text, widths, strict=True):
            if width:
                cells.append((char, style))
                cells += [("", style)] * (width - 1)
            elif cells:
                last = -1 if cells[-1][0] else -2
                cells[last] = (cells[last][0] + char, cells[last][1])
    return cells


def crop_row(row: Iterable[Span], start: int, end: int) -> Row:
    """Return the cells of `row` from `start` up to `end`; half of a cut wide character becomes a blank."""
    cells = row_cells(row)
    cropped = cells[start:end]
    if cropped and not cropped[0][0]:
        cropped[0] = (" ", cropped[0][1])
    if cropped and end < len(cells) and not cells[end][0]:
        cropped[-1] = (" ", cropped[-1][1])
    return merge_spans(cropped)


def join_left_right(left: Sequence[Span], right_part: Sequence[Span], width: int) -> Row:
    """Return `left`, with `right_part` at the right end; if both do not fit, `left` is truncated and marked."""
    right_width = row_width(right_part)
    if right_width >= width:
        return fit_row(right_part, width)
    return [*fit_row(left, width - right_width), *right_part]


def wrap_to_rows(
    text: str, width: int, style: str = "dim", max_rows: int | None = None, *, label: Sequence[Span] = ()
) -> list[Row]:
    """Return `text` in at most `max_rows` rows of at most `width` cells, broken between words; none without a text.

    `label` stands before the first row, and the others are indented as far.
    """
    if not text:
        return []
    indent = [(" " * row_width(label), label[-1][1])] if label else []
    first, *others = wrap_text(text, max(width - row_width(label), min(width, 10)), max_rows)
    return [[*label, (first, style)], *([*indent, (line, style)] for line in others)]


def add_scale(chart: Sequence[Row], top: str, bottom: str, gutter: int) -> list[Row]:
    """Return the rows of a chart, with the ends of its scale in `gutter` cells at the left."""
    labels = [top, *[""] * (len(chart) - 2), bottom]
    return [[(align_right(label, gutter - 1) + " ", "dim"), *row] for label, row in zip(labels, chart, strict=False)]


def draw_frame(
    title: Sequence[Span],
    corner: Sequence[Span],
    rows: Sequence[Sequence[Span]],
    width: int,
    height: int,
    *,
    focused: bool = False,
    first_row: int = 0,
    pinned_rows: int = 0,
) -> list[Row]:
    """Return a frame of `width` x `height` cells around `rows`, its title at the left and `corner` at the right.

    The frame shows how many rows do not fit. `first_row`: rows to scroll past, at most to the end. `pinned_rows`: rows
    at the top that do not scroll.
    """
    mark = "▸" if focused else " "
    if height <= 1 or width < 8:
        corner_spans: Row = [("  ", ""), *corner] if corner else []
        # A number is never cut.
        title_forms = ([*title, *corner_spans], [*title[:1], *corner_spans], [*title[:1], *corner_spans[:3]], title[:1])
        shown_title = next((form for form in title_forms if row_width(form) + 2 <= width), title[:1])
        return [fit_row([(mark, "frame.focus"), *shown_title], width)][:height]
    style = "frame.focus" if focused else "frame"
    top_left, top_right, bottom_left, bottom_right, line, side = "╭╮╰╯─│"
    title_row = draw_frame_title(title, corner, width - 3, line, style)
    framed: list[Row] = [[(top_left, style), (mark, style), *title_row, (top_right, style)]]
    inner_height = height - 2
    rows_above = min(max(first_row, 0), max(len(rows) - inner_height, 0)) if inner_height > pinned_rows else 0
    rows = [*rows[:pinned_rows], *rows[pinned_rows + rows_above :]] if rows_above else rows
    for index in range(inner_height):
        row = rows[index] if index < len(rows) else []
        framed.append([(side, style), (" ", ""), *fit_row(row, width - 4), (" ", ""), (side, style)])
    rows_below = len(rows) - inner_height
    notes = [f"{rows_above} above"] if rows_above else []
    if rows_below > 0:
        notes.append(f"{rows_below} more ↓")
    note = f" {', '.join(notes)} " if notes else ""
    line_cells = max(width - 3 - span_width(note), 0)
    bottom = [(bottom_left + line * line_cells, style), (note, "dim"), (line + bottom_right, style)]
    return [*framed, crop_row(bottom, 0, width)]


def draw_frame_title(title: Sequence[Span], corner: Sequence[Span], width: int, line: str, style: str) -> Row:
    """Return the upper edge of a frame: title, line, corner, in exactly `width` cells."""
    corner_width = row_width(corner)
    shown_corner = list(corner) if corner_width + 8 <= width else []
    title_cells = width - (row_width(shown_corner) + 3 if shown_corner else 1)
    shown_title = list(title) if row_width(title) <= title_cells - 1 else fit_row(title, max(title_cells - 1, 0))
    row: Row = [*shown_title, (" ", "")]
    corner_part: Row = [(" ", ""), *shown_corner, (" ", "")] if shown_corner else []
    gap = width - row_width(row) - row_width(corner_part)
    return [*row, (line * gap, style), *corner_part]

"""Rows of styled text, measured in cells: the basis of every picture.

A row is a list of spans (text, style name). `dpmon.ui.terminal_style` has the styles. The text is clean
(`dpmon.sanitize`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from dpmon.text.cells import align_right, span_width, wrap_text
from dpmon.text.cells import crop_text as cropped_text
from dpmon.ui.terminal_style import Glyphs

Span = tuple[str, str]
Row = list[Span]
_TEXT, _STYLE = map(itemgetter, (0, 1))


def row_width(row: Iterable[Span]) -> int:
    """Cells that a row takes."""
    total = 0
    for text, _ in row:  # thousands of spans per picture, so ASCII text is measured without a call
        total += len(text) if text.isascii() else span_width(text)
    return total


def plain_text(row: Iterable[Span]) -> str:
    """The row's text alone."""
    return "".join(text for text, _ in row)


def merge_spans(cells: Iterable[Span]) -> Row:
    """The same text in as few spans as its styles allow."""
    return [("".join(map(_TEXT, same)), style) for style, same in groupby(cells, key=_STYLE)]


def dim_row(row: Iterable[Span]) -> Row:
    """The row without its colors."""
    return [("".join(text for text, _ in row), "dim")]


def fit_row(row: Sequence[Span], width: int, more: str = "…") -> Row:
    """The row in exactly `width` cells: padded with spaces, or cut and marked."""
    total = row_width(row)
    if total <= width:
        return [*row, (" " * (width - total), "")] if total < width else list(row)
    fitted: Row = []
    room = width - span_width(more)
    if room < 0:
        return [("." * width, "dim")]
    for text, style in row:
        size = span_width(text)
        if size > room:
            fitted.append((cropped_text(text, room), style))
            break
        fitted.append((text, style))
        room -= size
    fitted.append((more, "dim"))
    return fitted


def crop_row(row: Iterable[Span], start: int, end: int) -> Row:
    """The cells of `row` from `start` up to `end`; half of a cut wide character becomes a blank."""
    found: Row = []
    at = 0
    for text, style in row:
        part = ""
        if text.isascii():
            part = text[max(start - at, 0) : max(end - at, 0)]
            at += len(text)
        for char in text if not text.isascii() else "":
            size = span_width(char)
            if start <= at and at + size <= end:
                part += char
            elif at < end and at + size > start:
                part += " " * (min(at + size, end) - max(at, start))
            at += size
        if part:
            found.append((part, style))
    return found


def join_left_right(left: Sequence[Span], right_part: Sequence[Span], width: int, more: str = "…") -> Row:
    """`left`, and `right_part` at the right end; if they do not fit together, `left` is cut and marked."""
    tail = row_width(right_part)
    if tail >= width:
        return fit_row(right_part, width, more)
    return [*fit_row(left, width - tail, more), *right_part]


class TableColumn(NamedTuple):
    """A column of a table: its head, its width in cells, and its rows: texts, or cells as wide as the column."""

    head: str | Row
    width: int
    cells: Sequence[str | Row]
    style: str = ""
    left: bool = False
    """Whether texts stand at the left, cut and marked where they are too long."""
    gap: int = 0
    """Blanks after the column."""


def table_rows(columns: Sequence[TableColumn], more: str) -> list[Row]:
    """The row of heads, then the rows of the table."""
    rows: list[Row] = [[]]
    for head, width, cells, style, left, gap in columns:
        if isinstance(head, str):
            head = [((head.ljust(width) if left else align_right(head, width)) + " " * gap, "dim")]
        rows[0] += head
        rows += [[] for _ in range(len(cells) + 1 - len(rows))]
        for row, cell in zip(rows[1:], cells, strict=True):
            if not isinstance(cell, str):
                row += cell
            elif left:
                row += [*fit_row([(cell, style)], width, more), (" " * gap, "")]
            else:
                row.append((align_right(cell, width) + " " * gap, style))
    return rows


def wrap_to_rows(text: str, width: int, style: str = "dim", most: int | None = None, more: str = "…") -> list[Row]:
    """`text` in rows of at most `width` cells, broken between words; at most `most` rows; none without a text."""
    return [[(line, style)] for line in wrap_text(text, width, most, more)] if text else []


def draw_frame(
    title: Sequence[Span],
    corner: Sequence[Span],
    rows: Sequence[Sequence[Span]],
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    focused: bool = False,
    first: int = 0,
    pinned: int = 0,
) -> list[Row]:
    """A frame of exactly `width` x `height` cells around `rows`, its title at the left and `corner` at the right.

    The frame shows how many rows do not fit. `first`: rows to scroll past, at most to the end. `pinned`: rows at the
    top that do not scroll.
    """
    if height <= 1 or width < 8:
        mark = glyphs.focus if focused else " "
        number: Row = [("  ", ""), *corner] if corner else []
        # A number is never cut.
        forms = ([*title, *number], [*title[:1], *number], [*title[:1], *number[:3]], title[:1])
        shown = next((form for form in forms if row_width(form) + 2 <= width), title[:1])
        return [fit_row([(mark, "frame.focus"), *shown], width, glyphs.more)][:height]
    style = "frame.focus" if focused else "frame"
    tl, tr, bl, br, line, side = glyphs.frame
    mark = glyphs.focus if focused else " "
    head = draw_frame_title(title, corner, width - 3, line, style, glyphs.more)
    framed: list[Row] = [[(tl, style), (mark, style), *head, (tr, style)]]
    inside = height - 2
    above = min(max(first, 0), max(len(rows) - inside, 0)) if inside > pinned else 0
    rows = [*rows[:pinned], *rows[pinned + above :]] if above else rows
    for index in range(inside):
        row = rows[index] if index < len(rows) else []
        framed.append([(side, style), (" ", ""), *fit_row(row, width - 4, glyphs.more), (" ", ""), (side, style)])
    hidden = len(rows) - inside
    if hidden > 0 or above:
        below = f"{hidden} more {glyphs.down}" if hidden > 0 else ""
        sign = " " + ", ".join(part for part in (f"{above} above" if above else "", below) if part) + " "
        framed.append([(bl + line * max(width - 3 - span_width(sign), 0), style), (sign, "dim"), (line + br, style)])
        framed[-1] = fit_row(framed[-1], width, "")
    else:
        framed.append([(bl + line * (width - 2) + br, style)])
    return framed


def draw_frame_title(
    title: Sequence[Span], corner: Sequence[Span], width: int, line: str, style: str, more: str
) -> Row:
    """The upper edge of a frame: title, line, corner, in exactly `width` cells."""
    corner_width = row_width(corner)
    shown_corner = list(corner) if corner_width + 8 <= width else []
    room = width - (row_width(shown_corner) + 3 if shown_corner else 1)
    shown = list(title) if row_width(title) <= room - 1 else fit_row(title, max(room - 1, 0), more)
    row: Row = [*shown, (" ", "")]
    tail: Row = [(" ", ""), *shown_corner, (" ", "")] if shown_corner else []
    gap = width - row_width(row) - row_width(tail)
    return [*row, (line * gap, style), *tail]

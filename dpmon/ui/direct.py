"""Writes only the changed cells to the terminal; Textual's compositor would send each changed row from its left edge.

This is a fast path for a screen on which only numbers change. The widgets hold all rows as well, so Textual can draw
the right picture itself, after a resize or under a dialog.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rich.color import ColorSystem
from rich.style import Style

from dpmon.text.cells import char_width, span_width
from dpmon.ui.look import Look
from dpmon.ui.rows import Span, width_of

Cell = tuple[str, str]
"""The text of one cell and its style's name; the right half of a wide character is empty."""
_GAP = 5
"""Up to this many unchanged cells between two changes are written again, because that is cheaper than a jump."""


def cells_of(row: Sequence[Span]) -> list[Cell]:
    """The row cell by cell; a combining mark, which has no width, stays with its character."""
    cells: list[Cell] = []
    for text, style in row:
        if text.isascii():
            cells += [(char, style) for char in text]
            continue
        for char in text:
            size = char_width(char)
            if size:
                cells.append((char, style))
                if size == 2:
                    cells.append(("", style))
            elif cells:
                at = -1 if cells[-1][0] or len(cells) < 2 else -2
                cells[at] = (cells[at][0] + char, cells[at][1])
    return cells


def _changes(before: Sequence[Cell], after: Sequence[Cell]) -> list[tuple[int, int]]:
    """Where the rows differ, as ranges of cells; ranges close to each other are merged."""
    ranges: list[tuple[int, int]] = []
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            if ranges and index - ranges[-1][1] <= _GAP:
                ranges[-1] = (ranges[-1][0], index + 1)
            else:
                ranges.append((index, index + 1))
    if len(after) > len(before):
        ranges.append((len(before), len(after)))
    # Never write half of a wide character.
    return [
        (
            start - 1 if start and not after[start][0] else start,
            end + 1 if end < len(after) and not after[end][0] else end,
        )
        for start, end in ranges
    ]


@lru_cache(maxsize=2048)
def _codes(style: Style, system: str | None) -> tuple[str, str, str]:
    """Attributes, foreground and background of a style as SGR parameters."""
    attributes = ";".join(
        code
        for code, on in (
            ("1", style.bold),
            ("2", style.dim),
            ("3", style.italic),
            ("4", style.underline),
            ("7", style.reverse),
            ("9", style.strike),
        )
        if on
    )
    if system is None:
        return attributes, "", ""
    level = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT}.get(system, ColorSystem.TRUECOLOR)
    front = ";".join(style.color.downgrade(level).get_ansi_codes(True)) if style.color else ""
    back = ";".join(style.bgcolor.downgrade(level).get_ansi_codes(False)) if style.bgcolor else ""
    return attributes, front, back


def patch_row(x: int, y: int, before: Sequence[Span], after: Sequence[Span], look: Look, system: str | None) -> str:
    """Like `patch`, for two rows of the same width; skips equal spans at the start and at the end."""
    first, last = 0, 0
    most = min(len(before), len(after))
    while first < most and before[first] == after[first]:
        first += 1
    while last < most - first and before[-1 - last] == after[-1 - last]:
        last += 1
    # A combining mark belongs to the last cell of the span before it.
    while first and any(_begins_with_mark(row, first) for row in (before, after)):
        first -= 1
    while last and _begins_with_mark(after, len(after) - last):
        last -= 1
    one, other = before[first : len(before) - last], after[first : len(after) - last]
    if width_of(one) != width_of(other):
        one, other = before[first:], after[first:]
    return patch(x + width_of(after[:first]), y, cells_of(one), cells_of(other), look, system)


def _begins_with_mark(row: Sequence[Span], index: int) -> bool:
    return any(not span_width(text[0]) for text, _ in row[index : index + 1] if text)


def patch(x: int, y: int, before: Sequence[Cell], after: Sequence[Cell], look: Look, system: str | None) -> str:
    """The codes that change a terminal from `before` to `after` at column `x` of row `y` (both from 0).

    `system`: the terminal's colours as Rich names them. The attributes are reset at the end.
    """
    out: list[str] = []
    now = ("", "", "")
    for start, end in _changes(before, after):
        out.append(f"\x1b[{y + 1};{x + start + 1}H")
        for char, name in after[start:end]:
            wanted = _codes(look.style(name), system)
            if wanted != now:
                out.append(_change(now, wanted))
                now = wanted
            out.append(char)
    if out and now != ("", "", ""):
        out.append("\x1b[m")
    return "".join(out)


def _change(now: tuple[str, str, str], wanted: tuple[str, str, str]) -> str:
    """The shortest SGR from one style to the other."""
    if now[0] != wanted[0] or (now[1] and not wanted[1]) or (now[2] and not wanted[2]):
        return "\x1b[" + ";".join(("0", *(part for part in wanted if part))) + "m"
    return "\x1b[" + ";".join(b for a, b in zip(now[1:], wanted[1:], strict=True) if a != b) + "m"

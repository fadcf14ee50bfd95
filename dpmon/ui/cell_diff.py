"""The cells of a picture that changed, as text for the terminal: short, because it may go over a slow line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from dpmon.text.cells import char_width
from dpmon.ui.styled_rows import Row, Span, merge_spans, row_width

_MIN_GAP_CELLS = 8
"""Equal cells between two changes that are not sent again; a move takes about as many bytes."""
_RESET = "\x1b[0m"


class CellChange(NamedTuple):
    """Cells to draw, and the position of the first one on the screen."""

    x: int
    y: int
    cells: Row


class _SgrCodes(NamedTuple):
    """The SGR codes of a style: "1", "38;2;214;219;225", "48;2;16;20;26"."""

    attributes: str = ""
    front: str = ""
    back: str = ""


def diff_rows(before: Row, after: Row, x: int, y: int) -> Iterator[CellChange]:
    """Yield the changes that turn one row into another, which is as wide; the rows begin at `x`."""
    old, new = ([(char, style) for text, style in row for char in text] for row in (before, after))
    if len(old) == len(new) and all(char_width(char) == 1 for char in {char for char, _ in (*old, *new)}):
        for start, end in _changed_runs(
            [index for index, (old_cell, new_cell) in enumerate(zip(old, new, strict=True)) if old_cell != new_cell]
        ):
            yield CellChange(x + start, y, merge_spans(new[start:end]))
        return
    column, cells = _changed_cells(old, new)
    if cells:
        yield CellChange(x + column, y, cells)


def _changed_runs(columns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first column of each run of changed cells, and the column after its last one."""
    for index, column in enumerate(columns):
        if not index or column - columns[index - 1] > _MIN_GAP_CELLS:
            start = column
        if index + 1 == len(columns) or columns[index + 1] - column > _MIN_GAP_CELLS:
            yield start, column + 1


def _changed_cells(old: Sequence[Span], new: Sequence[Span]) -> tuple[int, Row]:
    """Return the column of the first cell that differs, and all new cells from there to the last one that differs.

    A mark without a width stays with the character before it.
    """
    shared_count = min(len(old), len(new))
    equal_before = next((index for index in range(shared_count) if old[index] != new[index]), shared_count)
    while equal_before and not all(
        char_width(char) for char, _ in (*old[equal_before : equal_before + 1], *new[equal_before : equal_before + 1])
    ):
        equal_before -= 1
    equal_after = next(
        (index for index in range(shared_count - equal_before) if old[-1 - index] != new[-1 - index]),
        shared_count - equal_before,
    )
    while equal_after and not char_width(new[-equal_after][0]):
        equal_after -= 1
    return row_width(new[:equal_before]), merge_spans(new[equal_before : len(new) - equal_after])


def encode_changes(changes: Iterable[CellChange], sgr: Callable[[str], str]) -> str:
    """Return the terminal output that draws the changes in order.

    `sgr` returns the SGR codes of a style name. A style is sent only where it differs from the one before.
    """
    pieces: list[str] = []
    current, cursor_x, cursor_y = _SgrCodes(), -1, -1
    for x, y, cells in changes:
        pieces.append(f"\x1b[{x - cursor_x}C" if y == cursor_y and x > cursor_x else f"\x1b[{y + 1};{x + 1}H")
        for text, style in cells:
            codes = _split_codes(sgr(style))
            pieces += [_style_transition(current, codes), text]
            current = codes
        cursor_x, cursor_y = x + row_width(cells), y
    return "".join([*pieces, _RESET]) if pieces else ""


@cache
def _style_transition(before: _SgrCodes, after: _SgrCodes) -> str:
    """Return the escape sequence that switches from one style to another."""
    if before == after:
        return ""
    foreground = after.front if after.front != before.front else ""
    background = after.back if after.back != before.back else ""
    attributes = after.attributes if after.attributes != before.attributes else ""
    if before.attributes == "1" and not after.attributes and after.front and after.back:
        attributes = "22"  # only bold goes
    elif (
        before.attributes not in ("", after.attributes)
        or bool(before.front) > bool(after.front)
        or (bool(before.back) > bool(after.back))
    ):
        attributes, foreground, background = f"0;{after.attributes}".rstrip(";"), after.front, after.back
    return f"\x1b[{';'.join(part for part in (attributes, foreground, background) if part)}m"


@cache
def _split_codes(codes: str) -> _SgrCodes:
    """Return the codes of a style, split by what they set."""
    attributes, foreground, background = [], "", ""
    remaining = iter(codes.split(";") if codes else ())
    for code in remaining:
        whole_code = code
        if code in ("38", "48"):
            color_kind = next(remaining)
            whole_code = ";".join([code, color_kind, *(next(remaining) for _ in range(3 if color_kind == "2" else 1))])
        if code == "38" or 30 <= int(code) <= 39 or 90 <= int(code) <= 97:
            foreground = whole_code
        elif code == "48" or 40 <= int(code) <= 49 or 100 <= int(code) <= 107:
            background = whole_code
        else:
            attributes.append(code)
    return _SgrCodes(";".join(attributes), foreground, background)

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
    """Cells to draw from a place of the screen on."""

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
        for first, end in _changed_runs(
            [at for at, (one, other) in enumerate(zip(old, new, strict=True)) if one != other]
        ):
            yield CellChange(x + first, y, merge_spans(new[first:end]))
        return
    column, cells = _changed_cells(old, new)
    if cells:
        yield CellChange(x + column, y, cells)


def _changed_runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield start and end of the runs of changed cells."""
    for at, place in enumerate(places):
        if not at or place - places[at - 1] > _MIN_GAP_CELLS:
            first = place
        if at + 1 == len(places) or places[at + 1] - place > _MIN_GAP_CELLS:
            yield first, place + 1


def _changed_cells(old: Sequence[Span], new: Sequence[Span]) -> tuple[int, Row]:
    """The column of the first cell that differs, and the new cells from there to the last one that differs.

    A mark without a width stays with the character before it.
    """
    most = min(len(old), len(new))
    first = next((i for i in range(most) if old[i] != new[i]), most)
    while first and not all(char_width(char) for char, _ in (*old[first : first + 1], *new[first : first + 1])):
        first -= 1
    last = next((i for i in range(most - first) if old[-1 - i] != new[-1 - i]), most - first)
    while last and not char_width(new[-last][0]):
        last -= 1
    return row_width(new[:first]), merge_spans(new[first : len(new) - last])


def encode_changes(changes: Iterable[CellChange], sgr: Callable[[str], str]) -> str:
    """The text that draws the changes, in order; `sgr`: the SGR codes of a style by its name.

    A style is sent only where it differs from the one before.
    """
    written: list[str] = []
    now, at_x, at_y = _SgrCodes(), -1, -1
    for x, y, cells in changes:
        written.append(f"\x1b[{x - at_x}C" if y == at_y and x > at_x else f"\x1b[{y + 1};{x + 1}H")
        for text, style in cells:
            codes = _split_codes(sgr(style))
            written += [_style_transition(now, codes), text]
            now = codes
        at_x, at_y = x + row_width(cells), y
    return "".join([*written, _RESET]) if written else ""


@cache
def _style_transition(before: _SgrCodes, after: _SgrCodes) -> str:
    """The sequence from one style to another."""
    if before == after:
        return ""
    front = after.front if after.front != before.front else ""
    back = after.back if after.back != before.back else ""
    attributes = after.attributes if after.attributes != before.attributes else ""
    if before.attributes == "1" and not after.attributes and after.front and after.back:
        attributes = "22"  # only bold goes
    elif (
        before.attributes not in ("", after.attributes)
        or bool(before.front) > bool(after.front)
        or (bool(before.back) > bool(after.back))
    ):
        attributes, front, back = f"0;{after.attributes}".rstrip(";"), after.front, after.back
    return f"\x1b[{';'.join(part for part in (attributes, front, back) if part)}m"


@cache
def _split_codes(codes: str) -> _SgrCodes:
    """The codes of a style by what they set."""
    attributes, front, back = [], "", ""
    parts = iter(codes.split(";") if codes else ())
    for part in parts:
        whole = part
        if part in ("38", "48"):
            kind = next(parts)
            whole = ";".join([part, kind, *(next(parts) for _ in range(3 if kind == "2" else 1))])
        if part == "38" or 30 <= int(part) <= 39 or 90 <= int(part) <= 97:
            front = whole
        elif part == "48" or 40 <= int(part) <= 49 or 100 <= int(part) <= 107:
            back = whole
        else:
            attributes.append(part)
    return _SgrCodes(";".join(attributes), front, back)

"""The cells of a picture that changed, as text for the terminal: short, because it may go over a slow line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from rich.color import Color, ColorSystem
from rich.style import Style

from dpmon.ui.styled_rows import Row, merge_spans, row_cells, row_width

_MIN_GAP_CELLS = 8
"""Equal cells between two changes that are not sent again; a move takes about as many bytes."""
_DEFAULT_COLOR = Color.default()
_SWITCHES = (("italic", "3", "23"), ("underline", "4", "24"), ("reverse", "7", "27"), ("strike", "9", "29"))
"""Attributes with the SGR codes that switch them on and off."""

StyleCodes = tuple[str, ...]
"""The SGR codes of a style: foreground, background, weight, italic, underline, reverse, strike."""
PLAIN: StyleCodes = ("39", "49", "22", "23", "24", "27", "29")


@lru_cache(maxsize=1024)
def style_codes(style: Style, color_system: ColorSystem) -> StyleCodes:
    """Return the codes of a style on a terminal with these colors."""
    foreground = (style.color or _DEFAULT_COLOR).downgrade(color_system).get_ansi_codes()
    background = (style.bgcolor or _DEFAULT_COLOR).downgrade(color_system).get_ansi_codes(foreground=False)
    weight = "22" + ";1" * bool(style.bold) + ";2" * bool(style.dim)
    switches = [on if getattr(style, name) else off for name, on, off in _SWITCHES]
    return (";".join(foreground), ";".join(background), weight, *switches)


def encode_changes(before: Sequence[Row], after: Sequence[Row], codes: Callable[[str], StyleCodes]) -> str:
    """Return the terminal output that turns the screen's rows into other rows of the same widths.

    `codes` returns the codes of a style name. Only the codes that differ from those before are sent.
    """
    pieces: list[str] = []
    current, cursor_x, cursor_y = PLAIN, 0, -1
    for y, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        first = _count_shared(old, new)
        last = min(_count_shared(old[::-1], new[::-1]), len(old) - first, len(new) - first)
        first_column, new_cells = row_width(new[:first]), row_cells(new[first : len(new) - last])
        for start, end in _changed_runs(row_cells(old[first : len(old) - last]), new_cells):
            x = first_column + start
            pieces.append(f"\x1b[{x - cursor_x}C" if y == cursor_y else f"\x1b[{y + 1};{x + 1}H")
            changed = merge_spans(new_cells[start:end])
            for text, style in changed:
                wanted = codes(style)
                if wanted != current:
                    pieces.append(_switch_style(current, wanted))
                    current = wanted
                pieces.append(text)
            cursor_x, cursor_y = x + row_width(changed), y
    return "".join([*pieces, "\x1b[0m"]) if pieces else ""


@lru_cache(maxsize=1024)
def _switch_style(before: StyleCodes, after: StyleCodes) -> str:
    return f"\x1b[{';'.join(new for old, new in zip(before, after, strict=True) if new != old)}m"


def _count_shared(old: Row, new: Row) -> int:
    """Return the number of equal spans at the start of two different rows."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (old_span, new_span) in pairs if old_span != new_span), 0)


def _changed_runs(old: Row, new: Row) -> Iterator[tuple[int, int]]:
    """Yield the first column of each run of changed cells, and the column after its last one."""
    changed = [column for column, (old_cell, new_cell) in enumerate(zip(old, new, strict=True)) if old_cell != new_cell]
    starts = [after for before, after in pairwise([-_MIN_GAP_CELLS - 1, *changed]) if after - before > _MIN_GAP_CELLS]
    ends = [before for before, after in pairwise([*changed, 1 << 30]) if after - before > _MIN_GAP_CELLS]
    return ((start, end + 1) for start, end in zip(starts, ends, strict=True))

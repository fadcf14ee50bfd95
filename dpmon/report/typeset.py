"""Lines and tables of plain text, no wider than a terminal and without control characters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from dpmon.cleaning import clean


def wrap(text: str, width: int, first: str = "  ", rest: str | None = None) -> list[str]:
    rest = first if rest is None else rest
    return textwrap.wrap(clean(text), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) or [
        first.rstrip()
    ]


def table(rows: Sequence[Sequence[str]], width: int, left: int = 1) -> list[str]:
    """Columns as wide as their content, `left` of them left-aligned; whatever exceeds `width` is cut."""
    rows = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(size) if column < left else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(cut("  " + "  ".join(cells).rstrip(), width))
    return lines


def cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def more(count: int, shown: int) -> list[str]:
    return [f"  and {count - shown:,} more; --json has them all"] if count > shown else []


def sized_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table with a left-aligned last column (sizes), which goes to its own line if it does not fit."""
    narrow = table([row[:-1] for row in rows], width, left=2)
    widest = max(len(line) for line in narrow)
    room = width - widest - 2
    if max(len(clean(row[-1])) for row in rows) <= room:
        return [f"{line.ljust(widest)}  {clean(row[-1])}" for line, row in zip(narrow, rows, strict=True)]
    lines = narrow[:1]
    for line, row in zip(narrow[1:], rows[1:], strict=True):
        lines += [line, *wrap(row[-1], width, "      ")]
    return lines


def wrapped(texts: Iterable[str], width: int) -> list[str]:
    return [line for text in texts for line in wrap(text, width)]

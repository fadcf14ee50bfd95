"""Panel 5: what the script printed, as a terminal would end up showing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpmon.ui.format import group
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, span_width, width_of
from dpmon.ui.tail import Tail
from dpmon.ui.terminal_text import interpret, moves_up

__all__ = ["Output", "shifted", "title"]

_BAR_LINES = 600
"""Lines that are read together where some draw over others."""


@dataclass
class Output:
    """One log file and the place in it that is looked at; `top` None follows the end."""

    tails: list[Tail] = field(default_factory=list)
    which: int = 0
    top: int | None = None
    left: int = 0

    @property
    def tail(self) -> Tail | None:
        """The file that is shown."""
        return self.tails[self.which % len(self.tails)] if self.tails else None

    def refresh(self) -> None:
        """Look at the files again."""
        for tail in self.tails:
            tail.refresh()

    def scroll(self, by: int, height: int) -> None:
        """Move by lines (up is negative); at the end it follows again."""
        tail = self.tail
        if tail is None:
            return
        last_top = max(tail.lines() - height, 0)
        top = max((last_top if self.top is None else self.top) + by, 0)
        self.top = None if top >= last_top else top

    def visible(self, height: int) -> list[Row]:
        """The lines that are looked at, interpreted."""
        tail = self.tail
        if tail is None or height <= 0:
            return []
        if self.top is not None:
            return interpret(tail.at(self.top, height))[:height]
        lines = tail.last(height)
        if moves_up(lines):
            # Bars below each other: the same rows are drawn by many lines.
            lines = tail.last(_BAR_LINES)
        return interpret(lines)[-height:]


def title(output: Output, look: Look) -> tuple[Row, Row]:
    """The panel's title and where in the file one is."""
    tail = output.tail
    name: Row = [("5 Output", "title")]
    if len(output.tails) > 1 and tail is not None:
        name.append((f" {look.glyphs.middot} {tail.path.name}", "dim"))
    if tail is None or not tail.size:
        return name, []
    shift = [(f"column {output.left + 1}  ", "wait")] if output.left else []
    if output.top is None:
        return name, [*shift, ("following", "dim")]
    total = group(tail.lines()) if tail.complete else "many"
    return name, [*shift, (f"line {group(output.top + 1)} of {total}", "wait")]


def shifted(rows: Sequence[Row], left: int) -> list[Row]:
    """The rows without their first `left` cells."""
    if left <= 0:
        return list(rows)
    out: list[Row] = []
    for row in rows:
        rest, skip = [], left
        for text, style in row:
            size = span_width(text)
            if skip >= size:
                skip -= size
                continue
            kept = text
            while skip > 0 and kept:
                skip -= max(span_width(kept[0]), 0)
                kept = kept[1:]
            skip = 0
            rest.append((kept, style))
        out.append(rest if width_of(rest) else [])
    return out

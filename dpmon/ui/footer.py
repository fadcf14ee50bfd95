"""The last row: the keys that work now, the most useful first."""

from __future__ import annotations

from dpmon.ui.keys import DEEDS
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, fit, span_width, width_of
from dpmon.ui.scene import Scene

__all__ = ["at", "footer", "keys"]

_ALWAYS = 3
"""The last ones (more, help, leave) are there at every width."""


def keys(scene: Scene) -> list[tuple[str, str]]:
    """Key and word for everything that can be done now and has a place here."""
    return [(deed.key, word) for deed in DEEDS if (word := deed.word(scene))]


def footer(scene: Scene, width: int, look: Look) -> list[Row]:
    """One row of `width` cells; what has no room gives way to the sign for more, the last ones stay."""
    pairs = keys(scene)
    tail: Row = []
    for key, word in pairs[-_ALWAYS:]:
        tail += [("  ", ""), (key, "key"), (" " + word, "dim")]
    row: Row = []
    room = width - width_of(tail) - 1
    for key, word in pairs[:-_ALWAYS]:
        piece: Row = [("  " if row else " ", ""), (key, "key"), (" " + word, "dim")]
        if width_of(piece) > room - 2:
            row.append((" " + look.glyphs.more, "frame.focus"))
            break
        row += piece
        room -= width_of(piece)
    return [fit([*row, *tail], width, look.glyphs.more)]


def at(row: Row, x: int) -> str | None:
    """The key whose name or word stands in column `x`; None between them."""
    column = 0
    key: str | None = None
    for text, style in row:
        if style == "key":
            key = text
        elif style != "dim":
            key = None
        column += span_width(text)
        if x < column:
            return key
    return None

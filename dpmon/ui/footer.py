"""The last row: the keys that work now, or those of the dialog that is open.

If there is not enough room, the least useful keys are left out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.text.cells import span_width
from dpmon.ui.keys import DEEDS, Deed
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, fit
from dpmon.ui.scene import Scene

_LAST = ("?", "q", ":")
"""There at every width; the one called "more" has whatever has no room."""
_ORDER = ("esc", "d", "p", "end", "space", "n", "N", "/", "x", "enter", "1-5", "w", "i", "[ ]", "r", "e", "s", "t", "o")
"""The most useful first; what is not named here comes after."""
_OVER = ("r", "e")
"""What a run that is over is looked at for."""
_BACK = ("resume", "go on")
"""Words of what is held up until its key is pressed once more."""
_ALL = "list"
"""What `:` is called where nothing is left out; as long as the other word."""
_SHORT = {
    "→ single": "→single",
    "→ dp": "→dp",
    "all panels": "back",
    "to the end": "last",
    "end search": "end",
    "next call": "next",
    "warnings": "warn",
    "freeze": "hold",
    "picture": "svg",
    "refresh": "rate",
    "output file": "file",
}
"""What a word is on a row that has no room for all of them."""
_ROOMY = 100
"""Cells from which on keys stand two cells apart."""


class _Piece(NamedTuple):
    key: str
    word: str
    rank: int


def _rank(deed: Deed, word: str, scene: Scene) -> int:
    if deed.key in _LAST:
        return -3
    if word in _BACK or (deed.key == "i" and scene.input_wait_ns is not None):
        return -2
    if scene.over and deed.key in _OVER:
        return -1
    return _ORDER.index(deed.key) if deed.key in _ORDER else len(_ORDER)


def _pieces(scene: Scene) -> list[_Piece]:
    if scene.view.dialog:
        return [_Piece(key, word, -3) for key, word in scene.view.dialog]
    return [_Piece(deed.key, word, _rank(deed, word, scene)) for deed in DEEDS if (word := deed.word(scene))]


def keys(scene: Scene) -> list[tuple[str, str]]:
    """Key and word for everything that can be done now and has a place here."""
    return [(piece.key, piece.word) for piece in _pieces(scene)]


def footer(scene: Scene, width: int, look: Look) -> list[Row]:
    """One row of `width` cells; ": more" has all of them; a narrow one has short words."""
    gap = 2 if width >= _ROOMY else 1
    everything = _pieces(scene)
    shown = everything
    if _taken(everything, gap) > width:
        shown = _chosen(everything, width - 1, gap)
    row: Row = []
    for piece in shown:
        word = _ALL if piece.key == ":" and len(shown) == len(everything) else piece.word
        row += [(" " * (gap if row else 1), ""), (piece.key, "key"), (" " + word, "dim")]
    return [fit(row, width, look.glyphs.more)]


def _taken(pieces: Sequence[_Piece], gap: int) -> int:
    """Cells that these take."""
    return sum(gap + span_width(piece.key) + 1 + span_width(piece.word) for piece in pieces) - (gap - 1)


def _chosen(pieces: Sequence[_Piece], width: int, gap: int) -> list[_Piece]:
    """Those that have room, by their rank; near to each other in short words, then in full as far as there is room."""
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].rank)
    shown: dict[int, _Piece] = {}
    for index in order:
        word = pieces[index].word
        more = {**shown, index: pieces[index]._replace(word=_SHORT.get(word, word) if gap == 1 else word)}
        if pieces[index].key in _LAST or _taken(list(more.values()), gap) <= width:
            shown = more
    for index in order:
        if index in shown:
            more = {**shown, index: pieces[index]}
            shown = more if _taken(list(more.values()), gap) <= width else shown
    return [shown[index] for index in sorted(shown)]


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

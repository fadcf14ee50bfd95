"""One row with the time line of a playback and its keys."""

from __future__ import annotations

from dpmon.text.cells import span_width
from dpmon.text.quantities import clock
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, fit, width_of
from dpmon.ui.scene import Playing

_KEYS = (("space", "play"), (", .", "step"), ("b f", "10 s"), ("< >", "speed"), ("g G", "ends"))
_DONE, _REST = "━", "─"
_SHORT, _LONG = 7, 20
"""Least and preferred number of cells of the line; keys are left out to make room for it."""


def timeline(playing: Playing, width: int, look: Look) -> list[Row]:
    """One row of `width` cells: state and speed, position, and the keys."""
    speed = f"{playing.speed:g}{look.glyphs.times}"
    word = "playing" if playing.playing else "stopped"
    head: Row = [(f" {word} ", "good" if playing.playing else "wait"), (f"{speed:>5} ", "bold")]
    here, whole = clock(playing.position_ns), clock(playing.length_ns)
    head.append((f"{here} ", "bold"))
    end: Row = [(f" {whole}", "dim")]
    room = width - width_of(head) - width_of(end) - 1
    keys = _keys(playing, room - _LONG, 2)
    if len(keys) < 3 * len(_KEYS):  # more keys are better than a long line
        keys = _keys(playing, room - _SHORT, 1)
    room = max(width - width_of(head) - width_of(end) - width_of(keys) - 1, 1)
    done = round((room - 1) * min(max(playing.position_ns / max(playing.length_ns, 1), 0.0), 1.0))
    line: Row = [(_DONE * done, "good"), (look.glyphs.dot, "title"), (_REST * (room - 1 - done), "dim")]
    return [fit([*head, *line, *end, *keys], width, look.glyphs.more)]


def _keys(playing: Playing, width: int, gap: int) -> Row:
    """The keys that fit in `width` cells, each with its word."""
    row: Row = []
    for key, word in _KEYS:
        text = "stop" if word == "play" and playing.playing else word
        piece: Row = [(" " * gap, ""), (key, "key"), (" " + text, "dim")]
        if width_of(row) + width_of(piece) > width:
            break
        row += piece
    return row


def position_at(row: Row, x: int) -> float | None:
    """The fraction of the whole, 0 to 1, at column `x` of the time line; None beside it."""
    column, here, done, rest = 0, None, 0, 0
    for text, style in row:
        if style == "title":
            here = column
        elif text and not text.strip(_DONE + _REST):
            done, rest = (len(text), rest) if here is None else (done, len(text))
        column += span_width(text)
    if here is None or not here - done <= x <= here + rest:
        return None
    return (x - here + done) / max(done + rest, 1)

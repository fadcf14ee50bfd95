"""The last row: the keys that work now, or the keys of an open dialog. Above it, the time line of a playback.

If there is not enough room, the least useful keys are left out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.text.cells import span_width
from dpmon.text.formatting import format_clock
from dpmon.ui.keys import COMMANDS, KeyCommand
from dpmon.ui.screen_data import PlaybackPosition, ScreenData
from dpmon.ui.styled_rows import Row, fit_row, row_width
from dpmon.ui.terminal_style import TerminalStyle

_KEPT_KEYS = ("?", "q", ":")
"""Keys shown at every width; "more" lists the keys that do not fit."""
_KEYS_BY_USE: tuple[str, ...] = (
    "esc",
    "d",
    "p",
    "end",
    "space",
    "n",
    "N",
    "/",
    "x",
    "enter",
    "1-6",
    "w",
    "i",
    "< >",
    "l",
)
_KEYS_BY_USE += ("[ ]", "r", "e", "s", "t", "o")
"""The most useful keys first; the others follow."""
_KEYS_AFTER_END = ("r", "e")
"""The main keys after the end of a run."""
_WORDS_OF_RETURN = ("resume", "go on", "now")
"""Words of keys that end a state (a pause, a frozen picture, an earlier time) which no other key ends."""
_WORD_FOR_ALL = "list"
"""The word of `:` if nothing is left out; as long as "more"."""
_SHORT_WORDS = {"→ single": "→single", "→ dp": "→dp", "all panels": "back", "to the end": "last", "end search": "end"}
_SHORT_WORDS |= {"next call": "next", "warnings": "warn", "freeze": "hold", "picture": "svg", "slow steps": "slow"}
_SHORT_WORDS |= {"refresh": "rate", "output file": "file"}
"""Short forms of words for a row that is too narrow."""
_WIDE_CELLS = 100
"""From this many cells on, keys stand two cells apart."""
_TIMELINE_KEYS = (("space", "play"), (", .", "step"), ("< >", "time"), ("{ }", "speed"), ("g G", "ends"))
_PLAYED_SIGN, _REMAINING_SIGN = "━", "─"
_MIN_LINE_CELLS, _PREFERRED_LINE_CELLS = 7, 20
"""Least and preferred number of cells of the line; keys are left out to make room for it."""


class KeyHint(NamedTuple):
    """A key in the footer, with its word."""

    key: str
    word: str
    priority: int
    """Pieces with higher numbers are left out first."""


def _priority(command: KeyCommand, word: str, facts: ScreenData) -> int:
    if command.key in _KEPT_KEYS:
        return -3
    if word in _WORDS_OF_RETURN or (command.key == "i" and facts.input_wait_ns is not None):
        return -2
    if facts.is_over and command.key in _KEYS_AFTER_END:
        return -1
    return _KEYS_BY_USE.index(command.key) if command.key in _KEYS_BY_USE else len(_KEYS_BY_USE)


def current_key_hints(facts: ScreenData) -> list[KeyHint]:
    """Every command that works now and has a place in the footer."""
    if facts.view.dialog_keys:
        return [KeyHint(key, word, -3) for key, word in facts.view.dialog_keys]
    possible = ((command, command.footer_word(facts)) for command in COMMANDS)
    return [KeyHint(command.key, word, _priority(command, word, facts)) for command, word in possible if word]


def render_footer(facts: ScreenData, width: int, look: TerminalStyle) -> list[Row]:
    """One row of `width` cells; ": more" leads to all keys; a narrow row uses short words."""
    gap = 2 if width >= _WIDE_CELLS else 1
    everything = current_key_hints(facts)
    shown = everything
    if _cells_used(everything, gap) > width:
        shown = _choose_fitting(everything, width - 1, gap)
    row: Row = []
    for piece in shown:
        word = _WORD_FOR_ALL if piece.key == ":" and len(shown) == len(everything) else piece.word
        row += [(" " * (gap if row else 1), ""), (piece.key, "key"), (" " + word, "dim")]
    return [fit_row(row, width, look.glyphs.more)]


def _cells_used(pieces: Sequence[KeyHint], gap: int) -> int:
    """Number of cells that these pieces take."""
    return sum(gap + span_width(piece.key) + 1 + span_width(piece.word) for piece in pieces) - (gap - 1)


def _choose_fitting(pieces: Sequence[KeyHint], width: int, gap: int) -> list[KeyHint]:
    """The pieces that fit, the most useful first. A narrow row gets short words, and long ones where there is room."""
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].priority)
    shown: dict[int, KeyHint] = {}
    taken = 0
    for index in order:
        word = pieces[index].word
        piece = pieces[index]._replace(word=_SHORT_WORDS.get(word, word) if gap == 1 else word)
        more = taken + _cells_used([piece], gap) + (gap - 1) * bool(shown)
        if piece.key in _KEPT_KEYS or more <= width:
            shown[index], taken = piece, more
    for index in order:
        if index in shown:
            more = taken + span_width(pieces[index].word) - span_width(shown[index].word)
            if more <= width:
                shown[index], taken = pieces[index], more
    return [shown[index] for index in sorted(shown)]


def key_at(row: Row, x: int) -> str | None:
    """The key at column `x`, by its name or its word; None between keys."""
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


def render_timeline(playing: PlaybackPosition, width: int, look: TerminalStyle) -> list[Row]:
    """One row of `width` cells: state and speed, position, and the keys."""
    speed = f"{playing.speed:g}{look.glyphs.times}"
    word = "playing" if playing.is_playing else "stopped"
    head: Row = [(f" {word} ", "good" if playing.is_playing else "wait"), (f"{speed:>5} ", "bold")]
    here, whole = format_clock(playing.position_ns), format_clock(playing.length_ns)
    head.append((f"{here} ", "bold"))
    end: Row = [(f" {whole}", "dim")]
    room = width - row_width(head) - row_width(end) - 1
    keys = _timeline_keys(playing, room - _PREFERRED_LINE_CELLS, 2)
    if len(keys) < 3 * len(_TIMELINE_KEYS):  # more keys are better than a long line
        keys = _timeline_keys(playing, room - _MIN_LINE_CELLS, 1)
    room = max(width - row_width(head) - row_width(end) - row_width(keys) - 1, 1)
    done = round((room - 1) * min(max(playing.position_ns / max(playing.length_ns, 1), 0.0), 1.0))
    line: Row = [
        (_PLAYED_SIGN * done, "good"),
        (look.glyphs.dot, "title"),
        (_REMAINING_SIGN * (room - 1 - done), "dim"),
    ]
    return [fit_row([*head, *line, *end, *keys], width, look.glyphs.more)]


def _timeline_keys(playing: PlaybackPosition, width: int, gap: int) -> Row:
    """The keys that fit in `width` cells, each with its word."""
    row: Row = []
    for key, word in _TIMELINE_KEYS:
        text = "stop" if word == "play" and playing.is_playing else word
        piece: Row = [(" " * gap, ""), (key, "key"), (" " + text, "dim")]
        if row_width(row) + row_width(piece) > width:
            break
        row += piece
    return row


def position_at(row: Row, x: int) -> float | None:
    """The fraction of the whole, 0 to 1, at column `x` of the time line; None beside it."""
    column, here, done, rest = 0, None, 0, 0
    for text, style in row:
        if style == "title":
            here = column
        elif text and not text.strip(_PLAYED_SIGN + _REMAINING_SIGN):
            done, rest = (len(text), rest) if here is None else (done, len(text))
        column += span_width(text)
    if here is None or not here - done <= x <= here + rest:
        return None
    return (x - here + done) / max(done + rest, 1)

"""The last row: the keys that work now, or the keys of an open dialog. Above it, the time line of a cursor.

If there is not enough room, the least useful keys are left out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.text.cells import span_width
from dpmon.text.formatting import format_elapsed
from dpmon.ui.keys import COMMANDS, KeyCommand
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, fit_row, row_width
from dpmon.ui.time_cursor import TimeCursor

_KEPT_KEYS = ("?", "q", ":")
"""Keys shown at every width; "more" lists the keys that do not fit."""
_KEYS_BY_USE: tuple[str, ...] = ("esc", "d", "p", "end", "n", "N", "space", "/", "x", "1-6", "enter", "w")
_KEYS_BY_USE += ("i", "< >", "l", "[ ]", "s", "t")
"""The most useful keys first; the others follow."""
_WORDS_OF_RETURN = ("resume", "now")
"""Words of keys that end a state (a pause, a frozen picture, an earlier time) which no other key ends."""
_WORD_FOR_ALL = "list"
"""The word of `:` if nothing is left out; as long as "more"."""
_SHORT_WORDS = {"→ single": "→single", "→ dp": "→dp", "all panels": "back", "to the end": "last", "end search": "end"}
_SHORT_WORDS |= {"next call": "next", "slow steps": "slow"}
"""Short forms of words for a row that is too narrow."""
_WIDE_CELLS = 100
"""From this many cells on, keys stand two cells apart."""
_TIMELINE_KEYS = (("space", "play"), (", .", "step"), ("< >", "time"), ("g G", "ends"))
_PLAYED_SIGN, _REMAINING_SIGN = "━", "─"
_MIN_LINE_CELLS, _PREFERRED_LINE_CELLS = 7, 20
"""Least and preferred number of cells of the line; keys are left out to make room for it."""


class KeyHint(NamedTuple):
    """A key in the footer, with its word."""

    key: str
    word: str
    priority: int
    """Pieces with higher numbers are left out first."""


def _priority(command: KeyCommand, word: str, screen: ScreenData) -> int:
    if command.key in _KEPT_KEYS:
        return -3
    if word in _WORDS_OF_RETURN or (command.key == "i" and screen.input_wait_ns is not None):
        return -2
    return _KEYS_BY_USE.index(command.key) if command.key in _KEYS_BY_USE else len(_KEYS_BY_USE)


def current_key_hints(screen: ScreenData) -> list[KeyHint]:
    """Return every command that works now and has a place in the footer."""
    if screen.view.dialog_keys:
        return [KeyHint(key, word, -3) for key, word in screen.view.dialog_keys]
    labeled_commands = ((command, command.footer_word(screen)) for command in COMMANDS)
    return [KeyHint(command.key, word, _priority(command, word, screen)) for command, word in labeled_commands if word]


def render_footer(screen: ScreenData, width: int) -> list[Row]:
    """Return one row of `width` cells. The key ":" leads to all keys; a narrow row uses short words."""
    gap = 2 if width >= _WIDE_CELLS else 1
    hints = current_key_hints(screen)
    shown_hints = hints
    if _cells_used(hints, gap) > width:
        shown_hints = _choose_fitting(hints, width - 1, gap)
    row: Row = []
    for hint in shown_hints:
        word = _WORD_FOR_ALL if hint.key == ":" and len(shown_hints) == len(hints) else hint.word
        row += [(" " * (gap if row else 1), ""), (hint.key, "key"), (" " + word, "dim")]
    return [fit_row(row, width)]


def _cells_used(hints: Sequence[KeyHint], gap: int) -> int:
    """Return the number of cells that these hints take."""
    return sum(gap + span_width(hint.key) + 1 + span_width(hint.word) for hint in hints) - (gap - 1)


def _choose_fitting(hints: Sequence[KeyHint], width: int, gap: int) -> list[KeyHint]:
    """Return the hints that fit, the most useful first.

    A narrow row gets short words, and long ones where there is room.
    """
    order = sorted(range(len(hints)), key=lambda index: hints[index].priority)
    hint_by_index: dict[int, KeyHint] = {}
    used_cells = 0
    for index in order:
        word = hints[index].word
        hint = hints[index]._replace(word=_SHORT_WORDS.get(word, word) if gap == 1 else word)
        cells_with_hint = used_cells + _cells_used([hint], gap) + (gap - 1) * bool(hint_by_index)
        if hint.key in _KEPT_KEYS or cells_with_hint <= width:
            hint_by_index[index], used_cells = hint, cells_with_hint
    for index in order:
        if index in hint_by_index:
            cells_with_hint = used_cells + span_width(hints[index].word) - span_width(hint_by_index[index].word)
            if cells_with_hint <= width:
                hint_by_index[index], used_cells = hints[index], cells_with_hint
    return [hint_by_index[index] for index in sorted(hint_by_index)]


def key_at(row: Row, clicked_column: int) -> str | None:
    """Return the key whose name or word is at a column; None between keys."""
    column = 0
    key: str | None = None
    for text, style in row:
        if style == "key":
            key = text
        elif style != "dim":
            key = None
        column += span_width(text)
        if clicked_column < column:
            return key
    return None


def render_timeline(cursor: TimeCursor, width: int) -> list[Row]:
    """Return one row of `width` cells: state and speed, position, and the keys."""
    speed = f"{cursor.speed:g}×"
    state_word = "playing" if cursor.is_playing else "stopped"
    left_part: Row = [(f" {state_word} ", "good" if cursor.is_playing else "wait"), (f"{speed:>5} ", "bold")]
    position, length = format_elapsed(cursor.position_ns), format_elapsed(cursor.present_ns)
    left_part.append((f"{position} ", "bold"))
    end_time: Row = [(f" {length}", "dim")]
    line_cells = width - row_width(left_part) - row_width(end_time) - 1
    key_row = _timeline_keys(cursor, line_cells - _PREFERRED_LINE_CELLS, 2)
    if len(key_row) < 3 * len(_TIMELINE_KEYS):  # more keys are better than a long line
        key_row = _timeline_keys(cursor, line_cells - _MIN_LINE_CELLS, 1)
    line_cells = max(width - row_width(left_part) - row_width(end_time) - row_width(key_row) - 1, 1)
    played_cells = round((line_cells - 1) * min(max(cursor.position_ns / max(cursor.present_ns, 1), 0.0), 1.0))
    line: Row = [
        (_PLAYED_SIGN * played_cells, "good"),
        ("●", "title"),
        (_REMAINING_SIGN * (line_cells - 1 - played_cells), "dim"),
    ]
    return [fit_row([*left_part, *line, *end_time, *key_row], width)]


def _timeline_keys(cursor: TimeCursor, width: int, gap: int) -> Row:
    """Return the keys that fit in `width` cells, each with its word."""
    row: Row = []
    for key, word in _TIMELINE_KEYS:
        shown_word = "stop" if word == "play" and cursor.is_playing else word
        key_spans: Row = [(" " * gap, ""), (key, "key"), (" " + shown_word, "dim")]
        if row_width(row) + row_width(key_spans) > width:
            break
        row += key_spans
    return row


def position_at(row: Row, clicked_column: int) -> float | None:
    """Return the fraction of the run, 0 to 1, at a column of the time line; None outside the line."""
    column, cursor, played_cells, remaining_cells = 0, None, 0, 0
    for text, style in row:
        if style == "title":
            cursor = column
        elif text and not text.strip(_PLAYED_SIGN + _REMAINING_SIGN):
            played_cells, remaining_cells = (
                (len(text), remaining_cells) if cursor is None else (played_cells, len(text))
            )
        column += span_width(text)
    if cursor is None or not cursor - played_cells <= clicked_column <= cursor + remaining_cells:
        return None
    return (clicked_column - cursor + played_cells) / max(played_cells + remaining_cells, 1)

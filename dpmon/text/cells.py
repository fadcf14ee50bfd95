"""The width of plain text in terminal cells, functions to truncate and wrap it, and ASCII for terminals that need it.

The widths are equal to Rich's, which Textual uses on the screen; a test compares every character. The command line gets
them without importing Rich. The text must be clean (`dpmon.sanitize`).
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import TextIO

_MAX_CACHED_CHARS = 512
"""Texts of this length or more are not cached, because the cache holds the texts themselves."""

_NO_WIDTH = frozenset((*range(0x1160, 0x1200), *range(0xD7B0, 0xD800), *range(0x1F3FB, 0x1F400)))
"""Hangul vowels and final consonants, and skin tones: drawn in the cells of the character before them."""
_WIDE = frozenset(
    (
        *range(0x2630, 0x2638),
        *range(0x268A, 0x2690),
        *range(0x4DC0, 0x4E00),
        *range(0x1D300, 0x1D357),
        *range(0x1D360, 0x1D377),
    )
)
"""Wide since Unicode 16; older versions of Python list them as narrow."""
_ASCII_SYMBOLS = {
    "–": "-",
    "µ": "u",
    "°": " ",
    "…": ">",
    "·": "-",
    "×": "x",
    "≤": "<",
    "→": ">",
    "↓": "v",
    "±": "~",
    # Marks.
    **dict(zip("▸●○✗■╱├▲", ">*ox#/|^", strict=True)),
    # Lines, frames, bars and ranges.
    **dict(zip("─━╍│╭╮╰╯╶╴╺╸", "-=~|++++||==", strict=True)),
    "▤": "+",
    "░": ".",
    # The blocks of the history chart and of tqdm's progress bars.
    **dict(zip("▁▂▃▄▅▆▇█", ".:-=+*##", strict=True)),
    "▉": "#",
    "▊": "#",
    "▋": "=",
    "▌": "=",
    "▍": "-",
    "▎": "-",
    "▏": "|",
}
"""ASCII replacements for the symbols on the screen."""


@lru_cache(maxsize=4096)
def char_width(char: str) -> int:
    """Return cells that one character takes: 0 (a mark), 1 or 2."""
    code = ord(char)
    if code in _NO_WIDTH or unicodedata.category(char) in ("Mn", "Mc", "Me"):
        return 0
    return 2 if code in _WIDE or unicodedata.east_asian_width(char) in "WF" else 1


def _measure(text: str) -> int:
    return sum(map(char_width, text))


cached_width = lru_cache(maxsize=8192)(_measure)
"""The width of a short text, cached."""


def span_width(text: str) -> int:
    """Return cells that `text` takes (wide characters take two)."""
    if text.isascii():
        return len(text)
    return cached_width(text) if len(text) < _MAX_CACHED_CHARS else _measure(text)


def crop_text(text: str, width: int) -> str:
    """Return the first `width` cells of `text`; half of a wide character becomes a blank."""
    if width <= 0:
        return ""
    if text.isascii():
        return text[:width]
    cells_used = 0
    for index, char in enumerate(text):
        char_cells = char_width(char)
        if cells_used + char_cells > width:
            return text[:index] + " " * (width - cells_used)
        cells_used += char_cells
    return text


def truncate(text: str, width: int) -> str:
    """Return `text` in at most `width` cells; truncated text ends with an ellipsis."""
    if width <= 0:
        return ""
    if span_width(text) <= width:
        return text
    return crop_text(text, width - 1) + "…"


def wrap_text(text: str, width: int, max_lines: int | None = None) -> list[str]:
    """Return `text` in at most `max_lines` lines of `width` cells, broken between words; the last may be truncated."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and span_width(line) + 1 + span_width(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines = [truncate(line_text, width) for line_text in [*lines, line]]
    if max_lines is None or len(lines) <= max_lines:
        return lines
    return [*lines[: max_lines - 1], truncate(" ".join(lines[max_lines - 1 :]), width)]


def align_right(text: str, width: int) -> str:
    """Return `text` right-aligned in `width` cells, truncated if it is longer."""
    shown = truncate(text, width)
    return " " * (width - span_width(shown)) + shown


# ------------------------------------------------------------------------------------------------ ASCII


def needs_ascii(environ: Mapping[str, str], encoding: str | None) -> bool:
    """Return whether a terminal shows only ASCII, judged by its environment and the encoding of the output stream."""
    utf8 = (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"
    return not utf8 or environ.get("TERM", "").startswith(("linux", "vt1", "vt2", "dumb"))


def supports_color(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether a stream is a terminal that may show colors."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def ascii_for(char: str) -> str:
    """Return the ASCII replacement of one character, of the same width."""
    if char.isascii():
        return char
    return _ASCII_SYMBOLS.get(char, "?" * char_width(char))


def ascii_text(text: str) -> str:
    """Return the text in ASCII, as wide as before."""
    return text if text.isascii() else "".join(map(ascii_for, text))


def text_for_stream(text: str, stream: TextIO) -> str:
    """Return the text for `stream`: in ASCII if it is a terminal that needs it, unchanged for a file or a pipe."""
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError, OSError):
        return text
    return ascii_text(text) if is_terminal and needs_ascii(os.environ, getattr(stream, "encoding", None)) else text

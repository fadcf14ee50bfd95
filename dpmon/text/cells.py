"""The width of plain text in terminal cells, functions to cut and wrap it, and ASCII for terminals that need it.

The widths are equal to Rich's, which Textual uses on the screen; a test compares every character. The command line gets
them without importing Rich. The text must be clean (`dpmon.sanitize`).
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import TextIO

_KEPT_BELOW = 512
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
_SIGNS = {
    "–": "-",
    "µ": "u",
    "°": " ",
    "…": ">",
    "·": "-",
    "×": "x",
    "≤": "<",
    "→": ">",
    "±": "~",
    "─": "-",
    "━": "=",
    "│": "|",
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
"""ASCII replacements for the screen's signs."""


@lru_cache(maxsize=4096)
def char_width(char: str) -> int:
    """Cells that one character takes: 0 (a mark), 1 or 2."""
    code = ord(char)
    if code in _NO_WIDTH or unicodedata.category(char) in ("Mn", "Mc", "Me"):
        return 0
    return 2 if code in _WIDE or unicodedata.east_asian_width(char) in "WF" else 1


def _measure(text: str) -> int:
    return sum(map(char_width, text))


kept_width = lru_cache(maxsize=8192)(_measure)
"""The width of a short text, cached."""


def span_width(text: str) -> int:
    """Cells that `text` takes (wide characters take two)."""
    if text.isascii():
        return len(text)
    return kept_width(text) if len(text) < _KEPT_BELOW else _measure(text)


def crop_text(text: str, width: int) -> str:
    """The first `width` cells of `text`; a wide character cut in half becomes a blank."""
    if width <= 0:
        return ""
    if text.isascii():
        return text[:width]
    taken = 0
    for index, char in enumerate(text):
        size = char_width(char)
        if taken + size > width:
            return text[:index] + " " * (width - taken)
        taken += size
    return text


def truncate(text: str, width: int, more: str = "…") -> str:
    """`text` in at most `width` cells; a cut text ends with `more`."""
    if width <= 0:
        return ""
    if span_width(text) <= width:
        return text
    sign = more if span_width(more) <= width else "." * width
    return crop_text(text, width - span_width(sign)) + sign


def wrap_text(text: str, width: int, most: int | None = None, more: str = "…") -> list[str]:
    """`text` in at most `most` lines of `width` cells, broken between words; the last line is cut if text is left."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and span_width(line) + 1 + span_width(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines = [truncate(each, width) for each in [*lines, line]]
    if most is None or len(lines) <= most:
        return lines
    return [*lines[: most - 1], truncate(" ".join(lines[most - 1 :]), width, more)]


def align_right(text: str, width: int) -> str:
    """`text` right-aligned in `width` cells, cut with a sign if it is longer."""
    shown = truncate(text, width)
    return " " * (width - span_width(shown)) + shown


# ------------------------------------------------------------------------------------------------ ASCII


def needs_ascii(environ: Mapping[str, str], encoding: str | None) -> bool:
    """Whether a terminal shows only ASCII, judged by its environment and the encoding of the output stream."""
    utf8 = (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"
    return not utf8 or environ.get("TERM", "").startswith(("linux", "vt1", "vt2", "dumb"))


def supports_color(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that may show colors."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def ascii_for(char: str) -> str:
    """The ASCII replacement of one character, of the same width."""
    if char.isascii():
        return char
    return _SIGNS.get(char, "?" * char_width(char))


def ascii_text(text: str) -> str:
    """The text in ASCII, as wide as before."""
    return text if text.isascii() else "".join(map(ascii_for, text))


def encode_for_stream(text: str, stream: TextIO) -> str:
    """The text for `stream`: in ASCII if the terminal needs it; unchanged for a file or a pipe."""
    try:
        shown = stream.isatty()
    except (AttributeError, ValueError, OSError):
        return text
    return ascii_text(text) if shown and needs_ascii(os.environ, getattr(stream, "encoding", None)) else text

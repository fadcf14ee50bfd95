"""ASCII replacements for the screen's signs, and detection of terminals that need them.

Standard library only.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from typing import TextIO

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


_WITHOUT_WIDTH = {"Mn", "Mc", "Me", "Cf"}
"""Categories of characters that take no cell of their own: combining marks and format characters."""


def needs_ascii(environ: Mapping[str, str], encoding: str | None) -> bool:
    """Whether a terminal shows only ASCII, judged by its environment and the encoding of the output stream."""
    utf8 = (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"
    return not utf8 or environ.get("TERM", "").startswith(("linux", "vt1", "vt2", "dumb"))


def has_colours(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that may show colours."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def ascii_for(char: str) -> str:
    """The ASCII replacement of one character, of the same width."""
    if char.isascii():
        return char
    if unicodedata.category(char) in _WITHOUT_WIDTH:
        return ""
    return _SIGNS.get(char, "?" * (2 if unicodedata.east_asian_width(char) in "WF" else 1))


def ascii_text(text: str) -> str:
    """The text in ASCII, as wide as before."""
    return text if text.isascii() else "".join(map(ascii_for, text))


def in_stream(text: str, stream: TextIO) -> str:
    """The text for `stream`: in ASCII if the terminal needs it; unchanged for a file or a pipe."""
    try:
        shown = stream.isatty()
    except (AttributeError, ValueError, OSError):
        return text
    return ascii_text(text) if shown and needs_ascii(os.environ, getattr(stream, "encoding", None)) else text

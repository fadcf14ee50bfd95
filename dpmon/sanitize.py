"""Sanitizes text from outside, so that no script, path or device name can control the terminal.

Standard library only.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MAX_LINE_CHARS = 4096
"""Maximum length of the result of `sanitize_line`."""
_MAX_COMBINING_MARKS = 2
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Their category counts as visible. But fonts draw nothing for them (Hangul fillers, Khmer inherent vowels), or they
# change the width of the character before them in a way that differs between terminals (variation selectors).
_INVISIBLE = frozenset(
    (
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, 0xFFFC),
        *range(0x180B, 0x1810),
        *range(0xFE00, 0xFE10),
        *range(0xE0100, 0xE01F0),
    )
)
_ESCAPES = re.compile(r"\\[bfnrtu]")
"""JSON escapes of characters that `strip_control_chars` may change."""
_SPACES = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029")


@lru_cache(maxsize=4096)
def displayable_char(char: str) -> str:
    """Return the display form of one character: itself, a space, the replacement character, or nothing."""
    if char in _SPACES:
        return " "
    code = ord(char)
    if code in _INVISIBLE:
        return " " if code == 0x2800 else ""
    category = unicodedata.category(char)
    if category == "Zs":
        return " "
    # Cc: C0, DEL, C1. Cs: halves of surrogate pairs. Cn: not assigned, so its width is unknown.
    if category in ("Cc", "Cs", "Cn"):
        return _REPLACEMENT
    # Cf: direction overrides, isolates, zero-width joiners and spaces, soft hyphens, tags.
    return "" if category == "Cf" else char


def strip_control_chars(text: str) -> str:
    """Return `text` without control and invisible characters, and with at most two combining marks per character.

    Control characters are replaced, invisible ones dropped. The text may have any length.
    """
    if text.isascii() and text.isprintable():
        return text
    chars: list[str] = []
    marks = 0
    for char in text:
        displayed = displayable_char(char)
        if displayed and unicodedata.combining(displayed):
            marks += 1
            if marks > _MAX_COMBINING_MARKS or not chars:
                continue
        else:
            marks = 0
        chars.append(displayed)
    return "".join(chars)


def to_safe_json(value: object, **dumps_options: Any) -> str:
    """Return `value` as JSON in ASCII, with all its texts sanitized. `dumps_options`: arguments of json.dumps."""
    text = json.dumps(value, **dumps_options)
    return json.dumps(_sanitize_nested(value), **dumps_options) if _ESCAPES.search(text) else text


def _sanitize_nested(value: object) -> object:
    if isinstance(value, str):
        return strip_control_chars(value)
    if isinstance(value, Mapping):
        return {_sanitize_nested(key): _sanitize_nested(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sanitize_nested(child) for child in value]
    return value


def sanitize_line(text: object, limit: int = MAX_LINE_CHARS) -> str:
    """Return one line of at most `limit` characters that any terminal prints unchanged.

    Control characters (C0, C1 and DEL, so also the ESC of a terminal sequence), lone surrogates and unassigned code
    points become U+FFFD. Line breaks and tabs become a space. Format characters (bidi, zero-width) are dropped.
    Truncated text ends in an ellipsis. Never raises.
    """
    line = text if isinstance(text, str) else str(text)
    if len(line) > limit:
        return strip_control_chars(line[: limit - 1]) + "…"
    return strip_control_chars(line)

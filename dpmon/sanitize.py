"""Makes text from outside harmless: no script, path or device name can control the terminal.

Standard library only.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

LIMIT = 4096
"""Most characters that `sanitize_line` returns."""
_MARKS_IN_A_ROW = 2
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Visible by category. But fonts draw nothing for them (Hangul fillers, Khmer inherent vowels), or they change the width
# of the character before them, and terminals disagree how (variation selectors).
_INVISIBLE = frozenset(
    (
        *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, 0xFFFC),
        *range(0x180B, 0x1810),
        *range(0xFE00, 0xFE10),
        *range(0xE0100, 0xE01F0),
    )
)
_ESCAPED = re.compile(r"\\[bfnrtu]")
"""Characters in JSON that `strip_control_chars` may change."""
_AS_SPACE = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029")


@lru_cache(maxsize=4096)
def displayable_char(char: str) -> str:
    """The display form of one character: itself, a space, the replacement character, or nothing."""
    if char in _AS_SPACE:
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
    """`text`, of any length: control characters replaced, invisible ones dropped, at most two marks on a character."""
    if text.isascii() and text.isprintable():
        return text
    kept: list[str] = []
    marks = 0
    for char in text:
        shown = displayable_char(char)
        if shown and unicodedata.combining(shown):
            marks += 1
            if marks > _MARKS_IN_A_ROW or not kept:
                continue
        else:
            marks = 0
        kept.append(shown)
    return "".join(kept)


def to_safe_json(value: object, **how: Any) -> str:
    """`value` as JSON in ASCII, with all its texts harmless; `how`: arguments of json.dumps."""
    text = json.dumps(value, **how)
    return json.dumps(_sanitize_nested(value), **how) if _ESCAPED.search(text) else text


def _sanitize_nested(value: object) -> object:
    if isinstance(value, str):
        return strip_control_chars(value)
    if isinstance(value, Mapping):
        return {_sanitize_nested(key): _sanitize_nested(one) for key, one in value.items()}
    return [_sanitize_nested(one) for one in value] if isinstance(value, (list, tuple)) else value


def sanitize_line(text: object, limit: int = LIMIT) -> str:
    """One line of at most `limit` characters that any terminal prints unchanged; cut text ends in an ellipsis.

    Control characters (C0, C1 and DEL, so also the ESC of a terminal sequence), lone surrogates and unassigned code
    points become U+FFFD. Line breaks and tabs become a space. Format characters (bidi, zero-width) are dropped. Never
    raises.
    """
    line = text if isinstance(text, str) else str(text)
    if len(line) > limit:
        return strip_control_chars(line[: limit - 1]) + "…"
    return strip_control_chars(line)

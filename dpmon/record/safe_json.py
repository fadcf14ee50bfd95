"""Reads JSON from a run's files. Replaces huge numbers and NaN by None, and rejects deep nesting: no run writes them.

Any program may have written an event, so a member is read only if it has the expected type; else it is None. Standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NORMALIZE_NUMBERS = str.maketrans("123456789E", "000000000e")
_UNSAFE_PATTERNS = ("0" * 19, "e00", "e+00", "NaN", "Infinity")
"""A text with a huge number, NaN or Infinity contains one of these after `_NORMALIZE_NUMBERS`."""
_MAX_UNCHECKED_BRACKETS = 16
"""Texts with more brackets than this are checked for deep nesting."""
MAX_DEPTH = 12
"""Maximum nesting of values, where it is checked."""
_MAX_NUMBER = 1 << 63


def load_json(text: str | bytes) -> Any:
    """Return the value in `text`. NaN, and numbers of 2**63 or more (or -2**63 or less), become None (unknown).

    This holds for numbers as Python writes them, not for spellings such as 123456789012.0e9. Raises ValueError if the
    text is not JSON, is not UTF-8 or is nested too deeply.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # A search of the text is much cheaper than a walk over the values, and almost no text needs the walk. A search for
    # plain strings takes a quarter of the time that a regular expression takes.
    normalized = text.translate(_NORMALIZE_NUMBERS)
    bracket_count = text.count("[") + text.count("{")
    if bracket_count > _MAX_UNCHECKED_BRACKETS or any(pattern in normalized for pattern in _UNSAFE_PATTERNS):
        return _replace_unsafe_numbers(value, MAX_DEPTH)
    return value


def load_event(text: str | bytes) -> tuple[str, dict[str, Any]]:
    """Return the kind of an event and its other members. Raises ValueError if the text is not an event."""
    data = load_json(text)
    if not isinstance(data, dict) or not isinstance(kind := data.pop("kind", None), str):
        raise ValueError("not an event")
    return kind, data


def _replace_unsafe_numbers(value: Any, depth: int) -> Any:
    if isinstance(value, (dict, list)):
        if not depth:
            raise ValueError("nested too deeply")
        if isinstance(value, dict):
            return {key: _replace_unsafe_numbers(child, depth - 1) for key, child in value.items()}
        return [_replace_unsafe_numbers(child, depth - 1) for child in value]
    if isinstance(value, (int, float)) and not abs(value) < _MAX_NUMBER:
        return None
    return value


# ------------------------------------------------------------------------------------------------ members of an event


def number_member(data: Mapping[str, object], key: str) -> float | None:
    """Return the finite number under `key`; None if there is none. A bool is not a number.

    Python's JSON accepts NaN and infinity, which are not finite.
    """
    value = data.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        return value
    return None


def int_member(data: Mapping[str, object], key: str) -> int | None:
    """Return the integer under `key`; None if there is none. A bool is not a number."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_member(data: Mapping[str, object], key: str) -> str | None:
    """Return the text under `key`; None if there is none."""
    value = data.get(key)
    return value if isinstance(value, str) else None


def ns_member(data: Mapping[str, object], key: str) -> int | None:
    """Return the time or duration (s) under `key`, in ns; None if it is absent, negative or decades long."""
    seconds = number_member(data, key)
    if seconds is None or not 0 <= seconds < 1e9:
        return None
    return int(seconds * 1_000_000_000)


def replace_nonfinite(value: object) -> object:
    """Return the value with None in place of NaN and infinity, which only Python accepts as JSON."""
    if isinstance(value, float) and not abs(value) < 1e308:
        return None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(child) for child in value]
    return value

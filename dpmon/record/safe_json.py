"""Reads JSON from a run's files. Replaces huge numbers and NaN by None, and rejects deep nesting: no run writes them.

Any program may have written an event, so its members are read with their types: a member of another type is None. Uses
the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_ALIKE = str.maketrans("123456789E", "000000000e")
_ODD = ("0" * 19, "e00", "e+00", "NaN", "Infinity")
"""A text with a huge number, NaN or Infinity contains one of these, after each digit became 0 and each E an e."""
_NESTED = 16
"""Texts with more brackets than this are checked for deep nesting."""
DEEPEST = 12
"""Deepest nesting of values that is read, where it is checked."""
_LARGEST = 1 << 63


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
    # plain strings takes a quarter of the time of a pattern.
    alike = text.translate(_ALIKE)
    if any(sign in alike for sign in _ODD) or text.count("[") + text.count("{") > _NESTED:
        return _replace_unsafe_numbers(value, DEEPEST)
    return value


def load_event(text: str | bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and data of an event. Raises ValueError for anything else."""
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
    if isinstance(value, (int, float)) and not abs(value) < _LARGEST:
        return None
    return value


# ------------------------------------------------------------------------------------------------ members of an event


def number_member(data: Mapping[str, object], key: str) -> float | None:
    """The finite number under `key`; a bool is not a number. Python's JSON accepts NaN and infinity."""
    value = data.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        return value
    return None


def int_member(data: Mapping[str, object], key: str) -> int | None:
    """The whole number under `key`; a bool is not a number."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_member(data: Mapping[str, object], key: str) -> str | None:
    """The text under `key`."""
    value = data.get(key)
    return value if isinstance(value, str) else None


def ns_member(data: Mapping[str, object], key: str) -> int | None:
    """A time or a duration in seconds, as ns; None if it is negative or decades long."""
    seconds = number_member(data, key)
    return int(seconds * 1_000_000_000) if seconds is not None and 0 <= seconds < 1e9 else None


def replace_nonfinite(value: object) -> object:
    """The value with None for NaN and infinity, which only Python accepts as JSON."""
    if isinstance(value, float) and not abs(value) < 1e308:
        return None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(one) for key, one in value.items()}
    return [replace_nonfinite(one) for one in value] if isinstance(value, (list, tuple)) else value

"""Reads JSON, and the members of events. Standard library only.

Any program may have written an event, so a member is read only if it has the expected type; else it is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def load_json(text: str | bytes) -> Any:
    """Return the value in `text`. Raises ValueError if the text is not JSON, is not UTF-8 or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_event(text: str | bytes) -> tuple[str, dict[str, Any]]:
    """Return the kind of an event and its other members. Raises ValueError if the text is not an event."""
    data = load_json(text)
    if not isinstance(data, dict) or not isinstance(kind := data.pop("kind", None), str):
        raise ValueError("not an event")
    return kind, data


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

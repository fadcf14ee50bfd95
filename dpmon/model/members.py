"""Typed members of an event's data, which any program may have written: a member of another type is None."""

from __future__ import annotations

from collections.abc import Mapping

SECOND = 1_000_000_000


def number_in(data: Mapping[str, object], key: str) -> float | None:
    """The finite number under `key`; a bool is not a number. Python's JSON accepts NaN and infinity."""
    value = data.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        return value
    return None


def whole_in(data: Mapping[str, object], key: str) -> int | None:
    """The whole number under `key`; a bool is not a number."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_in(data: Mapping[str, object], key: str) -> str | None:
    """The text under `key`."""
    value = data.get(key)
    return value if isinstance(value, str) else None


def ns_in(data: Mapping[str, object], key: str) -> int | None:
    """A time or a duration in seconds, as ns; None if it is negative or decades long."""
    seconds = number_in(data, key)
    return int(seconds * SECOND) if seconds is not None and 0 <= seconds < 1e9 else None


def finite(value: object) -> object:
    """The value with None for NaN and infinity, which only Python accepts as JSON."""
    if isinstance(value, float) and not abs(value) < 1e308:
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value

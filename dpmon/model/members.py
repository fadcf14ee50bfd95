"""Members of an event's data, which anybody may have written: what is of another type is None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECOND = 1_000_000_000


def number_in(data: Mapping[str, Any], key: str) -> float | None:
    """A number that is no bool."""
    value = data.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole_in(data: Mapping[str, Any], key: str) -> int | None:
    """A whole number that is no bool."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_in(data: Mapping[str, Any], key: str) -> str | None:
    """A text."""
    value = data.get(key)
    return value if isinstance(value, str) else None


def ns_in(data: Mapping[str, Any], key: str) -> int | None:
    """A time or a duration in seconds, as ns; one that is negative or takes decades makes no sense."""
    seconds = number_in(data, key)
    # NaN and infinity are JSON to Python.
    return int(seconds * SECOND) if seconds is not None and 0 <= seconds < 1e9 else None


def finite(value: Any) -> Any:
    """The value with None in place of NaN and infinity, which only Python accepts as JSON."""
    if isinstance(value, float) and not abs(value) < 1e308:
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value

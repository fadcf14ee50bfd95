"""Medians and percentiles of values. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def median(values: Iterable[float]) -> float | None:
    """The middle value (the mean of the two middle ones); None without values."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return None
    half = count // 2
    return ordered[half] if count % 2 else (ordered[half - 1] + ordered[half]) / 2


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """The smallest value with at least `fraction` of all values at or below it (nearest rank); None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    nearest = -int(-fraction * len(ordered) // 1)
    return ordered[min(max(nearest, 1), len(ordered)) - 1]

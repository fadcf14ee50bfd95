"""Compares a result under dpmon with runs without dpmon, because torch itself may vary in the last bit.

How often the last bit differs depends on the load. A result under dpmon is right if torch also gives it without dpmon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TRIES = 20
"""Runs without dpmon before a difference counts as dpmon's; an equal result needs none of them."""
T = TypeVar("T")


def as_alone(found: T, alone: T, again: Callable[[], T], tries: int = TRIES) -> T:
    """Return a result without dpmon to compare with `found`: `alone`, or one of up to `tries` runs of `again`.

    Prefer one that equals `found`. If none does, return `alone`, so that the test shows the difference.
    """
    if found == alone:
        return alone
    return next((another for another in (again() for _ in range(tries)) if another == found), alone)

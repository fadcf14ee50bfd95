"""What a run gives alone, where torch itself does not always give the same last bit.

How often a rare last bit comes hangs on the load. A result under dpmon is right if torch gives it without dpmon, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["TRIES", "as_alone"]

TRIES = 20
"""Runs alone before a result counts as dpmon's own; a result that is right costs none of them."""
T = TypeVar("T")


def as_alone(found: T, alone: T, again: Callable[[], T], tries: int = TRIES) -> T:
    """What a run alone gave: `alone`, or that of up to `tries` runs of `again` which equals `found`.

    To be compared with `found`. Where no run alone gives that, it is `alone`, so that the test shows the difference.
    """
    if found == alone:
        return alone
    return next((another for another in (again() for _ in range(tries)) if another == found), alone)

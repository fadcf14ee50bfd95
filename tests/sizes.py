"""How much of a fault a test tries: what fits into a test run, or the figures of the promise with DPMON_LONG=1."""

from __future__ import annotations

import os

__all__ = ["LONG", "reached", "size"]

LONG = os.environ.get("DPMON_LONG") == "1"


def size(short: int, full: int) -> int:
    """`full` in a long run, else `short`."""
    return full if LONG else short


def reached(promise: str, text: str) -> None:
    """Say which figure was reached (pytest -s shows it)."""
    print(f"\n{promise}: {text}", flush=True)

"""Sizes of tests: small ones for a usual run, or the promised figures with DPMON_LONG=1."""

from __future__ import annotations

import os

LONG = os.environ.get("DPMON_LONG") == "1"


def size(short: int, full: int) -> int:
    """Return `full` in a long run, else `short`."""
    return full if LONG else short


def reached(promise: str, text: str) -> None:
    """Print a measured figure (pytest -s shows it)."""
    print(f"\n{promise}: {text}", flush=True)

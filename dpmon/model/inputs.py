"""A step in which the script waited for a line of input is no slow step: which steps have how much of such waits.

The waits are what the supervisor saw: where one began and ended is known to a fraction of a second. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT = "input"
"""Stands where else the phase stands that a step is longer by."""
SAID = "waiting for input"


def waited_ns(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """How much of the time from `start_ns` to `end_ns` lies in any of `spans`, which do not overlap."""
    return sum(max(min(end, end_ns) - max(begin, start_ns), 0) for begin, end in spans)


def is_wait(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> bool:
    """Whether the wait is most of this step."""
    return 2 * waited_ns(spans, start_ns, end_ns) > end_ns - start_ns > 0

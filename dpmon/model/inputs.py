"""Waits for a line of input within steps. A step that is long because of such a wait does not count as slow.

The supervisor measures their starts and ends to a fraction of a second. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT = "input"
"""Named in place of a phase if waits for input took most of the time."""
WAITING_TEXT = "waiting for input"


def waited_ns(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """How much of the time from `start_ns` to `end_ns` (ns) lies in `spans`, which do not overlap."""
    return sum(max(min(end, end_ns) - max(begin, start_ns), 0) for begin, end in spans)


def is_wait(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> bool:
    """Whether waits (`spans`) take most of the step from `start_ns` to `end_ns`."""
    return 2 * waited_ns(spans, start_ns, end_ns) > end_ns - start_ns > 0

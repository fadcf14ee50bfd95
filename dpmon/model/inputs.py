"""Waits for a line of input within steps: such a step is not slow.

The supervisor saw the waits; their starts and ends are known to a fraction of a second. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT = "input"
"""Takes the place of the longer phase."""
SAID = "waiting for input"


def waited_ns(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """How much of the time from `start_ns` to `end_ns` (ns) lies in `spans`, which do not overlap."""
    return sum(max(min(end, end_ns) - max(begin, start_ns), 0) for begin, end in spans)


def is_wait(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> bool:
    """Whether the wait is most of this step."""
    return 2 * waited_ns(spans, start_ns, end_ns) > end_ns - start_ns > 0

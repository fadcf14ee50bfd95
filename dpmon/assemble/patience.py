"""How long an open step waits for an optimizer before another rule divides it."""

from __future__ import annotations

FEW_CALLS, MANY_CALLS = 64, 4096
SOON_NS, LATE_NS = 5_000_000_000, 60_000_000_000
"""Since the first call."""
TIMES = 4
"""A step may take this many times the last `pace`, and have this many times as many calls as the last one."""
MAX_PACE = 3_600_000_000_000


class Patience:
    """Knows the time, and the number of calls, between optimizer steps."""

    __slots__ = ("calls", "ended", "pace", "until")

    def __init__(self, pace: int = 0, ended: int = 0, calls: int = 0, until: int = 0) -> None:
        self.pace = pace
        """ns between the last two optimizer steps that ended a step of the loop."""
        self.ended = ended
        """When the last of them ended, 0 for none."""
        self.calls = calls
        """Calls between the last two of them, or before the first."""
        self.until = until
        """Calls before the last of them."""

    def stepped(self, start: int, end: int, calls: int) -> None:
        """An optimizer ended the step of the loop that began at `start`; `calls`: of the process up to then."""
        self.calls, self.until = max(calls - self.until, 0), calls
        self.pace = min(max(end - (self.ended or start), 0), MAX_PACE)
        self.ended = end

    def too_many(self, calls: int, many: bool) -> bool:
        """Whether a step has more calls than are waited for; `many`: what they are for may come after many of them."""
        return calls > max(MANY_CALLS if many else FEW_CALLS, TIMES * self.calls)

    def too_long(self, took: int, made: bool) -> bool:
        """Whether the calls of a step took longer (ns) than is waited for; `made`: there is an optimizer."""
        return took > max(LATE_NS if made else SOON_NS, TIMES * self.pace)

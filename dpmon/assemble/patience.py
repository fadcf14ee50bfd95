"""How long an open step waits for an optimizer before another rule divides it."""

from __future__ import annotations

FEW_CALLS, MANY_CALLS = 64, 4096
SOON_NS, LATE_NS = 5_000_000_000, 60_000_000_000
"""Since the first call."""
TIMES = 4
"""A step may take this many times the last `pace`."""
MAX_PACE = 3_600_000_000_000


class Patience:
    """Knows the time between optimizer steps."""

    __slots__ = ("ended", "pace")

    def __init__(self, pace: int = 0, ended: int = 0) -> None:
        self.pace = pace
        """ns between the last two optimizer steps that ended a step of the loop."""
        self.ended = ended
        """When the last of them ended, 0 for none."""

    def stepped(self, start: int, end: int) -> None:
        """An optimizer ended the step of the loop that began at `start`."""
        self.pace = min(max(end - (self.ended or start), 0), MAX_PACE)
        self.ended = end

    def too_many(self, calls: int, many: bool) -> bool:
        """Whether a step has more calls than are waited for; `many`: what they are for may come after many of them."""
        return calls > (MANY_CALLS if many else FEW_CALLS)

    def too_long(self, took: int, made: bool) -> bool:
        """Whether the calls of a step took longer (ns) than is waited for; `made`: there is an optimizer."""
        return took > max(LATE_NS if made else SOON_NS, TIMES * self.pace)

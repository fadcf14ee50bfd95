"""How long an open step waits for an optimizer before another rule divides it."""

from __future__ import annotations

FEW_CALLS, MANY_CALLS = 64, 4096
SOON_NS, LATE_NS = 5_000_000_000, 60_000_000_000
"""Limits since the first call of a step, without and with an optimizer."""
TIMES = 4
"""A step may take this many times the last `pace`, or have this many times the calls of the last step."""
MAX_PACE = 3_600_000_000_000


class Patience:
    """Tracks time and number of calls between optimizer steps."""

    __slots__ = ("calls", "calls_before", "ended", "pace")

    def __init__(self) -> None:
        self.pace = 0
        """ns between the last two optimizer steps that ended a step of the loop."""
        self.ended = 0
        """End of the last of these steps; 0 for none."""
        self.calls = 0
        """Calls between the last two of these steps, or before the first."""
        self.calls_before = 0
        """Calls of the process up to the last of these steps."""

    def stepped(self, start: int, end: int, calls: int) -> None:
        """Note that an optimizer ended the step that began at `start`. `calls`: calls of the process so far."""
        self.calls, self.calls_before = max(calls - self.calls_before, 0), calls
        self.pace = min(max(end - (self.ended or start), 0), MAX_PACE)
        self.ended = end

    def too_many(self, calls: int, many: bool) -> bool:
        """Whether to stop waiting in a step with this many calls. `many`: allow MANY_CALLS instead of FEW_CALLS."""
        return calls > max(MANY_CALLS if many else FEW_CALLS, TIMES * self.calls)

    def too_long(self, took: int, made: bool) -> bool:
        """Whether to stop waiting `took` ns after the first call of a step. `made`: whether an optimizer exists."""
        return took > max(LATE_NS if made else SOON_NS, TIMES * self.pace)

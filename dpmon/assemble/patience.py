"""How long an open step waits for an optimizer before another rule divides it."""

from __future__ import annotations

WITHOUT_OPTIMIZER = 64, 5_000_000_000
WITH_OPTIMIZER = 4096, 60_000_000_000
"""Most calls, and most ns since the first call."""
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

    def too_many(self, made: bool, calls: int) -> bool:
        """Whether a step has too many calls to wait; `made`: there is an optimizer."""
        return calls > (WITH_OPTIMIZER if made else WITHOUT_OPTIMIZER)[0]

    def is_over(self, made: bool, calls: int, took: int) -> bool:
        """Whether a step waits no longer; `took`: ns from its first call to the end of its last phase."""
        longest = (WITH_OPTIMIZER if made else WITHOUT_OPTIMIZER)[1]
        return self.too_many(made, calls) or took > max(longest, TIMES * self.pace)

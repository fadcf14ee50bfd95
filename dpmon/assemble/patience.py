"""How long an open step waits for an optimizer to step, before it is divided by another rule."""

from __future__ import annotations

WITHOUT_OPTIMIZER = 64, 5_000_000_000
WITH_OPTIMIZER = 4096, 60_000_000_000
"""Calls, and ns since the first of them."""
TIMES = 4
"""As many times as long as the last step took."""
MAX_PACE = 3_600_000_000_000


class Patience:
    """Knows how far apart the optimizer's steps are."""

    __slots__ = ("ended", "pace")

    def __init__(self, pace: int = 0, ended: int = 0) -> None:
        self.pace = pace
        """ns between the last two steps of an optimizer that ended a step of the loop."""
        self.ended = ended
        """When the last one was over, 0 for none."""

    def stepped(self, start: int, end: int) -> None:
        """An optimizer ended a step of the loop, which began at `start`."""
        self.pace = min(max(end - (self.ended or start), 0), MAX_PACE)
        self.ended = end

    def too_many(self, made: bool, calls: int) -> bool:
        """Whether a step has more calls than are waited for; `made`: there is an optimizer."""
        return calls > (WITH_OPTIMIZER if made else WITHOUT_OPTIMIZER)[0]

    def is_over(self, made: bool, calls: int, took: int) -> bool:
        """Whether a step waits no longer, whose calls took so long (ns) together."""
        longest = (WITH_OPTIMIZER if made else WITHOUT_OPTIMIZER)[1]
        return self.too_many(made, calls) or took > max(longest, TIMES * self.pace)

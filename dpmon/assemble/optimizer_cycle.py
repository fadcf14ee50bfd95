"""Finds the optimizer that ends the steps of a loop without a loader: the last one in the loop's body."""

from __future__ import annotations

_MAX_OPTIMIZERS = 4096


class OptimizerCycle:
    """The order in which optimizers step. When one steps for the second time, the optimizer before it ends a step."""

    __slots__ = ("ends", "leading", "since")

    def __init__(self) -> None:
        self.ends = -1
        """Number of the optimizer that ends a step; -1 while unknown."""
        self.since: dict[int, None] = {}
        """The optimizers that have stepped since the last end of a step, in order."""
        self.leading: dict[int, int] = {}
        """Optimizers that stepped before the cycle began, each with the last span in which it may end a step."""

    def stepped(self, site: int, number: int) -> bool | None:
        """Take an optimizer step in the span `number`; return whether it ends a step of the loop.

        None means that the cycle has changed: spans assembled under the old cycle must be assembled again.
        """
        if site == self.ends:
            self.since.clear()
            return True
        if self.leading.pop(site, -1) >= number:
            return True
        if site not in self.since:
            if len(self.since) < _MAX_OPTIMIZERS:
                self.since[site] = None
            return False
        order = list(self.since)
        self.leading = dict.fromkeys(order[: order.index(site)], number)
        self.ends = order[-1]
        self.since.clear()
        return None

    def decide(self) -> bool:
        """Treat the optimizers that have stepped as the whole cycle; False if there are none."""
        if not self.since:
            return False
        self.ends = list(self.since)[-1]
        self.since.clear()
        return True

    def gone(self, site: int) -> None:
        """Forget a freed optimizer, which ends no more steps."""
        self.since.pop(site, None)
        if site == self.ends:
            self.ends = -1

"""Which optimizer ends a step where there is no loader: the last one of the loop's body."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["OptimizerCycle"]

_MOST = 4096


class OptimizerCycle:
    """The optimizers that step in turn. They repeat when the loop's body does: the one before the first ends a step."""

    __slots__ = ("ends", "once", "since")

    def __init__(self, ends: int = -1, since: Iterable[int] = ()) -> None:
        self.ends = ends
        """Number of the optimizer with which a step ends, -1 while it is not known."""
        self.since: dict[int, None] = dict.fromkeys(since)
        """Those that have stepped since, in order."""
        self.once: set[int] = set()
        """Those that stepped before the cycle began: each ends a step of its own, once."""

    def stepped(self, site: int) -> bool | None:
        """An optimizer has stepped: whether a step ends with it, None if the cycle turned out to be another one.

        Then what has been assembled with the former cycle is to be assembled anew.
        """
        if site == self.ends:
            self.since.clear()
            return True
        if site in self.once:
            self.once.remove(site)
            return True
        if site not in self.since:
            if len(self.since) < _MOST:
                self.since[site] = None
            return False
        order = list(self.since)
        self.once = set(order[: order.index(site)])
        self.ends = order[-1]
        self.since.clear()
        return None

    def decide(self) -> bool:
        """Take those that have stepped for the whole cycle; False if none has."""
        if not self.since:
            return False
        self.ends = list(self.since)[-1]
        self.since.clear()
        return True

    def gone(self, site: int) -> None:
        """An optimizer died: it ends no step any more."""
        self.since.pop(site, None)
        if site == self.ends:
            self.ends = -1

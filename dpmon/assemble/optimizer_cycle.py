"""Which optimizer ends a step where there is no loader: the last one of the loop's body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MOST = 4096


class OptimizerCycle:
    """The optimizers that step in turn. They repeat when the loop's body does: the one before the first ends a step."""

    __slots__ = ("ends", "once", "since")

    def __init__(self, ends: int = -1, since: Iterable[int] = (), once: Mapping[int, int] | None = None) -> None:
        self.ends = ends
        """Number of the optimizer with which a step ends, -1 while it is not known."""
        self.since: dict[int, None] = dict.fromkeys(since)
        """Those that have stepped since, in order."""
        self.once: dict[int, int] = dict(once or {})
        """Those that stepped before the cycle began: each ends a step of its own once, in a span up to this number."""

    def stepped(self, site: int, number: int) -> bool | None:
        """An optimizer has stepped in the span with this number: whether a step ends with it.

        None if the cycle turned out to be another one: then what was assembled with the former cycle is to be assembled
        anew.
        """
        if site == self.ends:
            self.since.clear()
            return True
        if self.once.pop(site, -1) >= number:
            return True
        if site not in self.since:
            if len(self.since) < _MOST:
                self.since[site] = None
            return False
        order = list(self.since)
        self.once = dict.fromkeys(order[: order.index(site)], number)
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

"""How many steps there are to be for each one that is timed on devices, so that timing costs a small share of them."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

COST_NS = 12_000
"""Of one time of one device: two events are recorded, asked for and read (tests/benchmarks/bench_inside.py)."""
SHARE = 0.01
MOST = 1024
"""The training process takes no higher number."""
STEPS = 64
"""Between two decisions, each of which is about so many steps."""
_SMALL_CHANGE = 1.25
"""A new number means a new block of steps, so one that is hardly different is not asked for."""


class Sampling:
    """Finds the number for one process from its steps."""

    def __init__(self) -> None:
        self.one_in = 0
        """One step in so many is to be timed; 0: it is not known yet."""
        self._walls: deque[int] = deque(maxlen=STEPS)
        self._steps = 0
        self._timed = self._times = 0.0
        """Steps that were timed, and times that came for them: the older ones count less."""

    def time(self) -> None:
        """A device has told a time."""
        self._times += 1

    def step(self, wall_ns: int, timed: bool) -> None:
        """A step is over."""
        self._walls.append(wall_ns)
        self._timed += timed
        self._steps += 1
        if self._steps % STEPS == 0 and self._timed:
            self._decide()

    def _decide(self) -> None:
        cost = self._times / self._timed * COST_NS
        wanted = min(max(ceil(cost / (SHARE * max(median(self._walls), 1))), 1), MOST)
        if not self.one_in / _SMALL_CHANGE <= wanted <= self.one_in * _SMALL_CHANGE:
            self.one_in = wanted
        self._timed /= 2
        self._times /= 2

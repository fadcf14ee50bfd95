"""Decides how many steps are timed on devices, so that timing costs only a small share of the time."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

COST_NS = 12_000
"""Cost of one device time: recording, querying and reading two events (tests/benchmarks/bench_inside.py)."""
SHARE = 0.01
MAX_ONE_IN = 1024
"""The training process accepts no higher number."""
STEPS = 64
"""Steps between two decisions, and steps that a decision considers."""
_SMALL_CHANGE = 1.25
"""Smaller changes are ignored, because each new number starts a new block of steps."""


class Sampling:
    """Finds `one_in` for one process from its steps."""

    def __init__(self) -> None:
        self.one_in = 0
        """One step in `one_in` should be timed; 0 while unknown."""
        self._walls: deque[int] = deque(maxlen=STEPS)
        self._steps = 0
        self._timed = self._times = 0.0
        """Numbers of timed steps and of their device times. Older ones count less."""

    def time(self) -> None:
        """Count one device time."""
        self._times += 1

    def step(self, wall_ns: int, timed: bool) -> None:
        """Count a step that has ended."""
        self._walls.append(wall_ns)
        self._timed += timed
        self._steps += 1
        if self._steps % STEPS == 0 and self._timed:
            self._decide()

    def _decide(self) -> None:
        cost = self._times / self._timed * COST_NS
        wanted = min(max(ceil(cost / (SHARE * max(median(self._walls), 1))), 1), MAX_ONE_IN)
        if not self.one_in / _SMALL_CHANGE <= wanted <= self.one_in * _SMALL_CHANGE:
            self.one_in = wanted
        self._timed /= 2
        self._times /= 2

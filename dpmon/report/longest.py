"""The longest steps of a run: those that are left, and those of which only sums are."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dpmon.model.evidence import LongStep
from dpmon.record.wire import STEP_PHASES
from dpmon.run.rollup import SERIES, Rollup
from dpmon.run.totals import Totals

__all__ = ["Longest"]

KEPT = 64
_BACKWARD, _OPTIMIZER = SERIES.index("backward"), SERIES.index("optimizer")


class Longest:
    """Takes steps in any order; keeps KEPT of each mode, of those that train and of evaluations."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, bool], list[tuple[int, int, LongStep]]] = {}
        """By mode, and whether it is an evaluation."""
        self._number = 0

    def step(
        self,
        process: int,
        number: int,
        mode: str,
        start: int,
        wall: int,
        phases: Sequence[int | None],
        evaluation: bool,
    ) -> None:
        """A step; `phases` as in STEP_PHASES."""
        found = self._found.get((mode, evaluation))
        if found is None or len(found) < KEPT or wall > found[0][0]:
            took, name = max((took or 0, name) for took, name in zip(phases, STEP_PHASES, strict=True))
            self._keep(LongStep(process, number, mode, start, wall, name, took), evaluation)

    def rollup(self, width_s: int, rollup: Rollup) -> None:
        """Of some seconds, of which only sums are left, the longest step."""
        if rollup.high_ns is not None and rollup.steps > 0:
            self._keep(_longest_of(width_s, rollup, rollup.high_ns), _evaluates(rollup))

    def _keep(self, step: LongStep, evaluation: bool) -> None:
        found = self._found.setdefault((step.mode, evaluation), [])
        self._number += 1
        entry = (step.wall_ns, -self._number, step)
        if len(found) < KEPT:
            heapq.heappush(found, entry)
        elif entry > found[0]:
            heapq.heapreplace(found, entry)

    def steps(self, totals: Totals) -> tuple[LongStep, ...]:
        """The longest first; those that the modes' figures are of, too."""
        trained = {*totals.evaluations, *(mode for mode, gone in totals.deleted.items() if not _evaluates(gone.sums))}
        found = [
            entry
            for (mode, evaluation), entries in self._found.items()
            if not evaluation or mode not in trained
            for entry in entries
        ]
        return tuple(step for _, _, step in sorted(found, reverse=True)[:KEPT])


def _evaluates(rollup: Rollup) -> bool:
    """Whether none of these steps trained; where some did, the others cannot be told apart."""
    return rollup.sums[_BACKWARD] is None and rollup.sums[_OPTIMIZER] is None


def _longest_of(width_s: int, rollup: Rollup, wall: int) -> LongStep:
    others = max((rollup.sums[0] or 0) - wall, 0)
    # As if all of the others had been in that phase: it was at least so long in this one.
    sums = dict(zip(SERIES, rollup.sums, strict=True))
    spent, name = max((sums[name] or 0, name) for name in STEP_PHASES)
    least = spent - others
    known = 2 * least > wall
    start = max((rollup.start_s + width_s) * 1_000_000_000 - wall, 0)
    return LongStep(rollup.process, None, rollup.mode, start, wall, name if known else None, least if known else 0)

"""Steps that take far longer than others, so that the median does not represent the speed. Pure.

A step that is long because it waits for a line of input does not count as slow. The supervisor measures starts and ends
of these waits to a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpmon.record.schema import PHASES, STEP
from dpmon.store.answers import LongRow
from dpmon.store.quantiles import middle
from dpmon.store.tally import Tally

INPUT = "input"
"""Named in place of a phase if waits for input took most of the time."""
WAITING_TEXT = "waiting for input"
_APART = 1.25
"""Largest ratio of mean to median, or of median to mean, without a note."""


def waited_ns(spans: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """How much of the time from `start_ns` to `end_ns` (ns) lies in `spans`, which do not overlap."""
    return sum(max(min(end, end_ns) - max(begin, start_ns), 0) for begin, end in spans)


class Uneven(NamedTuple):
    """The steps longer than the mean: their share of all steps and of all time (0 to 1), and the cause."""

    steps: float
    time: float
    phase: str | None
    """The phase that makes them long; INPUT if waits for a line of input do, in whichever phase."""


def uneven_steps(tally: Tally, longest: Sequence[LongRow], waits: Sequence[tuple[int, int]] = ()) -> Uneven | None:
    """How uneven the steps of a tally are; None if mean and median are close.

    `longest`: the longest of these steps; without them, the phase is unknown. `waits`: start and end (ns) of each wait
    for input.
    """
    steps = tally.stat(STEP)
    mean, centre = steps.mean, tally.median(STEP)
    if not mean or not centre or 1 / _APART <= mean / centre <= _APART:
        return None
    long = {bucket: count for bucket, count in steps.counts.items() if middle(bucket) > mean}
    count, spent = sum(long.values()), sum(middle(bucket) * number for bucket, number in long.items())
    if not 0 < count < steps.count:
        return None
    known = [step for step in longest if step.wall_ns > mean]
    return Uneven(count / steps.count, min(spent / steps.total, 1.0), _longer_by(tally, known, waits))


def _longer_by(tally: Tally, long: Sequence[LongRow], waits: Sequence[tuple[int, int]]) -> str | None:
    """The phase with the largest excess in `long` over the tally's other steps; INPUT if waits explain it."""
    others = tally.steps - len(long)
    if not long or others <= 0:
        return None
    longer = {}
    for phase in PHASES:
        spent = sum(step.phases.get(phase.name, 0) for step in long)
        if not phase.of_call:
            longer[phase.name] = spent / len(long) - max(tally.stat(phase.name).total - spent, 0) / others
    name = max(longer, key=lambda each: longer[each])
    waited = sum(waited_ns(waits, step.start_ns, step.start_ns + step.wall_ns) for step in long)
    if 2 * waited > max(longer[name], 1) * len(long):
        return INPUT
    return name if longer[name] > 0 else None

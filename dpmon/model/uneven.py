"""Steps that are not alike: where some take far longer than others, a median says little of the speed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.model.inputs import INPUT, waited_ns
from dpmon.model.state import PHASES, StepSample

__all__ = ["Uneven", "uneven"]

_APART = 1.25
"""By so much, either way, mean and median may differ without a word."""


class Uneven(NamedTuple):
    """The steps longer than the mean: their share of all steps, of all time (0 to 1), and the phase they differ by."""

    steps: float
    time: float
    phase: str | None
    """INPUT where they are longer by waits for a line of input, whatever phase those fell into."""


def uneven(
    drawn: Sequence[tuple[StepSample, float]],
    mean_ns: float | None,
    median_ns: float | None,
    waits: Sequence[tuple[int, int]] = (),
) -> Uneven | None:
    """How uneven steps are, of which `drawn` are some, each with how many it stands for; None where they are alike.

    Alike are steps whose mean and median are near each other. The phase is the one of which the long steps have most
    more than the others; None if the long ones have no phase more. The long ones may be few or most of the steps.
    `waits`: from when to when the script waited for input.
    """
    if not mean_ns or not median_ns or 1 / _APART <= mean_ns / median_ns <= _APART:
        return None
    long = [(step, weight) for step, weight in drawn if step.wall_ns > mean_ns]
    rest = [(step, weight) for step, weight in drawn if step.wall_ns <= mean_ns]
    if not long or not rest:
        return None
    of_long, of_rest = (sum(weight for _, weight in part) for part in (long, rest))
    spent, rest_spent = (sum(step.wall_ns * weight for step, weight in part) for part in (long, rest))
    longer = [
        sum(max(step.phases[index], 0) * weight for step, weight in long) / of_long
        - sum(max(step.phases[index], 0) * weight for step, weight in rest) / of_rest
        for index in range(len(PHASES))
    ]
    most = max(longer)
    phase = PHASES[longer.index(most)] if most > 0 else None
    waited = sum(waited_ns(waits, step.end_ns - step.wall_ns, step.end_ns) * weight for step, weight in long)
    if 2 * waited > max(most, 1) * of_long:
        phase = INPUT
    return Uneven(of_long / (of_long + of_rest), spent / (spent + rest_spent), phase)

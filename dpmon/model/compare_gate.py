"""Judges a comparison of runs by thresholds: the text, the JSON and the exit status come from these judgements. Pure.

Slower: the ratio is above the threshold, and its lower 95 % bound is above 1. Not slower: the upper 95 % bound of the
ratio is below the threshold. Anything else is inconclusive: a few runs that show nothing do not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dpmon.model.compare_runs import NOT_COMPARABLE, RunComparison, bounds, sentence, signed
from dpmon.model.compared_run import RUN_FIGURES, STEP_FIGURES
from dpmon.record.schema import STEP

SLOWER, NOT_SLOWER, INCONCLUSIVE = 4, 0, 3
"""Exit statuses."""
PHASES_GATED = (*(figure.name for figure in STEP_FIGURES if not figure.name.endswith("_device")), "cpu_step")
Outcome = Literal["slower", "not slower", "inconclusive"]
_STATUS: dict[Outcome, int] = {"slower": SLOWER, "not slower": NOT_SLOWER, "inconclusive": INCONCLUSIVE}


class Threshold(NamedTuple):
    """A figure that may grow by at most `limit` (0.05: 5 %)."""

    figure: str
    limit: float


class Judgement(NamedTuple):
    """What a comparison says about one threshold."""

    threshold: Threshold
    outcome: Outcome
    text: str


def judge(found: RunComparison, threshold: Threshold, *, anyway: bool = False) -> Judgement:
    """Judge one figure. `anyway`: also if the runs are not comparable."""
    name = threshold.figure
    if name == "memory" and name not in found.compared:
        name = "host_memory"
    label = next(figure.label.strip() for figure in (*STEP_FIGURES, *RUN_FIGURES) if figure.name == name)
    limit = signed(1 + threshold.limit)

    def judgement(outcome: Outcome, why: str) -> Judgement:
        word = outcome if name not in ("memory", "host_memory") else outcome.replace("slower", "larger")
        return Judgement(threshold, outcome, f"{word} ({label}, limit {limit}): {why}")

    unlike = [f"{what} ({a}, {b})" for what, a, b in found.differences if what in NOT_COMPARABLE]
    if unlike and not anyway:
        return judgement("inconclusive", f"not comparable: {', '.join(unlike)}; --anyway compares them")
    row = found.compared.get(name)
    if found.missing is not None or row is None:
        return judgement("inconclusive", found.missing or "it is unknown in these runs")
    told = row.change
    if told is None or told.least is None or told.most is None:
        return judgement("inconclusive", row.missing or "it has no interval")
    sure = f"{signed(told.ratio)} (one-sided bounds: {bounds(told)})"
    if told.least > 1 and told.ratio > 1 + threshold.limit:
        return judgement("slower", sure)
    if told.most < 1 + threshold.limit:
        return judgement("not slower", sure)
    other = "; on a busy machine, --phase fast_step or cpu_step may show more" if name == STEP else ""
    return judgement("inconclusive", f"{sure}; more or longer runs would narrow this{other}")


def status_of(judgements: Sequence[Judgement]) -> int:
    """The exit status: 4 if a figure grew too much, else 3 if one is inconclusive, else 0."""
    return max((_STATUS[one.outcome] for one in judgements), default=0)


def outcome(found: RunComparison, judgements: Sequence[Judgement]) -> str:
    """The judgements, or without any the result of the comparison, in a sentence."""
    return "; ".join(one.text for one in judgements) or sentence(found)

"""Compares runs: each metric on both sides, how it changed, and which phase explains most of the change.

The value of a run is the mean time per step, with the time between steps: what a user waits for. The value of a side is
the median of its runs, and a change is the ratio of the values of both sides, so what is shown always agrees. If steps
are not of the same number of samples and ranks, the time per sample is compared. Warm-up steps, and steps in which a
run stalled, are left out.

With one run on each side, the interval comes from parts of the two runs. It is then about these two runs only: it
does not include how much equal runs differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

from dpmon.model.compared_run import BETWEEN, CONDITIONS, RUN_METRICS, STEP_METRICS, ComparedRun, Metric
from dpmon.model.comparison_stats import Change, estimate_change
from dpmon.model.mode_comparison import MIN_STEPS, duration_or_none
from dpmon.record.schema import STEP, STEP_PHASES
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import OTHER_SIZES
from dpmon.text.formatting import UNKNOWN, format_count_with_noun, format_factor

SIDES = ("A", "B")
GATE_METRICS = tuple(metric.name for metric in STEP_METRICS if not metric.name.endswith("_device"))
QUIET_METRICS = ("fast_step", "cpu_step")
"""Metrics that other work on the machine disturbs less than the mean step."""
Outcome = Literal["slower", "not slower", "inconclusive"]
_EXIT_STATUSES: Mapping[Outcome, int] = {"slower": 4, "not slower": 0, "inconclusive": 3}


class ComparedMetric(NamedTuple):
    """One metric on both sides, with a value for each run. `missing`: why there is no ratio, or no interval."""

    figure: Metric
    values: tuple[Sequence[float | None], Sequence[float | None]]
    change: Change | None
    missing: str | None = None

    def typical_value(self, side: int) -> float | None:
        """Return the value of the run on a side, or the median of its runs."""
        known = [value for value in self.values[side] if value is not None]
        return median(known) if known else None

    @property
    def texts(self) -> tuple[str, str]:
        """The typical value of each side, in words."""
        return self.figure.format(self.typical_value(0)), self.figure.format(self.typical_value(1))

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Its label, both values and its change, for a table. As in benchstat, ~ is a change that may be none."""
        change_text = UNKNOWN
        if self.change is not None:
            is_sure = self.change.sign or self.change.interval is None
            change_text = format_change(self.change.ratio) if is_sure else "~"
        return (self.figure.label, *self.texts, change_text)

    @property
    def growth(self) -> float:
        """How much larger the typical value of the second side is; an unknown value counts as 0."""
        return (self.typical_value(1) or 0.0) - (self.typical_value(0) or 0.0)


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side: "A" before, "B" after."""

    sides: tuple[Sequence[ComparedRun], Sequence[ComparedRun]]

    @property
    def runs(self) -> list[ComparedRun]:
        """The runs of both sides."""
        return [*self.sides[0], *self.sides[1]]

    @property
    def is_pair(self) -> bool:
        """Whether there is one run on each side."""
        return all(len(side) == 1 for side in self.sides)

    @cached_property
    def batch(self) -> int | None:
        """Number of samples of the compared steps, if most steps of all runs have it; None for all steps.

        None also if the ranks of the runs differ.
        """
        first = self.runs[0]
        batch = first.main_batch
        is_common = batch not in (None, OTHER_SIZES) and all(
            (run.main_batch, run.ranks) == (batch, first.ranks)
            and run.steps_by_batch[batch] * 2 >= run.steps_by_batch.total()
            for run in self.runs
        )
        return batch if is_common else None

    @cached_property
    def per_sample(self) -> bool:
        """Whether times are per sample, not per step."""
        steps = [run.steps(None) for run in self.runs]
        all_counted = all(whole.steps == whole.stat("samples").count for whole in steps)
        return self.batch is None and self.missing is None and all_counted

    @property
    def unit(self) -> str:
        """What a time is divided by: "step" or "sample"."""
        return "sample" if self.per_sample else "step"

    @cached_property
    def missing(self) -> str | None:
        """Why steps are not compared; None if they are."""
        for run in self.runs:
            steps = run.steps(self.batch).steps
            if run.main_batch is None:
                return f"{run.name} has no step to compare"
            if steps < MIN_STEPS:
                return f"{run.name} has only {format_count_with_noun(steps, 'step')} to compare, fewer than {MIN_STEPS}"
        return None

    def steps(self, run: ComparedRun) -> Tally:
        """Return the compared steps of a run."""
        return run.steps(self.batch) if self.missing is None else Tally()

    @cached_property
    def differences(self) -> Sequence[tuple[str, str, str]]:
        """What differs between the sides, and its value on both."""
        differences = []
        for label in self.runs[0].set_up:
            old, new = (dict.fromkeys(value for run in side if (value := run.set_up[label])) for side in self.sides)
            if len(old | new) > 1 or (label == "state" and [*old] != ["finished"]):
                differences.append((label, ", ".join(old) or UNKNOWN, ", ".join(new) or UNKNOWN))
        for label, (min_difference, format_value) in CONDITIONS.items():
            known = [[number for run in side if (number := run.measured[label]) is not None] for side in self.sides]
            if all(known):
                before, after = map(median, known)
                if abs(before - after) >= min_difference:
                    differences.append((label, format_value(before), format_value(after)))
        return differences

    @cached_property
    def compared(self) -> Mapping[str, ComparedMetric]:
        """By name: the metrics of STEP_METRICS and RUN_METRICS that are known for a run."""
        steps_by_run = [(run, self.steps(run)) for run in self.runs]
        parts_by_run = [(run, run.parts(self.batch)) for run in self.runs if self.is_pair and self.missing is None]
        compared: dict[str, ComparedMetric] = {}
        for metric in (*STEP_METRICS, *RUN_METRICS):
            values = [run.value(metric, steps, per_sample=self.per_sample) for run, steps in steps_by_run]
            if not any(values):
                continue
            split, parts = len(self.sides[0]), None
            if parts_by_run and metric.series:
                parts = [
                    [run.value(metric, part, per_sample=self.per_sample) or 0.0 for part in run_parts]
                    for run, run_parts in parts_by_run
                ]
            sides = values[:split], values[split:]
            compared[metric.name] = _compare_metric(metric, sides, parts, self.runs[0].part_s)
        return compared

    @cached_property
    def reason(self) -> ComparedMetric | None:
        """The phase, or the time between steps, that changed most in the direction of the step time; None if none.

        None also if the step time has not changed.
        """
        step = self.compared.get(STEP)
        if step is None or step.change is None or not step.change.sign:
            return None
        sign, phases = step.change.sign, [self.compared.get(name) for name in (*STEP_PHASES, BETWEEN)]
        known = [row for row in phases if row is not None and row.growth * sign > 0]
        return max(known, key=lambda row: row.growth * sign, default=None)

    def run_to_run_spread(self, side: int) -> float | None:
        """Return how much slower the slowest run of a side is than its fastest (0.02: 2%); None for a single run."""
        step = self.compared.get(STEP)
        values = [value for value in step.values[side] if value] if step is not None else []
        return max(values) / min(values) - 1 if len(values) > 1 else None


def _compare_metric(
    metric: Metric,
    sides: tuple[Sequence[float | None], Sequence[float | None]],
    parts: Sequence[Sequence[float]] | None,
    part_s: int,
) -> ComparedMetric:
    """Compare one metric. `parts`: for a pair, its values over the parts of each run, of `part_s` or more."""
    for side, values in zip(SIDES, sides, strict=True):
        unknown = sum(value is None for value in values)
        if unknown:
            runs_text = "" if len(values) == 1 else f"{unknown} of {len(values)} runs of "
            return ComparedMetric(metric, sides, None, f"none in {runs_text}{side}")
    known = [[value or 0.0 for value in values] for values in sides]
    if min(map(min, known)) <= 0:
        return ComparedMetric(metric, sides, None, "there is no ratio to nothing")
    before, after = parts or known
    ratio = median(known[1]) / median(known[0])
    if min(*before, *after) <= 0:
        return ComparedMetric(metric, sides, Change(ratio), "it is 0 in a part of a run")
    # Quantiles come from sketches.
    change = estimate_change(before, after, ratio, in_order=parts is not None, is_exact=metric.fraction is None)
    missing = None
    if change.low is None:
        values_text = f"{'runs' if parts is None else f'parts of {part_s} s'} ({len(before)} vs. {len(after)})"
        missing = f"too few {values_text}"
        if change.least is not None:
            missing += " for a 95% interval"
    return ComparedMetric(metric, sides, change, missing)


# ------------------------------------------------------------------------------------------------ words


def format_change(ratio: float | None) -> str:
    """Return a ratio as a change: "+4.2%", "-12%", "2.40×"."""
    if ratio is None:
        return UNKNOWN
    if ratio >= 2:
        return format_factor(ratio)
    change_pct = (ratio - 1) * 100
    if abs(change_pct) < 0.05:
        return "0.0%"
    return f"{change_pct:+.0f}%" if abs(change_pct) >= 9.95 else f"{change_pct:+.1f}%"


def format_interval(change: Change, *, one_sided: bool = False) -> str:
    """Return the interval with its level: "+1.2% to +3.4% (95%)".

    `one_sided`: the 90% interval between the one-sided bounds, as where there is no 95% interval.
    """
    if change.interval is None:
        return "no interval"
    if one_sided or change.low is None:
        return f"{format_change(change.least)} to {format_change(change.most)} (90%)"
    return f"{format_change(change.low)} to {format_change(change.high)} (95%)"


def result_sentence(comparison: RunComparison) -> str:
    """Return the result, in one or two sentences."""
    step = comparison.compared.get(STEP)
    if comparison.missing is not None or step is None:
        return f"inconclusive: {comparison.missing or 'no step was timed'}"
    change = step.change
    if change is None:
        return f"inconclusive: {step.missing}"
    if change.sign:
        return f"B is {'slower' if change.sign > 0 else 'faster'}: {step_time_text(comparison)}"
    if change.low is None or change.interval is None:
        return f"inconclusive: {step.missing}; {step_time_text(comparison)}"
    verdict = "no difference shows" if change.interval.is_close_to_1 else "inconclusive, the interval is too wide"
    return f"{verdict}: {step_time_text(comparison)}"


def change_text(row: ComparedMetric, per: str = "", *, one_sided: bool = False) -> str:
    """Return the values of a metric, its change and its interval. `per`: what follows the values."""
    if row.change is None:
        return row.missing or ""
    interval_text = format_interval(row.change, one_sided=one_sided)
    return f"from {' to '.join(row.texts)}{per}, {format_change(row.change.ratio)} [{interval_text}]"


def step_time_text(comparison: RunComparison, *, one_sided: bool = False) -> str:
    """Return the `change_text` of the step time, with the phase that changed most; empty if there is no change."""
    step = comparison.compared.get(STEP)
    if step is None or step.change is None:
        return ""
    text = change_text(step, f" per {comparison.unit}", one_sided=one_sided)
    if comparison.reason is not None:
        old, new = (duration_or_none(comparison.reason.typical_value(side)) for side in (0, 1))
        text += f"; most of the change is in {comparison.reason.figure.label.strip()}: from {old} to {new}"
    return text


def scope_notes(comparison: RunComparison) -> list[str]:
    """Return sentences about the scope of the interval, and about how much equal runs differ."""
    if comparison.is_pair:
        return [
            "One run on each side: the result is about this pair only. Equal runs differ from each other, and the"
            " interval does not include that; give several runs per side (A1 A2 A3 -- B1 B2 B3)."
        ]
    spreads = [(side, comparison.run_to_run_spread(place)) for place, side in enumerate(SIDES)]
    texts = [f"{side} by {spread * 100:.{int(spread < 0.1)}f}%" for side, spread in spreads if spread is not None]
    return [f"Equal runs differ (slowest vs. fastest): {', '.join(texts)}."] if texts else []


# ------------------------------------------------------------------------------------------------ gate


class Judgment(NamedTuple):
    """The outcome of a comparison for a metric that may grow by at most `limit` (0.05: 5%)."""

    figure: str
    limit: float
    outcome: Outcome
    text: str


def judge_metric(comparison: RunComparison, name: str, limit: float) -> Judgment:
    """Judge one of GATE_METRICS.

    Slower: the ratio is above the limit, and its lower 95% bound is above 1. Not slower: the upper 95% bound of the
    ratio is below the limit. Anything else is inconclusive, so a few runs that show nothing do not pass. If the step
    time is inconclusive, the text says whether a metric of QUIET_METRICS is not.
    """
    row = comparison.compared.get(name)
    outcome: Outcome = "inconclusive"
    if comparison.missing is not None or row is None:
        text = comparison.missing or "it is unknown in these runs"
    elif row.change is None:
        text = row.missing or ""
    else:
        text = step_time_text(comparison, one_sided=True) if name == STEP else change_text(row, one_sided=True)
        ratio, least, most = row.change.ratio, row.change.least, row.change.most
        if least is not None and least > 1 and ratio > 1 + limit:
            outcome = "slower"
        elif most is not None and most < 1 + limit:
            outcome = "not slower"
        else:
            hint = row.missing if least is None else "more or longer runs would narrow this"
            text += f"; {_quiet_judgment(comparison, name, limit) or hint}"
    label = next(metric.label.strip() for metric in STEP_METRICS if metric.name == name)
    unit = " per sample" if comparison.per_sample else ""
    return Judgment(name, limit, outcome, f"{outcome} ({label}{unit}, limit {format_change(1 + limit)}): {text}")


def _quiet_judgment(comparison: RunComparison, name: str, limit: float) -> str | None:
    """Return what a metric of QUIET_METRICS says if the step time is inconclusive; None if nothing."""
    for quiet_name in QUIET_METRICS if name == STEP else ():
        judgment = judge_metric(comparison, quiet_name, limit)
        if judgment.outcome != "inconclusive":
            return f"{judgment.text}; --phase {quiet_name} makes this the gate"
    return None


def exit_status_of(judgments: Sequence[Judgment]) -> int:
    """Return the exit status: 4 if a metric grew too much, else 3 if one is inconclusive, else 0."""
    return max((_EXIT_STATUSES[judgment.outcome] for judgment in judgments), default=0)


def outcome_sentence(comparison: RunComparison, judgments: Sequence[Judgment]) -> str:
    """Return the judgments in a sentence; without judgments, the result of the comparison."""
    return "; ".join(judgment.text for judgment in judgments) or result_sentence(comparison)

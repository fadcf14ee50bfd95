"""Compares runs: each metric on both sides, how it changed, and which phase explains most of the change.

With one run on each side, parts of the two runs are compared. The interval is then about these two runs only: it
does not include how much equal runs differ. With several runs on a side, each run counts as one value, its median. Only
steps of one kind are compared, as for dp and single. Settling steps, and parts with a pause or a stall, are left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Literal, NamedTuple

from dpmon.model.compared_run import RUN_METRICS, STEP_METRICS, ComparedRun, Metric
from dpmon.model.comparison_stats import Change, estimate_change
from dpmon.model.mode_comparison import (
    MAX_UNCERTAINTY,
    MIN_STEPS,
    StepKind,
    common_kind,
    duration_or_none,
    incomparable_reason,
    phase_values,
    phase_with_largest_change,
)
from dpmon.record.schema import STEP
from dpmon.store.quantile_sketch import fine_quantile
from dpmon.store.step_stats import compute_step_stats
from dpmon.store.tally import Tally
from dpmon.text.formatting import UNKNOWN, format_count_with_noun, format_factor, format_percent

SIDES = ("A", "B")
NOT_COMPARABLE = ("arguments", "mode", "ranks", "devices", "hardware", "samples a step")
"""Runs that differ in one of these are not judged by a threshold."""
SUM_METRIC = "samples_per_s"
"""The metric that is a sum over the ranks."""
MEASURED_CONDITIONS: Mapping[str, tuple[float, Callable[[float], str]]] = {
    "clock of the GPUs": (30.0, "{:.0f} MHz".format),
    "throttled": (0.05, format_percent),
    "processors busy with other work": (0.5, "{:.1f}".format),
}
"""Measured conditions: the smallest difference to show, and how to format a value."""
SLOWER, NOT_SLOWER, INCONCLUSIVE = 4, 0, 3
"""Exit statuses of a comparison with thresholds."""
GATE_METRICS = (*(figure.name for figure in STEP_METRICS if not figure.name.endswith("_device")), "cpu_step")
Outcome = Literal["slower", "not slower", "inconclusive"]
_EXIT_STATUSES: dict[Outcome, int] = {"slower": SLOWER, "not slower": NOT_SLOWER, "inconclusive": INCONCLUSIVE}


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


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side: "A" before, "B" after."""

    sides: tuple[Sequence[ComparedRun], Sequence[ComparedRun]]
    kind: StepKind | None
    """The compared steps."""
    missing: str | None
    """Why steps are not compared."""
    differences: Sequence[tuple[str, str, str]]
    """What differs, and its value on both sides."""
    compared: Mapping[str, ComparedMetric]
    """By name: the metrics of STEP_METRICS and RUN_METRICS that are known for a run."""
    reason: tuple[str, float | None, float | None] | None
    """The phase that changed most in the direction of the step, with its time (ns) on both sides."""

    @property
    def is_pair(self) -> bool:
        """Whether there is one run on each side."""
        return all(len(side) == 1 for side in self.sides)

    def run_to_run_spread(self, side: int) -> float | None:
        """Return how much slower the slowest run of a side is than its fastest (0.02: 2%); None for a single run."""
        step = self.compared.get(STEP)
        values = [value for value in step.values[side] if value] if step is not None else []
        return max(values) / min(values) - 1 if len(values) > 1 else None


def compare_runs(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> RunComparison:
    """Compare the runs of two sides."""
    runs = (*before, *after)
    kind = common_kind(run.steps_by_kind for run in runs)
    missing = _incomparable_reason(runs, kind)
    parts = [run.parts(kind) if kind is not None and missing is None else [] for run in runs]
    wholes = [run.steps(None if missing else kind) for run in runs]
    is_pair, split = len(runs) == 2, len(before)
    groups = parts if is_pair else (wholes[:split], wholes[split:])
    compared: dict[str, ComparedMetric] = {}
    for metric, values in known_metrics(runs, wholes):
        quantiles = (
            None
            if metric.series is None
            else [_quantiles(tallies, metric.series, metric.fraction) for tallies in groups]
        )
        sides = values[:split], values[split:]
        compared[metric.name] = _compare_metric(metric, sides, quantiles, runs[0].part_s if is_pair else None)
    if (
        len({run.set_up["ranks"] for run in runs}) > 1
        and any(run.ranks_seen for run in runs)
        and SUM_METRIC in compared
    ):
        compared[SUM_METRIC] = compared[SUM_METRIC]._replace(
            change=None, missing="a sum over the ranks seen, which differ"
        )
    reason = _reason(compared.get(STEP), wholes[:split], wholes[split:])
    return RunComparison((before, after), kind, missing, setup_differences(before, after), compared, reason)


def known_metrics(
    runs: Sequence[ComparedRun], wholes: Sequence[Tally]
) -> Iterator[tuple[Metric, Sequence[float | None]]]:
    """Yield each metric that is known for any run, with its value for each run. `wholes`: the steps of each run."""
    for metric in (*STEP_METRICS, *RUN_METRICS):
        if metric.series is None:
            values = [run.values.get(metric.name) for run in runs]
        else:
            values = [metric.value_over(whole) for whole in wholes]
        if any(value is not None for value in values):
            yield metric, values


def setup_differences(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> list[tuple[str, str, str]]:
    """Return what differs between the sides: a label, and its value on each side."""
    differences = []
    for label in before[0].set_up:
        old, new = (dict.fromkeys(value for run in side if (value := run.set_up[label])) for side in (before, after))
        if len(old | new) > 1 or (label == "state" and [*old] != ["finished"]):
            differences.append((label, ", ".join(old) or UNKNOWN, ", ".join(new) or UNKNOWN))
    for label, (min_difference, format_value) in MEASURED_CONDITIONS.items():
        values = [[run.measured[label] for run in side if label in run.measured] for side in (before, after)]
        if all(values):
            old_median, new_median = map(median, values)
            if abs(old_median - new_median) >= min_difference:
                differences.append((label, format_value(old_median), format_value(new_median)))
    return differences


def _incomparable_reason(runs: Sequence[ComparedRun], kind: StepKind | None) -> str | None:
    """Return why the steps of the runs cannot be compared; None if they can."""
    for run in runs:
        if not run.steps_by_kind:
            return f"{run.name} has no step to compare"
    if kind is None:
        return incomparable_reason({run.name: run.steps_by_kind for run in runs})
    few = min(runs, key=lambda run: run.steps_by_kind[kind])
    steps = few.steps_by_kind[kind]
    if steps < MIN_STEPS:
        return f"{few.name} has only {format_count_with_noun(steps, 'step')} to compare, fewer than {MIN_STEPS}"
    return None


def _quantiles(tallies: Sequence[Tally], series: str, fraction: float) -> list[float]:
    values = (fine_quantile(tally.stat(series).counts, fraction) for tally in tallies)
    return [value for value in values if value is not None]


def _compare_metric(
    metric: Metric,
    values: tuple[Sequence[float | None], Sequence[float | None]],
    quantiles: Sequence[Sequence[float]] | None,
    part_s: int | None,
) -> ComparedMetric:
    """Compare one metric. `quantiles`: if it is a quantile, its values over runs or over parts of `part_s`."""
    for side, side_values in zip(SIDES, values, strict=True):
        unknown = sum(value is None for value in side_values)
        if unknown:
            runs_text = "" if len(side_values) == 1 else f"{unknown} of {len(side_values)} runs of "
            return ComparedMetric(metric, values, None, f"none in {runs_text}{side}")
    before, after = quantiles or [[value or 0.0 for value in side] for side in values]
    if min(*before, *after) <= 0:
        return ComparedMetric(metric, values, None, "there is no ratio to nothing")
    has_parts = quantiles is not None and part_s is not None
    change = estimate_change(before, after, in_order=has_parts, is_exact=quantiles is None)
    missing = None
    if change.low is None:
        counts, noun = f"{len(before)} vs. {len(after)}", f"parts of {part_s} s" if has_parts else "runs"
        if change.least is not None:
            missing = f"{counts} {noun} have no 95% interval"
        elif has_parts:
            missing = f"the runs are too short: {counts} {noun}"
        elif len(before) == len(after) == 1:
            missing = "one value per side has no interval"
        else:
            orders = comb(len(before) + len(after), len(before))
            missing = f"too few {noun} ({counts}): 1 ordering in {orders} separates the sides by chance"
    return ComparedMetric(metric, values, change, missing)


def _reason(
    step: ComparedMetric | None, before: Sequence[Tally], after: Sequence[Tally]
) -> tuple[str, float | None, float | None] | None:
    """Return the phase that changed most, with its medians before and after.

    None if the step time has not changed, or no phase has changed in the same direction.
    """
    if step is None or step.change is None or not step.change.sign:
        return None
    times = []
    for side in (before, after):
        phases_by_run = [
            phase_values(compute_step_stats("", tally=tally, rate=None), lambda phase: phase.median_ns)
            for tally in side
        ]
        names = {name for phases in phases_by_run for name in phases}
        times.append({name: median(phases.get(name, 0.0) for phases in phases_by_run) for name in names})
    name = phase_with_largest_change(*times, slower=step.change.sign > 0)
    old, new = times
    return None if name is None else (name, old.get(name), new.get(name))


# ------------------------------------------------------------------------------------------------ words


def format_change(ratio: float | None) -> str:
    """Return a ratio as a change: "+4.2%", "-12%", "2.40×"."""
    if ratio is None:
        return UNKNOWN
    change_pct = (ratio - 1) * 100
    if abs(change_pct) < 0.05:
        return "0.0%"
    if change_pct >= 100:
        return format_factor(ratio)
    return f"{change_pct:+.0f}%" if abs(change_pct) >= 9.95 else f"{change_pct:+.1f}%"


def format_interval(change: Change) -> str:
    """Return the interval with its level: "+1.2% to +3.4% (95%)"."""
    if change.interval is None:
        return "no interval"
    low, high = change.interval
    return f"{format_change(low)} to {format_change(high)} ({'90' if change.low is None else '95'}%)"


def format_bounds(change: Change) -> str:
    """Return the one-sided bounds: "at least +1.2%, at most +3.4%, 95% each"."""
    return f"at least {format_change(change.least)}, at most {format_change(change.most)}, 95% each"


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
    if change.low is None or change.high is None:
        return f"inconclusive: {step.missing}; {step_time_text(comparison)}"
    is_wide = change.low < 1 / MAX_UNCERTAINTY or change.high > MAX_UNCERTAINTY
    verdict = "inconclusive, the interval is too wide" if is_wide else "no difference shows"
    return f"{verdict}: {step_time_text(comparison)}"


def step_time_text(comparison: RunComparison) -> str:
    """Return the step time on both sides, its change with the interval, and the phase with most of it, as text."""
    step = comparison.compared.get(STEP)
    if step is None or step.change is None:
        return ""
    change = step.change
    before, after = (step.figure.format(step.typical_value(side)) for side in (0, 1))
    if change.interval is None:
        bounds_text = "no interval"
    elif change.low is None:
        bounds_text = f"one-sided bounds: {format_bounds(change)}"
    else:
        bounds_text = f"95% interval {format_change(change.low)} to {format_change(change.high)}"
    text = f"from {before} to {after} per step, {format_change(change.ratio)} ({bounds_text})"
    if comparison.reason is not None:
        name, old, new = comparison.reason
        text += f"; most of the change is in {name}: from {duration_or_none(old)} to {duration_or_none(new)}"
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
    return [f"Equal runs differ (slowest vs. fastest median step): {', '.join(texts)}."] if texts else []


# ------------------------------------------------------------------------------------------------ thresholds


class Threshold(NamedTuple):
    """A metric that may grow by at most `limit` (0.05: 5%)."""

    figure: str
    limit: float


class Judgment(NamedTuple):
    """The outcome of a comparison for one threshold."""

    threshold: Threshold
    outcome: Outcome
    text: str


def judge_threshold(comparison: RunComparison, threshold: Threshold, *, anyway: bool = False) -> Judgment:
    """Judge one metric. `anyway`: also if the runs are not comparable.

    Slower: the ratio is above the threshold, and its lower 95% bound is above 1. Not slower: the upper 95% bound of
    the ratio is below the threshold. Anything else is inconclusive, so a few runs that show nothing do not pass.
    """
    name = threshold.figure
    if name == "memory" and name not in comparison.compared:
        name = "host_memory"
    label = next(metric.label.strip() for metric in (*STEP_METRICS, *RUN_METRICS) if metric.name == name)
    limit = format_change(1 + threshold.limit)

    def judgment(outcome: Outcome, reason: str) -> Judgment:
        word = outcome if name not in ("memory", "host_memory") else outcome.replace("slower", "larger")
        return Judgment(threshold, outcome, f"{word} ({label}, limit {limit}): {reason}")

    differences = [f"{aspect} ({a}, {b})" for aspect, a, b in comparison.differences if aspect in NOT_COMPARABLE]
    if differences and not anyway:
        return judgment("inconclusive", f"not comparable: {', '.join(differences)}; --anyway compares them")
    row = comparison.compared.get(name)
    if comparison.missing is not None or row is None:
        return judgment("inconclusive", comparison.missing or "it is unknown in these runs")
    change = row.change
    if change is None or change.least is None or change.most is None:
        return judgment("inconclusive", row.missing or "it has no interval")
    bounds_text = f"{format_change(change.ratio)} (one-sided bounds: {format_bounds(change)})"
    if change.least > 1 and change.ratio > 1 + threshold.limit:
        return judgment("slower", bounds_text)
    if change.most < 1 + threshold.limit:
        return judgment("not slower", bounds_text)
    hint = "; on a busy machine, --phase fast_step or cpu_step may show more" if name == STEP else ""
    return judgment("inconclusive", f"{bounds_text}; more or longer runs would narrow this{hint}")


def exit_status_of(judgments: Sequence[Judgment]) -> int:
    """Return the exit status: 4 if a metric grew too much, else 3 if one is inconclusive, else 0."""
    return max((_EXIT_STATUSES[judgment.outcome] for judgment in judgments), default=0)


def outcome_sentence(comparison: RunComparison, judgments: Sequence[Judgment]) -> str:
    """Return the judgments in a sentence; without judgments, the result of the comparison."""
    return "; ".join(judgment.text for judgment in judgments) or result_sentence(comparison)

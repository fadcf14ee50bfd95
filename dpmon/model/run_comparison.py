"""Compares runs: each figure on both sides, how it changed, and which phase explains most of the change. Pure.

With one run on each side, stretches of the two runs are compared. The interval is then about these two runs only: it
does not include how much equal runs differ. With several runs on a side, each run counts as one value, its median. Only
steps of one kind are compared, as for dp and single. Settling steps, and stretches with a pause or a stall, are left
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
"""The figure that is a sum over the ranks."""
MEASURED_CONDITIONS: Mapping[str, tuple[float, Callable[[float], str]]] = {
    "clock of the GPUs": (30.0, "{:.0f} MHz".format),
    "throttled": (0.05, format_percent),
    "processors busy with other work": (0.5, "{:.1f}".format),
}
"""Measured conditions: the smallest difference to show, and how to write a value."""
SLOWER, NOT_SLOWER, INCONCLUSIVE = 4, 0, 3
"""Exit statuses."""
GATE_METRICS = (*(figure.name for figure in STEP_METRICS if not figure.name.endswith("_device")), "cpu_step")
Outcome = Literal["slower", "not slower", "inconclusive"]
_EXIT_STATUSES: dict[Outcome, int] = {"slower": SLOWER, "not slower": NOT_SLOWER, "inconclusive": INCONCLUSIVE}


class ComparedMetric(NamedTuple):
    """One figure on both sides, with a value for each run; `missing`: why there is no ratio, or no interval."""

    figure: Metric
    values: tuple[Sequence[float | None], Sequence[float | None]]
    change: Change | None
    missing: str | None = None

    def typical_value(self, side: int) -> float | None:
        """The value of the run on a side, or the median of its runs."""
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
    """By name: the figures of STEP_METRICS and RUN_METRICS that are known of a run."""
    reason: tuple[str, float | None, float | None] | None
    """The phase that changed most in the direction of the step, with its time (ns) on both sides."""

    @property
    def is_pair(self) -> bool:
        """Whether there is one run on each side."""
        return len(self.sides[0]) == len(self.sides[1]) == 1

    def run_to_run_spread(self, side: int) -> float | None:
        """How much slower the slowest run of a side is than its fastest one (0.02: 2%); None for a single run."""
        step = self.compared.get(STEP)
        known = [value for value in step.values[side] if value] if step is not None else []
        return max(known) / min(known) - 1 if len(known) > 1 else None


def compare_runs(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> RunComparison:
    """Compare the runs of two sides."""
    runs = (*before, *after)
    kind = common_kind(run.kinds for run in runs)
    missing = _incomparable_reason(runs, kind)
    stretches = [run.stretches(kind) if kind is not None and missing is None else [] for run in runs]
    wholes = [run.steps(None if missing else kind) for run in runs]
    pair, split = len(runs) == 2, len(before)
    groups = stretches if pair else (wholes[:split], wholes[split:])
    found: dict[str, ComparedMetric] = {}
    for figure, values in known_metrics(runs, wholes):
        quantiles = (
            None if figure.series is None else [_quantiles(each, figure.series, figure.fraction) for each in groups]
        )
        sides = values[:split], values[split:]
        found[figure.name] = _compare_metric(figure, sides, quantiles, runs[0].stretch_s if pair else None)
    if len({one.set_up["ranks"] for one in runs}) > 1 and any(one.ranks_seen for one in runs) and SUM_METRIC in found:
        found[SUM_METRIC] = found[SUM_METRIC]._replace(change=None, missing="a sum over the ranks seen, which differ")
    reason = _reason(found.get(STEP), wholes[:split], wholes[split:])
    return RunComparison((before, after), kind, missing, setup_differences(before, after), found, reason)


def known_metrics(
    runs: Sequence[ComparedRun], wholes: Sequence[Tally]
) -> Iterator[tuple[Metric, Sequence[float | None]]]:
    """Each figure that is known of a run, with its value for each run. `wholes`: the steps of each run."""
    for figure in (*STEP_METRICS, *RUN_METRICS):
        if figure.series is None:
            values = [run.values.get(figure.name) for run in runs]
        else:
            values = [figure.value_over(whole) for whole in wholes]
        if any(value is not None for value in values):
            yield figure, values


def setup_differences(before: Sequence[ComparedRun], after: Sequence[ComparedRun]) -> list[tuple[str, str, str]]:
    """What differs between two sides, and its value on each."""
    found = []
    for what in before[0].set_up:
        sides = [dict.fromkeys(value for one in side if (value := one.set_up[what])) for side in (before, after)]
        if len(sides[0] | sides[1]) > 1 or (what == "state" and [*sides[0]] != ["finished"]):
            found.append((what, ", ".join(sides[0]) or UNKNOWN, ", ".join(sides[1]) or UNKNOWN))
    for what, (least, words) in MEASURED_CONDITIONS.items():
        values = [[one.measured[what] for one in side if what in one.measured] for side in (before, after)]
        if all(values) and abs(median(values[0]) - median(values[1])) >= least:
            found.append((what, words(median(values[0])), words(median(values[1]))))
    return found


def _incomparable_reason(runs: Sequence[ComparedRun], kind: StepKind | None) -> str | None:
    for run in runs:
        if not run.kinds:
            return f"{run.name} has no step to compare"
    if kind is None:
        return incomparable_reason({run.name: run.kinds for run in runs})
    few = min(runs, key=lambda run: run.kinds[kind])
    if few.kinds[kind] < MIN_STEPS:
        return (
            f"{few.name} has only {format_count_with_noun(few.kinds[kind], 'step')} to compare, fewer than {MIN_STEPS}"
        )
    return None


def _quantiles(tallies: Sequence[Tally], series: str, fraction: float) -> list[float]:
    found = (fine_quantile(tally.stat(series).counts, fraction) for tally in tallies)
    return [value for value in found if value is not None]


def _compare_metric(
    figure: Metric,
    values: tuple[Sequence[float | None], Sequence[float | None]],
    quantiles: Sequence[Sequence[float]] | None,
    stretch_s: int | None,
) -> ComparedMetric:
    """`quantiles`: the values to compare, if they are quantiles: of runs, or of stretches of `stretch_s` seconds."""
    for side, each in zip(SIDES, values, strict=True):
        unknown = sum(value is None for value in each)
        if unknown:
            which = "" if len(each) == 1 else f"{unknown} of {len(each)} runs of "
            return ComparedMetric(figure, values, None, f"none in {which}{side}")
    before, after = quantiles or [[value or 0.0 for value in side] for side in values]
    if min(*before, *after) <= 0:
        return ComparedMetric(figure, values, None, "there is no ratio to nothing")
    stretched = quantiles is not None and stretch_s is not None
    found = estimate_change(before, after, in_order=stretched, exact=quantiles is None)
    missing = None
    if found.low is None:
        counts, of = f"{len(before)} against {len(after)}", f"parts of {stretch_s} s" if stretched else "runs"
        if found.least is not None:
            missing = f"{counts} {of} have no 95% interval"
        elif stretched:
            missing = f"the runs are too short: {counts} {of}"
        elif len(before) == len(after) == 1:
            missing = "one value a side has no interval"
        else:
            often = comb(len(before) + len(after), len(before))
            missing = f"{counts} {of} are too few: by chance alone, one order in {often} puts a whole side on top"
    return ComparedMetric(figure, values, found, missing)


def _reason(
    step: ComparedMetric | None, before: Sequence[Tally], after: Sequence[Tally]
) -> tuple[str, float | None, float | None] | None:
    if step is None or step.change is None or not step.change.sign:
        return None
    took = []
    for side in (before, after):
        each = [
            phase_values(compute_step_stats("", False, tally, None), lambda phase: phase.median_ns) for tally in side
        ]
        names = {name for phases in each for name in phases}
        took.append({name: median(phases.get(name, 0.0) for phases in each) for name in names})
    name = phase_with_largest_change(*took, slower=step.change.sign > 0)
    return None if name is None else (name, took[0].get(name), took[1].get(name))


# ------------------------------------------------------------------------------------------------ words


def format_change(ratio: float | None) -> str:
    """A ratio as a change: "+4.2%", "-12%", "2.40×"."""
    if ratio is None:
        return UNKNOWN
    part = (ratio - 1) * 100
    if abs(part) < 0.05:
        return "0.0%"
    return format_factor(ratio) if part >= 100 else f"{part:+.0f}%" if abs(part) >= 9.95 else f"{part:+.1f}%"


def format_interval(found: Change) -> str:
    """The interval with its level: "+1.2% to +3.4% (95%)"."""
    if found.interval is None:
        return "no interval"
    low, high = found.interval
    return f"{format_change(low)} to {format_change(high)} ({'90' if found.low is None else '95'}%)"


def format_bounds(found: Change) -> str:
    """The single bounds: "at least +1.2%, at most +3.4%, 95% each"."""
    return f"at least {format_change(found.least)}, at most {format_change(found.most)}, 95% each"


def result_sentence(found: RunComparison) -> str:
    """The result, in one or two sentences."""
    step = found.compared.get(STEP)
    if found.missing is not None or step is None:
        return f"inconclusive: {found.missing or 'no step was timed'}"
    told = step.change
    if told is None:
        return f"inconclusive: {step.missing}"
    if told.sign:
        return f"B is {'slower' if told.sign > 0 else 'faster'}: {step_time_text(found)}"
    if told.low is None or told.high is None:
        return f"inconclusive: {step.missing}; {step_time_text(found)}"
    wide = told.low < 1 / MAX_UNCERTAINTY or told.high > MAX_UNCERTAINTY
    return f"{'inconclusive, the interval is too wide' if wide else 'no difference shows'}: {step_time_text(found)}"


def step_time_text(found: RunComparison) -> str:
    """The time of a step on both sides, its change with the interval, and the phase with most of it; no verdict."""
    step = found.compared.get(STEP)
    if step is None or step.change is None:
        return ""
    told = step.change
    a, b = (step.figure.format(step.typical_value(side)) for side in (0, 1))
    if told.interval is None:
        sure = "no interval"
    elif told.low is None:
        sure = f"one-sided bounds: {format_bounds(told)}"
    else:
        sure = f"95% interval {format_change(told.low)} to {format_change(told.high)}"
    text = f"from {a} to {b} a step, {format_change(told.ratio)} ({sure})"
    if found.reason is not None:
        name, old, new = found.reason
        text += f"; most of the change is in {name}: from {duration_or_none(old)} to {duration_or_none(new)}"
    return text


def scope_notes(found: RunComparison) -> list[str]:
    """Which runs the interval is about, and how much equal runs differ."""
    if found.is_pair:
        return [
            "One run on each side: this speaks for this pair only. Equal runs differ from each other, and the interval"
            " does not include that; give several runs a side (A1 A2 A3 -- B1 B2 B3)."
        ]
    known = [(side, found.run_to_run_spread(place)) for place, side in enumerate(SIDES)]
    texts = [f"{side} by {part * 100:.{int(part < 0.1)}f}%" for side, part in known if part is not None]
    return [f"Equal runs differ (slowest against fastest median step): {', '.join(texts)}."] if texts else []


# ------------------------------------------------------------------------------------------------ thresholds


class Threshold(NamedTuple):
    """A figure that may grow by at most `limit` (0.05: 5%)."""

    figure: str
    limit: float


class Judgment(NamedTuple):
    """What a comparison says about one threshold."""

    threshold: Threshold
    outcome: Outcome
    text: str


def judge_threshold(found: RunComparison, threshold: Threshold, *, anyway: bool = False) -> Judgment:
    """Judge one figure. `anyway`: also if the runs are not comparable.

    Slower: the ratio is above the threshold, and its lower 95% bound is above 1. Not slower: the upper 95% bound of
    the ratio is below the threshold. Anything else is inconclusive: a few runs that show nothing do not pass.
    """
    name = threshold.figure
    if name == "memory" and name not in found.compared:
        name = "host_memory"
    label = next(figure.label.strip() for figure in (*STEP_METRICS, *RUN_METRICS) if figure.name == name)
    limit = format_change(1 + threshold.limit)

    def judgment(outcome: Outcome, why: str) -> Judgment:
        word = outcome if name not in ("memory", "host_memory") else outcome.replace("slower", "larger")
        return Judgment(threshold, outcome, f"{word} ({label}, limit {limit}): {why}")

    unlike = [f"{what} ({a}, {b})" for what, a, b in found.differences if what in NOT_COMPARABLE]
    if unlike and not anyway:
        return judgment("inconclusive", f"not comparable: {', '.join(unlike)}; --anyway compares them")
    row = found.compared.get(name)
    if found.missing is not None or row is None:
        return judgment("inconclusive", found.missing or "it is unknown in these runs")
    told = row.change
    if told is None or told.least is None or told.most is None:
        return judgment("inconclusive", row.missing or "it has no interval")
    sure = f"{format_change(told.ratio)} (one-sided bounds: {format_bounds(told)})"
    if told.least > 1 and told.ratio > 1 + threshold.limit:
        return judgment("slower", sure)
    if told.most < 1 + threshold.limit:
        return judgment("not slower", sure)
    other = "; on a busy machine, --phase fast_step or cpu_step may show more" if name == STEP else ""
    return judgment("inconclusive", f"{sure}; more or longer runs would narrow this{other}")


def exit_status_of(judgments: Sequence[Judgment]) -> int:
    """The exit status: 4 if a figure grew too much, else 3 if one is inconclusive, else 0."""
    return max((_EXIT_STATUSES[one.outcome] for one in judgments), default=0)


def outcome_sentence(found: RunComparison, judgments: Sequence[Judgment]) -> str:
    """The judgments, or without any the result of the comparison, in a sentence."""
    return "; ".join(one.text for one in judgments) or result_sentence(found)

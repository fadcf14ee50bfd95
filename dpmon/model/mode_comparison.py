"""Compares dp with single: the speed-up with its interval and its main reason, or what is missing for a verdict.

Only steps of the main kind with the same number of samples are compared, without warm-up steps. The speed-up is the
ratio of the median step times, with its interval (dpmon.model.comparison_stats).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dpmon.model.comparison_stats import Interval, median_interval, ratio_of_estimates
from dpmon.record.schema import REST, WARM_UP, step_kind
from dpmon.store.step_stats import PhaseStats, StatsWindow, StepStats, compute_step_stats
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES, TallyKey
from dpmon.text.formatting import format_count_with_noun, format_duration, format_factor, format_percent

MODES_COMPARED = ("single", "dp")
MIN_STEPS = 20
"""Fewest steps of each mode for a verdict."""
MAX_UNCERTAINTY = 1.25
"""The modes count as equally fast only if both ends of the interval are within this factor of equal speed."""
MIN_COST_SHARE = 0.05
"""Smallest share of the step at which copying is mentioned."""
_PARALLEL_APPLY = "parallel_apply"
COPY_PHASES = ("scatter", "replicate", "gather")
"""Phases that only dp has."""


class Reason(NamedTuple):
    """A phase that explains a verdict, its share of the dp step, and its median in each mode (ns or None)."""

    phase: str
    share: float | None
    dp_ns: float | None
    single_ns: float | None


@dataclass(frozen=True)
class Comparison:
    """Both modes side by side. `missing` says why there is no speed-up; otherwise `outcome` describes it."""

    sides: Mapping[str, StepStats] = field(default_factory=dict)
    """The metrics of each mode over the compared steps; the rate is over all steps of the mode."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """All steps of the main kind of each mode."""
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By mode and device, the peak of allocated memory (bytes), if it rose in this mode."""
    devices: tuple[str, ...] = ()
    """The devices of dp."""
    virtual: bool = False
    samples: int | None = None
    """Samples in each compared step; None if unknown, or if nothing is compared."""
    left_out: int = 0
    """Omitted steps, which have another number of samples."""
    speedup: Interval | None = None
    efficiency: float | None = None
    """Speed-up per device; None for virtual replicas, which share devices."""
    outcome: str | None = None
    """The result: "faster", "slower", or "even" if the interval contains 1."""
    reasons: tuple[Reason, ...] = ()
    """The phases that explain most of the difference, the largest change first."""
    cost: Reason | None = None
    """The copying that takes the largest share of the dp step."""
    missing: str | None = None

    @property
    def uncertain(self) -> bool:
        """Whether the interval contains 1, but is too wide to call the modes equally fast."""
        if self.outcome != "even" or self.speedup is None:
            return False
        return self.speedup.low < 1 / MAX_UNCERTAINTY or self.speedup.high > MAX_UNCERTAINTY


# ------------------------------------------------------------------------------------------------ comparing


def is_compared(key: TallyKey, main_kind: int) -> bool:
    """Return whether the steps of a tally are compared: those of the main kind, without warm-up steps."""
    return not key.kind & WARM_UP and step_kind(key.kind) == main_kind


def compare_modes(
    window: StatsWindow,
    process: int,
    *,
    devices: Sequence[str] = (),
    virtual: bool = False,
) -> Comparison:
    """Compare the "dp" steps of one process with its "single" steps. `devices`: the devices of dp."""
    seen = {mode: steps for mode in MODES_COMPARED if (steps := window.tally(mode, process=process).steps)}
    steps_by_batch: dict[str, Counter[int]] = {mode: Counter() for mode in seen}
    for key, tally in window.tallies.items():
        if key.process == process and key.mode in steps_by_batch and is_compared(key, window.main_kind):
            steps_by_batch[key.mode][key.batch] += tally.steps
    has_both = len(seen) == 2
    batch = _common_batch(steps_by_batch.values()) if has_both else None
    compared = {mode: window.tally(mode, None, process, without_warmup=has_both, batch=batch) for mode in seen}
    sides = {
        mode: compute_step_stats(mode, tally=tally, rate=window.rate(mode, process=process))
        for mode, tally in compared.items()
    }
    base = Comparison(sides=sides, seen=seen, devices=tuple(devices), virtual=virtual)
    if not has_both:
        unseen = [mode for mode in MODES_COMPARED if mode not in seen]
        return replace(base, missing=f"{' and '.join(unseen)} not seen yet")
    if batch is None:
        return replace(base, missing=_incomparable_reason(steps_by_batch))
    needed = [
        f"{format_count_with_noun(MIN_STEPS - counts[batch], 'more step')} in {mode}"
        for mode, counts in steps_by_batch.items()
        if counts[batch] < MIN_STEPS
    ]
    if needed:
        return replace(base, missing=f"no verdict yet: it needs {' and '.join(needed)}")
    base = replace(
        base,
        samples=None if batch == NO_SAMPLES else batch,
        left_out=sum(counts.total() - counts[batch] for counts in steps_by_batch.values()),
    )

    parts: dict[str, list[Tally]] = {mode: [] for mode in seen}
    for key, tally in window.rows(process):
        if key.mode in seen and key.batch == batch and is_compared(key, window.main_kind):
            parts[key.mode].append(tally)
    return _with_verdict(base, compared, parts)


def first_with_both(window: StatsWindow) -> int:
    """Return the first process with steps in both modes, or else the first."""
    modes: dict[int, set[str]] = {process: set() for process in window.processes}
    for key in window.tallies:
        if step_kind(key.kind) == window.main_kind:
            modes.setdefault(key.process, set()).add(key.mode)
    with_both = (process for process, modes_of_process in modes.items() if modes_of_process.issuperset(MODES_COMPARED))
    return next(with_both, min(modes, default=0))


def _common_batch(sides: Iterable[Counter[int]]) -> int | None:
    """Return the number of samples of the steps to compare; None if the sides share none.

    `sides`: number of steps by their number of samples, without warm-up steps. The most frequent number on all sides
    comes first. If a side has no such steps yet, it is the most frequent number of the others.
    """
    sides = list(sides)
    shared = {
        batch: min(side[batch] for side in sides)
        for batch in sides[0]
        if batch != OTHER_SIZES and all(side[batch] for side in sides)
    }
    if shared:
        return max(shared, key=lambda batch: (shared[batch], batch))
    if all(sides):
        return None
    total = sum(sides, Counter[int]())
    return max(total, key=lambda batch: total[batch], default=NO_SAMPLES)


def _incomparable_reason(steps_by_batch: Mapping[str, Counter[int]]) -> str:
    """Return why no step of one mode can be compared with a step of the other."""
    most_frequent = {mode: max(counts, key=lambda batch: counts[batch]) for mode, counts in steps_by_batch.items()}
    names = {NO_SAMPLES: "an unknown number of", OTHER_SIZES: "changing numbers of"}
    sizes = ", ".join(f"{names.get(batch, batch)} samples per step in {mode}" for mode, batch in most_frequent.items())
    return f"no verdict: the batches are not of the same size ({sizes})"


def _with_verdict(base: Comparison, tallies: Mapping[str, Tally], parts: Mapping[str, Sequence[Tally]]) -> Comparison:
    single, dp = (median_interval(tallies[mode], parts[mode]) for mode in MODES_COMPARED)
    speedup = ratio_of_estimates(single, dp) if single is not None and dp is not None else None
    if speedup is None:
        return replace(base, missing="no verdict: a step took no measurable time")
    outcome = "even"
    if speedup.low > 1:
        outcome = "faster"
    elif speedup.high < 1:
        outcome = "slower"
    single_mean_ns, dp_mean_ns = (base.sides[mode].mean_ns or 0.0 for mode in MODES_COMPARED)
    if outcome != "even" and (single_mean_ns > dp_mean_ns) != (outcome == "faster"):
        return replace(base, missing="no verdict: steps are so uneven that medians and means name different modes")
    efficiency = speedup.value / len(base.devices) if base.devices and not base.virtual else None
    reasons, cost = _main_reasons(base.sides, outcome), _main_dp_cost(base.sides["dp"])
    return replace(base, efficiency=efficiency, reasons=reasons, cost=cost, speedup=speedup, outcome=outcome)


def _main_dp_cost(dp: StepStats) -> Reason | None:
    copies = [phase for phase in dp.phases if phase.name in COPY_PHASES and phase.share is not None]
    largest = max(copies, key=lambda phase: phase.share or 0, default=None)
    return Reason(largest.name, largest.share, largest.median_ns, None) if largest is not None else None


def _main_reasons(sides: Mapping[str, StepStats], outcome: str) -> tuple[Reason, ...]:
    """Return the fewest phases that explain most of the difference; the forward of the replicas counts as forward.

    A phase that only one mode has is no time in the other.
    """
    if outcome == "even":  # the copying, if its share is large enough to mention
        cost = _main_dp_cost(sides["dp"])
        return (cost,) if cost is not None and (cost.share or 0) >= MIN_COST_SHARE else ()
    single, dp = (_phase_values(sides[mode], lambda phase: phase.median_ns) for mode in MODES_COMPARED)
    sign = 1 if outcome == "slower" else -1
    changes = {name: sign * (dp.get(name, 0.0) - single.get(name, 0.0)) for name in sorted(dp.keys() | single.keys())}
    shares = _phase_values(sides["dp"], lambda phase: phase.share)
    reasons: list[Reason] = []
    unexplained_ns = sum(changes.values()) / 2
    for name in sorted(changes, key=changes.__getitem__, reverse=True):
        if changes[name] <= 0 or (reasons and unexplained_ns <= 0):
            break
        reasons.append(Reason(name, shares.get(name), dp.get(name), single.get(name)))
        unexplained_ns -= changes[name]
    return tuple(reasons)


def _phase_values(side: StepStats, metric_of: Callable[[PhaseStats], float | None]) -> dict[str, float]:
    """Return a metric of each phase that ran in most steps. `forward` includes the forward of the replicas."""
    values: dict[str, float] = {}
    for phase in side.phases:
        value = metric_of(phase)
        if value is not None and phase.name != "forward" and 2 * phase.ran > side.steps:
            name = "forward" if phase.name in (REST, _PARALLEL_APPLY) else phase.name
            values[name] = values.get(name, 0.0) + value
    return values


# ------------------------------------------------------------------------------------------------ words


def verdict_sentence(comparison: Comparison) -> str | None:
    """Return the verdict with its reason, in one sentence; None without a verdict."""
    if comparison.speedup is None:
        return None
    devices_text = f" over {len(comparison.devices)}" if comparison.devices else ""
    name = f"DataParallel{devices_text}{' virtual replicas' if comparison.virtual and comparison.devices else ''}"
    value, low, high = map(format_factor, comparison.speedup)
    reason = "" if comparison.uncertain else _reason_text(comparison)
    if comparison.uncertain:
        verdict = f"{name} is {low} to {high} as fast as one device: too uncertain for a verdict"
    elif comparison.outcome == "even":
        verdict = f"{name} makes no difference that shows ({low} to {high} as fast as one device)"
    else:
        verdict = f"{name} is {value} as fast as one device"
    return f"{verdict}: {reason}." if reason else f"{verdict}."


def _reason_text(comparison: Comparison) -> str:
    texts, cost = [_phase_text(comparison, reason) for reason in comparison.reasons], comparison.cost
    if texts and comparison.outcome == "faster" and cost is not None and (cost.share or 0) >= MIN_COST_SHARE:
        texts.append(f"{cost.phase} {_time_within_step(comparison, cost)}")
    return ", ".join(texts)


def _phase_text(comparison: Comparison, reason: Reason) -> str:
    if reason.phase in COPY_PHASES:
        return f"{reason.phase} takes {_time_within_step(comparison, reason)}"
    dp, single = duration_or_none(reason.dp_ns), duration_or_none(reason.single_ns)
    if reason.phase == "forward":
        # The names in panel 3. This includes starting the threads, so it is more than the forward of any replica.
        return f"parallel_apply and other forward take {dp}, forward on one device {single}"
    return f"{_PHRASES.get(reason.phase, reason.phase)} takes {dp}, on one device {single}"


def _time_within_step(comparison: Comparison, reason: Reason) -> str:
    """Return the median time of a phase in a median dp step, as text.

    The verdict compares medians, whereas a share refers to the mean step.
    """
    step = comparison.sides["dp"].median_ns
    if step is None or reason.dp_ns is None:
        return f"{format_percent(reason.share)} of the time"
    return f"{format_duration(reason.dp_ns)} of a {format_duration(step)} step"


_PHRASES = {"data": "waiting for data", "other": "the script's own work"}


def duration_or_none(ns: float | None) -> str:
    """Return a duration as text; "none" for a phase that did not run."""
    return "none" if ns is None else format_duration(ns)

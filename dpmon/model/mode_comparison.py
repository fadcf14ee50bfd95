"""Compares dp with single: the speed-up with its interval and its main reason, or what is missing for a verdict.

Only steps of the main kind with the same number of samples are compared, without warm-up steps. The speed-up is the
ratio of the median step times, with its interval (dpmon.model.comparison_stats).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dpmon.model.comparison_stats import Interval, median_interval, ratio_of_estimates
from dpmon.record.schema import REST, WARM_UP, step_kind
from dpmon.store.step_stats import StatsWindow, StepStats, compute_step_stats
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES, TallyKey
from dpmon.text.formatting import format_count_with_noun, format_duration, format_factor

MODES_COMPARED = ("single", "dp")
MIN_STEPS = 20
"""Fewest steps of each mode for a verdict."""
MIN_COST_SHARE = 0.05
"""Smallest share of the step at which copying is mentioned."""
COPY_PHASES = ("scatter", "replicate", "gather")
"""Phases that only dp has."""
_PHRASES = {"data": "waiting for data", "other": "the script's own work"}
_OUTCOMES = {1: "faster", 0: "even", -1: "slower"}


@dataclass(frozen=True)
class Comparison:
    """Both modes side by side. `missing` says why there is no speed-up."""

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
    reason: str = ""
    """The phases that explain most of the difference, and the copying that costs most, in words."""
    missing: str | None = None

    @property
    def outcome(self) -> str | None:
        """The result: "faster", "slower", or "even" if the interval contains 1; None without a speed-up."""
        return None if self.speedup is None else _OUTCOMES[self.speedup.sign]

    @property
    def uncertain(self) -> bool:
        """Whether the interval contains 1, but is too wide to call the modes equally fast."""
        return self.speedup is not None and not self.speedup.sign and not self.speedup.is_close_to_1

    @property
    def efficiency(self) -> float | None:
        """Speed-up per device; None for virtual replicas, which share devices."""
        if self.speedup is None or not self.devices or self.virtual:
            return None
        return self.speedup.value / len(self.devices)


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
    parts: dict[str, list[Tally]] = {mode: [] for mode in seen}
    for key, tally in window.rows(process):
        if key.mode in seen and key.batch == batch and is_compared(key, window.main_kind):
            parts[key.mode].append(tally)
    single, dp = (median_interval(compared[mode], parts[mode]) for mode in MODES_COMPARED)
    speedup, missing = ratio_of_estimates(single, dp), None
    single_mean_ns, dp_mean_ns = (sides[mode].mean_ns or 0.0 for mode in MODES_COMPARED)
    if speedup is None:
        missing = "no verdict: a step took no measurable time"
    elif speedup.sign and (single_mean_ns > dp_mean_ns) != (speedup.sign > 0):
        speedup, missing = None, "no verdict: steps are so uneven that medians and means name different modes"
    return replace(
        base,
        samples=None if batch == NO_SAMPLES else batch,
        left_out=sum(counts.total() - counts[batch] for counts in steps_by_batch.values()),
        speedup=speedup,
        reason=_reason_text(sides, speedup.sign) if speedup is not None else "",
        missing=missing,
    )


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


# ------------------------------------------------------------------------------------------------ words


def _reason_text(sides: Mapping[str, StepStats], sign: int) -> str:
    """Return the fewest phases that explain most of the difference, and the copying with the largest share.

    The forward of the replicas counts as forward. A phase that only one mode has is no time in the other. `sign`: that
    of the speed-up.
    """
    step = format_duration(sides["dp"].median_ns)
    copies = [phase for phase in sides["dp"].phases if phase.name in COPY_PHASES]
    cost = max(copies, key=lambda phase: phase.share or 0, default=None)
    # The verdict compares medians, whereas a share refers to the mean step.
    cost_time = ""
    if cost is not None and (cost.share or 0) >= MIN_COST_SHARE:
        cost_time = f"{format_duration(cost.median_ns)} of a {step} step"
    if cost is not None and cost_time and not sign:
        return f"{cost.name} takes {cost_time}"
    single, dp = (_median_times(sides[mode]) for mode in MODES_COMPARED)
    saved = {name: sign * (single.get(name, 0.0) - dp.get(name, 0.0)) for name in sorted(dp.keys() | single.keys())}
    texts: list[str] = []
    unexplained_ns = sum(saved.values()) / 2
    for name in sorted(saved, key=saved.__getitem__, reverse=True):
        if saved[name] <= 0 or (texts and unexplained_ns <= 0):
            break
        unexplained_ns -= saved[name]
        dp_time, single_time = duration_or_none(dp.get(name)), duration_or_none(single.get(name))
        text = f"{_PHRASES.get(name, name)} takes {dp_time}, on one device {single_time}"
        if name in COPY_PHASES:
            text = f"{name} takes {dp_time} of a {step} step"
        elif name == "forward":
            # The names in panel 3. This includes starting the threads, so it is more than any replica's forward.
            text = f"parallel_apply and other forward take {dp_time}, forward on one device {single_time}"
        texts.append(text)
    if cost is not None and cost_time and texts and sign > 0:
        texts.append(f"{cost.name} {cost_time}")
    return ", ".join(texts)


def _median_times(side: StepStats) -> dict[str, float]:
    """Return the median of each phase that ran in most steps (ns). `forward` includes the forward of the replicas."""
    values: dict[str, float] = {}
    for phase in side.phases:
        if phase.median_ns is not None and phase.name != "forward" and 2 * phase.ran > side.steps:
            name = "forward" if phase.name in (REST, "parallel_apply") else phase.name
            values[name] = values.get(name, 0.0) + phase.median_ns
    return values


def verdict_sentence(comparison: Comparison) -> str | None:
    """Return the verdict with its reason, in one sentence; None without a verdict."""
    if comparison.speedup is None:
        return None
    name, devices = "DataParallel", len(comparison.devices)
    if devices:
        name += f" over {devices}{' virtual replicas' if comparison.virtual else ''}"
    value, low, high = map(format_factor, comparison.speedup)
    if comparison.uncertain:
        return f"{name} is {low} to {high} as fast as one device: too uncertain for a verdict."
    verdict = f"is {value} as fast as one device"
    if not comparison.speedup.sign:
        verdict = f"makes no difference that shows ({low} to {high} as fast as one device)"
    return f"{name} {verdict}: {comparison.reason}." if comparison.reason else f"{name} {verdict}."


def duration_or_none(ns: float | None) -> str:
    """Return a duration as text; "none" for a phase that did not run."""
    return "none" if ns is None else format_duration(ns)

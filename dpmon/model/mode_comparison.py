"""Compares dp with single: the speed-up with its interval and its main reason, or what is missing for a verdict. Pure.

Only steps of one kind are compared: the same number of samples, and all training or all evaluation. The first steps
after a change of mode are left out (caches fill, algorithms are chosen). The speed-up is the ratio of the median step
times, with its interval (dpmon.model.comparison_stats).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import log
from typing import NamedTuple

from dpmon.model.comparison_stats import Interval, median_interval, ratio_of_estimates
from dpmon.model.slow_steps import INPUT, WAITING_TEXT, StepUnevenness, uneven_steps
from dpmon.record.schema import EVALUATION, REST, SECOND, STEP, WARM_UP
from dpmon.store.query_results import LongStepRow
from dpmon.store.step_stats import PhaseStats, StatsWindow, StepStats, compute_step_stats
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, Tally, TallyKey
from dpmon.text.formatting import format_duration, format_factor, format_percent

MODES_COMPARED = ("single", "dp")
MIN_STEPS = 20
"""Fewest steps of each mode for a verdict."""
_CHANGES, _CHANGES_S = 12, 600
"""Most changes of mode with a speed-up of their own, and the newest time (s) in which they are looked for."""
CERTAIN = 1.25
"""The modes are called equally fast only if no end of the interval is further than this factor from equal speed."""
WORTH = 0.05
"""Smallest share of a step at which copying is mentioned."""
_APART = 1.1
"""Factor by which the ratio of means may lie outside the interval without a note."""
_APPLY = "parallel_apply"
COPIES = ("scatter", "replicate", "gather")
"""Phases that only dp has."""


class Reason(NamedTuple):
    """The reason for a verdict: the phase that changed most, its share of the dp step, its median in each mode (ns)."""

    phase: str
    share: float | None
    dp_ns: float | None
    single_ns: float | None


class ModeSpeedup(NamedTuple):
    """A change of mode: its time (ns since the run's start), and the speed-up from the steps before and after it."""

    t_ns: int
    to: str
    """The mode after it."""
    speedup: Interval


class Peak(NamedTuple):
    """The peak memory of a mode; only an upper bound if not `exact`: it may come from another mode."""

    bytes: int
    exact: bool


@dataclass(frozen=True)
class Comparison:
    """Both modes side by side. `missing` says why there is no speed-up; otherwise `outcome` describes it."""

    sides: Mapping[str, StepStats] = field(default_factory=dict)
    """The figures of each mode over the compared steps; the rate is over all steps of the mode."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """All steps of each mode, without evaluations if the mode trains."""
    memory: Mapping[str, Mapping[str, Peak]] = field(default_factory=dict)
    """Peak of allocated memory by mode and device."""
    devices: tuple[str, ...] = ()
    """The devices of dp."""
    virtual: bool = False
    samples: int | None = None
    """Samples in each compared step; None if unknown, or if nothing is compared."""
    left_out: int = 0
    """Omitted steps: another number of samples, or evaluation instead of training (or the reverse)."""
    left_other_kind: int = 0
    """Part of `left_out`: evaluation instead of training, or the reverse."""
    trained: bool = True
    """Whether the compared steps train."""
    speedup: Interval | None = None
    efficiency: float | None = None
    """Speed-up per device; None for virtual replicas, which share devices."""
    outcome: str | None = None
    """The result: "faster", "slower", or "even" if the interval contains 1."""
    by_mean: float | None = None
    """The ratio of the mean step times, if it differs much from the ratio of the medians."""
    uneven: tuple[str, StepUnevenness] | None = None
    """With `by_mean`: the mode with the more uneven steps, and how uneven; None if neither is uneven."""
    reason: Reason | None = None
    cost: Reason | None = None
    """The copying that takes the largest share of the dp step."""
    missing: str | None = None
    changes: tuple[ModeSpeedup, ...] = ()
    """The newest changes of mode with enough steps on both sides, if they were wanted."""

    @property
    def uncertain(self) -> bool:
        """Whether the interval contains 1, and factors too far from 1 to call the modes equally fast."""
        found = self.speedup
        return self.outcome == "even" and found is not None and (found.low < 1 / CERTAIN or found.high > CERTAIN)


# ------------------------------------------------------------------------------------------------ comparing


class StepKind(NamedTuple):
    """The steps that can be compared with each other: the same number of samples, all training or all evaluation."""

    batch: int
    trains: bool


def comparable_kind(key: TallyKey) -> StepKind | None:
    """The kind of the steps of a tally; None for the first ones after the start or after a change of mode."""
    return None if key.kind & WARM_UP else StepKind(key.batch, not key.kind & EVALUATION)


def compare_modes(
    window: StatsWindow,
    process: int,
    *,
    devices: Sequence[str] = (),
    virtual: bool = False,
    longest: Sequence[LongStepRow] = (),
    waits: Sequence[tuple[int, int]] = (),
    changes: bool = False,
) -> Comparison:
    """Compare the "dp" steps of one process with its "single" steps; `changes`: also around each change of mode.

    `devices`: the devices of dp. `longest`: the longest steps, which show why steps are uneven. `waits`: start and end
    (ns) of each wait for input.
    """
    tallies = {key: tally for key, tally in window.by_process.items() if key.process == process and tally.steps}
    there = [mode for mode in MODES_COMPARED if any(key.mode == mode for key in tallies)]
    kinds: dict[str, Counter[StepKind]] = {mode: Counter() for mode in there}
    for key, tally in tallies.items():
        found = comparable_kind(key)
        if key.mode in kinds and found is not None:
            kinds[key.mode][found] += tally.steps
    both = len(there) == 2
    kind = common_kind(kinds.values()) if both else None
    evaluation, batch = (False, None) if kind is None else (not kind.trains, kind.batch)
    taken = {mode: window.tally(mode, evaluation, process, settled=both, batch=batch) for mode in there}
    sides = {mode: compute_step_stats(mode, False, taken[mode], window.rate(mode, process=process)) for mode in there}
    seen = {mode: window.tally(mode, process=process).steps for mode in there}
    base = Comparison(sides=sides, seen=seen, devices=tuple(devices), virtual=virtual)
    lacking = {mode: MIN_STEPS - each[kind] for mode, each in kinds.items() if kind and each[kind] < MIN_STEPS}
    if not both or lacking:
        return replace(base, missing=_missing_steps_text(there, lacking))
    if kind is None:
        return replace(base, missing=incomparable_reason(kinds))
    passes = sum(count for each in kinds.values() for other, count in each.items() if other.trains != kind.trains)
    base = replace(
        base,
        samples=None if kind.batch == NO_SAMPLES else kind.batch,
        left_out=sum(each.total() - each[kind] for each in kinds.values()),
        left_other_kind=passes,
        trained=kind.trains,
    )
    parts: dict[str, list[Tally]] = {mode: [] for mode in there}
    for key, tally in window.rows(process):
        if key.mode in parts and comparable_kind(key) == kind:
            parts[key.mode].append(tally)
    if changes:
        last_s = max(tally.last_ns or 0 for tally in taken.values()) // SECOND
        rows = window.rows(process, last_s - _CHANGES_S, widest=1)
        settled = [(key.mode, tally) for key, tally in rows if comparable_kind(key) == kind]
        base = replace(base, changes=_speedup_per_switch(settled))
    long = [step for step in longest if step.process == process and bool(step.kind & EVALUATION) == evaluation]
    return _with_verdict(base, taken, parts, long, waits)


def _speedup_per_switch(rows: Sequence[tuple[str, Tally]]) -> tuple[ModeSpeedup, ...]:
    """The speed-up at each of the newest changes of mode. `rows`: modes and tallies of steps of one kind."""
    found: list[tuple[str, int, Interval | None]] = []
    ordered = sorted(rows, key=lambda row: row[1].first_ns or 0)
    for mode, own in groupby(ordered, key=lambda row: row[0]):
        parts, whole = [tally for _, tally in own], Tally()
        for part in parts:
            whole.merge(part)
        known = median_interval(whole, parts) if whole.steps >= MIN_STEPS else None
        found.append((mode, parts[0].first_ns or 0, known))
    changes: list[ModeSpeedup] = []
    for (_, _, before), (mode, t_ns, after) in pairwise(found):
        single, dp = (before, after) if mode == "dp" else (after, before)
        speedup = ratio_of_estimates(single, dp) if single is not None and dp is not None else None
        changes += [ModeSpeedup(t_ns, mode, speedup)] if speedup is not None else []
    return tuple(changes[-_CHANGES:])


def first_with_both(window: StatsWindow) -> int:
    """The first process with steps in both modes, or else the first."""
    modes: dict[int, set[str]] = {process: set() for process in window.processes}
    for key in window.by_process:
        modes.setdefault(key.process, set()).add(key.mode)
    both = (process for process, there in modes.items() if there.issuperset(MODES_COMPARED))
    return next(both, min(modes, default=0))


def common_kind(sides: Iterable[Counter[StepKind]]) -> StepKind | None:
    """The kind of step to compare; None if the sides share none. `sides`: number of settled steps by kind.

    A kind with enough steps on all sides comes first, then training, then the most frequent kind. If a side has no
    settled steps yet, this is the most frequent kind of the others.
    """
    sides = list(sides)
    shared = {
        kind: min(side[kind] for side in sides)
        for kind in sides[0]
        if kind.batch != OTHER_SIZES and all(side[kind] for side in sides)
    }
    if shared:
        return max(shared, key=lambda kind: (shared[kind] >= MIN_STEPS, kind.trains, shared[kind], kind.batch))
    if all(sides):
        return None
    whole = sum(sides, Counter[StepKind]())
    return next(iter(whole.most_common(1)), (StepKind(NO_SAMPLES, True), 0))[0]


def _missing_steps_text(there: Sequence[str], lacking: Mapping[str, int]) -> str:
    """The steps that are missing for a verdict."""
    unseen = [mode for mode in MODES_COMPARED if mode not in there]
    if unseen:
        return f"{' and '.join(unseen)} not seen yet"
    parts = [f"{count} more step{'' if count == 1 else 's'} in {mode}" for mode, count in lacking.items()]
    return f"no verdict yet: it needs {' and '.join(parts)}"


def incomparable_reason(kinds: Mapping[str, Counter[StepKind]]) -> str:
    """Why no step of one mode can be compared with a step of the other."""
    usual = {mode: max(found, key=lambda kind: found[kind]) for mode, found in kinds.items()}
    trains = {mode: kind.trains for mode, kind in usual.items()}
    if len(set(trains.values())) > 1:
        which = next(mode for mode, trained in trains.items() if not trained)
        return f"no verdict: the steps in {which} have no backward pass, the others do"
    names = {NO_SAMPLES: "an unknown number of", OTHER_SIZES: "changing numbers of"}
    sizes = ", ".join(f"{names.get(kind.batch, kind.batch)} samples a step in {mode}" for mode, kind in usual.items())
    return f"no verdict: the batches are not of the same size ({sizes})"


def _with_verdict(
    base: Comparison,
    taken: Mapping[str, Tally],
    parts: Mapping[str, Sequence[Tally]],
    longest: Sequence[LongStepRow],
    waits: Sequence[tuple[int, int]],
) -> Comparison:
    single, dp = (median_interval(taken[mode], parts[mode]) for mode in MODES_COMPARED)
    found = ratio_of_estimates(single, dp) if single is not None and dp is not None else None
    if found is None:
        return replace(base, missing="no verdict: a step took no measurable time")
    outcome = "faster" if found.low > 1 else "slower" if found.high < 1 else "even"
    each = found.value / len(base.devices) if base.devices and not base.virtual else None
    cost = _main_dp_cost(base.sides["dp"])
    reason = _main_reason(base.sides, outcome)
    means = _ratio_of_means(found, base.sides)
    why = _more_uneven_mode(taken, longest, waits) if means is not None else None
    base = replace(base, by_mean=means, uneven=why)
    return replace(base, speedup=found, efficiency=each, outcome=outcome, reason=reason, cost=cost)


def _ratio_of_means(found: Interval, sides: Mapping[str, StepStats]) -> float | None:
    """The ratio of the means, if it lies well outside the interval of the medians' ratio."""
    single, dp = (sides[mode].mean_ns for mode in MODES_COMPARED)
    means = single / dp if single and dp else found.value
    return None if found.low / _APART <= means <= found.high * _APART else means


def _more_uneven_mode(
    taken: Mapping[str, Tally], longest: Sequence[LongStepRow], waits: Sequence[tuple[int, int]]
) -> tuple[str, StepUnevenness] | None:
    """The mode with the larger gap between mean and median step; None if both gaps are small."""
    most, found = 0.0, None
    for mode in MODES_COMPARED:
        mean, center = taken[mode].stat(STEP).mean, taken[mode].median(STEP)
        how = uneven_steps(taken[mode], [step for step in longest if step.mode == mode], waits)
        if how is not None and mean and center and abs(log(mean / center)) > most:
            most, found = abs(log(mean / center)), (mode, how)
    return found


def _main_dp_cost(dp: StepStats) -> Reason | None:
    copies = [phase for phase in dp.phases if phase.name in COPIES and phase.share is not None]
    most = max(copies, key=lambda phase: phase.share or 0, default=None)
    return Reason(most.name, most.share, most.median_ns, None) if most is not None else None


def _main_reason(sides: Mapping[str, StepStats], outcome: str) -> Reason | None:
    """The phase that explains most of the difference; the replicas' forward counts as forward."""
    if outcome == "even":  # the copying, if its share is large enough to mention
        cost = _main_dp_cost(sides["dp"])
        return cost if cost is not None and (cost.share or 0) >= WORTH else None
    took = {mode: phase_values(side, lambda phase: phase.median_ns) for mode, side in sides.items()}
    name = phase_with_largest_change(took["single"], took["dp"], slower=outcome == "slower")
    if name is None:
        return None
    shares = phase_values(sides["dp"], lambda phase: phase.share)
    return Reason(name, shares.get(name), took["dp"].get(name), took["single"].get(name))


def phase_with_largest_change(before: Mapping[str, float], after: Mapping[str, float], *, slower: bool) -> str | None:
    """The phase whose time grew most (or, unless `slower`, fell most); None if none did."""
    sign = 1 if slower else -1
    changes = {name: sign * (after.get(name, 0.0) - before.get(name, 0.0)) for name in after.keys() | before.keys()}
    name = max(sorted(changes), key=lambda each: changes[each], default=None)
    return None if name is None or changes[name] <= 0 else name


def phase_values(side: StepStats, figure: Callable[[PhaseStats], float | None]) -> dict[str, float]:
    """A figure of each phase that ran. `forward` is the replicas' forward plus the rest of the forward."""
    found: dict[str, float] = {}
    for phase in side.phases:
        value = figure(phase)
        if value is not None and phase.name != "forward":
            name = "forward" if phase.name in (REST, _APPLY) else phase.name
            found[name] = found.get(name, 0.0) + value
    return found


# ------------------------------------------------------------------------------------------------ words


def verdict_sentence(found: Comparison) -> str | None:
    """The verdict with its reason, in one sentence; None without a verdict."""
    if found.speedup is None:
        return None
    over = f" over {len(found.devices)}" if found.devices else ""
    name = f"DataParallel{over}{' virtual replicas' if found.virtual and found.devices else ''}"
    value, low, high = map(format_factor, found.speedup)
    reason = "" if found.uncertain else _reason_text(found)
    if found.uncertain:
        head = f"{name} is {low} to {high} as fast as one device: too uncertain for a verdict"
    elif found.outcome == "even":
        head = f"{name} makes no difference that shows ({low} to {high} as fast as one device)"
    else:
        head = f"{name} is {value} as fast as one device"
    means = ""
    if found.by_mean is not None:
        means = f" By the mean step it is {format_factor(found.by_mean)}{_why_uneven(found)}."
    return f"{head}: {reason}.{means}" if reason else f"{head}.{means}"


def _why_uneven(found: Comparison) -> str:
    if found.uneven is None:
        return ""
    mode, how = found.uneven
    by = f" ({WAITING_TEXT})" if how.phase == INPUT else ""
    return (
        f": of the steps in {mode}, about {format_percent(how.steps)} take {format_percent(how.time)} of the time{by}"
    )


def _reason_text(found: Comparison) -> str:
    reason, cost = found.reason, found.cost
    if reason is None:
        return ""
    if reason.phase in COPIES:
        return f"{reason.phase} takes {_time_within_step(found, reason)}"
    dp, single = duration_or_none(reason.dp_ns), duration_or_none(reason.single_ns)
    if reason.phase == "forward":
        # The names in panel 3. This includes starting the threads, so it is more than the forward of any replica.
        text = f"parallel_apply and the forward rest take {dp} against {single} of forward on one device"
    else:
        text = f"{_PHRASES.get(reason.phase, reason.phase)} takes {dp} against {single} on one device"
    if found.outcome == "faster" and cost is not None and (cost.share or 0) >= WORTH:
        text += f", {cost.phase} {_time_within_step(found, cost)}"
    return text


def _time_within_step(found: Comparison, reason: Reason) -> str:
    """A phase's median time in a median dp step: the verdict compares medians, but a share refers to the mean step."""
    step = found.sides["dp"].median_ns
    if step is None or reason.dp_ns is None:
        return f"{format_percent(reason.share)} of the time"
    return f"{format_duration(reason.dp_ns)} of a {format_duration(step)} step"


_PHRASES = {"data": "waiting for data", "other": "the script's own work"}


def duration_or_none(ns: float | None) -> str:
    """A duration; "none" for a phase that did not run."""
    return "none" if ns is None else format_duration(ns)

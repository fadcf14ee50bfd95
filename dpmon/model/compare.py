"""dp against single: what the other devices are worth, with its uncertainty, its ground, or what a verdict lacks. Pure.

Compared are steps of one kind: the same number of samples, and with a backward pass or without. The first steps after
every change of mode are left out (caches are filled, algorithms chosen). The speed-up is the ratio of the median step
times. Its interval comes from the order statistics of each mode's steps (a median's usual interval, which asks for no
distribution), widened where steps depend on those before them (by batch means of what lies above the median), and put
together for the ratio by MOVER on the logarithms (Zou and Donner, 2008).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, log, sqrt
from typing import NamedTuple

from dpmon.model.inputs import INPUT, SAID
from dpmon.model.numbers import duration, percent, times
from dpmon.model.state import (
    MODES_COMPARED,
    PHASES,
    SETTLED_AT_ONCE,
    SETTLED_KEPT,
    SETTLED_MANY,
    Peak,
    Process,
    StepSample,
)
from dpmon.model.stats import PhaseFigures, median, percentile, summary
from dpmon.model.uneven import Uneven, uneven
from dpmon.rates import Rate, rate_of

__all__ = [
    "MIN_STEPS",
    "Comparison",
    "Ground",
    "Interval",
    "Side",
    "compare",
    "compared",
    "median_interval",
    "ratio",
    "sentence",
]

MIN_STEPS = 20
"""Steps of each mode below which no verdict is given."""
_Z = 1.96
"""Of a normal distribution, for 95 %."""
_WORTH = 0.05
"""Share of a step below which copying is not worth a word."""
_APART = 1.1
"""By so much the ratio of means may lie outside the interval without a word."""
_BACKWARD = PHASES.index("backward")
_COPIES = ("scatter", "replicate", "gather")
"""Phases that only dp has."""


class Interval(NamedTuple):
    """An estimate, and between what it lies with 95 % confidence."""

    value: float
    low: float
    high: float


class Side(NamedTuple):
    """One mode, over the steps that are compared; times in ns."""

    mode: str
    steps: int
    """Steps behind the figures."""
    seen: int
    """Steps of this mode in all."""
    median_ns: float | None
    p95_ns: float | None
    rate: Rate | None
    """Of a process: over all steps of the mode, whatever is compared."""
    phases: tuple[PhaseFigures, ...]
    memory: Mapping[str, Peak]
    """By device, the most that was allocated while in this mode."""
    kept: int
    """Steps that `steps` are taken from, of every kind."""
    settled: int
    """Of how many those were drawn, each as likely as any other; the same number where all are kept."""


class Ground(NamedTuple):
    """What a verdict rests on: the phase that changed most, its share of the dp step, its median in each mode (ns)."""

    phase: str
    share: float | None
    dp_ns: float | None
    single_ns: float | None


@dataclass(frozen=True)
class Comparison:
    """Both modes side by side. Without a speed-up, `missing` says why; with one, `outcome` is a word for it."""

    sides: Mapping[str, Side] = field(default_factory=dict)
    """By mode, those that were seen."""
    devices: tuple[str, ...] = ()
    """Of dp."""
    virtual: bool = False
    samples: int | None = None
    """Samples in each of the steps that are compared; None: not known, or nothing is compared."""
    left_out: int = 0
    """Kept steps of another kind: another number of samples, or the other in having a backward pass."""
    left_backward: int = 0
    """Of these, those that are the other in having a backward pass."""
    trained: bool = True
    """Whether the steps that are compared have one."""
    speedup: Interval | None = None
    efficiency: float | None = None
    """Speed-up a device; None for virtual replicas, which have no devices of their own."""
    outcome: str | None = None
    """faster, slower, or even: the interval holds 1."""
    by_mean: float | None = None
    """The ratio of the mean step times, where it is quite another than that of the medians."""
    uneven: tuple[str, Uneven] | None = None
    """With `by_mean`: the mode whose steps are less alike, and how; None if those of each are alike enough."""
    ground: Ground | None = None
    cost: Ground | None = None
    """The copying that takes the largest share of the dp step."""
    missing: str | None = None
    lacking: Mapping[str, int] = field(default_factory=dict)
    """By mode, how many steps are missing for a verdict."""


# ------------------------------------------------------------------------------------------------ figures


def median_interval(values: Sequence[float]) -> Interval | None:
    """The median of `values`, in their order of time, and its interval; None of nothing."""
    count = len(values)
    middle = median(values)
    if middle is None:
        return None
    ordered = sorted(values)
    reach = _Z * sqrt(count * _dependence(values, middle)) / 2
    low = max(int((count - 1) / 2 - reach), 0)
    high = min(count - 1 - int((count - 1) / 2 - reach), count - 1)
    return Interval(middle, ordered[low], ordered[high])


def _dependence(values: Sequence[float], middle: float) -> float:
    """By how much the variance of a median is larger than if no value depended on those before it; at least 1."""
    count = len(values)
    size = int(sqrt(count))
    blocks = count // size if size else 0
    if blocks < 4:
        return 1.0
    above = [1.0 if value > middle else 0.5 if value == middle else 0.0 for value in values[count - blocks * size :]]
    means = [sum(above[i * size : (i + 1) * size]) / size for i in range(blocks)]
    mean = sum(means) / blocks
    variance = sum((each - mean) ** 2 for each in means) / (blocks - 1)
    whole = sum((each - mean) ** 2 for each in above) / len(above)
    return max(variance * size / whole, 1.0) if whole > 0 else 1.0


def ratio(above: Interval, below: Interval) -> Interval | None:
    """One estimate over another that does not depend on it; None unless all are positive."""
    if min(*above, *below) <= 0:
        return None
    middle = log(above.value) - log(below.value)
    down = sqrt(log(above.value / above.low) ** 2 + log(below.high / below.value) ** 2)
    up = sqrt(log(above.high / above.value) ** 2 + log(below.value / below.low) ** 2)
    return Interval(exp(middle), exp(middle - down), exp(middle + up))


# ------------------------------------------------------------------------------------------------ comparing

_Kind = tuple[int | None, bool]


def _kind(step: StepSample) -> _Kind:
    return step.samples, step.phases[_BACKWARD] >= 0


def compare(
    steps: Mapping[str, Sequence[StepSample]],
    *,
    seen: Mapping[str, int] | None = None,
    settled: Mapping[str, int] | None = None,
    devices: Sequence[str] = (),
    virtual: bool = False,
    memory: Mapping[str, Mapping[str, Peak]] | None = None,
    waits: Sequence[tuple[int, int]] = (),
) -> Comparison:
    """Compare the steps of "dp" with those of "single", oldest first, without those after a change of mode.

    `seen`: how many steps of each mode there were in all, if not those; `settled`: from how many of each they were
    drawn, if not from those; `devices`: those of dp; `memory`: by mode and device, the peak; `waits`: from when to when
    the script waited for input.
    """
    counts = dict(seen) if seen is not None else {mode: len(found) for mode, found in steps.items()}
    there = [mode for mode in MODES_COMPARED if counts.get(mode)]
    kinds = {mode: Counter(map(_kind, steps.get(mode, ()))) for mode in there}
    kind = _common(kinds) if len(there) == 2 else None
    taken = {
        mode: [step for step in steps.get(mode, ()) if kind is None or _kind(step) == kind] or list(steps.get(mode, ()))
        for mode in there
    }
    peaks = memory or {}
    kept = {mode: len(steps.get(mode, ())) for mode in there}
    drawn = {mode: _Drawn(count, max((settled or {}).get(mode, 0), count)) for mode, count in kept.items()}
    sides = {mode: _side(mode, taken[mode], counts[mode], peaks.get(mode, {}), drawn[mode]) for mode in there}
    base = Comparison(sides=sides, devices=tuple(devices), virtual=virtual)
    lacking = {mode: MIN_STEPS - found[kind] for mode, found in kinds.items() if kind and found[kind] < MIN_STEPS}
    if len(there) < 2 or lacking:
        drawn_of = {
            mode: counts[mode] / len(found) if len(found := steps.get(mode, ())) >= SETTLED_KEPT else 1
            for mode in lacking
        }
        return replace(base, missing=_lacking(there, lacking, drawn_of), lacking=lacking)
    if kind is None:
        return replace(base, missing=_unlike(kinds), lacking={})
    left_out = sum(sum(each.values()) - each[kind] for each in kinds.values())
    passes = sum(count for each in kinds.values() for other, count in each.items() if other[1] != kind[1])
    base = replace(base, samples=kind[0], left_out=left_out, left_backward=passes, trained=kind[1])
    return _judged(base, taken, waits)


def _common(kinds: Mapping[str, Counter[_Kind]]) -> _Kind | None:
    """The kind of step that both modes have most of, rather one with a backward pass; None if they share none."""
    one, other = kinds.values()
    both = {kind: min(count, other[kind]) for kind, count in one.items() if other[kind]}
    if both:
        return max(both, key=lambda kind: (both[kind] >= MIN_STEPS, kind[1], both[kind], kind[0] or 0))
    if one and other:
        return None
    return next(iter((one or other).most_common(1)), ((None, True), 0))[0]


def _lacking(there: Sequence[str], lacking: Mapping[str, int], drawn_of: Mapping[str, float]) -> str:
    """What is missing, in steps; of so many steps (`drawn_of`, by mode) one is drawn."""
    unseen = [mode for mode in MODES_COMPARED if mode not in there]
    if unseen:
        return f"{' and '.join(unseen)} not seen yet"
    parts = []
    for mode, steps in lacking.items():
        count = ceil(steps * drawn_of[mode])
        parts.append(f"{count} more step{'' if count == 1 else 's'} in {mode}")
    return f"no verdict yet: it needs {' and '.join(parts)}"


def _unlike(kinds: Mapping[str, Counter[_Kind]]) -> str:
    """Why no step of one mode can be compared with one of the other."""
    usual = {mode: max(found, key=lambda kind: found[kind]) for mode, found in kinds.items()}
    trains = {mode: kind[1] for mode, kind in usual.items()}
    if len(set(trains.values())) > 1:
        which = next(mode for mode, backward in trains.items() if not backward)
        return f"no verdict: the steps in {which} have no backward pass, the others have"
    sizes = ", ".join(
        f"{'unknown' if kind[0] is None else kind[0]} samples a step in {mode}" for mode, kind in usual.items()
    )
    return f"no verdict: the batches are not of the same size ({sizes})"


class _Drawn(NamedTuple):
    kept: int
    of: int


def _side(mode: str, steps: Sequence[StepSample], seen: int, memory: Mapping[str, Peak], drawn: _Drawn) -> Side:
    found = summary(steps)
    walls = [step.wall_ns for step in steps]
    return Side(
        mode=mode,
        steps=len(steps),
        seen=seen,
        median_ns=median(walls),
        p95_ns=percentile(walls, 0.95),
        rate=None,
        phases=found.phases,
        memory=memory,
        kept=drawn.kept,
        settled=drawn.of,
    )


def _judged(
    base: Comparison, taken: Mapping[str, Sequence[StepSample]], waits: Sequence[tuple[int, int]]
) -> Comparison:
    single, dp = (median_interval([step.wall_ns for step in taken[mode]]) for mode in MODES_COMPARED)
    found = ratio(single, dp) if single is not None and dp is not None else None
    if found is None:
        return replace(base, missing="no verdict: a step took no time that could be measured")
    outcome = "faster" if found.low > 1 else "slower" if found.high < 1 else "even"
    each = found.value / len(base.devices) if base.devices and not base.virtual else None
    cost = _cost(base.sides["dp"])
    ground = _largest(base.sides, outcome)
    means = _means(found, taken)
    why = _least_alike(taken, waits) if means is not None else None
    base = replace(base, by_mean=means, uneven=why)
    return replace(base, speedup=found, efficiency=each, outcome=outcome, ground=ground, cost=cost)


def _mean(steps: Sequence[StepSample]) -> float:
    return sum(step.wall_ns for step in steps) / len(steps)


def _means(found: Interval, taken: Mapping[str, Sequence[StepSample]]) -> float | None:
    """The ratio of the means, if it lies well outside the interval of the medians' ratio."""
    single, dp = (_mean(taken[mode]) for mode in MODES_COMPARED)
    means = single / dp
    return None if found.low / _APART <= means <= found.high * _APART else means


def _least_alike(
    taken: Mapping[str, Sequence[StepSample]], waits: Sequence[tuple[int, int]]
) -> tuple[str, Uneven] | None:
    """The mode whose mean and median step are further apart, if they are far."""
    most, found = 0.0, None
    for mode in MODES_COMPARED:
        mean, middle = _mean(taken[mode]), median([step.wall_ns for step in taken[mode]])
        how = uneven([(step, 1.0) for step in taken[mode]], mean, middle, waits)
        if how is not None and middle and abs(log(mean / middle)) > most:
            most, found = abs(log(mean / middle)), (mode, how)
    return found


def _cost(dp: Side) -> Ground | None:
    copies = [phase for phase in dp.phases if phase.name in _COPIES and phase.share is not None]
    most = max(copies, key=lambda phase: phase.share or 0, default=None)
    return Ground(most.name, most.share, most.median_ns, None) if most is not None else None


def _largest(sides: Mapping[str, Side], outcome: str) -> Ground | None:
    """The phase that is most of the difference; the replicas' forward counts as forward."""
    times = {mode: _times(side) for mode, side in sides.items()}
    shares = {phase.name: phase.share for phase in sides["dp"].phases}
    apply, forward = shares.get("apply"), shares.get("forward")
    shares["forward"] = (apply or 0) + (forward or 0) if apply is not None or forward is not None else None
    if outcome == "even":  # the copying, if it is worth a word
        cost = _cost(sides["dp"])
        return cost if cost is not None and (cost.share or 0) >= _WORTH else None
    sign = 1 if outcome == "slower" else -1
    changes = {
        name: sign * (times["dp"].get(name, 0.0) - times["single"].get(name, 0.0))
        for name in times["dp"].keys() | times["single"].keys()
    }
    name = max(sorted(changes), key=lambda each: changes[each], default=None)
    if name is None or changes[name] <= 0:
        return None
    return Ground(name, shares.get(name), times["dp"].get(name), times["single"].get(name))


def _times(side: Side) -> dict[str, float]:
    times = {phase.name: phase.median_ns for phase in side.phases if phase.median_ns is not None}
    apply = times.pop("apply", None)
    if apply is not None:
        times["forward"] = times.get("forward", 0.0) + apply
    return times


def compared(process: Process) -> Comparison:
    """The modes of a process, over the steps that it keeps of each for this."""
    tracks = {mode: track for mode in MODES_COMPARED if (track := process.modes.get(mode)) is not None}
    dp = tracks.get("dp")
    devices, virtual = (dp.devices, dp.virtual) if dp is not None else ((), False)
    seen = {mode: track.count for mode, track in tracks.items()}
    memory = {mode: dict(track.peaks) for mode, track in tracks.items()}
    many = all(track.settled_count >= SETTLED_MANY for track in tracks.values())
    # Where many are compared a few more make little difference, and each time costs more.
    counts = (track.settled_count // max(SETTLED_AT_ONCE, len(track.settled) // 16) for track in tracks.values())
    key = (devices, virtual, *counts, *list(process.inputs)[-1:])
    known = process.memo.get("compared")
    if many and known is not None and known[0] == key:
        found: Comparison = known[1]
    else:
        steps = {mode: process.settled_of(mode) for mode in tracks}
        settled = {mode: track.settled_of for mode, track in tracks.items()}
        waits = tuple(process.inputs)
        found = compare(steps, seen=seen, settled=settled, devices=devices, virtual=virtual, waits=waits)
        process.memo["compared"] = (key, found) if many else None
    sides = {
        mode: side._replace(seen=seen[mode], rate=rate_of([process.paces.of(mode).counted()]), memory=memory[mode])
        for mode, side in found.sides.items()
    }
    return replace(found, sides=sides)


# ------------------------------------------------------------------------------------------------ words


def sentence(found: Comparison) -> str | None:
    """The verdict with its ground, in one sentence; None when there is none."""
    if found.speedup is None:
        return None
    over = f" over {len(found.devices)}" if found.devices else ""
    virtual = " virtual replicas" if found.virtual and found.devices else ""
    head = f"DataParallel{over}{virtual} is {times(found.speedup.value)} as fast as one device"
    if found.outcome == "even":
        low, high = (times(each) for each in found.speedup[1:])
        head = f"DataParallel{over}{virtual} makes no difference that shows ({low} to {high} as fast as one device)"
    said = _ground(found)
    means = ""
    if found.by_mean is not None:
        means = f" By the mean step it is {times(found.by_mean)}{_why_uneven(found)}."
    return f"{head}: {said}.{means}" if said else f"{head}.{means}"


def _why_uneven(found: Comparison) -> str:
    if found.uneven is None:
        return ""
    mode, how = found.uneven
    by = f" ({SAID})" if how.phase == INPUT else ""
    return f": of the steps in {mode}, about {percent(how.steps)} take {percent(how.time)} of the time{by}"


def _ground(found: Comparison) -> str:
    ground, cost = found.ground, found.cost
    if ground is None:
        return ""
    if ground.phase in _COPIES:
        return f"{ground.phase} takes {percent(ground.share)} of the step"
    name = "the replicas' forward" if ground.phase == "forward" else _PHRASES.get(ground.phase, ground.phase)
    text = f"{name} takes {_took(ground.dp_ns)} against {_took(ground.single_ns)} on one device"
    if found.outcome == "faster" and cost is not None and (cost.share or 0) >= _WORTH:
        text += f", {cost.phase} {percent(cost.share)} of the step"
    return text


_PHRASES = {"data": "waiting for data", "other": "the script's own work"}


def _took(ns: float | None) -> str:
    return "none" if ns is None else duration(ns)

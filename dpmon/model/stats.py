"""Figures from the state's buffers: medians, tails, shares and speeds. Pure; the time of asking is a parameter."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from dpmon.model.members import SECOND
from dpmon.model.phases import CALLS_AT
from dpmon.model.state import PHASES, Process, StepSample
from dpmon.model.uneven import Uneven
from dpmon.rates import Rate, rate_of, span_rate
from dpmon.record.schema import phase_shown

__all__ = [
    "PhaseFigures",
    "Speed",
    "Summary",
    "leaves_rest",
    "mean_speed",
    "median",
    "median_known",
    "middle",
    "percentile",
    "phase_figures",
    "rank",
    "shown",
    "speed",
    "summary",
    "weighed_middle",
    "weighed_phase",
    "weighed_rank",
]

SPEED_WINDOW_NS = 10_000_000_000
_ROUNDING = 1e-6


class PhaseFigures(NamedTuple):
    """One phase over recent steps: median and p95 (ns) of the steps it ran in, its share of all their time (0 to 1)."""

    name: str
    ran: int
    median_ns: float | None
    p95_ns: float | None
    share: float | None
    device_ns: float | None = None
    """Median of what the slowest device took, where that is known."""
    device_count: int = 0
    """How often that is known."""
    device_share: float | None = None
    """Of all time of the steps (0 to 1), if the phase took it every time what it did where that is known."""


class Summary(NamedTuple):
    """Recent steps of one mode."""

    steps: int
    span_ns: int
    """From the first one's start to the last one's end."""
    median_ns: float | None
    p95_ns: float | None
    phases: tuple[PhaseFigures, ...]
    sampled: int = 0
    """How many of the steps the medians and tails are of."""
    mean_ns: float | None = None
    """Mean time of a step."""
    uneven: Uneven | None = None
    """Where the median says little of the speed: why."""
    rate: Rate | None = None
    """Rate of the training steps; None if it is unknown, as for sampled steps."""


class Speed(NamedTuple):
    """A rate, or None and the reason."""

    rate: Rate | None
    reason: str | None

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of elapsed training time."""
        return None if self.rate is None else self.rate.steps_per_s

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of elapsed training time."""
        return None if self.rate is None else self.rate.samples_per_s


def middle(ordered: Sequence[float]) -> float | None:
    """The middle value of what is in order (the mean of the two middle ones), None of nothing."""
    count = len(ordered)
    if not count:
        return None
    half = count // 2
    return ordered[half] if count % 2 else (ordered[half - 1] + ordered[half]) / 2


def median(values: Iterable[float]) -> float | None:
    """The middle value (the mean of the two middle ones), None of nothing."""
    return middle(sorted(values))


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    return median(value for value in values if value is not None)


def rank(ordered: Sequence[float], fraction: float) -> float | None:
    """Of what is in order, the smallest value that at least `fraction` of all do not exceed; None of nothing."""
    if not ordered:
        return None
    nearest = -int(-fraction * len(ordered) // 1)
    return ordered[min(max(nearest, 1), len(ordered)) - 1]


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """The smallest value that at least `fraction` of all do not exceed (nearest rank), None of nothing."""
    return rank(sorted(values), fraction)


def weighed_rank(ordered: Sequence[tuple[float, float]], fraction: float) -> float | None:
    """As `rank`, of (value, how many it stands for) in order of the values."""
    return _ranked(ordered, _summed(ordered), fraction)


def weighed_middle(ordered: Sequence[tuple[float, float]]) -> float | None:
    """As `middle`, of (value, how many it stands for) in order of the values."""
    return _middle(ordered, _summed(ordered))


def weighed_phase(name: str, ran: int, times: Iterable[tuple[int, float]], share: float | None) -> PhaseFigures:
    """As `phase_figures`, of (time, how many it stands for)."""
    ordered = sorted(pair for pair in times if pair[0] >= 0)
    sums = _summed(ordered)
    return PhaseFigures(name, ran, _middle(ordered, sums), _ranked(ordered, sums, 0.95), share)


def _summed(ordered: Sequence[tuple[float, float]]) -> list[float]:
    """How many each value and those before it stand for."""
    return list(accumulate(weight for _, weight in ordered))


def _ranked(ordered: Sequence[tuple[float, float]], sums: Sequence[float], fraction: float) -> float | None:
    if not ordered:
        return None
    return ordered[min(bisect_left(sums, fraction * sums[-1] - _ROUNDING), len(ordered) - 1)][0]


def _middle(ordered: Sequence[tuple[float, float]], sums: Sequence[float]) -> float | None:
    if not ordered:
        return None
    half = sums[-1] / 2
    at = min(bisect_left(sums, half - _ROUNDING), len(ordered) - 1)
    if sums[at] <= half + _ROUNDING and at + 1 < len(ordered):
        return (ordered[at][0] + ordered[at + 1][0]) / 2
    return ordered[at][0]


def summary(steps: Sequence[StepSample]) -> Summary:
    """Figures over `steps`, oldest first."""
    walls = sorted(step.wall_ns for step in steps)
    total = sum(walls)
    return Summary(
        steps=len(steps),
        span_ns=steps[-1].end_ns - (steps[0].end_ns - steps[0].wall_ns) if steps else 0,
        median_ns=middle(walls),
        p95_ns=rank(walls, 0.95),
        phases=_phases([step.phases for step in steps], total),
        sampled=len(steps),
        mean_ns=total / len(steps) if steps else None,
    )


def _phases(steps: Sequence[tuple[int, ...]], total: int) -> tuple[PhaseFigures, ...]:
    if not steps:
        return tuple(PhaseFigures(name, 0, None, None, None) for name in PHASES)
    found = []
    for name, times in zip(PHASES, zip(*steps, strict=True), strict=True):
        ran = sum(took >= 0 for took in times)
        share = sum(took for took in times if took >= 0) / total if ran and total else None
        found.append(phase_figures(name, ran, times, share))
    return tuple(found)


def shown(phases: Sequence[PhaseFigures]) -> list[PhaseFigures]:
    """The phases that are worth a column: all, but optional ones (copies, which take a GPU) only if they ran."""
    return [phase for phase in phases if phase.ran or not phase_shown(phase.name).optional]


def leaves_rest(phases: Sequence[PhaseFigures]) -> bool:
    """Whether the phases of the calls are listed separately, so that `forward` is only the rest."""
    return any(phase.ran for phase in phases if phase.name in PHASES[CALLS_AT])


def phase_figures(name: str, ran: int, times: Iterable[int], share: float | None) -> PhaseFigures:
    """Figures of a phase that took `times`, NOT_RUN among them."""
    ordered = sorted(times)
    if ordered and ordered[0] < 0:
        ordered = [took for took in ordered if took >= 0]
    return PhaseFigures(name, ran, middle(ordered), rank(ordered, 0.95), share)


def mean_speed(process: Process) -> Speed:
    """The rate of all its training, in all modes."""
    rate = rate_of([process.paces.total().counted()])
    return Speed(rate, "no step has ended yet" if rate is None else None)


def speed(process: Process, now_ns: int | None) -> Speed:
    """The rate of the last ten seconds of training; `now_ns` is None once the run is over.

    The rate is None, with a reason, if there are too few steps or if no step has ended for a long time.
    """
    marks = process.marks
    last = process.last_step
    if last is None:
        return Speed(None, "no step has ended yet")
    if process.paused_since_ns is not None:
        return Speed(None, "the training is paused")
    if len(marks) < 2:
        return Speed(None, "one step so far in this mode, or since the pause")
    newest = marks[-1]
    quiet = 0 if now_ns is None else now_ns - last.end_ns
    if quiet > max(3 * SECOND, 3 * last.wall_ns):
        return Speed(None, f"no step has ended for {quiet / 1e9:.0f} s")
    evaluated = last.end_ns - newest.end_ns
    if evaluated > max(3 * SECOND, 3 * newest.step_ns // newest.steps):
        return Speed(None, f"an evaluation: no training step has ended for {evaluated / 1e9:.0f} s")
    first = next(m for m in marks if m.end_ns >= newest.end_ns - SPEED_WINDOW_NS)
    if first is newest:
        first = marks[-2]
    took, steps = newest.elapsed_ns - first.elapsed_ns, newest.steps - first.steps
    if took <= 0 or steps <= 0:
        return Speed(None, "one step so far in this mode, or since the pause")
    knowing = steps - (newest.unknown - first.unknown)
    samples = (newest.samples - first.samples) / knowing * steps if knowing > 0 else None
    return Speed(span_rate(steps, samples, took, newest.step_ns - first.step_ns), None)

"""How fast a process trains: over the last ten seconds, and over the whole run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpmon.model.process import Process, Recent
from dpmon.model.state import State
from dpmon.rates import Rate, span_rate
from dpmon.record.kinds import Step
from dpmon.record.schema import EVALUATION, STEP
from dpmon.store.answers import TimeRow
from dpmon.store.tally import Key, Tally

__all__ = ["WINDOW_S", "Speed", "recent", "recent_of_steps", "speed"]

WINDOW_S = 10
_SECOND = 1_000_000_000


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


def recent(rows: Iterable[tuple[Key, Tally]], times: Sequence[TimeRow], mode: str, trained: bool) -> Recent:
    """The last ten seconds of a mode, from tallies of a second each in order of time and the activities of that time.

    `trained`: whether the mode has training steps at all; if not, its evaluation steps count. Steps before another
    mode was in force do not.
    """
    taken: list[Tally] = []
    for key, tally in rows:
        if key.mode != mode:
            taken.clear()
        elif tally.steps and not (trained and key.kind & EVALUATION):
            taken.append(tally)
    last = max((tally.last_ns for tally in taken if tally.last_ns is not None), default=None)
    if last is None:
        return Recent()
    taken = [tally for tally in taken if tally.last_ns is not None and tally.last_ns >= last - WINDOW_S * _SECOND]
    first = min(tally.first_ns for tally in taken if tally.first_ns is not None)
    whole = Tally()
    for tally in taken:
        whole.merge(tally)
    step_ns = whole.stat(STEP).total
    known = whole.sum("samples")
    samples = known.total / known.count * whole.steps if known.count else None
    return _recent(whole.steps, samples, _counted_ns(times, first, last, trained), step_ns, last)


def recent_of_steps(steps: Sequence[Step], times: Sequence[TimeRow], trained: bool) -> Recent:
    """The same of the two newest steps, the newest first, if they are of one mode: for steps of many seconds."""
    if not steps:
        return Recent()
    taken = [step for step in steps[:2] if step.mode == steps[0].mode and step.evaluation == steps[0].evaluation]
    first, last = taken[-1].start_ns, taken[0].start_ns + taken[0].wall_ns
    known = [step.samples for step in taken if step.samples is not None]
    samples = sum(known) if len(known) == len(taken) else None
    step_ns = sum(step.wall_ns for step in taken)
    return _recent(len(taken), samples, _counted_ns(times, first, last, trained), step_ns, last)


def _recent(steps: int, samples: float | None, counted_ns: int, step_ns: int, last_ns: int) -> Recent:
    found = None
    if steps > 1 and counted_ns > 0:
        found = span_rate(steps, samples, counted_ns, min(step_ns, counted_ns))
    return Recent(found, last_ns, step_ns // max(steps, 1))


def _counted_ns(times: Iterable[TimeRow], begin_ns: int, end_ns: int, trained: bool) -> int:
    """The time of training (of evaluation, if the mode never trains), and between steps, that lies between two times.

    The activities are known by the second: in the first second and the last, as much as has room counts. A row may
    hold more than has room in it: the rest lies after it (dpmon.store.accounting.Spent.by_second).
    """
    found = 0
    stretches: dict[tuple[int, int], int] = {}
    for row in times:
        place = row.start_s, row.width_s
        spent = row.spent["training"] + row.spent["between"] + (0 if trained else row.spent["evaluation"])
        stretches[place] = stretches.get(place, 0) + spent
    for (start, width), spent in stretches.items():
        low, high = max(start * _SECOND, begin_ns), min(start * _SECOND + max(width * _SECOND, spent), end_ns)
        found += min(max(spent, 0), max(high - low, 0))
    return found


def speed(process: Process, state: State, now_ns: int) -> Speed:
    """The rate of the last ten seconds of training of a process; of the whole run once it is over.

    Ranks step together and their samples add up. Without a rate there is a reason: too few steps, or no step has ended
    for a long time.
    """
    if state.over:
        return Speed(_together(process.mean, process, state), "no step has ended yet" if process.mean is None else None)
    last, found = process.last_step, process.recent
    if last is None:
        return Speed(None, "no step has ended yet")
    if process.paused_since_ns is not None:
        return Speed(None, "the training is paused")
    end = last.start_ns + last.wall_ns
    quiet = now_ns - end
    if quiet > max(3 * _SECOND, 3 * last.wall_ns):
        return Speed(None, f"no step has ended for {quiet / 1e9:.0f} s")
    evaluated = end - (end if found.last_ns is None else found.last_ns)
    if evaluated > max(3 * _SECOND, 3 * found.step_ns):
        return Speed(None, f"an evaluation: no training step has ended for {evaluated / 1e9:.0f} s")
    if found.rate is None:
        return Speed(None, "one step so far in this mode")
    return Speed(_together(found.rate, process, state), None)


def _together(rate: Rate | None, process: Process, state: State) -> Rate | None:
    if rate is None or process.rank is None or rate.samples_per_s is None or rate.samples_within is None:
        return rate
    share = state.samples_share
    if share is None:
        return rate._replace(samples_per_s=None, samples_within=None)
    return rate._replace(samples_per_s=rate.samples_per_s * share, samples_within=rate.samples_within * share)

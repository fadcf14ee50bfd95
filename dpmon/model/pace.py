"""How fast a process trains: over the last ten seconds, and over the whole run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.model.members import SECOND
from dpmon.model.process import Process
from dpmon.model.state import State
from dpmon.rates import Rate
from dpmon.record.kinds import Step
from dpmon.record.schema import EVALUATION, STEP
from dpmon.store.answers import TimeRow
from dpmon.store.figures import rate
from dpmon.store.tally import Key, Stat, Sum, Tally

__all__ = ["WINDOW_S", "Speed", "Trained", "rate_together", "recent", "recent_of_steps", "speed"]

WINDOW_S = 10


class Trained(NamedTuple):
    """The newest training steps of a process, from the begin of the first to the end of the last."""

    tally: Tally
    elapsed_ns: int
    """Without pauses, evaluations and waits for input."""
    within_ns: int
    """Within steps alone."""

    @property
    def enough(self) -> bool:
        """Whether there are enough steps for a rate."""
        return self.tally.steps > 1 and self.elapsed_ns > 0


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


def recent(rows: Iterable[tuple[Key, Tally]], times: Sequence[TimeRow], mode: str, trained: bool) -> Trained:
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
    last = max((tally.last_ns for tally in taken if tally.last_ns is not None), default=0)
    whole = Tally()
    for tally in taken:
        if tally.last_ns is not None and tally.last_ns >= last - WINDOW_S * SECOND:
            whole.merge(tally)
    return _trained(whole, times, trained)


def recent_of_steps(steps: Sequence[Step], times: Sequence[TimeRow], mode: str, trained: bool) -> Trained:
    """The same of the two newest steps, the newest first, if they are of this mode: for steps of many seconds."""
    alike = [step for step in steps[:2] if step.mode == mode and step.evaluation == steps[0].evaluation]
    whole = Tally()
    for step in alike if steps and not (trained and steps[0].evaluation) else ():
        known = {} if step.samples is None else {"samples": Sum(1, step.samples)}
        wall = Stat()
        wall.add([step.wall_ns])
        end = step.start_ns + step.wall_ns
        whole.merge(Tally(1, first_ns=step.start_ns, last_ns=end, sums=known, stats={STEP: wall}))
    return _trained(whole, times, trained)


def _trained(whole: Tally, times: Sequence[TimeRow], trained: bool) -> Trained:
    if whole.first_ns is None or whole.last_ns is None:
        return Trained(whole, 0, 0)
    counted = _counted_ns(times, whole.first_ns, whole.last_ns, trained)
    return Trained(whole, counted, min(whole.stat(STEP).total, counted))


def rate_together(found: Mapping[int, Trained]) -> Rate | None:
    """The rate of processes that train at the same time (dpmon.store.figures.rate)."""
    tallies = {process: one.tally for process, one in found.items()}
    return rate(tallies, {process: (one.elapsed_ns, one.within_ns) for process, one in found.items()}, together=True)


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
        low, high = max(start * SECOND, begin_ns), min(start * SECOND + max(width * SECOND, spent), end_ns)
        found += min(max(spent, 0), max(high - low, 0))
    return found


def speed(process: Process, state: State, now_ns: int) -> Speed:
    """The rate of the last ten seconds of training of a process; of the whole run once it is over.

    Of ranks it is that of all of them. Without a rate there is a reason: too few steps, or no step has ended
    for a long time.
    """
    if state.over:
        return Speed(process.mean, "no step has ended yet" if process.mean is None else None)
    last, found = process.last_step, process.recent
    if last is None:
        return Speed(None, "no step has ended yet")
    if process.paused_since_ns is not None:
        return Speed(None, "the training is paused")
    end = last.start_ns + last.wall_ns
    quiet = now_ns - end
    if quiet > max(3 * SECOND, 3 * last.wall_ns):
        return Speed(None, f"no step has ended for {quiet / 1e9:.0f} s")
    evaluated = end - (end if found.last_ns is None else found.last_ns)
    if evaluated > max(3 * SECOND, 3 * found.step_ns):
        return Speed(None, f"an evaluation: no training step has ended for {evaluated / 1e9:.0f} s")
    if found.rate is None:
        return Speed(None, "one step so far in this mode")
    return Speed(found.rate, None)

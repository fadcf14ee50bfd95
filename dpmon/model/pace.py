"""The speed of a process: over the last ten seconds, and over the whole run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.model.state import Process, State
from dpmon.record.kinds import Step
from dpmon.record.schema import EVALUATION, SECOND, STEP
from dpmon.store.answers import TimeRow
from dpmon.store.figures import Rate, rate
from dpmon.store.tally import Key, Stat, Sum, Tally

WINDOW_S = 10


class Trained(NamedTuple):
    """The newest training steps of a process, from the start of the first to the end of the last."""

    tally: Tally
    elapsed_ns: int
    """Time without pauses, evaluations and waits for input, in ns."""
    within_ns: int
    """Time within steps alone, in ns."""

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


def recent(rows: Iterable[tuple[Key, Tally]], times: Iterable[TimeRow], mode: str, trained: bool) -> Trained:
    """The last ten seconds of a mode, from tallies of one second each in order of time, and the time by activity.

    `trained`: whether the mode has training steps at all; if not, its evaluation steps count. Steps before the last
    change of mode do not count.
    """
    taken: list[Tally] = []
    for key, tally in rows:
        if key.mode != mode:
            taken.clear()
        elif tally.steps and not (trained and key.kind & EVALUATION):
            taken.append(tally)
    last = max((tally.last_ns or 0 for tally in taken), default=0)
    return _trained([tally for tally in taken if (tally.last_ns or 0) >= last - WINDOW_S * SECOND], times, trained)


def recent_of_steps(steps: Sequence[Step], times: Iterable[TimeRow], mode: str, trained: bool) -> Trained:
    """Like `recent`, for steps of many seconds: from the two newest `steps` (newest first) if they have this mode."""
    alike = [step for step in steps[:2] if step.mode == mode and step.evaluation == steps[0].evaluation]
    tallies = []
    for step in alike if steps and not (trained and steps[0].evaluation) else ():
        one = Tally(steps=1, first_ns=step.start_ns, last_ns=step.start_ns + step.wall_ns, stats={STEP: Stat()})
        one.stats[STEP].add((step.wall_ns,))
        if step.samples is not None:
            one.sums["samples"] = Sum(1, step.samples)
        tallies.append(one)
    return _trained(tallies, times, trained)


def _trained(tallies: Sequence[Tally], times: Iterable[TimeRow], trained: bool) -> Trained:
    whole = Tally()
    for tally in tallies:
        whole.merge(tally)
    if whole.first_ns is None or whole.last_ns is None:
        return Trained(whole, 0, 0)
    counted = _counted_ns(times, trained, whole.first_ns, whole.last_ns)
    return Trained(whole, counted, min(whole.stat(STEP).total, counted))


def rate_together(found: Mapping[int, Trained]) -> Rate | None:
    """The rate of processes that train at the same time (dpmon.store.figures.rate)."""
    tallies = {process: one.tally for process, one in found.items()}
    return rate(tallies, {process: (one.elapsed_ns, one.within_ns) for process, one in found.items()}, together=True)


def _counted_ns(times: Iterable[TimeRow], trained: bool, begin_ns: int, end_ns: int) -> int:
    """The time of training, and between steps, from `begin_ns` to `end_ns`; of evaluation if no step trains.

    It is known only per stretch: of a stretch that is partly outside, at most the part inside counts. A stretch may
    hold more time than its width; the time then continues after it (dpmon.store.accounting.Spent.by_second).
    """
    found = 0
    stretches: Counter[tuple[int, int]] = Counter()
    for row in times:
        spent = row.spent["training"] + row.spent["between"] + (0 if trained else row.spent["evaluation"])
        stretches[row.start_s, row.width_s] += spent
    for (start, width), ns in stretches.items():
        low, high = max(start * SECOND, begin_ns), min(start * SECOND + max(width * SECOND, ns), end_ns)
        if ns > 0 and high > low:
            found += min(ns, high - low)
    return found


def speed(process: Process, state: State, now_ns: int) -> Speed:
    """The rate of the last ten seconds of training of a process; of the whole run once it is over.

    All ranks together have one rate. If there is no rate, the reason is given: too few steps, or none for a long time.
    """
    if state.over:
        why = "no step has ended yet" if process.last_step is None else "no step is in the figures"
        return Speed(process.mean, why if process.mean is None else None)
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

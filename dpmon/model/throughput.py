"""The speed of a process: over the last ten seconds, and over the whole run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dpmon.model.run_snapshot import Process, RecentRate, RunSnapshot
from dpmon.record.schema import EVALUATION, SECOND, STEP
from dpmon.store.query_results import SecondRow
from dpmon.store.step_stats import Rate, compute_rate, training_modes
from dpmon.store.tally import WIDTHS, QuantitySum, SeriesStats, Tally

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

WINDOW_S = 10
MOST_RATES = 128
"""Most ranks besides the focus with rates that are read; further ranks count as the mean of these."""
_GOLDEN = 0.6180339887
_Item = TypeVar("_Item")


class RecentTraining(NamedTuple):
    """The newest training steps of a process, from the start of the first to the end of the last."""

    tally: Tally
    elapsed_ns: int
    """Time without pauses, evaluations and waits for input, in ns."""
    within_ns: int
    """Time within steps alone, in ns."""

    @property
    def has_enough_steps(self) -> bool:
        """Whether there are enough steps for a rate."""
        return self.tally.steps > 1 and self.elapsed_ns > 0


class Throughput(NamedTuple):
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


def metrics_end_s(rows: Store, process: Process) -> int:
    """The second before which the figures of a process end; they include its newest step.

    As of a time in the past, they include only whole seconds, unless the process has none yet.
    """
    assert process.last_step is not None
    end_s = (process.last_step.start_ns + process.last_step.wall_ns) // SECOND + 1
    whole_s = rows.until_s
    return end_s if whole_s is None or whole_s <= process.began_ns // SECOND + 1 else min(end_s, whole_s)


def sample_unevenly(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    """All items or, if there are more, `most` of them, at uneven distances: every eighth rank may differ."""
    return items if len(items) <= most else [items[at] for at in _places(len(items), most)]


@lru_cache(8)
def _places(count: int, most: int) -> Sequence[int]:
    """The places of `most` of `count` items. Each picture needs the same ones."""
    return sorted(sorted(range(count), key=lambda at: at * _GOLDEN % 1.0)[:most])


def read_recent_rate(
    rows: Store, processes: Sequence[int], mode: str, begin_s: int, until_s: int, times: float = 1.0
) -> RecentRate:
    """The last ten seconds of training of the first process; with fewer than two steps there, the last two steps.

    `processes`: those that train together, in a mode. `begin_s`, `until_s`: the seconds to read. `times`: number
    of processes that train, divided by the number of those that are read.
    """
    process, trained = processes[0], mode in training_modes(rows.kinds())
    found = _last_ten_seconds(rows, tuple(processes), begin_s, until_s, mode, trained)
    own = found[process]
    if not own.has_enough_steps:
        found = {number: _last_two_steps(rows, number, until_s, mode, trained) for number in processes}
        own = found[process] if found[process].has_enough_steps else own
    last_ns, step_ns = own.tally.last_ns, own.tally.stat(STEP).total // max(own.tally.steps, 1)
    if last_ns is None and trained:
        last_ns = rows.last_training_ns(process)
    return RecentRate(_combined_rate(found, times) if own.has_enough_steps else None, last_ns, step_ns)


def _last_ten_seconds(
    rows: Store, processes: tuple[int, ...], begin_s: int, end_s: int, mode: str, trained: bool
) -> dict[int, RecentTraining]:
    """The last ten seconds of processes in one mode, from its last change on.

    `trained`: whether the mode has training steps; if not, its evaluation steps count.
    """
    taken: dict[int, list[SecondRow]] = {process: [] for process in processes}
    for row in rows.seconds(begin_s, end_s, processes):
        if row.mode != mode:
            taken[row.process].clear()
        elif not (trained and row.kind & EVALUATION):
            taken[row.process].append(row)
    times = _active_time(rows, begin_s, end_s, processes, trained, widest=1)
    found = {}
    for process, own in taken.items():
        last = max((row.last_ns for row in own), default=0)
        found[process] = _sum_steps([row for row in own if row.last_ns >= last - WINDOW_S * SECOND], times[process])
    return found


def _last_two_steps(rows: Store, process: int, end_s: int, mode: str, trained: bool) -> RecentTraining:
    """The two newest steps of a process, if they have this mode."""
    newest = rows.steps(2, process=process, left_out=False)
    taken = [
        SecondRow(process, mode, 0, 1, step.samples, step.start_ns, step.start_ns + step.wall_ns, step.wall_ns)
        for step in newest
        if step.mode == mode and step.is_evaluation == newest[0].is_evaluation and not (trained and step.is_evaluation)
    ]
    begin_s = newest[-1].start_ns // SECOND if newest else end_s
    return _sum_steps(taken[::-1], _active_time(rows, begin_s, end_s, (process,), trained)[process])


def _active_time(
    rows: Store, begin_s: int, end_s: int, processes: tuple[int, ...], trained: bool, *, widest: int = WIDTHS[-1]
) -> dict[int, Counter[tuple[int, int]]]:
    """The time (ns) of training, and between steps, of each process by start and width of the stretch (s)."""
    found: dict[int, Counter[tuple[int, int]]] = {process: Counter() for process in processes}
    activities = ("training", "between") if trained else ("training", "between", "evaluation")
    for process, start, width, ns in rows.activity_time(begin_s, end_s, processes, activities, widest=widest):
        found[process][start, width] += ns
    return found


def _sum_steps(taken: Sequence[SecondRow], times: Mapping[tuple[int, int], int]) -> RecentTraining:
    """What these steps took together."""
    whole = Tally()
    if not taken:
        return RecentTraining(whole, 0, 0)
    whole.steps = sum(row.steps for row in taken)
    whole.first_ns, whole.last_ns = min(row.first_ns for row in taken), max(row.last_ns for row in taken)
    step = whole.stats[STEP] = SeriesStats()
    step.count, step.total = whole.steps, sum(row.step_ns for row in taken)
    known = [row.samples for row in taken if row.samples is not None]
    if len(known) == len(taken):
        whole.sums["samples"] = QuantitySum(whole.steps, sum(known))
    counted = _counted_ns(times, whole.first_ns, whole.last_ns)
    return RecentTraining(whole, counted, min(step.total, counted))


def _combined_rate(found: Mapping[int, RecentTraining], times: float) -> Rate | None:
    """The rate of processes that train at the same time (dpmon.store.step_stats.compute_rate)."""
    tallies = {process: one.tally for process, one in found.items()}
    return compute_rate(
        tallies, {process: (one.elapsed_ns, one.within_ns) for process, one in found.items()}, together=times
    )


def _counted_ns(times: Mapping[tuple[int, int], int], begin_ns: int, end_ns: int) -> int:
    """The part of `times` (ns by start and width of a stretch, s) from `begin_ns` to `end_ns`.

    It is known only per stretch: of a stretch that is partly outside, at most the part inside counts. A stretch may
    hold more time than its width; the time then continues after it (see `ActivityInterval.split_by_second`).
    """
    found = 0
    for (start, width), ns in times.items():
        low, high = max(start * SECOND, begin_ns), min(start * SECOND + max(width * SECOND, ns), end_ns)
        if ns > 0 and high > low:
            found += min(ns, high - low)
    return found


def throughput_of(process: Process, state: RunSnapshot, now_ns: int, since_ns: int = 0) -> Throughput:
    """The rate of the last ten seconds of training of a process; of the whole run once it is over.

    All ranks together have one rate. If there is no rate, the reason is given: too few steps, or none for a long time.
    `since_ns`: when the process began what it does now. On an overloaded machine, steps before may not be recorded yet.
    """
    if state.over:
        why = "no step has ended yet" if process.last_step is None else "no step is in the figures"
        return Throughput(process.mean, why if process.mean is None else None)
    last, found = process.last_step, process.recent
    if last is None:
        return Throughput(None, "no step has ended yet")
    if process.paused_since_ns is not None:
        return Throughput(None, "the training is paused")
    end = last.start_ns + last.wall_ns
    if now_ns - max(end, since_ns) > max(3 * SECOND, 3 * last.wall_ns):
        return Throughput(None, f"no step has ended for {(now_ns - end) / 1e9:.0f} s")
    evaluated = end - (end if found.last_ns is None else found.last_ns)
    if evaluated > max(3 * SECOND, 3 * found.step_ns):
        return Throughput(None, f"an evaluation: no training step has ended for {evaluated / 1e9:.0f} s")
    if found.rate is None:
        return Throughput(None, "one step so far in this mode")
    return Throughput(found.rate, None)

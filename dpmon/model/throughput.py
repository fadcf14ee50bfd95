"""The throughput of a process: over the last ten seconds, and over the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dpmon.record.schema import SECOND, STEP, STEP_KINDS, step_kind
from dpmon.store.activity_times import read_times
from dpmon.store.step_stats import Rate, compute_rate
from dpmon.store.steps import find_last_main_step, read_steps
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_tables import read_tally_rows
from dpmon.store.time_buckets import WIDTHS

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.model.run_process import Process
    from dpmon.store.store_queries import Store

WINDOW_S = 10
MAX_RATES = 128
"""Most ranks, besides the representative one, whose rates are read; other ranks count as the mean of these."""
_GOLDEN_RATIO = 0.6180339887
_SERIES = (STEP, "samples", "tokens")
_NO_STEP = "no step has finished yet"
_Item = TypeVar("_Item")


class RecentRate(NamedTuple):
    """The last ten seconds of training in the current mode; `rate` is None if there are too few steps."""

    rate: Rate | None = None
    """The rate of all ranks that train together."""
    last_ns: int | None = None
    """The end of the last training step."""
    step_ns: int = 0
    """The mean time of a step, with the time between steps."""


class RecentTraining(NamedTuple):
    """The newest training steps of a process, from the end of the step before them to the end of the last."""

    tally: Tally
    elapsed_ns: int
    """Time without pauses, evaluations and waits for input, in ns."""
    within_ns: int
    """Time within steps alone, in ns."""

    @property
    def has_enough_steps(self) -> bool:
        """Whether there are enough steps for a rate."""
        return self.tally.steps > 0 and self.elapsed_ns > 0


class Throughput(NamedTuple):
    """A rate, or None and the reason."""

    rate: Rate | None
    reason: str | None


def sample_unevenly(items: Sequence[_Item], limit: int) -> Sequence[_Item]:
    """Return at most `limit` of the items, at irregular intervals.

    A regular interval could hit, for example, only every eighth rank.
    """
    return items if len(items) <= limit else [items[index] for index in _sample_indices(len(items), limit)]


@lru_cache(8)
def _sample_indices(count: int, limit: int) -> Sequence[int]:
    """Return the indices of `limit` of `count` items. Each run needs the same ones."""
    return sorted(sorted(range(count), key=lambda index: index * _GOLDEN_RATIO % 1.0)[:limit])


def read_recent_rate(
    store: Store, processes: Sequence[int], mode: str, start_s: int, until_s: int, scale: float = 1.0
) -> RecentRate:
    """Return the rate over the last ten seconds of training; over the last two steps if all ended in one second.

    `processes`: the processes that train together in `mode`; the first one represents them. `start_s`, `until_s`: the
    seconds to read. `scale`: number of processes that train, divided by the number of those that are read.
    """
    process = processes[0]
    training = _last_ten_seconds(store, tuple(processes), start_s, until_s, mode)
    first = training[process]
    if not first.has_enough_steps:
        training = {number: _last_two_steps(store, number, until_s, mode) for number in processes}
        first = training[process] if training[process].has_enough_steps else first
    last_ns, step_ns = first.tally.last_ns, first.elapsed_ns // max(first.tally.steps, 1)
    if last_ns is None and (last_step := find_last_main_step(store, process)) is not None:
        last_ns = last_step.end_ns
    return RecentRate(_combined_rate(store, training, scale) if first.has_enough_steps else None, last_ns, step_ns)


def _last_ten_seconds(
    store: Store, processes: tuple[int, ...], start_s: int, end_s: int, mode: str
) -> dict[int, RecentTraining]:
    """Return the last ten seconds of each process in one mode, since its last mode switch.

    Tallies have whole seconds, so the end of the last step in the first second is the start.
    """
    seconds: dict[int, list[tuple[int, Tally]]] = {process: [] for process in processes}
    rows = read_tally_rows(store, start_s, end_s, process=processes, widest=1, series=_SERIES, sketches=False)
    for _, _, key, tally in rows:
        if step_kind(key.kind) != store.main_kind:
            continue
        if key.mode == mode:
            seconds[key.process].append((tally.last_ns or 0, tally))
        else:
            seconds[key.process].clear()
    times = _active_time(store, start_s, end_s, processes, widest=1)
    training = {}
    for process, tallies in seconds.items():
        last_ns = max((end_ns for end_ns, _ in tallies), default=0)
        newest = [(end_ns, tally) for end_ns, tally in tallies if end_ns >= last_ns - WINDOW_S * SECOND]
        first_s = min((end_ns for end_ns, _ in newest), default=0) // SECOND
        start_ns = max((end_ns for end_ns, _ in newest if end_ns // SECOND == first_s), default=0)
        training[process] = _sum_steps(newest, start_ns, times[process])
    return training


def _last_two_steps(store: Store, process: int, end_s: int, mode: str) -> RecentTraining:
    """Return the two newest steps of a process in one mode; one if there are only two, because a step must precede."""
    newest = read_steps(store, 3, process=process, main_only=True)
    tallies = []
    for step in newest:
        if step.mode == mode:
            end_ns = step.start_ns + step.wall_ns
            values = {STEP: step.wall_ns, "samples": step.samples, **step.quantities}
            stats = {name: SeriesStats(1, value) for name, value in values.items() if value is not None}
            tallies.append((end_ns, Tally(1, first_ns=step.start_ns, last_ns=end_ns, stats=stats)))
    start_s = newest[-1].start_ns // SECOND if newest else end_s
    start_ns = tallies[-1][0] if tallies else 0
    return _sum_steps(tallies, start_ns, _active_time(store, start_s, end_s, (process,))[process])


def _active_time(
    store: Store, start_s: int, end_s: int, processes: tuple[int, ...], *, widest: int = WIDTHS[-1]
) -> dict[int, Counter[tuple[int, int]]]:
    """Return the time (ns) that counts in rates, by process, then by start and width (s)."""
    times: dict[int, Counter[tuple[int, int]]] = {process: Counter() for process in processes}
    activities = STEP_KINDS[store.main_kind], *store.between_activities
    for row in read_times(store, start_s, end_s, process=processes, activities=activities, widest=widest):
        times[row.process][row.start_s, row.width_s] += sum(row.spent.values())
    return times


def _sum_steps(
    tallies: Sequence[tuple[int, Tally]], start_ns: int, times: Mapping[tuple[int, int], int]
) -> RecentTraining:
    """Sum the steps that ended after `start_ns` into one tally, and the training time since then.

    `tallies`: each with the end of its last step (ns).
    """
    whole = Tally()
    for end_ns, tally in tallies:
        if end_ns > start_ns:
            whole.merge(tally)
    elapsed_ns = 0 if whole.last_ns is None else _counted_ns(times, start_ns, whole.last_ns)
    return RecentTraining(whole, elapsed_ns, min(whole.stat(STEP).total, elapsed_ns))


def _combined_rate(store: Store, training: Mapping[int, RecentTraining], scale: float) -> Rate | None:
    """Return the rate of processes that train at the same time (dpmon.store.step_stats.compute_rate)."""
    tallies = {process: recent.tally for process, recent in training.items()}
    times = {process: (recent.elapsed_ns, recent.within_ns) for process, recent in training.items()}
    return compute_rate(tallies, times, store.ranks, together=scale)


def _counted_ns(times: Mapping[tuple[int, int], int], start_ns: int, end_ns: int) -> int:
    """Return the part of `times` (ns by start and width of a bucket, s) from `start_ns` to `end_ns`.

    Times are known only per bucket: of a bucket that is partly outside, at most the part inside counts. A bucket may
    hold more time than its width; the time then continues after it (see `ActivityInterval.split_by_second`).
    """
    counted_ns = 0
    for (start, width), ns in times.items():
        low, high = max(start * SECOND, start_ns), min(start * SECOND + max(width * SECOND, ns), end_ns)
        if ns > 0 and high > low:
            counted_ns += min(ns, high - low)
    return counted_ns


def throughput_of(process: Process, run: RunAnalysis, now_ns: int, since_ns: int = 0) -> Throughput:
    """Return the rate over the last ten seconds of training of a process; of the whole run once it has ended.

    All ranks together have one rate. Without a rate, it has a reason: too few steps, or none for a long time.
    `since_ns`: start of the current activity of the process. With an overloaded CPU, earlier steps may not be recorded
    yet.
    """
    if run.over:
        if process.mean is not None:
            return Throughput(process.mean, None)
        return Throughput(None, _NO_STEP if process.last_step is None else "no step is in the metrics")
    last, recent = process.last_step, process.recent
    if last is None:
        return Throughput(None, _NO_STEP)
    if process.paused_since_ns is not None:
        return Throughput(None, "the training is paused")
    end_ns = last.start_ns + last.wall_ns
    if now_ns - max(end_ns, since_ns) > max(3 * SECOND, 3 * last.wall_ns):
        return Throughput(None, f"no step has finished for {(now_ns - end_ns) / 1e9:.0f} s")
    evaluation_ns = end_ns - (end_ns if recent.last_ns is None else recent.last_ns)
    if evaluation_ns > max(3 * SECOND, 3 * recent.step_ns):
        word = run.kind_words[last.kind]
        return Throughput(None, f"{word}: no training step has finished for {evaluation_ns / 1e9:.0f} s")
    if recent.rate is None:
        return Throughput(None, "one step so far in this mode")
    return Throughput(recent.rate, None)

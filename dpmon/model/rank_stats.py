"""The metrics of each rank: over a time range, and its mean times compared with the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.layouts import format_sizes
from dpmon.model.stragglers import MIN_STEPS, RankTimes, build_rank_times
from dpmon.model.stragglers import SERIES as STRAGGLER_SERIES
from dpmon.record.schema import SECOND, STEP
from dpmon.record.shared_names import node_suffix
from dpmon.store.step_stats import Rate, StepStats, compute_step_stats, merge_mode_tallies, split_tallies_by_process
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import read_tallies

if TYPE_CHECKING:
    from dpmon.model.run_process import Process
    from dpmon.store.store_queries import Store

MAX_LEAST_WAITING = 10
"""Number of the slowest ranks that are shown of many."""
Seconds = tuple[range, ...]
"""Seconds of stalls, in order of time."""
RANK_STEPS, RANK_S = 50, 5
"""Fewest steps and seconds for a comparison of the ranks."""
RANKS_A_SECOND = 32
"""The times and rates of this many ranks are read once a second; those of more ranks are read less often."""
_SAMPLED_S = 40
"""Most seconds for a comparison of ranks of several machines: the waits of about one step a second are known."""
_SERIES = (STEP, "forward", "backward")
_RANK = attrgetter("rank")


class RankSummary(NamedTuple):
    """One process of several: the most frequent inputs and outputs of its calls, and its steps; None if unknown.

    Calls and steps are those of the main kind.
    """

    process: int
    rank: int | None
    world: int | None
    device: str
    inputs: str | None
    outputs: str | None
    calls: int
    steps: int
    median_ns: float | None
    rate: Rate | None
    forward_ns: float | None
    """Median device time of the forward of a step, on the slowest device."""
    untimed: str | None
    """Why `forward_ns` is unknown, if the record has a reason."""
    times: RankTimes | None = None
    """Mean times of the training steps of all processes of its rank, without warm-up steps; None without a rank."""
    node: str | None = None
    """Its node; None on one machine."""

    @property
    def label(self) -> str:
        """Its rank, or its process: "rank 0 of 2", "process 1", "rank 11 of 16 (gpu-1)"."""
        name = f"process {self.process}" if self.rank is None else f"rank {self.rank} of {self.world or '?'}"
        return name + node_suffix(self.node)

    @property
    def flow(self) -> str:
        """The sizes received and returned."""
        return format_sizes(self.inputs, self.outputs)


def slowest_first(ranks: Sequence[RankSummary], limit: int) -> list[RankSummary]:
    """Return all ranks, first the `limit` ranks that were the slowest most often; both parts keep their order."""
    slowest = nlargest(limit, ranks, key=lambda line: 0 if line.times is None else line.times.slowest)
    first_processes = {rank.process for rank in slowest}
    return sorted(ranks, key=lambda line: line.process not in first_processes)


def read_rank_times(
    store: Store, focus: Process, others: Sequence[Process], stalled: Seconds = ()
) -> tuple[RankTimes, ...]:
    """Return the mean times of ranks that train together, by rank, as of the newest step of `focus`, one of them.

    They cover at least RANK_S seconds and about RANK_STEPS steps. The newest second counts as a whole one. With several
    nodes, the seconds in `stalled` are left out.
    """
    if focus.last_step is None:
        return ()
    ranks = sorted((rank for rank in (focus, *others) if rank.rank is not None), key=_RANK)
    end_s = max(rank.end_s for rank in ranks if rank.last_step is not None)
    if focus.last_step.kind != store.main_kind and focus.recent.last_ns is not None:
        end_s = min(end_s, focus.recent.last_ns // SECOND + 1)  # the ranks train together in training steps only
    step_ns = focus.recent.step_ns or focus.last_step.wall_ns
    width_s = max(-(-RANK_STEPS * step_ns // SECOND), RANK_S)
    if not store.is_mirror:
        return _mean_times(store, focus, ranks, [(max(end_s - width_s, 0), end_s)])
    (alone,) = _mean_times(store, focus, [focus], _unstalled_ranges(end_s, width_s, stalled))
    while width_s < _SAMPLED_S and 0 < alone.joined < min(alone.steps, MIN_STEPS):
        width_s = min(-(-width_s * MIN_STEPS // alone.joined), _SAMPLED_S)
        (alone,) = _mean_times(store, focus, [focus], _unstalled_ranges(end_s, width_s, stalled))
    return _mean_times(store, focus, ranks, _unstalled_ranges(end_s, width_s, stalled))


def _unstalled_ranges(end_s: int, width_s: int, stalled: Seconds) -> list[tuple[int, int]]:
    """Return the `width_s` seconds before `end_s` that are not `stalled`, in parts."""
    ranges = []
    for seconds in reversed((range(0), *stalled)):
        start_s = max(end_s - width_s, min(seconds.stop, end_s))
        if start_s < end_s:
            ranges.append((start_s, end_s))
            width_s -= end_s - start_s
        end_s = min(end_s, seconds.start)
    return ranges[::-1] or [(0, 0)]


def _mean_times(
    store: Store, focus: Process, ranks: Sequence[Process], ranges: Sequence[tuple[int, int]]
) -> tuple[RankTimes, ...]:
    """Return the mean times of ranks in some ranges of seconds, of the steps in the mode of `focus`."""
    assert focus.last_step is not None
    numbers, mode = tuple(rank.process for rank in ranks), focus.last_step.mode
    tallies: dict[int, dict[TallyKey, Tally]] = {number: {} for number in numbers}
    for start_s, until_s in ranges:
        read = read_tallies(store, start_s, until_s, process=numbers, sketches=False, series=STRAGGLER_SERIES)
        for key, tally in read.items():
            tallies[key.process].setdefault(key, Tally()).merge(tally)
    merged = (
        (rank, merge_mode_tallies(tallies[rank.process], mode, store.main_kind, without_warmup=True)) for rank in ranks
    )
    return tuple(build_rank_times(rank.process, rank.number, tally, rank.node) for rank, tally in merged)


def read_range_stats(store: Store, processes: Iterable[Process], range_s: int) -> dict[int, StepStats]:
    """Return the metrics of processes over the last `range_s` seconds, by process; 0: over the whole run."""
    by_end: dict[int, list[Process]] = {}
    for process in processes:
        if process.last_step is not None:
            by_end.setdefault(process.end_s, []).append(process)
    stats: dict[int, StepStats] = {}
    for end_s, group in by_end.items():
        start_s = max(end_s - range_s, 0) if range_s else 0
        numbers = tuple(process.process for process in group)
        tallies = read_tallies(store, start_s, end_s, process=numbers, series=_SERIES)
        by_process = split_tallies_by_process(tallies)
        for process in group:
            mode = process.last_step.mode if process.last_step is not None else ""
            tally = merge_mode_tallies(by_process.get(process.process, {}), mode, store.main_kind)
            stats[process.process] = compute_step_stats(mode, tally=tally, rate=None)
    return stats

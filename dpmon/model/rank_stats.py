"""The metrics of each rank: over a time range, and its mean times compared with the other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from dpmon.model.communication import Wrapper, groups_of
from dpmon.model.stragglers import MIN_STEPS, Group, RankTimes, build_rank_times
from dpmon.model.stragglers import SERIES as STRAGGLER_SERIES
from dpmon.model.throughput import sample_unevenly
from dpmon.record.schema import SECOND, STEP
from dpmon.store.step_stats import StepStats, compute_step_stats, merge_mode_tallies, split_tallies_by_process
from dpmon.store.steps import find_unknown_wait, read_waits
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import read_tallies

if TYPE_CHECKING:
    from dpmon.model.run_snapshot import Process
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
_AGE_S = 8
"""With many ranks, some times may be old, but less than this."""
_LATE_S = 6
"""Waits that become known later than this after their step are left out of a live snapshot."""
_OLD_STEPS = 4
"""The last known waits of a rank are too old after this many steps, and `_SAMPLED_S`: a node may be disconnected."""
_SERIES = (STEP, "forward", "backward")
_RANK, _STEPS = map(attrgetter, ("rank", "steps"))


class _RecentWaits:
    """The last steps of a rank with known waits: as many as are needed to name a straggler.

    Their sums are kept, because a snapshot needs those of a thousand ranks.
    """

    __slots__ = ("_last", "exposed_ns", "number", "second", "slowest", "steps", "wait_ns")

    def __init__(self) -> None:
        self.number = self.second = -1
        """The number of its last sync pass, and the second in which it ended."""
        self.steps = self.slowest = self.wait_ns = self.exposed_ns = 0
        """Sums: all steps, those in which it did not wait, its waits for the slowest rank, exposed communication."""
        self._last: deque[tuple[int, int]] = deque(maxlen=MIN_STEPS)

    def add(self, wait_ns: int, exposed_ns: int) -> None:
        """Add a step; if there are MIN_STEPS already, drop the oldest one."""
        old_ns, old_exposed_ns, was_slowest = 0, 0, False
        if self.steps < MIN_STEPS:
            self.steps += 1
        else:
            old_ns, old_exposed_ns = self._last[0]
            was_slowest = not old_ns
        self._last.append((wait_ns, exposed_ns))
        self.wait_ns += wait_ns - old_ns
        self.exposed_ns += exposed_ns - old_exposed_ns
        self.slowest += (not wait_ns) - was_slowest


class _RecentWaitCache:
    """Reads the waits of many ranks, each once."""

    def __init__(self, store: Store, process: int, end_s: int, stalled: Seconds) -> None:
        """Start at a step of `process`, about `_SAMPLED_S` before `end_s` (s); leave out the seconds `stalled`."""
        start_s = _unstalled_ranges(end_s, _SAMPLED_S, stalled)[0][0]
        first_id = store.as_of(start_s * SECOND).last_id(process)
        self._stalled = stalled
        self._read = deque([(end_s, first_id)])
        """The seconds of the last reads, and the last ids that they found."""
        self._known_id = first_id
        """All waits up to this id are known."""
        self.of: dict[int, _RecentWaits] = {}
        """By process."""

    def read(self, store: Store, end_s: int, ranks: Sequence[Process], step_s: int) -> bool:
        """Read the waits that are known now, and forget those that are too old; return whether any have changed.

        The waits of a step are known when the rows of all ranks have come. `step_s`: the length of a step.
        """
        while len(self._read) > 1 and self._read[1][0] < end_s - _LATE_S:
            self._read.popleft()
        last_id, waits, has_changed, stalled = self._read[-1][1], self.of, False, self._stalled
        # The ranks of another group may have far fewer passes.
        least_pass = min(waits[rank.process].number if rank.process in waits else -1 for rank in ranks)
        after_id = max(self._read[0][1], self._known_id)
        for wait in read_waits(store, after_id, least_pass):
            last_id = wait.id
            if stalled and any(wait.end_s in seconds for seconds in stalled):
                continue
            recent = waits.get(wait.process)
            if recent is None:
                recent = waits[wait.process] = _RecentWaits()
            if wait.sync_number > recent.number:
                recent.number, recent.second, has_changed = wait.sync_number, wait.end_s, True
                recent.add(wait.wait_ns, wait.exposed_ns)
        self._read.append((end_s, last_id))
        unknown_id = find_unknown_wait(store, after_id, least_pass)
        self._known_id = last_id if unknown_id is None else unknown_id - 1
        oldest_s = _unstalled_ranges(end_s, max(_SAMPLED_S, _OLD_STEPS * step_s), self._stalled)[0][0]
        self.of = {process: recent for process, recent in waits.items() if recent.second >= oldest_s}
        return has_changed or len(self.of) < len(waits)


@dataclass(slots=True)
class RankTimesCache:
    """Reads the mean times of ranks that train together.

    With many ranks, all times are read only for some of them, the slowest included, and may be some seconds old. Only
    the waits are read for the others.
    """

    _of: tuple[int, ...] = ()
    """The processes of the last times, and the seconds that they leave out."""
    _stalled: Seconds = ()
    _waits: _RecentWaitCache | None = None
    _end_s: int = 0
    """The second up to which waits were read."""
    _times: tuple[RankTimes, ...] = ()
    """The times as of the last waits."""
    _width_s: int = RANK_S
    """Seconds that have enough steps with known waits."""
    _whole: dict[int, tuple[int, RankTimes]] = field(default_factory=dict)
    """All times of some or all processes, and the second up to which they were read."""
    groups: Mapping[int, Group | None] = field(default_factory=dict)
    """The process group of each rank."""
    _grouped: Sequence[object] = ()
    """The processes and wrappers from which `groups` was made."""
    _one_of: Mapping[Group | None, int] = field(default_factory=dict)
    """A process of each group."""
    _alone: bool = True
    """Whether ranks wait for each other only in the backward."""

    def read(
        self,
        store: Store,
        focus: Process,
        others: Sequence[Process],
        wrappers: Sequence[Wrapper] = (),
        stalled: Seconds = (),
    ) -> tuple[RankTimes, ...]:
        """Return the times as of the newest step of `focus`, one of the ranks; empty without a step of it.

        With several nodes, the seconds in `stalled` are left out.
        """
        if focus.last_step is None:
            return ()
        ranks = sorted((rank for rank in (focus, *others) if rank.rank is not None), key=_RANK)
        end_s, processes = focus.end_s, tuple(rank.process for rank in ranks)
        stalled *= store.is_mirror
        if (processes, stalled) != (self._of, self._stalled):
            self._of, self._stalled, self._width_s = processes, stalled, RANK_S
            self._waits, self._whole, self._times = None, {}, ()
        if (grouped := (processes, [*wrappers])) != self._grouped:
            self._grouped, self.groups = grouped, groups_of((rank.number for rank in ranks), wrappers)
            self._one_of = {self.groups[rank.number]: rank.process for rank in ranks}
            # If ranks also wait for each other in the forward, the waits of the backward alone do not show who is slow.
            self._alone = not any(rank.waits_in_forward for rank in wrappers)
        if not (store.is_mirror and self._alone and len(ranks) > RANKS_A_SECOND):
            return self._read_whole(store, focus, ranks, end_s, len(ranks) // RANKS_A_SECOND)
        if self._waits is None or end_s < self._end_s or store.until_s is not None:
            self._waits, self._times = _RecentWaitCache(store, focus.process, end_s, stalled), ()
        has_changed = self._waits.read(store, end_s, ranks, focus.last_step.wall_ns // SECOND)
        self._end_s = end_s
        if has_changed or not self._times:
            self._times = self._with_waits(store, focus, ranks, end_s, self._waits.of)
        return self._times

    def _with_waits(
        self, store: Store, focus: Process, ranks: Sequence[Process], end_s: int, waits: Mapping[int, _RecentWaits]
    ) -> tuple[RankTimes, ...]:
        """Return the times of many ranks with their last waits."""
        groups = self.groups
        read = self._read_whole(store, focus, self._choose_ranks_to_read(ranks, focus, waits), end_s, _AGE_S)
        whole = {rank.process: rank._replace(group=groups[rank.rank]) for rank in read}
        step_by_group = {
            rank.group: (rank.step_ns, min(rank.synced / rank.steps, 1.0) if rank.steps else 0.0)
            for rank in (*sorted(whole.values(), key=_STEPS), whole[focus.process])
        }
        times_of_ranks = []
        for rank in ranks:
            times, recent, group = whole.get(rank.process), waits.get(rank.process), groups[rank.number]
            step_ns, syncs_per_step = step_by_group[group]
            if times is None:  # all leave a synchronized pass together, so they have the same mean step
                times = RankTimes(rank.process, rank.number, 0, step_ns, {}, group=group, node=rank.node)
            if recent is not None:
                syncs_per_step /= recent.steps
                times = times._replace(
                    joined=recent.steps,
                    exposed_ns=recent.exposed_ns * syncs_per_step,
                    wait_ns=recent.wait_ns * syncs_per_step,
                    slowest=recent.slowest,
                )
            times_of_ranks.append(times)
        return tuple(times_of_ranks)

    def _read_whole(
        self, store: Store, focus: Process, ranks: Sequence[Process], end_s: int, age_s: int
    ) -> tuple[RankTimes, ...]:
        """Return all times of some ranks, less than `age_s` old."""
        oldest_s = end_s - max(age_s, 1)
        self._whole = {number: rank for number, rank in self._whole.items() if oldest_s < rank[0] <= end_s}
        due = [rank for rank in ranks if rank.process not in self._whole]
        if due:
            self._width_s, read = _rank_times(store, focus, due, self._stalled, self._width_s)
            self._whole |= {rank.process: (end_s, rank) for rank in read}
        return tuple(self._whole[rank.process][1] for rank in ranks)

    def _choose_ranks_to_read(
        self, ranks: Sequence[Process], focus: Process, waits: Mapping[int, _RecentWaits]
    ) -> list[Process]:
        """Return the ranks whose times are all read: `focus`, the slowest, and some of each group for comparison."""
        means = {
            process: process_by_group.wait_ns / process_by_group.steps for process, process_by_group in waits.items()
        }
        slowest = sorted(means, key=means.__getitem__)[:MAX_LEAST_WAITING]
        chosen = {
            focus.process,
            *slowest,
            *(rank.process for rank in sample_unevenly(ranks, RANKS_A_SECOND - MAX_LEAST_WAITING)),
        }
        process_by_group = {self.groups[rank.number]: rank.process for rank in ranks if rank.process in chosen}
        chosen.update({**self._one_of, **process_by_group}.values())
        return [rank for rank in ranks if rank.process in chosen]


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


def _rank_times(
    store: Store, focus: Process, ranks: Sequence[Process], stalled: Seconds, width_s: int
) -> tuple[int, tuple[RankTimes, ...]]:
    """Return a number of seconds, and the mean times of ranks in them; `stalled` seconds are left out.

    The seconds are whole, at least `width_s`, and enough for about RANK_STEPS steps.
    """
    assert focus.last_step is not None
    end_s = max(rank.end_s for rank in (focus, *ranks) if rank.last_step is not None)
    if focus.last_step.kind != store.main_kind and focus.recent.last_ns is not None:
        end_s = min(end_s, focus.recent.last_ns // SECOND + 1)  # the ranks train together in training steps only
    step_ns = focus.recent.step_ns or focus.last_step.wall_ns
    width_s = max(-(-RANK_STEPS * step_ns // SECOND), width_s if store.is_mirror else RANK_S)
    numbers, mode = tuple(rank.process for rank in ranks), focus.last_step.mode
    while True:
        tallies: dict[int, dict[TallyKey, Tally]] = {number: {} for number in numbers}
        for start_s, until_s in _unstalled_ranges(end_s, width_s, stalled):
            read = read_tallies(store, start_s, until_s, process=numbers, sketches=False, series=STRAGGLER_SERIES)
            for key, tally in read.items():
                tallies[key.process].setdefault(key, Tally()).merge(tally)
        merged = (
            (rank, merge_mode_tallies(tallies[rank.process], mode, store.main_kind, without_warmup=True))
            for rank in ranks
        )
        times = tuple(build_rank_times(rank.process, rank.number, tally, rank.node) for rank, tally in merged)
        joined = times[0].joined
        if not store.is_mirror or width_s >= _SAMPLED_S or not 0 < joined < min(times[0].steps, MIN_STEPS):
            return width_s, times
        width_s = min(-(-width_s * MIN_STEPS // joined), _SAMPLED_S)


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

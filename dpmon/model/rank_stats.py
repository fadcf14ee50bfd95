"""The figures of each rank in a picture: its last minutes, and its mean times beside those of the others. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dpmon.model.communication import Wrapper, groups_of
from dpmon.model.run_snapshot import MAX_LEAST_WAITING, Process
from dpmon.model.stragglers import MIN_STEPS, Group, RankTimes, build_rank_times
from dpmon.model.stragglers import SERIES as STRAGGLER_SERIES
from dpmon.model.throughput import metrics_end_s, sample_unevenly
from dpmon.record.schema import SECOND, STEP
from dpmon.store.step_stats import compute_step_stats, merge_mode_tallies, tallies_by_process, training_modes
from dpmon.store.tally import Tally, TallyKey

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

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
"""Waits that become known later than this after their step are left out of a live picture."""
_OLD_STEPS = 4
"""The last known waits of a rank are too old after this many steps, and `_SAMPLED_S`: a machine may be cut off."""
_JOINED, _SYNCED = map(RankTimes._fields.index, ("joined", "synced"))
_UNKNOWN: tuple[Any, ...] = (0, None, None, 0)
"""The members of RankTimes from `joined` to `slowest`, if the waits of a rank are unknown."""
_SERIES = (STEP, "forward", "backward")
_MINUTE_S = 60
_RANK, _STEPS = map(attrgetter, ("rank", "steps"))


class _RecentWaits:
    """The last steps of a rank with known waits: as many as are needed to name a straggler.

    Their sums are kept, because a picture needs those of a thousand ranks.
    """

    __slots__ = ("_last", "exposed_ns", "number", "second", "slowest", "steps", "wait_ns")

    def __init__(self) -> None:
        self.number = self.second = -1
        """The number of its last synchronized pass, and the second in which it ended."""
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

    def __init__(self, rows: Store, process: int, end_s: int, stalled: Seconds) -> None:
        """Begin at a step of `process`, about `_SAMPLED_S` before the second `end_s`; leave `stalled` out."""
        begin_s = _unstalled_ranges(end_s, _SAMPLED_S, stalled)[0][0]
        first_id = rows.as_of(begin_s * SECOND).last_step_id([process])
        self._stalled = stalled
        self._read = deque([(end_s, first_id)])
        """The seconds of the last reads, and the last ids that they found."""
        self._known_id = first_id
        """All waits up to this id are known."""
        self.of: dict[int, _RecentWaits] = {}
        """By process."""

    def read(self, rows: Store, end_s: int, ranks: Sequence[Process], step_s: int) -> bool:
        """Read the waits that are known now, and forget those that are too old; return whether any have changed.

        The waits of a step are known when the rows of all ranks have come. `step_s`: the length of a step.
        """
        while len(self._read) > 1 and self._read[1][0] < end_s - _LATE_S:
            self._read.popleft()
        last_id, of, new, stalled = self._read[-1][1], self.of, False, self._stalled
        # The ranks of another group may have far fewer passes.
        least = min(of[one.process].number if one.process in of else -1 for one in ranks)
        after_id = max(self._read[0][1], self._known_id)
        for number, process, sync_number, exposed_ns, wait_ns, second in rows.waits(after_id, least):
            last_id = number
            if stalled and any(second in each for each in stalled):
                continue
            own = of.get(process)
            if own is None:
                own = of[process] = _RecentWaits()
            if sync_number > own.number:
                own.number, own.second, new = sync_number, second, True
                own.add(wait_ns, exposed_ns)
        self._read.append((end_s, last_id))
        unknown_id = rows.unknown_wait(after_id, least)
        self._known_id = last_id if unknown_id is None else unknown_id - 1
        oldest_s = _unstalled_ranges(end_s, max(_SAMPLED_S, _OLD_STEPS * step_s), self._stalled)[0][0]
        self.of = {process: own for process, own in of.items() if own.second >= oldest_s}
        return new or len(self.of) < len(of)


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
        rows: Store,
        focus: Process,
        others: Sequence[Process],
        wrappers: Sequence[Wrapper] = (),
        stalled: Seconds = (),
    ) -> tuple[RankTimes, ...]:
        """The times as of the newest step of `focus`, one of the ranks; of several machines, without `stalled`."""
        if focus.last_step is None:
            return ()
        ranks = sorted((one for one in (focus, *others) if one.rank is not None), key=_RANK)
        end_s, of, stalled = metrics_end_s(rows, focus), tuple(one.process for one in ranks), stalled * rows.is_mirror
        if (of, stalled) != (self._of, self._stalled):
            self._of, self._stalled, self._width_s = of, stalled, RANK_S
            self._waits, self._whole, self._times = None, {}, ()
        if (grouped := (of, [*wrappers])) != self._grouped:
            self._grouped, self.groups = grouped, groups_of((one.number for one in ranks), wrappers)
            self._one_of = {self.groups[one.number]: one.process for one in ranks}
            # If ranks also wait for each other in the forward, the waits of the backward alone do not show who is slow.
            self._alone = not any(one.waits_in_forward for one in wrappers)
        if not (rows.is_mirror and self._alone and len(ranks) > RANKS_A_SECOND):
            return self._read_whole(rows, focus, ranks, end_s, len(ranks) // RANKS_A_SECOND)
        if self._waits is None or end_s < self._end_s or rows.until_s is not None:
            self._waits, self._times = _RecentWaitCache(rows, focus.process, end_s, stalled), ()
        new = self._waits.read(rows, end_s, ranks, focus.last_step.wall_ns // SECOND)
        self._end_s = end_s
        if new or not self._times:
            self._times = self._with_waits(rows, focus, ranks, end_s, self._waits.of)
        return self._times

    def _with_waits(
        self, rows: Store, focus: Process, ranks: Sequence[Process], end_s: int, waits: Mapping[int, _RecentWaits]
    ) -> tuple[RankTimes, ...]:
        """The times of many ranks with their last waits."""
        groups = self.groups
        read = self._read_whole(rows, focus, self._choose_ranks_to_read(ranks, focus, waits), end_s, _AGE_S)
        whole = {one.process: one._replace(group=groups[one.rank]) for one in read}
        of_group = {
            one.group: (one.step_ns, min(one.synced / one.steps, 1.0) if one.steps else 0.0)
            for one in (*sorted(whole.values(), key=_STEPS), whole[focus.process])
        }
        found = []
        for one in ranks:
            process, number, known = one.process, one.number, _UNKNOWN
            times, own, group = whole.get(process), waits.get(process), groups[number]
            step_ns, part = of_group[group]
            if times is not None:
                before, known, after = times[:_JOINED], times[_JOINED:_SYNCED], times[_SYNCED:]
            else:  # all leave a synchronized pass together, so they have the same mean step
                before, after = (process, number, 0, step_ns, {}), (0, 0, 0, group, False, one.node)
            if own is not None:
                part /= own.steps
                known = own.steps, own.exposed_ns * part, own.wait_ns * part, own.slowest
            found.append(RankTimes._make(before + known + after))
        return tuple(found)

    def _read_whole(
        self, rows: Store, focus: Process, ranks: Sequence[Process], end_s: int, age_s: int
    ) -> tuple[RankTimes, ...]:
        """All times of some ranks, less than `age_s` old."""
        oldest_s = end_s - max(age_s, 1)
        self._whole = {number: one for number, one in self._whole.items() if oldest_s < one[0] <= end_s}
        due = [one for one in ranks if one.process not in self._whole]
        if due:
            self._width_s, read = _rank_times(rows, focus, due, self._stalled, self._width_s)
            self._whole |= {one.process: (end_s, one) for one in read}
        return tuple(self._whole[one.process][1] for one in ranks)

    def _choose_ranks_to_read(
        self, ranks: Sequence[Process], focus: Process, waits: Mapping[int, _RecentWaits]
    ) -> list[Process]:
        """The ranks for which all times are read: `focus`, the slowest, and some of each group for comparison."""
        means = {process: own.wait_ns / own.steps for process, own in waits.items()}
        slowest = sorted(means, key=means.__getitem__)[:MAX_LEAST_WAITING]
        wanted = {
            focus.process,
            *slowest,
            *(one.process for one in sample_unevenly(ranks, RANKS_A_SECOND - MAX_LEAST_WAITING)),
        }
        own = {self.groups[one.number]: one.process for one in ranks if one.process in wanted}
        wanted.update({**self._one_of, **own}.values())
        return [one for one in ranks if one.process in wanted]


def _unstalled_ranges(end_s: int, width_s: int, stalled: Seconds) -> list[tuple[int, int]]:
    """The `width_s` seconds before `end_s` that are not `stalled`, in parts."""
    found = []
    for each in reversed((range(0), *stalled)):
        begin_s = max(end_s - width_s, min(each.stop, end_s))
        if begin_s < end_s:
            found.append((begin_s, end_s))
            width_s -= end_s - begin_s
        end_s = min(end_s, each.start)
    return found[::-1] or [(0, 0)]


def _rank_times(
    rows: Store, focus: Process, ranks: Sequence[Process], stalled: Seconds, width_s: int
) -> tuple[int, tuple[RankTimes, ...]]:
    """Return a number of seconds, and the mean times of ranks in them; `stalled` seconds are left out.

    The seconds are whole, at least `width_s`, and enough for about RANK_STEPS steps.
    """
    assert focus.last_step is not None
    end_s = max(metrics_end_s(rows, one) for one in (focus, *ranks) if one.last_step is not None)
    step_ns = focus.recent.step_ns or focus.last_step.wall_ns
    width_s = max(-(-RANK_STEPS * step_ns // SECOND), width_s if rows.is_mirror else RANK_S)
    numbers, mode = tuple(one.process for one in ranks), focus.last_step.mode
    while True:
        own: dict[int, dict[TallyKey, Tally]] = {number: {} for number in numbers}
        for begin_s, until_s in _unstalled_ranges(end_s, width_s, stalled):
            found = rows.tallies(begin_s, until_s, process=numbers, sketches=False, series=STRAGGLER_SERIES)
            for key, tally in found.items():
                own[key.process].setdefault(key, Tally()).merge(tally)
        trained = mode in training_modes((key.mode, key.kind) for each in own.values() for key in each)
        whole = ((one, merge_mode_tallies(own[one.process], mode, False, trained, settled=True)) for one in ranks)
        times = tuple(build_rank_times(one.process, one.number, tally, one.node) for one, tally in whole)
        joined = times[0].joined
        if not rows.is_mirror or width_s >= _SAMPLED_S or not 0 < joined < min(times[0].steps, MIN_STEPS):
            return width_s, times
        width_s = min(-(-width_s * MIN_STEPS // joined), _SAMPLED_S)


def with_recent_stats(rows: Store, processes: Iterable[Process]) -> Iterator[Process]:
    """The processes with their figures over the current minute and the one before."""
    alike: dict[int, list[Process]] = {}
    for process in processes:
        if process.last_step is not None:
            alike.setdefault(metrics_end_s(rows, process), []).append(process)
    for end_s, those in alike.items():
        begin_s = max(end_s // _MINUTE_S - 1, 0) * _MINUTE_S  # each minute has its own tally
        numbers = tuple(process.process for process in those)
        found = rows.tallies(begin_s, end_s, process=numbers, series=_SERIES)
        trained, own = training_modes((key.mode, key.kind) for key in found), tallies_by_process(found)
        for process in those:
            mode = process.last_step.mode if process.last_step is not None else ""
            tally = merge_mode_tallies(own.get(process.process, {}), mode, False, mode in trained)
            yield replace(process, figures=compute_step_stats(mode, False, tally, None))

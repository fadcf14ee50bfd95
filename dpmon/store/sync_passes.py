"""Finds, for each synchronized backward pass, which rank the others waited for. Pure.

All ranks leave a synchronized backward pass together. The time from a rank's last gradient to that end is shortest on
the rank that the others wait for. The shortest time is communication that no computation hides; the rest of a rank's
time is its wait. Only durations are compared, so the clocks of the ranks may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.record.schema import AFTER_OTHER_KIND, EXPOSED, SPAN_PHASES, STRAGGLER_DELAY, UNCOMPARED, WAIT
from dpmon.store.tally import TallyKey

MAX_WAITING = 1 << 16
"""Most steps of a group that wait for other ranks: more than fit into the largest ring. The oldest are dropped."""
_MAX_RANKS = 1 << 16
_SYNC_AT = SPAN_PHASES.index("sync")


class SyncStep(NamedTuple):
    """A step with synchronized backward passes."""

    id: int
    """Id of its row."""
    key: TallyKey
    second: int
    """Second in which it ended, since the run's start."""
    number: int
    """Number of its last synchronized pass, the same on all ranks."""
    passes: int
    tail_ns: int
    """Total time from the last gradients to the ends of these passes."""
    wall_ns: int


class RankStepWait(NamedTuple):
    """How long one rank communicated and waited in one step (ns). Known only after every rank's step has arrived."""

    step: SyncStep
    exposed_ns: int | None
    """None if a rank ran steps of another kind since its previous pass: the others may have waited for these, so
    tallies do not compare the ranks in this step."""
    wait_ns: int
    held_ns: int | None
    """On the slowest rank: how much later it was than the second slowest. None on the other ranks."""

    @property
    def tally_values(self) -> dict[str, int]:
        """Its values for a tally, by series."""
        if self.exposed_ns is None:
            return {UNCOMPARED: self.step.wall_ns}
        values = {EXPOSED: self.exposed_ns, WAIT: self.wait_ns}
        return values if self.held_ns is None else {**values, STRAGGLER_DELAY: self.held_ns}


class _RankGroup:
    """The processes that average their gradients together, one per rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pending: dict[tuple[int, int], dict[int, SyncStep]] = {}
        """The steps by rank, for each (number of the last pass, count of passes)."""
        self.waiting = 0
        """Number of steps in `pending`."""
        self.newest: dict[int, int] = {}
        """Newest process by rank."""
        self.replaced: set[int] = set()
        """Processes of the job before its restart."""

    def register_process(self, rank: int, process: int) -> bool:
        """Register the rank of a process. Return False if the process belongs to the job before its last restart.

        The first process that replaces another one marks a restart: earlier processes no longer count.
        """
        known = self.newest.get(rank)
        if known == process:
            return process not in self.replaced
        if known is not None and known > process:
            return False
        if known is not None and known not in self.replaced:
            self.replaced = set(self.newest.values())
            self.pending.clear()
            self.waiting = 0
        self.newest[rank] = process
        return True

    def add(self, rank: int, step: SyncStep) -> Sequence[RankStepWait]:
        """Add a step of a rank. Return the waits of all ranks once the steps of its round are complete."""
        place = step.number, step.passes
        steps = self.pending.setdefault(place, {})
        self.waiting += rank not in steps
        steps[rank] = step
        if len(steps) == self.size:
            self._drop_round(place)
            return tuple(_split_waits(steps))
        while self.waiting > MAX_WAITING:
            self._drop_round(next(iter(self.pending)))
        return ()

    def _drop_round(self, place: tuple[int, int]) -> None:
        self.waiting -= len(self.pending.pop(place))


class SyncPassMatcher:
    """The synchronized passes of a run."""

    def __init__(self) -> None:
        self._ranks: dict[int, Sequence[int]] = {}
        """Ranks of the group by process."""
        self._rank_of: dict[int, int] = {}
        self._reported: set[int] = set()
        """Processes with wrappers that have named their ranks."""
        self._several: set[int] = set()
        """Processes with wrappers of different groups."""
        self._groups: dict[Sequence[int], _RankGroup] = {}

    def handle_event(self, process: int, kind: str, data: Mapping[str, Any]) -> None:
        """Read the rank and world size of a process, or the group of its wrapper, from an event.

        A process that reports only its rank gets no group: it may be a child of that rank.
        """
        rank, world, group = data.get("rank"), data.get("world"), data.get("group")
        if type(rank) is not int or rank < 0:
            return
        self._rank_of[process] = rank
        if kind == "process" and type(world) is int and 0 < world <= _MAX_RANKS:
            self._ranks.setdefault(process, range(world))
        elif kind == "ddp" and isinstance(group, list) and all(type(one) is int for one in group) and rank in group:
            ranks = tuple(sorted(group))
            group_of = range(len(ranks)) if ranks == tuple(range(len(ranks))) else ranks
            if self._ranks.get(process, group_of) != group_of and process in self._reported:
                self._several.add(process)  # passes of different groups cannot be distinguished
            self._reported.add(process)
            self._ranks[process] = group_of
            self._group(process)

    def rank_group(self, process: int) -> Sequence[int] | None:
        """Return the ranks with which a process averages its gradients; None if unknown."""
        return None if process in self._several else self._ranks.get(process)

    def _group(self, process: int) -> _RankGroup | None:
        """Return the group of a process; None if it has no group or is from before a restart of the job."""
        ranks, rank = self._ranks.get(process), self._rank_of.get(process)
        if ranks is None or rank is None or len(ranks) < 2 or rank not in ranks or process in self._several:
            return None
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = _RankGroup(len(ranks))
        return group if group.register_process(rank, process) else None

    def roll_back(self, first_id: int, joined: Iterable[RankStepWait]) -> None:
        """Roll back the steps with ids of `first_id` or higher.

        The other ranks' steps in those rounds become pending again.
        """
        for group in self._groups.values():
            for place, steps in list(group.pending.items()):
                kept = {rank: step for rank, step in steps.items() if step.id < first_id}
                group.waiting -= len(steps) - len(kept)
                group.pending[place] = kept
                if not kept:
                    del group.pending[place]
        for one in joined:
            if one.step.id < first_id:
                self.add_step(one.step.key.process, one.step)

    def add_step(self, process: int, step: SyncStep) -> list[RankStepWait]:
        """Add a step of a process. Return the waits of all ranks in the rounds that are now complete."""
        group = self._group(process)
        return [] if group is None else list(group.add(self._rank_of[process], step))


def _split_waits(steps: Mapping[int, SyncStep]) -> Iterator[RankStepWait]:
    tails = sorted(step.tail_ns for step in steps.values())
    least, next_least = tails[:2]
    slowest = min(steps, key=lambda rank: steps[rank].tail_ns)
    exposed_ns = None if any(step.key.kind & AFTER_OTHER_KIND for step in steps.values()) else least
    for rank, step in steps.items():
        yield RankStepWait(step, exposed_ns, step.tail_ns - least, next_least - least if rank == slowest else None)


def sync_device_ns(times: Sequence[float | None]) -> int | None:
    """Return the device time (ns) of a step's phase `sync`, or None. `times`: its device times (ms) of SPAN_PHASES."""
    ms = times[_SYNC_AT] if len(times) > _SYNC_AT else None
    return None if ms is None else int(ms * 1e6)

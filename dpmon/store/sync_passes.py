"""Finds, for each synchronized backward pass, which rank the others waited for.

All ranks leave a synchronized backward pass together. The time from a rank's last gradient to that end, its tail, is
shortest on the rank that the others wait for. The shortest tail is communication that no computation hides; the rest
of a rank's tail is its wait. Only durations are compared, so the clocks of the ranks may differ.

A step waits for the steps of the other ranks in a table in memory, until its pass is complete.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.record.schema import AFTER_OTHER_KIND, EXPOSED, SPAN_PHASES, STRAGGLER_DELAY, UNCOMPARED, WAIT
from dpmon.store.steps import StepRow
from dpmon.store.tally_keys import KeyNumbers, TallyKey

SCHEMA = """
CREATE TEMP TABLE pending_steps (
    rank_group INTEGER NOT NULL,
    number     INTEGER NOT NULL,  -- of the last sync pass in the step, the same on all ranks
    passes     INTEGER NOT NULL,  -- sync passes in the step
    rank       INTEGER NOT NULL,
    ranks      INTEGER NOT NULL,  -- number of ranks in the group
    step_id    INTEGER NOT NULL,
    key        INTEGER NOT NULL,  -- the key and the second of its tally
    second     INTEGER NOT NULL,
    tail_ns    INTEGER NOT NULL,  -- from the last gradients to the ends of the passes
    wall_ns    INTEGER NOT NULL,
    uncompared INTEGER NOT NULL,  -- whether steps of another kind ran before it: AFTER_OTHER_KIND
    PRIMARY KEY (rank_group, number, passes, rank)
) WITHOUT ROWID;
CREATE TEMP TABLE complete_passes (
    rank_group   INTEGER NOT NULL,
    number       INTEGER NOT NULL,
    passes       INTEGER NOT NULL,
    least_ns     INTEGER NOT NULL,  -- the shortest tail
    straggler_id INTEGER NOT NULL,  -- id of the step with it
    uncompared   INTEGER NOT NULL,  -- how many of its steps are
    PRIMARY KEY (rank_group, number, passes)
) WITHOUT ROWID;
"""
_NOTE_COMPLETE = """
INSERT INTO complete_passes SELECT rank_group, number, passes, min(tail_ns), step_id, sum(uncompared) FROM pending_steps
WHERE rank_group = ? AND number = ? AND passes = ? GROUP BY rank_group, number, passes HAVING count(*) = ranks
"""
_FIND_WAITS = """
SELECT step_id, key, second, wall_ns, CASE complete_passes.uncompared WHEN 0 THEN least_ns END, tail_ns - least_ns,
    CASE step_id WHEN straggler_id THEN (
        SELECT min(tail_ns) FROM pending_steps AS other WHERE other.rank_group = pending_steps.rank_group
        AND other.number = pending_steps.number AND other.passes = pending_steps.passes AND step_id != straggler_id
    ) - least_ns END
FROM complete_passes CROSS JOIN pending_steps USING (rank_group, number, passes)
"""
_DELETE_COMPLETE = """
DELETE FROM pending_steps WHERE (rank_group, number, passes) IN (SELECT rank_group, number, passes FROM complete_passes)
"""
_DELETE_OLD = "DELETE FROM pending_steps WHERE rank_group >= ? AND (rank_group, number) < (?, ?)"
MAX_PENDING = 1 << 16
"""Most steps of a group that wait for other ranks: more than fit into the largest ring. The oldest are dropped."""
_RESTART_BITS = 16
_SYNC_AT = SPAN_PHASES.index("sync")


class SyncStep(NamedTuple):
    """A step with sync passes: a row of `pending_steps`, with its key."""

    rank_group: int
    number: int
    passes: int
    rank: int
    ranks: int
    step_id: int
    key: TallyKey
    second: int
    tail_ns: int
    wall_ns: int


class RankStepWait(NamedTuple):
    """How long one rank communicated and waited in one step (ns). Known only after every rank's step has arrived."""

    step_id: int
    key: int
    """Number of the key of its tally."""
    second: int
    """Second of the tables in which it ended."""
    wall_ns: int
    exposed_ns: int | None
    """None if a rank ran steps of another kind since its previous pass: the others may have waited for these, so
    tallies do not compare the ranks in this step."""
    wait_ns: int
    straggler_delay_ns: int | None
    """On the slowest rank: how much later it was than the second slowest. None on the other ranks."""

    @property
    def series(self) -> dict[str, int]:
        """Its values for a tally, by series."""
        if self.exposed_ns is None:
            return {UNCOMPARED: self.wall_ns}
        values = {EXPOSED: self.exposed_ns, WAIT: self.wait_ns}
        return values if self.straggler_delay_ns is None else {**values, STRAGGLER_DELAY: self.straggler_delay_ns}


def join_sync_steps(db: sqlite3.Connection, steps: Sequence[SyncStep], numbers: KeyNumbers) -> list[RankStepWait]:
    """Add steps. Return the waits of all ranks in the passes that are complete now, and write them to `steps`."""
    if not steps:
        return []
    places = [(step.rank_group, step.number, step.passes) for step in steps]
    rows = [
        (
            *(*place, step.rank, step.ranks, step.step_id, numbers.number(step.key), step.second),
            *(step.tail_ns, step.wall_ns, step.key.kind & AFTER_OTHER_KIND > 0),
        )
        for place, step in zip(places, steps, strict=True)
    ]
    db.executemany("INSERT OR REPLACE INTO pending_steps VALUES (?,?,?,?,?,?,?,?,?,?,?)", rows)
    db.executemany(_NOTE_COMPLETE, set(places))
    waits = [RankStepWait._make(row) for row in db.execute(_FIND_WAITS)]
    if waits:
        db.execute(_DELETE_COMPLETE)
        db.execute("DELETE FROM complete_passes")
    for step in {step.rank_group: step for step in steps}.values():
        first_restart = step.rank_group >> _RESTART_BITS << _RESTART_BITS
        oldest_kept = step.rank_group, step.number - MAX_PENDING // step.ranks
        db.execute(_DELETE_OLD, (first_restart, *oldest_kept))
    db.executemany(
        f"UPDATE steps SET {EXPOSED}_ns = ?, {WAIT}_ns = ? WHERE id = ?",
        [(wait.exposed_ns, wait.wait_ns, wait.step_id) for wait in waits],
    )
    return waits


class _RankGroup:
    """The processes that average their gradients together, one per rank."""

    def __init__(self, index: int, size: int) -> None:
        self.number = index << _RESTART_BITS
        """Its number: the next one after a restart of the job."""
        self.size = size
        self.newest: dict[int, int] = {}
        """Newest process by rank."""
        self.replaced: set[int] = set()
        """Processes of the job before its restarts."""

    def register_process(self, rank: int, process: int) -> bool:
        """Register the rank of a process. Return False if the process belongs to the job before its last restart.

        The first process that replaces another one marks a restart: earlier processes no longer count.
        """
        known = self.newest.get(rank)
        if process in self.replaced:
            return False
        if known not in (None, process) and known not in self.replaced:
            self.replaced.update(self.newest.values())
            self.number += 1
        self.newest[rank] = process
        return True


class RankGroups:
    """The process groups of a run, as its processes report them."""

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
        if rank is None:
            return
        self._rank_of[process] = rank
        if kind == "process" and world:
            self._ranks.setdefault(process, range(world))
        elif kind == "ddp" and group and rank in group:
            ranks = tuple(sorted(group))
            group_of = range(len(ranks)) if ranks == tuple(range(len(ranks))) else ranks
            if self._ranks.get(process, group_of) != group_of and process in self._reported:
                self._several.add(process)  # passes of different groups cannot be distinguished
            self._reported.add(process)
            self._ranks[process] = group_of
            self._group(process)

    def ranks(self, process: int) -> Sequence[int] | None:
        """Return the ranks with which a process averages its gradients; None if unknown."""
        return None if process in self._several else self._ranks.get(process)

    def _group(self, process: int) -> _RankGroup | None:
        """Return the group of a process; None if it has no group or is from before a restart of the job."""
        ranks, rank = self.ranks(process), self._rank_of.get(process)
        if ranks is None or rank is None or len(ranks) < 2 or rank not in ranks:
            return None
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = _RankGroup(len(self._groups), len(ranks))
        return group if group.register_process(rank, process) else None

    def sync_step(self, key: TallyKey, step: StepRow, tail_ns: int | None, second: int) -> SyncStep | None:
        """Return a step of a process as one that waits for the steps of the other ranks; None if there are none.

        `second`: that of its tally.
        """
        if step.sync_number is None or tail_ns is None:
            return None
        group = self._group(key.process)
        if group is None:
            return None
        return SyncStep(
            rank_group=group.number,
            number=step.sync_number,
            passes=step.measurement("synced") or 0,
            rank=self._rank_of[key.process],
            ranks=group.size,
            step_id=step.id,
            key=key,
            second=second,
            tail_ns=tail_ns,
            wall_ns=step.wall_ns,
        )


def sync_device_ns(times: Sequence[float | None]) -> int | None:
    """Return the device time (ns) of a step's phase `sync`, or None. `times`: its device times (ms) of SPAN_PHASES."""
    ms = times[_SYNC_AT] if len(times) > _SYNC_AT else None
    return None if ms is None else int(ms * 1e6)

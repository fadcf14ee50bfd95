"""Joining the ranks of a synchronized backward pass."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence

import pytest

from dpmon.errors import HistoryError
from dpmon.record.schema import AFTER_OTHER_KIND, UNCOMPARED
from dpmon.store import sync_passes
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.steps import MEASURED, StepRow
from dpmon.store.sync_passes import RankGroups, RankStepWait, join_sync_steps
from dpmon.store.tally_keys import TallyKey

Step = tuple[int, int, int]
"""Process, number of its last pass, and tail (ns) of a step."""


def _row(process: int, number: int, wall_ns: int, passes: int) -> StepRow:
    measured = tuple(passes if name == "synced" else None for name in MEASURED)
    return StepRow(1000 * process + number, process, number, "single", 0, wall_ns, 0, 0, measured)


class Ranks:
    """The process groups of a run, and a history for their steps."""

    def __init__(self, count: int, *groups: list[int]) -> None:
        """Processes 0, 1, ... have the same ranks; `groups`: their process groups."""
        self.groups = RankGroups()
        self.history = HistoryWriter(sqlite3.connect(":memory:", isolation_level=None), {})
        for rank in range(count):
            self.groups.handle_event(rank, "process", {"rank": rank, "world": count})
        for group in groups:
            for rank in group:
                self.groups.handle_event(rank, "ddp", {"rank": rank, "group": group})

    def add(self, *steps: Step, passes: int = 1, kind: int = 0, fails: bool = False) -> list[RankStepWait]:
        """Write steps in one transaction. Return the waits that are known now. `fails`: the transaction does."""
        added = [
            self.groups.sync_step(
                TallyKey(process, "single", kind, 8),
                _row(process, number, 2 * tail_ns, passes)._replace(kind=kind, sync_number=number),
                tail_ns,
                number,
            )
            for process, number, tail_ns in steps
        ]
        known = [step for step in added if step is not None]
        waits: list[RankStepWait] = []

        def write() -> None:
            waits.extend(join_sync_steps(self.history._db, known, self.history.key_numbers))
            if fails:
                raise HistoryError("the disk is full")

        self.history.run_transaction(write)
        return waits

    def pending(self) -> int:
        """Return how many steps wait."""
        return int(self.history._db.execute("SELECT count(*) FROM pending_steps").fetchone()[0])


def waits_by_process(waits: Sequence[RankStepWait]) -> dict[int, tuple[int | None, int, int | None]]:
    """Return exposed communication, wait and delay of the straggler by process."""
    return {wait.step_id // 1000: (wait.exposed_ns, wait.wait_ns, wait.straggler_delay_ns) for wait in waits}


def test_the_shortest_tail_is_exposed_time_and_the_rest_is_wait() -> None:
    ranks = Ranks(3)
    assert ranks.add((0, 1, 90)) == []
    assert ranks.add((2, 1, 30)) == []
    assert waits_by_process(ranks.add((1, 1, 50))) == {0: (30, 60, None), 1: (30, 20, None), 2: (30, 0, 20)}
    assert ranks.pending() == 0


def test_waits_do_not_count_in_a_pass_for_which_a_rank_came_from_an_evaluation() -> None:
    ranks = Ranks(2)
    waits: list[RankStepWait] = []
    for number, kind in ((1, 0), (2, AFTER_OTHER_KIND), (3, 0)):
        ranks.add((0, number, 10), kind=kind)
        waits += ranks.add((1, number, 3000))
    assert [(wait.exposed_ns, wait.wait_ns) for wait in waits if wait.step_id >= 1000] == [
        (10, 2990),
        (None, 2990),
        (10, 2990),
    ]
    names = {number: {name for wait in waits if wait.second == number for name in wait.series} for number in (1, 2, 3)}
    assert UNCOMPARED not in names[1] | names[3]
    assert names[2] == {UNCOMPARED}


def test_ranks_may_be_several_passes_apart() -> None:
    ranks = Ranks(2)
    assert ranks.add((0, 1, 10), (0, 2, 10), (0, 3, 10)) == []
    found = [waits_by_process(ranks.add((1, number, 4))) for number in (1, 2, 3)]
    assert found == [{0: (4, 6, None), 1: (4, 0, 6)}] * 3


def test_each_process_group_is_joined_by_itself() -> None:
    ranks = Ranks(4, [0, 2], [1, 3])
    assert ranks.add((0, 1, 10), (1, 1, 20)) == []
    assert waits_by_process(ranks.add((2, 1, 15))) == {0: (10, 0, 5), 2: (10, 5, None)}
    assert waits_by_process(ranks.add((3, 1, 25))) == {1: (20, 0, 5), 3: (20, 5, None)}


def test_steps_with_other_passes_are_not_joined() -> None:
    ranks = Ranks(2)
    ranks.add((0, 2, 10), passes=2)
    assert ranks.add((1, 2, 10), passes=1) == []


def test_a_rank_without_records_leaves_the_waits_of_the_others_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_passes, "MAX_PENDING", 99)
    ranks = Ranks(3)
    for number in range(1, 1000):
        assert ranks.add((0, number, 10), (1, number, 20)) == []
    assert ranks.pending() <= 99


def test_ranks_may_be_read_one_after_the_other() -> None:
    ranks = Ranks(3)
    found = [wait for rank in range(3) for wait in ranks.add(*((rank, n, rank + 5) for n in range(1, 4000)))]
    assert len(found) == 3 * 3999
    assert {wait.exposed_ns for wait in found} == {5}


def test_a_pass_is_unknown_if_a_rank_has_no_record_of_it() -> None:
    ranks = Ranks(2)
    ranks.add((0, 1, 10))
    assert ranks.add((1, 2, 10)) == []
    assert len(ranks.add((0, 2, 10))) == 2


def test_a_job_that_was_started_again_is_not_joined_with_its_earlier_processes() -> None:
    ranks = Ranks(2)
    ranks.add((0, 1, 10))
    for rank in range(2):
        ranks.groups.handle_event(2 + rank, "ddp", {"rank": rank, "group": [0, 1]})
    assert ranks.add((3, 1, 10)) == []  # rank 1 of the new job does not meet rank 0 of the old one
    assert ranks.pending() == 1
    assert waits_by_process(ranks.add((2, 1, 15))) == {2: (10, 5, None), 3: (10, 0, 5)}
    assert ranks.add((0, 2, 10)) == []


def test_wrappers_of_different_groups_are_not_joined() -> None:
    ranks = Ranks(4, [0, 1, 2, 3], [0, 1], [2, 3])
    assert ranks.add(*((rank, 1, 10) for rank in range(4))) == []


def test_the_time_of_a_step_does_not_grow_with_the_steps_that_wait() -> None:
    """SQLite's own counter of instructions tells it, so this needs no clock."""

    def instructions(ranks: Ranks, number: int) -> int:
        counted = 0

        def count() -> None:
            nonlocal counted
            counted += 1

        ranks.add((0, number, 10))
        ranks.history._db.set_progress_handler(count, 1)
        ranks.add((1, number, 20))
        ranks.history._db.set_progress_handler(None, 0)
        return counted

    few, many = Ranks(3), Ranks(3)
    many.add(*((rank, number, 10) for number in range(1, 5000) for rank in (0, 1)))
    assert instructions(many, 5000) <= 1.2 * instructions(few, 5000)


@pytest.mark.parametrize("seed", range(5))
def test_waits_are_found_in_any_order_and_in_spite_of_failed_writes(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.choice((2, 3, 5))
    ranks, tails = Ranks(count), dict[int, list[int]]()
    for number in range(1, 100):
        tails[number] = [chance.randrange(1, 1000) for _ in range(count)]
    steps: list[Step] = [
        (rank, number, tail) for number, all_tails in tails.items() for rank, tail in enumerate(all_tails)
    ]
    steps.sort(key=lambda step: step[1] + chance.randrange(1, 30))
    found: dict[int, tuple[int | None, int, int | None]] = {}
    while steps:
        size = chance.randrange(1, 20)
        if chance.random() < 0.3:
            with pytest.raises(HistoryError):
                ranks.add(*steps[:size], fails=True)
        for wait in ranks.add(*steps[:size]):
            assert wait.step_id not in found
            found[wait.step_id] = wait.exposed_ns, wait.wait_ns, wait.straggler_delay_ns
        del steps[:size]
    assert ranks.pending() == 0
    for number, all_tails in tails.items():
        least, second, *_ = sorted(all_tails)
        slowest = all_tails.index(least)
        for rank, tail in enumerate(all_tails):
            delay = second - least if rank == slowest else None
            assert found[1000 * rank + number] == (least, tail - least, delay)

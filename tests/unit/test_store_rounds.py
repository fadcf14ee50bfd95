"""Joining the ranks of a synchronized backward pass."""

from __future__ import annotations

import pytest

from dpmon.record.schema import AFTER_OTHER_KIND, UNCOMPARED
from dpmon.store.sync_passes import RankStepWait, SyncPassMatcher, SyncStep
from dpmon.store.tally import TallyKey
from dpmon.store.write_batch import WriteBatch


def step(process: int, number: int, tail_ns: int, passes: int = 1) -> SyncStep:
    return SyncStep(
        1000 * process + number, TallyKey(process, "single", 0, 8), number, number, passes, tail_ns, 2 * tail_ns
    )


def of_ranks(count: int, *groups: list[int]) -> SyncPassMatcher:
    """Return the rounds of processes 0, 1, ... with the same ranks; `groups`: their process groups."""
    rounds = SyncPassMatcher()
    for rank in range(count):
        rounds.handle_event(rank, "process", {"rank": rank, "world": count})
    for group in groups:
        for rank in group:
            rounds.handle_event(rank, "ddp", {"rank": rank, "group": group})
    return rounds


def waits_by_process(found: list[RankStepWait]) -> dict[int, tuple[int | None, int, int | None]]:
    """Return exposed, wait and held by process."""
    return {one.step.key.process: (one.exposed_ns, one.wait_ns, one.held_ns) for one in found}


def test_the_shortest_tail_is_exposed_time_and_the_rest_is_wait() -> None:
    rounds = of_ranks(3)
    assert rounds.add_step(0, step(0, 1, 90)) == []
    assert rounds.add_step(2, step(2, 1, 30)) == []
    assert waits_by_process(rounds.add_step(1, step(1, 1, 50))) == {
        0: (30, 60, None),
        1: (30, 20, None),
        2: (30, 0, 20),
    }


def test_waits_do_not_count_in_a_pass_for_which_a_rank_came_from_an_evaluation() -> None:
    rounds, batch = of_ranks(2), WriteBatch()
    for number, flags in ((1, 0), (2, AFTER_OTHER_KIND), (3, 0)):
        late = step(0, number, 10)
        rounds.add_step(0, late._replace(key=late.key._replace(kind=flags)))
        batch.add_waits(rounds.add_step(1, step(1, number, 3000)))
    waits = [(wait.exposed_ns, wait.wait_ns) for wait in batch.rank_waits if wait.step.key.process == 1]
    assert waits == [(10, 2990), (None, 2990), (10, 2990)]
    names = {second: {name for name, _ in added.series} for (second, _), added in batch.steps_by_tally.items()}
    assert UNCOMPARED not in names[1] | names[3]
    assert names[2] == {UNCOMPARED}


def test_ranks_may_be_several_passes_apart() -> None:
    rounds = of_ranks(2)
    assert [rounds.add_step(0, step(0, number, 10)) for number in (1, 2, 3)] == [[], [], []]
    found = [waits_by_process(rounds.add_step(1, step(1, number, 4))) for number in (1, 2, 3)]
    assert found == [{0: (4, 6, None), 1: (4, 0, 6)}] * 3


def test_each_process_group_is_joined_by_itself() -> None:
    rounds = of_ranks(4, [0, 2], [1, 3])
    assert rounds.add_step(0, step(0, 1, 10)) == []
    assert rounds.add_step(1, step(1, 1, 20)) == []
    assert waits_by_process(rounds.add_step(2, step(2, 1, 15))) == {0: (10, 0, 5), 2: (10, 5, None)}
    assert waits_by_process(rounds.add_step(3, step(3, 1, 25))) == {1: (20, 0, 5), 3: (20, 5, None)}


def test_steps_with_other_passes_are_not_joined() -> None:
    rounds = of_ranks(2)
    rounds.add_step(0, step(0, 2, 10, passes=2))
    assert rounds.add_step(1, step(1, 2, 10, passes=1)) == []


def test_a_rank_without_records_leaves_the_waits_of_the_others_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.store.sync_passes.MAX_WAITING", 100)
    rounds = of_ranks(3)
    for number in range(1, 1000):
        assert rounds.add_step(0, step(0, number, 10)) == []
        assert rounds.add_step(1, step(1, number, 20)) == []
    assert sum(len(steps) for group in rounds._groups.values() for steps in group.pending.values()) <= 100


def test_ranks_may_be_read_one_after_the_other() -> None:
    rounds = of_ranks(3)
    found = [one for rank in range(3) for n in range(1, 4000) for one in rounds.add_step(rank, step(rank, n, rank + 5))]
    assert len(found) == 3 * 3999
    assert {one.exposed_ns for one in found} == {5}


def test_a_pass_is_unknown_if_a_rank_has_no_record_of_it() -> None:
    rounds = of_ranks(2)
    rounds.add_step(0, step(0, 1, 10))
    assert waits_by_process(rounds.add_step(1, step(1, 2, 10))) == {}
    assert len(rounds.add_step(0, step(0, 2, 10))) == 2


def test_a_job_that_was_started_again_is_not_joined_with_its_earlier_processes() -> None:
    rounds = of_ranks(2)
    rounds.add_step(0, step(0, 1, 10))
    for rank in range(2):
        rounds.handle_event(2 + rank, "ddp", {"rank": rank, "group": [0, 1]})
    assert rounds.add_step(3, step(3, 1, 10)) == []  # rank 1 of the new job does not meet rank 0 of the old one
    assert waits_by_process(rounds.add_step(2, step(2, 1, 15))) == {2: (10, 5, None), 3: (10, 0, 5)}
    assert rounds.add_step(0, step(0, 2, 10)) == []


def test_a_child_that_only_has_the_rank_of_its_parent_changes_nothing() -> None:
    rounds = of_ranks(2, [0, 1])
    rounds.add_step(0, step(0, 1, 10))
    rounds.handle_event(2, "process", {"rank": 0, "world": 2})
    assert len(rounds.add_step(1, step(1, 1, 15))) == 2
    rounds.add_step(0, step(0, 2, 10))
    assert len(rounds.add_step(1, step(1, 2, 15))) == 2


def test_wrappers_of_different_groups_are_not_joined() -> None:
    rounds = of_ranks(4, [0, 1, 2, 3], [0, 1], [2, 3])
    for rank in range(4):
        assert rounds.add_step(rank, step(rank, 1, 10)) == []


def test_processes_without_ranks_are_left_alone() -> None:
    rounds = SyncPassMatcher()
    assert rounds.add_step(0, step(0, 1, 10)) == []
    rounds.handle_event(1, "process", {"rank": 0, "world": 1})
    assert rounds.add_step(1, step(1, 1, 10)) == []
    for damaged in ({"rank": "0"}, {"rank": 0, "world": -2}, {"rank": 0, "group": ["x"]}, {"rank": 5, "group": [0]}):
        rounds.handle_event(2, "process" if "world" in damaged else "ddp", damaged)
    assert rounds.add_step(2, step(2, 1, 10)) == []

"""A run of many ranks: one query reads a row of each process, and every rank is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import WRAPPERS_READ, RunEvents
from dpmon.record.record_types import Event
from dpmon.store.events import read_newest_memory
from dpmon.store.steps import (
    read_called_steps,
    read_newest_activity,
    read_newest_steps,
    read_steps,
)
from dpmon.store.store_queries import Store
from dpmon.store.tally import Tally
from support.history_builders import Recording
from support.rank_builders import ddp_event, record_ddp_ranks
from support.record_builders import SECOND, Training


def alone(store: Store, processes: Iterable[int]) -> dict[str, dict[int, Any]]:
    """Return the newest rows of each process, from a query for each."""
    steps = {number: step for number in processes for step in read_steps(store, 1, process=number)}
    ends = {
        number: (step.mode, step.start_ns + step.wall_ns)
        for number in processes
        for step in read_called_steps(store, number, 1)
    }
    memory = {number: event for each in processes for number, event in read_newest_memory(store, [each]).items()}
    return {"steps": {**steps}, "ends": ends, "memory": {**memory}}


def together(store: Store, processes: Iterable[int]) -> dict[str, dict[int, Any]]:
    """Return the same rows, from one query for all processes."""
    numbers = list(processes)
    found = read_newest_steps(store, numbers), read_newest_activity(store, numbers), read_newest_memory(store, numbers)
    return {"steps": {**found[0]}, "ends": {**found[1]}, "memory": {**found[2]}}


def memory(process: int, t_s: float) -> Event:
    """Return a record of the memory of a process."""
    return Event("memory", {"process": process, "t_s": t_s, "devices": []})


def test_one_query_finds_the_newest_rows_of_all_processes_now_and_at_any_time() -> None:
    run, end = record_ddp_ranks(5, steps=40)
    for process in range(4):
        run.add([memory(process, 2.1 + process), memory(process, 2.3)], process, process)
    run.add([memory(9, 2.2)], 9)
    processes = range(12)  # some of them have no step, and some no record
    for at in (None, end, 2 * SECOND + (end - 2 * SECOND) // 3, 2 * SECOND, 0):
        store = run.store().as_of(at)
        assert together(store, processes) == alone(store, processes)
    assert set(read_newest_steps(run.store(), processes)) == set(range(5))
    assert set(read_newest_memory(run.store(), processes)) == {0, 1, 2, 3, 9}
    assert (
        read_newest_steps(run.store(), [])
        == read_newest_activity(run.store(), [])
        == read_newest_memory(run.store(), [])
        == {}
    )


def test_the_rows_of_an_earlier_time_are_found_near_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run, end = record_ddp_ranks(32, steps=40)
    searched: list[int] = []
    search = Store._find_last_id

    def noted(store: Store, process: int, low_id: int, high_id: int) -> int:
        searched.append(process)
        return search(store, process, low_id, high_id)

    monkeypatch.setattr(Store, "_find_last_id", noted)
    assert len(read_newest_steps(run.store().as_of((end + 2 * SECOND) // 2), range(32))) == 32
    assert searched == [0]


def test_the_mode_and_the_wrapper_of_every_rank_are_known() -> None:
    ranks = WRAPPERS_READ + 20
    run = Recording()
    for number in range(ranks):
        run.add([*Training(process=number, rank=number).begin(), ddp_event(number, 8)], number, number)
    found = RunEvents.read(run.store())
    assert {wrapper.process for wrapper in found.wrappers} == set(range(ranks))
    assert {change.process for change in found.changes} == set(range(ranks))


def test_a_new_event_is_in_the_next_picture() -> None:
    training = Training()
    run = Recording().add([*training.begin(), *training.run(50)])
    assert run.state().warnings == run.state().warnings == ()
    run.add([Event("warning", {"process": 0, "t_s": 3.0, "text": "it is hot"})])
    (warning,) = run.state().warnings
    assert warning.text == "it is hot"
    assert run.state(2 * SECOND).warnings == ()
    assert run.state().warnings == (warning,)


def test_the_work_for_all_facts_grows_linearly_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, work = Tally.merge, [0]

    def counted(self: Tally, other: Tally) -> None:
        work[0] += 1
        merge(self, other)

    monkeypatch.setattr(Tally, "merge", counted)
    needed = []
    for number in (10, 40):
        run, _ = record_ddp_ranks(number, steps=20)
        work[0] = 0
        facts = RunAnalysis(run.store())
        assert all((facts.rank_summaries, facts.replicas_by_kind, facts.spent_by_process, facts.communication))
        assert len(facts.other_process_modes) == number - 1
        needed.append(work[0])
    assert 2 * needed[0] < needed[1] < 6 * needed[0]

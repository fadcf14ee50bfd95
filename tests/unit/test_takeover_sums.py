"""Supervisors that are killed at any instant count each step and all time once, like one that is not killed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.record.schema import STEP, WAIT
from dpmon.store.ring_drain import COMMIT_S
from dpmon.store.store_opening import open_store
from support.history_builders import SupervisedRun, read_all_of_store
from support.record_builders import Training, eventful_training
from support.ring_writers import RowRing, use_row_rings
from support.run_harness import scaled_size

pytestmark = pytest.mark.slow

Rounds = list[dict[int, list[Row]]]
"""Rows that each process writes between two reads of the supervisor (-1: the supervisor itself)."""


def rounds(seed: int) -> Rounds:
    """Yield rounds of a run of two processes."""
    chance = random.Random(seed)
    writers = {process: eventful_training(chance, process) for process in (0, 1)}
    found: Rounds = []
    while writers:
        each: dict[int, list[Row]] = {}
        for process in list(writers):
            each[process] = []
            for _ in range(chance.randrange(3)):
                part = next(writers[process], None)
                if part is None:
                    del writers[process]
                    break
                each[process] += part
        found.append(each)
    found.append({0: Training().step()[:-1]})  # a call that is in no step
    found.append({-1: [Event("exit", {"status": 0, "t_s": 300.0, "signal": None})]})
    return found


def write(run: SupervisedRun, records: Mapping[int, Sequence[Row]]) -> None:
    """Write rows to the rings, and the supervisor's own ones, which a kill would lose, to the history."""
    for process, rows in records.items():
        path = run.directory / f"process-{process}.ring"
        if process >= 0:
            (RowRing.made.get(path) or RowRing(path)).write(*rows)
            continue
        for event in rows:
            assert isinstance(event, Event)
            run.drain.emit(event.kind, event.data)
        run.look()


@pytest.mark.parametrize("seed", range(20, 20 + scaled_size(2, 40)))
@pytest.mark.parametrize("when", ["after a commit", "at any time"])
def test_takeovers_count_every_step_once(state: Path, monkeypatch: pytest.MonkeyPatch, seed: int, when: str) -> None:
    use_row_rings(monkeypatch)
    chance = random.Random(seed)
    undisturbed, killed = SupervisedRun(), SupervisedRun()
    for records in rounds(seed):
        seconds = COMMIT_S if when == "after a commit" else chance.random() * COMMIT_S
        for run in (undisturbed, killed):
            write(run, records)
            run.look(seconds)
        if chance.random() < 0.2:
            killed.kill()
    monkeypatch.setattr("dpmon.store.ring_drain.is_alive", lambda *_: False)
    killed.drain.flush(command_ended=True)
    killed.kill()
    stores = []
    for run in (undisturbed, killed):
        run.end()
        assert run.warnings == []
        with open_store(run.directory) as store:
            stores.append(read_all_of_store(store))
    wanted, found = stores
    for name in ("times", "seconds of times", "gaps", "events", "dropped"):
        assert found[name] == wanted[name], name
    for process in (0, 1):
        found_calls, wanted_calls = ([step.calls for step in rows["calls"][process]] for rows in (found, wanted))
        assert found_calls == wanted_calls
        steps, undisturbed_steps = found["steps"][process], wanted["steps"][process]
        unknown = [step._replace(exposed_ns=None, wait_ns=None) for step in undisturbed_steps]
        assert all(step in pair for step, *pair in zip(steps, undisturbed_steps, unknown, strict=True))
        tallies = found["tallies"][process].values()
        waits = [step.wait_ns for step in steps if step.wait_ns is not None]
        assert waits
        assert sum(tally.stat(WAIT).total for tally in tallies) == sum(waits)
        assert sum(tally.steps for tally in tallies) == len(steps)
        assert sum(tally.stat(STEP).total for tally in tallies) == sum(step.wall_ns for step in steps)

"""Supervisors that are killed at any instant count each step and all time once, like one that is not killed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from everything import everything
from rowring import RowRing, use_row_rings
from sizes import size
from synthetic import SECOND, Training, changed, pause_event, with_other
from test_store_spans import Run

from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.record.schema import STEP, WAIT
from dpmon.store.ring_drain import COMMIT_S
from dpmon.store.store_opening import open_store

pytestmark = pytest.mark.slow

Rounds = list[dict[int, list[Row]]]
"""Rows that each process writes between two reads of the supervisor (-1: the supervisor itself)."""


def eventful(chance: random.Random, process: int) -> Iterator[list[Row]]:
    """Yield a few records at a time of a training with all activities."""
    training = Training(process=process, rank=process, step_ns=75_000_000, batch=30, seed=process)
    first, *others = training.begin()
    yield [changed(first, pid=4242 + process), *others]
    yield [Event("ddp", {"process": process, "rank": process, "t_s": training.now / SECOND, "group": [0, 1]})]
    passes = 0
    for number in range(150):
        what = chance.random()
        if what < 0.05:
            yield training.switch("single" if training.mode == "dp" else "dp")
        elif what < 0.1:
            training.now += chance.randrange(SECOND // 50, SECOND)  # a checkpoint
        elif what < 0.15:
            began = training.now
            training.now += chance.randrange(2 * SECOND)
            yield [pause_event(began / SECOND, 1, process=process)]
            if what < 0.13:  # else the record of its end was lost
                took = (training.now - began) / SECOND
                yield [pause_event(training.now / SECOND, 1, took, process=process)]
        elif what < 0.2:
            training.steps += chance.randrange(1, 3)  # missed
        elif what < 0.3:
            yield training.step(evaluates=True)
        records = training.step(rows=chance.choice([30, 30, 30, number + 2]))
        if what > 0.35:  # a synchronized backward pass
            passes += 1
            sync = {"sync": chance.randrange(1, 9_000_000), "synced": 1, "sync_number": passes}
            row = records[-1]
            phases = with_other({**row.phases, "sync": sync.pop("sync")}, row.wall_ns)
            records[-1] = row._replace(phases=phases, counts={**row.counts, **sync})
        if what < 0.45:
            records[-1] = records[-1].with_device_times((None, 1.5, 2.5, None, None, 3.5), 3)
        yield from ([record] for record in records) if what > 0.6 else [records]


def rounds(seed: int) -> Rounds:
    """Yield rounds of a run of two processes."""
    chance = random.Random(seed)
    writers = {process: eventful(chance, process) for process in (0, 1)}
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


def write(run: Run, records: Mapping[int, Sequence[Row]]) -> None:
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


@pytest.mark.parametrize("seed", range(20, 20 + size(2, 40)))
@pytest.mark.parametrize("when", ["after a commit", "at any time"])
def test_takeovers_count_every_step_once(state: Path, monkeypatch: pytest.MonkeyPatch, seed: int, when: str) -> None:
    use_row_rings(monkeypatch)
    chance = random.Random(seed)
    undisturbed, killed = Run(), Run()
    for records in rounds(seed):
        seconds = COMMIT_S if when == "after a commit" else chance.random() * COMMIT_S
        for run in (undisturbed, killed):
            write(run, records)
            run.look(seconds)
        if chance.random() < 0.2:
            killed.kill()
    monkeypatch.setattr("dpmon.store.ring_drain.is_alive", lambda *_: False)
    killed.drain.flush(over=True)
    killed.kill()
    stores = []
    for run in (undisturbed, killed):
        run.end()
        assert run.warnings == []
        with open_store(run.directory) as store:
            stores.append(everything(store))
    wanted, found = stores
    for name in ("times", "seconds of times", "gaps", "calls", "events", "dropped"):
        assert found[name] == wanted[name], name
    for process in (0, 1):
        steps, undisturbed_steps = found["steps"][process], wanted["steps"][process]
        unknown = [step._replace(exposed_ns=None, wait_ns=None) for step in undisturbed_steps]
        assert all(step in pair for step, *pair in zip(steps, undisturbed_steps, unknown, strict=True))
        tallies = found["tallies"][process].values()
        waits = [step.wait_ns for step in steps if step.wait_ns is not None]
        assert waits
        assert sum(tally.stat(WAIT).total for tally in tallies) == sum(waits)
        assert sum(tally.steps for tally in tallies) == len(steps)
        assert sum(tally.stat(STEP).total for tally in tallies) == sum(step.wall_ns for step in steps)

"""From rings of spans into the history: nothing twice, and only open steps are lost with their supervisor."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dpmon.assemble.assembler import Assembler
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.record.safe_json import load_event
from dpmon.record.span_format import Kind
from dpmon.span_reader import HOLE_NS, current_span_in
from dpmon.span_ring import SLOTS, HeaderWord
from dpmon.store import ring_drain as drain_module
from dpmon.store.events import read_events
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.ring_drain import COMMIT_S, GONE_S
from dpmon.store.steps import decode_calls
from dpmon.store.store_opening import open_store
from support.history_builders import SupervisedRun
from support.record_builders import host_event
from support.ring_writers import WRITE_SPANS, Children, SpanTraining, open_reader, read_all_spans
from support.run_harness import report_measured, scaled_size, wait_for


class Killed(BaseException):
    """Stands for SIGKILL within this process."""


@pytest.fixture
def run(state: Path) -> Iterator[SupervisedRun]:
    found = SupervisedRun()
    yield found
    found.close()


@pytest.fixture
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.end()


def rows_of(path: str) -> tuple[list[Row], list[int]]:
    """Return all rows of a ring from a single assembler, and the kinds of all spans."""
    with open_reader(path) as reader:
        spans = read_all_spans(reader, process_ended=True)
        lines = [line for part in reader.lines() for line in part]
        assert reader.missed == 0
        words = reader.header_words()
    assembler = Assembler()
    rows = assembler.feed(spans, lines)
    kind, since_ns = current_span_in(words, max(assembler.thread, 0))
    if since_ns:  # killed within a span; the start of a span may end a step
        rows += assembler.take_current_span(kind, since_ns)
    rows += assembler.finish()
    return rows, [span.kind for span in spans]


def check(run: SupervisedRun, process: int = 0) -> int:
    """Assert that the history has all of a ring exactly once; return how many steps there are."""
    made, spans = rows_of(run.ring(process))
    calls = spans.count(Kind.CALL)
    cut_off = calls > 1 and spans[-1] == Kind.CALL  # the training was killed before the backward pass of its last step
    of_steps = [one for one in made if isinstance(one, Step)]
    only = f"WHERE process = {process}"
    steps = calls - cut_off
    assert [one.step for one in of_steps] == [*range(1, steps + 1), *[-calls] * cut_off]
    rows = run.rows(f"SELECT called, start_ns, last_call FROM steps {only} ORDER BY id")
    assert [decode_calls(*row) for row in rows] == [list(one.calls) for one in of_steps]
    assert [number for *_, number in rows] == list(range(1, calls + 1))
    assert run.rows(f"SELECT step, start_ns, wall_ns, calls FROM steps {only} ORDER BY id") == [
        (one.step, one.start_ns, one.wall_ns, 1) for one in of_steps
    ]
    events = [(one.kind, one.data) for one in made if isinstance(one, Event)]
    found = run.rows(f"SELECT kind, json FROM events {only} ORDER BY id")
    assert [(kind, load_event(text)[1]) for kind, text in found] == events
    assert run.rows(f"SELECT calls, steps, last_step, last_call, missed, ended FROM rings {only}") == [
        (calls, steps, steps or None, calls or None, 0, 1)
    ]
    return steps


def check_after_kills(run: SupervisedRun, kills: int) -> int:
    """Assert that each killed supervisor lost or divided one step at most; return how many steps there are."""
    made, _ = rows_of(run.ring())
    made_starts = {one.start_ns for one in made if isinstance(one, Step)}
    rows = run.rows("SELECT step, start_ns FROM steps ORDER BY id")
    starts = {start_ns for _, start_ns in rows}
    numbers = [step for step, _ in rows if step > 0]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(rows) - len(numbers) <= kills, "the rest of a step has no number"
    assert len(starts) == len(rows), "none is there twice"
    assert len(made_starts - starts) <= kills
    assert len(starts - made_starts) <= kills, "the rest of a step without its beginning"
    calls = run.rows("SELECT last_call FROM steps ORDER BY id")
    assert [call for (call,) in calls] == list(range(1, len(calls) + 1))
    events = [one.kind for one in made if isinstance(one, Event)]
    assert [kind for (kind,) in run.rows("SELECT kind FROM events ORDER BY id")] == events
    ((steps, last_step, missed, ended),) = run.rows("SELECT steps, last_step, missed, ended FROM rings")
    assert (steps, last_step, missed, ended) == (len(numbers), len(numbers) or None, 0, 1)
    return len(numbers)


def test_the_end_of_the_newest_record_is_known(run: SupervisedRun) -> None:
    run.look()
    assert run.drain.newest_ns() == 0
    SpanTraining(run.ring()).run(20)
    run.look()
    ((end,),) = run.rows("SELECT max(start_ns + wall_ns) FROM steps")
    assert run.drain.newest_ns() == end > 0
    run.drain.emit("host", {"t_s": end / 1e9 + 1})
    run.look()
    assert run.drain.newest_ns() == pytest.approx(end + 1e9)


# ------------------------------------------------------------------------------------------------ killed at any instant


@pytest.mark.timeout(scaled_size(300, 3000))
def test_training_and_supervisors_are_killed_at_any_instant(
    state: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """The supervisor is killed between any two reads, before a commit, or directly after it."""
    chance = random.Random(11)
    write = HistoryWriter.write

    def dies(history: HistoryWriter, *batch: Any) -> None:
        what = chance.random()
        if what < 0.1:
            raise Killed
        write(history, *batch)
        if what > 0.9:
            raise Killed

    monkeypatch.setattr(HistoryWriter, "write", dies)
    instants, steps, kills = scaled_size(8, 200), 0, 0
    for _ in range(instants):
        run, kills_before = SupervisedRun(), kills
        writer = children.start(*WRITE_SPANS, run.ring())
        until = time.monotonic() + chance.random() * 0.5
        while writer.returncode is None or chance.random() < 0.7:
            if time.monotonic() > until:
                children.kill(writer)
            try:
                run.look(chance.random() * COMMIT_S)
                if chance.random() < 0.1:
                    raise Killed
            except Killed:
                run.kill()
                kills += 1
            time.sleep(chance.random() * 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(HistoryWriter, "write", write)
            run.end()
            steps += check_after_kills(run, kills - kills_before)
        assert run.warnings == []
    report_measured("killed at any instant", f"{instants} trainings of {steps} steps, {kills} supervisors")


# ------------------------------------------------------------------------------------------------ one thing at a time


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("phases", range(5))
@pytest.mark.parametrize("steps", [3, 2000])
def test_a_training_is_killed_after_or_within_any_phase(
    run: SupervisedRun, steps: int, phases: int, within: bool
) -> None:
    training = SpanTraining(run.ring())
    training.run(steps)
    training.step(phases)
    if within:
        time.sleep(0.001)
        training.ring.words[HeaderWord.SPAN_START] = time.monotonic_ns()
        training.ring.kinds[0] = (Kind.FETCH, Kind.CALL, Kind.BACKWARD, Kind.OPTIMIZER)[phases % 4]
    run.look()
    training.ring.words[HeaderWord.ENDED] = 1
    run.end()
    assert check(run) == steps + (phases > 2)


def test_a_step_is_there_as_soon_as_the_next_one_fetches(run: SupervisedRun) -> None:
    training = SpanTraining(run.ring())
    training.run(3)
    run.look()
    assert run.steps() == [1, 2], "the third may go on"
    training.ring.words[HeaderWord.SPAN_START] = time.monotonic_ns()
    training.ring.kinds[0] = Kind.FETCH
    run.look()
    assert run.steps() == [1, 2, 3]
    history = run.drain._history
    assert history is not None
    changes = history._db.total_changes
    for _ in range(5):
        run.look()
    assert history._db.total_changes == changes, "nothing is written while nothing happens"


def test_a_rank_that_died_is_ended_while_the_run_goes_on(run: SupervisedRun, children: Children) -> None:
    alive, dies = SpanTraining(run.ring(0)), children.start(*WRITE_SPANS, run.ring(1))
    alive.step()
    with open_reader(run.ring(1)) as reader:
        wait_for(lambda: reader.read(time.monotonic_ns()), what="a step")
        wait_for(lambda: reader.read(time.monotonic_ns()), what="another step")
    run.look()
    children.kill(dies)
    run.look(GONE_S)
    assert check(run, 1) > 0
    assert run.rows("SELECT steps FROM rings WHERE process = 0") == [(0,)]
    alive.step()
    run.look()
    assert run.rows("SELECT steps FROM rings WHERE process = 0") == [(1,)]


def test_spans_that_were_never_written_are_counted_once(run: SupervisedRun) -> None:
    training = SpanTraining(run.ring())
    training.step()
    training.ring.next()
    training.step()
    run.look()
    run.look(COMMIT_S + HOLE_NS / 1e9)
    assert run.steps() == [1]
    for _ in range(3):
        run.kill()
        run.look()
    training.step()
    training.end()
    run.end()
    assert run.steps() == [1, 2], "the second one was open"
    assert run.rows("SELECT missed FROM rings") == [(1,)]


def test_overwritten_spans_are_counted(run: SupervisedRun) -> None:
    training = SpanTraining(run.ring(), slots=64)
    training.run(1000)
    training.end()
    run.end()
    ((missed, calls),) = run.rows("SELECT missed, calls FROM rings")
    assert run.steps() == list(range(1, calls + 1))
    assert 10 <= calls <= 16
    assert 4000 - 64 <= missed <= 4000 - 40


def test_a_damaged_history_is_warned_of_once(run: SupervisedRun) -> None:
    training = SpanTraining(run.ring(), clock=count(5_000_000_000, 1000).__next__)  # all steps in one second
    training.run(10)
    run.look()
    run.kill()
    path = run.directory / "history.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as history:
        history.seek(4096)
        history.write(bytes(path.stat().st_size - 4096))
    for _ in range(3):
        training.run(100)
        run.look()
    training.end()
    assert ["the history cannot be written" in text for text in run.warnings] == [True]


def fill_disk(run: SupervisedRun) -> sqlite3.Connection:
    """Let the history have no more pages than now; with more, there is room again."""
    assert run.drain._history is not None
    db = run.drain._history._db
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    return db


def test_a_disk_that_is_full_loses_nothing(run: SupervisedRun) -> None:
    training = SpanTraining(run.ring())
    run.look()
    for _ in range(3):
        db = fill_disk(run)
        for _ in range(7):
            training.run(100)
            run.look()
        assert len(run.warnings) == 1, "also if there is room now and then"
        assert "disk is full" in run.warnings[0]
        db.execute("PRAGMA max_page_count = 100000")
        run.look(drain_module.RETRY_S + 1)
    training.end()
    run.end()
    assert run.steps() == list(range(1, 2101))


@pytest.mark.parametrize("slots", [SLOTS, 4096])
def test_the_rest_of_a_ring_waits_while_the_history_cannot_take_it(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Memory is bounded. What the ring still has is not lost, even after its process has ended."""
    monkeypatch.setattr(drain_module, "HOLD_ROWS", 10)
    training = SpanTraining(run.ring(), slots=slots)
    run.look()
    db = fill_disk(run)
    for _ in range(20):
        training.run(100)
        run.look()
        assert run.drain._batch.row_count < 600
    training.end()
    run.drain.flush(command_ended=True)
    db.execute("PRAGMA max_page_count = 100000")
    run.look(drain_module.RETRY_S + 1)
    run.look()
    ((calls, missed),) = run.rows("SELECT calls, missed FROM rings")
    assert run.steps() == list(range(1, calls + 1))
    assert (calls == 2000) == (missed == 0) == (slots == SLOTS)
    assert abs(4 * calls + missed - 8000) <= 8


@pytest.mark.parametrize("kind", ["mode", "pause", "warning"])
def test_records_are_committed_once_a_moment_and_answers_at_once(run: SupervisedRun, kind: str) -> None:
    training = SpanTraining(run.ring())
    training.run(2)
    run.look(0.05)
    assert run.steps() == [1], "the first after a silence, at once"
    training.step()
    run.look(0.05)
    assert run.steps() == [1]
    run.look(COMMIT_S)
    assert run.steps() == [1, 2]
    training.lines.put(kind=kind, at=training.now(), process=0, t_s=0.5)
    training.step()
    run.look(0.01)
    assert run.steps() == [1, 2, 3]
    assert run.rows("SELECT kind FROM events") == [("process",), (kind,)]


# ------------------------------------------------------------------------------------------------ own records


def test_each_supervisor_adds_its_samples_and_the_last_one_the_exit(run: SupervisedRun) -> None:
    for number in range(3):
        for second in range(5):
            run.drain.emit("host", host_event(100.0 * number + second).data)
        if number == 2:
            run.drain.emit("exit", {"status": 0, "signal": None, "t_s": 300.0})
        run.drain.flush()
        run.kill()
    with open_store(run.directory) as store:
        found = {kind: [event.data["t_s"] for event in read_events(store, kind)] for kind in ("host", "exit")}
        assert found == {"host": [100.0 * n + s for n in range(3) for s in range(5)], "exit": [300.0]}
        assert store.dropped == 0


def test_own_records_wait_for_the_history(run: SupervisedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get a time. Those that find no room are counted. What JSON does not have is unknown."""
    monkeypatch.setattr(drain_module, "MAX_OWN", 10)
    path = run.directory / "history.sqlite"
    path.mkdir()
    run.look()
    run.drain.emit("host", {"number": 0, "cpu_pct": float("nan"), "load_1m": float("inf")})
    for number in range(1, 15):
        run.drain.emit("host", {"number": number})
    for _ in range(4):
        run.look()
    assert len(run.warnings) == 1
    path.rmdir()
    run.look(drain_module.RETRY_S + 1)
    with open_store(run.directory) as store:
        events = read_events(store, "host")
        assert [event.data["number"] for event in events] == list(range(10))
        assert all(event.data["t_s"] > 0 for event in events)
        assert (events[0].data["cpu_pct"], events[0].data["load_1m"]) == (None, None)
        assert store.dropped == 5

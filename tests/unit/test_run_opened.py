"""Readers get all records of a run, however much of it is in the history."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.errors import HistoryError
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.run import proc
from dpmon.run.lifecycle import build_exit_info
from dpmon.run.run_directory import load_info, write_info
from dpmon.store import store_opening as opened_module
from dpmon.store.history_schema import HISTORY_FILE
from dpmon.store.ring_drain import RingDrain
from dpmon.store.store_opening import open_store
from support.history_builders import assert_same_contents, read_all_of_store, write_run_directory
from support.record_builders import Training, host_event
from support.ring_writers import make_row_ring, use_row_rings
from support.run_harness import wait_for


def rows(steps: int = 300) -> dict[int, list[Row]]:
    """Return rows of a process that trained in both modes, and of the supervisor."""
    training = Training()
    records = [*training.begin(), *training.run(steps // 2)]
    records += [*training.switch("single"), *training.run(steps - steps // 2)]
    return {0: records, -1: [host_event(1.0), host_event(2.0)]}


def read(directory: Path) -> dict[str, Any]:
    with open_store(directory) as store:
        return read_all_of_store(store)


@pytest.fixture(autouse=True)
def _rings(monkeypatch: pytest.MonkeyPatch) -> None:
    use_row_rings(monkeypatch)


def recorded(part: float = 1.0, *, history: bool = True, **about: Any) -> Path:
    """Return a run with all rows in its ring, and this part of its steps in its history, as a supervisor wrote it."""
    directory = write_run_directory({}, status=None, **about)
    own, supervisor = rows()[0], rows()[-1]
    ends = [number for number, row in enumerate(own, 1) if isinstance(row, Step)]
    in_history = ends[int((len(ends) - 1) * part)]
    ring = make_row_ring(directory / "process-0.ring", own[:in_history])
    drain = RingDrain(directory, load_info(directory))
    for event in supervisor:
        assert isinstance(event, Event)
        drain.emit(event.kind, event.data)
    drain.flush()
    drain.close()
    ring.write(*own[in_history:])
    if not history:
        (directory / HISTORY_FILE).unlink()
    return directory


@pytest.fixture
def whole(state: Path) -> dict[str, Any]:
    """Answers of the store of a run with a complete history."""
    return read(recorded())


def without_samples(answers: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only the history has: the records of the supervisor."""
    return {**answers, "events": {**answers["events"], "host": []}}


def test_a_complete_history_is_queried_in_its_file(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_module, "_store_with_rings", lambda *_: pytest.fail("copied"))
    assert read(recorded())["tallies"]


def test_without_a_history_everything_is_read_from_the_rings(whole: dict[str, Any]) -> None:
    assert_same_contents(read(recorded(history=False)), without_samples(whole))


def test_many_rows_of_rings_are_not_taken_for_an_endless_table(state: Path) -> None:
    training = Training()
    steps = [training.step()[-1] for _ in range(12_000)]
    directory = write_run_directory({})
    (directory / HISTORY_FILE).unlink()
    make_row_ring(directory / "process-0.ring", steps)
    with open_store(directory) as store:
        assert len(store.steps(1 << 30)) == 12_000


@pytest.mark.parametrize("part", [0.05, 0.3, 0.301, 0.999])
def test_records_missing_in_the_history_are_read_from_the_rings(whole: dict[str, Any], part: float) -> None:
    directory = recorded(part)
    assert_same_contents(read(directory), whole)
    assert_same_contents(read(directory), whole)


def test_an_active_supervisor_is_trusted_until_it_stops_writing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = recorded(0.3, boot_id=proc.boot_id())
    us: dict[str, Any] = {"supervisor_pid": os.getpid(), "supervisor_started": proc.start_time_s(os.getpid())}
    write_info(directory, replace(load_info(directory), **us))
    monkeypatch.setattr("dpmon.store.store_opening.STARVED_S", 600.0)
    for age_s in (0, 4):
        assert 0 < steps_after(directory, age_s) < 100, "what it writes next follows this, even if it is late"
    assert steps_after(directory, 1000) == 300, "it is stuck, or the disk is full"


def steps_after(directory: Path, age_s: float) -> int:
    """Return the number of steps that a reader gets when nothing was written for some seconds."""
    then = time.time() - age_s
    for name in os.listdir(directory):
        os.utime(directory / name, (then, then))
    return len(read(directory)["steps"][0])


def test_a_suspended_supervisor_is_not_waited_for(state: Path) -> None:
    directory = recorded(0.3, boot_id=proc.boot_id())
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        sleeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: proc.is_suspended(sleeper.pid), what="the stop")
        supervisor: dict[str, Any] = {
            "supervisor_pid": sleeper.pid,
            "supervisor_started": proc.start_time_s(sleeper.pid),
        }
        write_info(directory, replace(load_info(directory), **supervisor))
        assert steps_after(directory, 4) == 300
        sleeper.kill()


def test_a_journal_that_vanishes_hides_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last writer deletes it at the run's end, between two looks of a reader."""
    directory = recorded()
    journal = directory / f"{HISTORY_FILE}-wal"
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self == journal or exists(self))
    monkeypatch.setattr(opened_module, "_store_with_rings", lambda *_: pytest.fail("not from the history"))
    assert len(read(directory)["steps"][0]) == 300


@pytest.mark.parametrize("drained", [False, True], ids=["before it read the rings", "after it read the rings"])
def test_a_supervisor_is_not_trusted_after_the_end_of_the_command(state: Path, drained: bool) -> None:
    """It may have replaced a killed one and not have read the rings; and workers may outlive the command."""
    directory = recorded(0.3, boot_id=proc.boot_id())
    us: dict[str, Any] = {"supervisor_pid": os.getpid(), "supervisor_started": proc.start_time_s(os.getpid())}
    info = replace(load_info(directory), **us)
    write_info(directory, info)
    write_info(directory, build_exit_info(info, 0, "foreground", drained=drained))
    assert len(read(directory)["steps"][0]) == 300


@pytest.mark.parametrize("damage", ["no database", "cut off", "a directory", "another schema"])
def test_a_damaged_history_is_refused(state: Path, damage: str) -> None:
    directory = recorded()
    path = directory / HISTORY_FILE
    if damage == "no database":
        path.write_bytes(b"x" * 10_000)
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "a directory":
        path.unlink()
        path.mkdir()
    else:
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE steps")
            db.commit()
    with pytest.raises(HistoryError, match=r"^the history is damaged: "):
        read(directory)


@pytest.mark.parametrize("column", ["spans = 'x'", "device = 'x'"])
def test_damage_of_a_row_ends_in_one_sentence(state: Path, column: str) -> None:
    directory = recorded()
    with closing(sqlite3.connect(directory / HISTORY_FILE)) as db:
        db.execute(f"UPDATE steps SET {column}")
        db.commit()
    with pytest.raises(HistoryError, match=r"^the history is damaged: "):
        read(directory)


def test_records_are_read_in_parts_between_which_others_write(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.store.store_queries._IDS_PER_TRANSACTION", 7)
    directory = write_run_directory(rows())
    with open_store(directory) as store:
        whole = list(store.records())
        found = []
        with closing(sqlite3.connect(directory / HISTORY_FILE, timeout=0, isolation_level=None)) as writer:
            for record in store.records():
                found.append(record)
                writer.execute("INSERT OR REPLACE INTO meta VALUES ('written', ?)", (len(found),))
    assert found == whole
    assert len(found) > 100


def test_the_writer_of_the_history_opens_it_without_a_copy(state: Path) -> None:
    directory = recorded(0.15)
    with open_store(directory, as_written=True) as store:
        assert sum(tally.steps for tally in store.tallies().values()) < 60
    assert sum(1 for _ in read(directory)["steps"][0]) == 300
    (directory / HISTORY_FILE).write_bytes(b"no database")
    with pytest.raises(HistoryError), open_store(directory, as_written=True):
        pass

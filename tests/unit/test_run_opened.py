"""Readers get the history of a run, and learn what it lacks."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.errors import HistoryError
from dpmon.export import iter_records
from dpmon.model.run_events import RunEvents
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.run import proc
from dpmon.run.lifecycle import build_exit_info, take_lock
from dpmon.run.run_directory import RunError, load_info, write_info
from dpmon.store import store_opening as opened_module
from dpmon.store.database import HISTORY_FILE
from dpmon.store.records import read_records
from dpmon.store.ring_drain import RingDrain
from dpmon.store.store_opening import open_store
from support.history_builders import assert_same_contents, read_all_of_store, write_run_directory
from support.record_builders import Training, host_event
from support.ring_writers import RowRing, make_row_ring, use_row_rings


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


def live(part: float) -> Path:
    """Return a run whose command is alive, and whose supervisor is this process."""
    directory = recorded(part, boot_id=proc.boot_id())
    pid, started = os.getpid(), proc.start_time_s(os.getpid())
    supervisor: dict[str, Any] = {"supervisor_pid": pid, "supervisor_started": started}
    command: dict[str, Any] = {"command_pid": pid, "command_started": started}
    write_info(directory, replace(load_info(directory), **supervisor, **command))
    return directory


def unread(directory: Path) -> str | None:
    with open_store(directory) as store:
        return store.unread_warning


@pytest.fixture
def whole(state: Path) -> dict[str, Any]:
    """Answers of the store of a run with a complete history."""
    return read(recorded())


@pytest.mark.parametrize("part", [0.05, 0.3, 0.301, 0.999])
def test_the_history_of_an_ended_run_is_completed_once(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    directory = recorded(part)
    assert_same_contents(read(directory), whole)
    monkeypatch.setattr(opened_module, "RingDrain", lambda *_: pytest.fail("drained again"))
    assert_same_contents(read(directory), whole)
    assert unread(directory) is None


def test_a_copied_directory_is_not_written(state: Path) -> None:
    directory = recorded(0.3)
    copy = shutil.copytree(directory, directory.with_name("copy"))
    ring = RowRing.made[directory / "process-0.ring"]
    RowRing.made[copy / "process-0.ring"] = ring
    before = (copy / HISTORY_FILE).read_bytes()
    text = unread(copy)
    assert text is not None
    assert "records are not in the history yet" in text
    assert 0 < len(read(copy)["steps"][0]) < 100
    assert (copy / HISTORY_FILE).read_bytes() == before
    assert not (copy / "supervisor.lock").exists()


def test_an_ended_run_is_not_drained_beside_another_process(state: Path) -> None:
    directory = recorded(0.3)
    held = take_lock(directory)
    assert held is not None
    try:
        assert 0 < len(read(directory)["steps"][0]) < 100
    finally:
        os.close(held)
    assert len(read(directory)["steps"][0]) == 300


def test_a_live_run_is_not_drained_by_its_readers(state: Path) -> None:
    directory = live(0.3)
    assert unread(directory) is None, "its supervisor writes these records in a moment"
    for name in os.listdir(directory):
        os.utime(directory / name, (time.time() - 1000,) * 2)
    text = unread(directory)
    assert text is not None, "its supervisor is stuck, or the disk is full"
    assert "not in the history yet" in text
    assert 0 < len(read(directory)["steps"][0]) < 100
    with open_store(directory) as store:
        events = RunEvents.read(store)
    assert [warning.text for warning in events.warnings] == [text]
    assert events.warning_count == 1
    assert text in [str(record.data.get("text")) for record in iter_records(directory) if isinstance(record, Event)]


def test_a_run_without_a_history_is_refused_after_its_end(state: Path) -> None:
    directory = recorded(history=False)
    write_info(directory, build_exit_info(load_info(directory), 0, "supervisor"))
    with pytest.raises(RunError, match="has no history: the disk was full"):
        read(directory)


def test_a_run_that_begins_has_an_empty_history(state: Path) -> None:
    directory = live(0.3)
    (directory / HISTORY_FILE).unlink()
    assert read(directory)["steps"] == {}
    (directory / HISTORY_FILE).touch()
    assert read(directory)["steps"] == {}


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


def test_records_are_read_in_parts_between_which_others_write(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmon.store.records._RECORDS_PER_TRANSACTION", 7)
    directory = write_run_directory(rows())
    with open_store(directory) as store:
        whole = list(read_records(store))
        found = []
        with closing(sqlite3.connect(directory / HISTORY_FILE, timeout=0, isolation_level=None)) as writer:
            for record in read_records(store):
                found.append(record)
                writer.execute("INSERT OR REPLACE INTO meta VALUES ('written', ?)", (len(found),))
    assert found == whole
    assert len(found) > 100

"""From the rings into the history: everything once, whatever fails in between."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rowring import RowRing, use_row_rings
from synthetic import call_row, host_event, step_row

from dpmon.export.records import history, write_jsonl
from dpmon.record.history_rows import Definition, Row
from dpmon.record.kinds import Event
from dpmon.run.rundir import RunInfo
from dpmon.run.runs import create_run
from dpmon.store import drain as drain_module
from dpmon.store.drain import RETRY_S, Drain
from dpmon.store.opened import open_store

START = 1_000_000_000


class Setting:
    """A run with one ring, its drain, and a clock that only the test moves."""

    def __init__(self, directory: Path, info: RunInfo) -> None:
        self.directory, self.info = directory, info
        self.warnings: list[str] = []
        self.now = 100.0
        self.ring = self.new_ring(0)
        self.drain = self.new_drain()
        self.step = 0

    def new_ring(self, process: int) -> RowRing:
        """Make a ring with the definitions that `steps` needs."""
        ring = RowRing(self.directory / f"process-{process}.ring", 8000)
        layout = {"root": "Model", "via": None, "virtual": False, "devices": ["cpu:0"], "absent": {}}
        ring.write(Definition(1, layout))
        ring.write(Definition(2, [["x", [], "int64", 8], ["y", [4, 5], "float32", 80]]))
        return ring

    def new_drain(self) -> Drain:
        """Make the drain of another supervisor of this run."""
        drain = Drain(self.directory, self.info)
        drain.warn = self.warnings.append  # type: ignore[method-assign]
        return drain

    def steps(self, count: int, ring: RowRing | None = None) -> None:
        """Write `count` calls and steps."""
        ring = ring or self.ring
        for _ in range(count):
            self.step += 1
            now = START + self.step * 1000
            ring.write(call_row("dp", 0, 1, self.step, self.step, now, 5, 2, 0, replicas=(2, 0, 0, 5)))
            ring.write(step_row("dp", self.step, now, 900, None, (1, 2, -1, -1)))

    def advance(self, seconds: float = 1.1) -> None:
        """Let time pass, then drain until nothing more can be read."""
        self.now += seconds
        while self.drain.drain(self.now):
            pass

    def rows(self, query: str) -> list[Any]:
        """Query the history."""
        with closing(sqlite3.connect(self.directory / "history.sqlite")) as db:
            return db.execute(query).fetchall()


@pytest.fixture
def setting(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """A new run."""
    use_row_rings(monkeypatch)
    info = RunInfo(
        id="", name="x", command=("x.py",), script="x.py", cwd="/", python=None, started_unix=1e9, start_ns=START,
        boot_id="", headless=True,
    )  # fmt: skip
    found = Setting(*create_run(info))
    yield found
    found.drain.close()


FIRST_COLUMNS = (
    "id, process, step, mode, start_ns, wall_ns, samples, data_ns, forward_ns, backward_ns, optimizer_ns, other_ns,"
    " device, copy_ns, copied_bytes"
)


def test_rows_hold_what_the_records_say(setting: Setting) -> None:
    setting.steps(2)
    setting.ring.write(Event("warning", {"process": 0, "t_s": 0.5, "text": "hm"}))
    setting.advance()
    assert setting.rows("SELECT id, process, call, step, mode, start_ns, wall_ns, rows FROM calls") == [
        (1, 0, 1, 1, "dp", 1000, 5, 4),
        (3, 0, 2, 2, "dp", 2000, 5, 4),
    ]
    assert setting.rows(f"SELECT {FIRST_COLUMNS} FROM steps") == [
        (2, 0, 1, "dp", 1000, 900, None, 1, 2, None, None, 897, None, None, None),
        (4, 0, 2, "dp", 2000, 900, None, 1, 2, None, None, 897, None, None, None),
    ]
    ((number, process, kind, t_ns, text),) = setting.rows("SELECT * FROM events")
    assert (number, process, kind, t_ns) == (5, 0, "warning", 500_000_000)
    assert json.loads(text)["text"] == "hm"
    assert setting.rows("SELECT name, process, sequence, missed, calls, steps, last_step FROM rings") == [
        ("process-0.ring", 0, 7, 0, 2, 2, 2)
    ]


def test_a_successor_goes_on_where_the_last_one_stopped(setting: Setting) -> None:
    """As after a kill: the first drain is dropped, with records that it has read but not written."""
    setting.steps(10)
    setting.advance()
    setting.steps(10)
    setting.drain.drain(setting.now + 0.1)
    setting.steps(10)
    killed, setting.drain = setting.drain, setting.new_drain()
    setting.advance()
    assert [step for (step,) in setting.rows("SELECT step FROM steps ORDER BY id")] == list(range(1, 31))
    assert setting.rows("SELECT calls, steps, missed FROM rings") == [(30, 30, 0)]
    killed.close()


def test_the_supervisors_own_records_are_written_in_order(setting: Setting) -> None:
    """Each supervisor adds its samples, and the last one the exit."""
    for number in range(3):
        for second in range(5):
            setting.drain.emit("host", host_event(100.0 * number + second).data)
        if number == 2:
            setting.drain.emit("exit", {"status": 0, "signal": None, "t_s": 300.0})
        setting.drain.flush()
        setting.drain.close()
        setting.drain = setting.new_drain()
    with open_store(setting.directory) as store:
        assert [event.data["t_s"] for event in store.events("host")] == [
            100.0 * n + s for n in range(3) for s in range(5)
        ]
        assert [event.data["t_s"] for event in store.events("exit")] == [300.0]
        assert store.dropped == 0


def test_own_records_get_a_time_and_wait_for_the_history(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that find no room are counted."""
    monkeypatch.setattr(drain_module, "MAX_OWN", 10)
    path = setting.directory / "history.sqlite"
    path.mkdir()
    setting.advance()
    for number in range(15):
        setting.drain.emit("host", {"number": number})
    path.rmdir()
    setting.advance(RETRY_S + 1)
    with open_store(setting.directory) as store:
        events = store.events("host")
        assert [event.data["number"] for event in events] == list(range(10))
        assert all(event.data["t_s"] > 0 for event in events)
        assert store.dropped == 5


def test_own_records_from_many_threads_are_complete(setting: Setting) -> None:
    threads = [
        threading.Thread(target=lambda n=n: [setting.drain.emit("warning", {"text": f"{n}:{i}"}) for i in range(100)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    setting.advance()
    texts = [json.loads(text)["text"] for (text,) in setting.rows("SELECT json FROM events")]
    assert sorted(texts) == sorted(f"{n}:{i}" for n in range(8) for i in range(100))


def test_a_number_that_json_does_not_have_is_unknown(setting: Setting) -> None:
    setting.drain.emit("host", {"t_s": 1.0, "cpu_pct": float("nan"), "load_1m": float("inf")})
    setting.advance()
    ((text,),) = setting.rows("SELECT json FROM events")
    assert json.loads(text) == {"kind": "host", "t_s": 1.0, "cpu_pct": None, "load_1m": None}


def test_records_are_committed_soon_and_nothing_when_nothing_happens(setting: Setting) -> None:
    setting.steps(1)
    setting.advance(0.05)
    assert setting.rows("SELECT count(*) FROM steps") == [(1,)], "the first after a silence, at once"
    setting.steps(1)
    setting.advance(0.05)
    assert setting.rows("SELECT count(*) FROM steps") == [(1,)]
    setting.advance(drain_module.COMMIT_S)
    assert setting.rows("SELECT count(*) FROM steps") == [(2,)]
    changes = setting.drain._history._db.total_changes
    for _ in range(10):
        setting.advance()
    assert setting.drain._history._db.total_changes == changes


def test_many_rings_are_committed_when_a_second_is_over(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "MANY_RINGS", 0)
    second = START / 1e9 + 1000
    setting.advance(second + 0.2 - setting.now)
    setting.steps(1)
    for at, committed in ((0.3, 0), (1.0, 0), (1.09, 0), (1.11, 1)):
        setting.advance(second + at - setting.now)
        assert setting.rows("SELECT count(*) FROM steps") == [(committed,)], at


@pytest.mark.parametrize("kind", ["mode", "pause", "warning"])
def test_an_awaited_answer_is_committed_immediately(setting: Setting, kind: str) -> None:
    setting.steps(1)
    setting.advance()
    setting.steps(1)
    setting.ring.write(Event(kind, {"process": 0, "t_s": 0.5}))
    setting.advance(0.01)
    assert setting.rows("SELECT kind FROM events") == [(kind,)]


def test_a_full_disk_is_one_warning_and_nothing_lost_when_there_is_room_again(setting: Setting) -> None:
    setting.steps(5)
    setting.advance()
    db = setting.drain._history._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(8):
        setting.steps(50)
        setting.advance()
    assert len(setting.warnings) == 1
    assert "disk is full" in setting.warnings[0]
    db.execute("PRAGMA max_page_count = 100000")
    setting.advance(RETRY_S + 1)
    assert [step for (step,) in setting.rows("SELECT step FROM steps ORDER BY id")] == list(range(1, 406))
    assert setting.rows("SELECT calls, steps, missed FROM rings") == [(405, 405, 0)]
    assert len(setting.warnings) == 1


def test_a_disk_that_has_room_now_and_then_is_one_warning(setting: Setting) -> None:
    setting.advance()
    db = setting.drain._history._db
    for _ in range(5):
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
        setting.steps(400)
        setting.advance(RETRY_S + 1)
        db.execute("PRAGMA max_page_count = 100000")
        setting.advance(RETRY_S + 1)
    assert setting.rows("SELECT count(*) FROM steps") == [(2000,)]
    assert len(setting.warnings) == 1
    setting.now += drain_module.WARN_AGAIN_S
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    setting.steps(400)
    setting.advance()
    assert len(setting.warnings) == 2, "much later it is news again"


def test_while_the_disk_is_full_memory_is_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "HOLD_BYTES", 100_000)
    setting.advance()
    db = setting.drain._history._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(60):
        setting.steps(400)
        setting.advance()
        assert setting.drain._batch.rows < 100 + 800
    db.execute("PRAGMA max_page_count = 100000")
    for _ in range(8):
        setting.advance(RETRY_S + 1)
    ((calls, steps, missed, sequence),) = setting.rows("SELECT calls, steps, missed, sequence FROM rings")
    assert sequence == 2 + 2 * 24_000
    assert calls + steps + missed == 2 * 24_000
    assert missed > 10_000
    assert len(setting.warnings) == 1


def test_held_records_are_counted_by_their_size_in_memory(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "HOLD_BYTES", 4 << 20)
    setting.advance()
    db = setting.drain._history._db
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    tracemalloc.start()
    try:
        for _ in range(40):
            setting.steps(400)
            setting.advance()
        setting.ring.forget()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2 << 20 < held < 6 << 20


def test_a_history_that_cannot_be_opened_is_tried_again(setting: Setting) -> None:
    path = setting.directory / "history.sqlite"
    path.mkdir()
    setting.steps(20)
    for _ in range(4):
        setting.advance()
    assert len(setting.warnings) == 1
    path.rmdir()
    setting.advance(RETRY_S + 1)
    assert setting.rows("SELECT count(*) FROM steps") == [(20,)]


def test_rings_that_come_later_are_taken_too(setting: Setting) -> None:
    setting.advance()
    setting.steps(3, setting.new_ring(7))
    setting.advance()
    assert setting.rows("SELECT DISTINCT process FROM calls") == [(7,)]


def test_a_foreign_ring_is_one_warning(setting: Setting) -> None:
    path = setting.directory / "process-5.ring"
    path.write_bytes(b"nonsense" * 10_000)
    os.utime(path, (1, 1))
    for _ in range(5):
        setting.advance()
    assert len(setting.warnings) == 1
    assert "process-5.ring" in setting.warnings[0]


@pytest.mark.parametrize(
    "row",
    [
        Event("\ud800", {}),
        Event("ddp", {"group": 5, "wrapper": [], "rank": {}}),
        step_row("dp", 1, -(1 << 63), 9, 1, (-1, -1, -1, -1)),
        call_row("dp", 0, 1, 1, 1, -(1 << 63), 5, 2, 0, replicas=(2, 0, 0, 5)),
    ],
    ids=["name", "ddp", "step", "call"],
)
def test_rows_with_impossible_values_are_counted_or_kept(setting: Setting, row: Row) -> None:
    setting.ring.write(row)
    setting.steps(2)
    setting.advance()
    ((missed, calls, steps),) = setting.rows("SELECT missed, calls, steps FROM rings")
    assert (calls, steps) == (2, 2)
    records = list(history(setting.directory))
    assert [r.data["count"] for r in records if getattr(r, "kind", "") == "dropped"] == [missed]
    assert len(records) == 6 - missed
    assert missed == (not isinstance(row, Event) or row.kind != "ddp")


@pytest.mark.parametrize("rows", [1 << 70, -1, True, "4"])
def test_rows_that_no_batch_has_are_not_known(setting: Setting, rows: Any) -> None:
    """After a flipped bit in a definition, the supervisor goes on, and the rows are unknown."""
    setting.ring.write(Definition(3, [["x", [rows], "float32", 4]]))
    setting.ring.write(call_row("dp", 0, 1, 1, 1, START, 5, 3, 0, replicas=(3, 0, 0, 5)))
    setting.advance()
    assert setting.rows("SELECT rows FROM calls") == [(None,)]


def test_damaged_counts_of_a_ring_do_not_end_the_recording(setting: Setting) -> None:
    setting.steps(3)
    setting.advance()
    with closing(sqlite3.connect(setting.directory / "history.sqlite")) as db:
        db.execute("UPDATE rings SET calls = ?, steps = ?", ((1 << 63) - 1, (1 << 63) - 1))
        db.commit()
    setting.drain.close()
    setting.drain = setting.new_drain()
    setting.steps(3)
    setting.advance()
    assert setting.warnings == []
    assert setting.rows("SELECT max(step) FROM steps") == [(6,)]


def test_calls_whose_definition_was_lost_are_kept_and_counted_as_unreadable(setting: Setting) -> None:
    setting.ring.write(call_row("dp", 0, 99, 1, 1, START, 5, 98, 0, replicas=(98, 0, 0, 5)))
    setting.steps(1)
    setting.advance()
    assert setting.rows("SELECT rows FROM calls") == [(None,), (4,)]
    records = list(history(setting.directory))
    assert [r.data["count"] for r in records if getattr(r, "kind", "") == "dropped"] == [1]


def test_export_before_any_drain_is_the_same_as_after(setting: Setting) -> None:
    setting.steps(30)
    before = list(history(setting.directory))
    setting.advance()
    assert list(history(setting.directory)) == before
    setting.steps(2)
    both = list(history(setting.directory))
    assert both[: len(before) - 1] == before[:-1]
    assert len(both) == len(before) + 4


def test_a_reader_of_the_history_does_not_hold_the_writer_up(setting: Setting) -> None:
    setting.steps(50)
    setting.advance()
    reading = history(setting.directory)
    first = next(reading)
    setting.steps(50)
    setting.advance()
    assert setting.warnings == []
    assert setting.rows("SELECT count(*) FROM steps") == [(100,)]
    rest = list(reading)
    assert first not in rest
    assert len([r for r in rest if type(r).__name__ == "Step"]) == 50, "what it began with, nothing newer"


def test_jsonl_is_one_object_a_line(setting: Setting, tmp_path: Path) -> None:
    setting.steps(2)
    setting.ring.write(Event("warning", {"process": 0, "t_s": 0.5, "text": "ü\n\u2028"}))
    with open(tmp_path / "x", "w", encoding="utf-8") as file:
        write_jsonl(setting.directory, file)
    lines = (tmp_path / "x").read_text("utf-8").split("\n")
    assert lines.pop() == ""
    assert [json.loads(line)["kind"] for line in lines] == ["call", "step", "call", "step", "warning", "dropped"]


def test_a_second_drain_waits_while_the_history_is_locked(setting: Setting) -> None:
    setting.advance()
    with closing(sqlite3.connect(setting.directory / "history.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        setting.steps(5)
        setting.advance()
        assert len(setting.warnings) == 1
        other.execute("ROLLBACK")
    setting.advance(RETRY_S + 1)
    assert setting.rows("SELECT count(*) FROM steps") == [(5,)]


def test_no_sqlite_error_escapes(state: Path, tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_bytes(b"x" * 100)

"""From the rings into the history: everything once, whatever fails in between."""

from __future__ import annotations

import json
import os
import sqlite3
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from synthetic import host_event

from dpmon.export.records import history, write_jsonl
from dpmon.record.wire import pack_call, pack_definition, pack_event, pack_step
from dpmon.ring import Ring
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

    def new_ring(self, process: int, capacity: int = 1 << 20) -> Ring:
        """Make a ring with the definitions that `steps` needs."""
        path = str(self.directory / f"process-{process}.ring")
        ring = Ring(path, process=process, start_ns=START, capacity=capacity)
        layout = {"root": "Model", "via": None, "virtual": False, "devices": ["cpu:0"], "absent": {}}
        ring.write(pack_definition(1, layout))
        ring.write(pack_definition(2, [["x", [], "int64", 8], ["y", [4, 5], "float32", 80]]))
        return ring

    def new_drain(self) -> Drain:
        """Make the drain of another supervisor of this run."""
        return Drain(self.directory, self.info, self.warnings.append)

    def steps(self, count: int, ring: Ring | None = None) -> None:
        """Write `count` calls and steps."""
        ring = ring or self.ring
        for _ in range(count):
            self.step += 1
            now = START + self.step * 1000
            ring.write(pack_call(1, 0, 1, self.step, self.step, now, 5, 2, 0, (-1, 0) * 4, (2, 0, 0, 5)))
            ring.write(pack_step(1, self.step, now, 900, -1, (1, 2, -1, -1)))

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
def setting(state: Path) -> Iterator[Setting]:
    """A new run."""
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
    setting.ring.write(pack_event("warning", {"process": 0, "t_s": 0.5, "text": "hm"}))
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
    assert setting.rows("SELECT name, process, sequence, missed, lost, calls, steps, last_step FROM rings") == [
        ("process-0.ring", 0, 7, 0, 0, 2, 2, 2)
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


@pytest.mark.parametrize("last", ["drained", "left in its ring"])
def test_the_third_supervisor_makes_the_ring_of_the_first_anew(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The ring of the first was deleted; the history still knows how far it was read."""
    for number, name in enumerate(("gpu.ring", "gpu-1.ring", "gpu.ring")):
        monkeypatch.setattr(os, "getpid", lambda pid=1000 + number: pid)
        ring = Ring(str(setting.directory / name), process=-1, start_ns=START)
        drain = setting.new_drain()
        drain.flush()
        drain.drop_samples(name)
        for second in range(50 if number == 0 else 3):
            ring.write(host_event(100.0 * number + second))
        if number == 2:
            ring.write(pack_event("exit", {"status": 0, "signal": None, "t_s": 300.0}))
        if number < 2 or last == "drained":
            drain.flush()
        drain.close()
    with open_store(setting.directory) as store:
        assert len(store.events("host")) == 56
        assert [event.data["t_s"] for event in store.events("exit")] == [300.0]
        assert store.dropped == 0


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
    setting.ring.write(pack_event(kind, {"process": 0, "t_s": 0.5}))
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
        held = sum(len(value) for row in setting.drain._batch.calls for value in row if isinstance(value, bytes))
        held += sum(map(len, (payload for _, payloads in setting.drain._taken for payload in payloads)))
        assert held < 100_000 + (1 << 20)
    db.execute("PRAGMA max_page_count = 100000")
    for _ in range(8):
        setting.advance(RETRY_S + 1)
    ((calls, steps, missed, sequence),) = setting.rows("SELECT calls, steps, missed, sequence FROM rings")
    assert sequence == 2 + 2 * 24_000
    assert calls + steps + missed == 2 * 24_000
    assert missed > 10_000
    assert len(setting.warnings) == 1


def test_held_records_are_counted_by_their_size_in_memory(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded record takes ten times the memory of its payload."""
    monkeypatch.setattr(drain_module, "HOLD_BYTES", 4 << 20)
    setting.advance()
    db = setting.drain._history._db
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    tracemalloc.start()
    try:
        for _ in range(40):
            setting.steps(400)
            setting.advance()
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
    "payload",
    [b"", b"\x00", b"\x09abc", b"\x02short", b"\x03short", b"\x01\0\0\0\1\0\0\0{", b"\x04{", b"\x04[]", b"\x04{}",
     b"\x04\xff\xfe", b"\x04" + b"[" * 20_000, b"\x01\0\0\0\1\0\0\0" + b"[[1]]",
     b'\x04{"kind":"\\ud800"}', pack_step(1, 1, -(1 << 63), 9, 1, (-1, -1, -1, -1)),
     pack_call(1, 0, 1, 1, 1, -(1 << 63), 5, 2, 0, (-1, 0) * 4, (2, 0, 0, 5))],
)  # fmt: skip
def test_payloads_that_are_no_records_are_counted(setting: Setting, payload: bytes) -> None:
    setting.ring.write(payload)
    setting.steps(2)
    setting.advance()
    assert setting.rows("SELECT missed, calls, steps FROM rings") == [(1, 2, 2)]
    records = list(history(setting.directory))
    assert [r.data["count"] for r in records if getattr(r, "kind", "") == "dropped"] == [1]
    assert len(records) == 5


@pytest.mark.parametrize("rows", ["1e400", str(1 << 70), "-1", "true", '"4"'])
def test_rows_that_no_batch_has_are_not_known(setting: Setting, rows: str) -> None:
    """After a flipped bit in a definition, the supervisor goes on, and the rows are unknown."""
    setting.ring.write(pack_definition(3, ["rows"]).replace(b'"rows"', b'["x",[%s],"float32",4]' % rows.encode()))
    setting.ring.write(pack_call(1, 0, 1, 1, 1, START, 5, 3, 0, (-1, 0) * 4, (3, 0, 0, 5)))
    setting.advance()
    assert setting.rows("SELECT rows FROM calls") == [(None,)]


def test_sums_beyond_reason_are_cut(setting: Setting) -> None:
    for _ in range(3):
        setting.ring.write(pack_call(1, 0, 1, 1, 1, START, 5, 2, 0, (0, 1 - (1 << 63)) * 4, (2, 0, 0, 5)))
        setting.advance()
    assert setting.rows("SELECT count(*) FROM calls") == [(3,)]


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
    setting.ring.write(pack_call(1, 0, 99, 1, 1, START, 5, 98, 0, (-1, 0) * 4, (98, 0, 0, 5)))
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
    setting.ring.write(pack_event("warning", {"process": 0, "t_s": 0.5, "text": "ü\n\u2028"}))
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

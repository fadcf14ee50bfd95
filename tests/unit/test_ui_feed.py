"""The screen reads all records, and the end last."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.errors import HistoryError
from dpmon.model.run_analysis import MAX_FULLY_READ, RunAnalysis
from dpmon.run.run_directory import ExitInfo
from dpmon.store.database import HISTORY_FILE, HistoryConnection, prepare_to_read
from dpmon.store.store_queries import Store
from dpmon.ui.live_run import LiveRun
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.screen_data import ScreenData, View, describe_activity
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.time_axis import shift_by_parts
from dpmon.ui.time_cursor import TimeCursor
from support.history_builders import Recording
from support.record_builders import SECOND, Training
from support.screen_harness import FakeReader
from support.screen_states import STYLE, paint_screen


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no slow read postpone the next one: on a busy machine, every read may be slow."""
    monkeypatch.setattr("dpmon.ui.live_run._SLOW_READ_S", 600.0)


def feed_of(directory: Path, reader: FakeReader, clock: Callable[[], int] = time.monotonic_ns) -> LiveRun:
    return LiveRun(directory, reader.as_reader, clock, reader.open_store)


def test_the_last_picture_has_all_that_was_recorded_and_how_it_ended(tmp_path: Path) -> None:
    training = Training()
    reader = FakeReader(tmp_path)
    reader.new = [*training.begin(), *training.run(400)]
    cause = "rank 1: RuntimeError: broke (train.py:12)"
    reader.ended = ExitInfo(3, None, 1.7e9, 9 * SECOND, 9.0, "supervisor", cause=cause)
    feed = feed_of(tmp_path, reader)
    feed.start()
    feed.refresh()
    process = feed.state.representative
    assert process is not None
    assert process.last_step is not None
    assert (process.last_step.step, process.ranged.steps, feed.state.over) == (400, 400, True)
    assert feed.exit_info is not None
    assert (feed.exit_info.status, feed.build_screen_data(View()).exit_cause) == (3, cause)


def test_a_history_that_cannot_be_read_leaves_the_picture_as_it_was(tmp_path: Path) -> None:
    reader = FakeReader(tmp_path)
    reader.new = Training().run(40)
    feed = feed_of(tmp_path, reader)
    feed.start()
    feed.refresh()
    before = feed.state

    @contextmanager
    def damaged() -> Iterator[Store]:
        raise HistoryError("damaged")
        yield

    feed._open_store = damaged
    feed.refresh()
    assert feed.state.processes is before.processes
    assert [warning.text for warning in feed.state.warnings] == ["damaged"]
    assert before.newest_ns > 0


@pytest.mark.parametrize("is_drawn", [True, False])
def test_between_two_pictures_the_history_is_closed(tmp_path: Path, is_drawn: bool) -> None:
    """The supervisor can then shorten its journal and, at the end, remove it, also if a stalled terminal gets none."""
    reader, training = FakeReader(tmp_path), Training()
    reader.recording = Recording(reader.info.start_ns, tmp_path)
    reader.recording.add([*training.begin(), *training.run(40)])

    def connect() -> sqlite3.Connection:
        db = sqlite3.connect(tmp_path / HISTORY_FILE, isolation_level=None)
        prepare_to_read(db)
        db.execute("BEGIN")
        return db

    @contextmanager
    def opened() -> Iterator[Store]:
        with closing(HistoryConnection(connect(), connect)) as connection:
            yield Store(connection)

    feed = LiveRun(tmp_path, reader.as_reader, open_store=opened)
    feed.start()
    feed.refresh()
    if is_drawn:
        assert "4 dp" in drawn(feed, 120, 40)
    feed.release_records()
    reader.recording.add(training.run(40))
    assert reader.recording._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    assert reader.recording._db.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    assert "4 dp" in drawn(feed, 200, 60), "other facts of the same picture can still be queried"
    feed.close()
    reader.recording.close()


# ------------------------------------------------------------------------------------------------ a late attach

SILENT = re.compile(r"idle|no step has (?:ended|finished)|first batch|first call|no call yet|waiting")


def drawn(feed: LiveRun, width: int, height: int) -> str:
    return "\n".join(
        plain_text(row) for row in paint_screen(feed.build_screen_data(View()), OutputView(), width, height, STYLE)
    )


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_unread_records_do_not_count_as_silence(tmp_path: Path, size: tuple[int, int]) -> None:
    training = Training(start_ns=5 * SECOND)
    (tmp_path / "process-0.ring").touch()
    reader = FakeReader(tmp_path)
    reader.new = [*training.begin(), *training.run(400)]
    now = training.now + 67 * SECOND
    feed = feed_of(tmp_path, reader, lambda: now)
    text = drawn(feed, *size)
    assert describe_activity(feed.build_screen_data(View())).word == "reading the record"
    assert not SILENT.search(text), text
    feed.start()
    feed.refresh()
    assert describe_activity(feed.build_screen_data(View())) == ("idle", "wait", "67 s"), "all is read: now it is true"
    assert "idle 67 s" in drawn(feed, *size)


def test_a_new_time_range_is_read_immediately(tmp_path: Path) -> None:
    training = Training(step_ns=SECOND)
    reader = FakeReader(tmp_path)
    reader.new = [*training.begin(), *training.run(100)]
    feed = feed_of(tmp_path, reader, lambda: reader.info.start_ns + 101 * SECOND)
    feed.start()
    feed.refresh()

    def steps(facts: ScreenData) -> int:
        assert facts.process is not None
        return facts.process.ranged.steps

    assert 29 <= steps(feed.build_screen_data(View(range_s=30))) <= 32
    assert steps(feed.build_screen_data(View(range_s=0))) == 100
    feed.move_cursor(TimeCursor.freeze)
    reader.new = training.run(50)
    feed.refresh()
    still = feed.build_screen_data(View(range_s=30))
    assert 28 <= steps(still) <= 32
    assert still.process is not None
    assert still.process.last_step is not None
    assert still.process.last_step.step == 100
    feed.move_cursor(TimeCursor.return_to_present)
    assert steps(feed.build_screen_data(View(range_s=0))) == 150


def test_a_look_back_starts_at_the_time_of_the_freeze_and_sends_no_requests(tmp_path: Path) -> None:
    reader, training = FakeReader(tmp_path), Training(step_ns=SECOND // 10)
    reader.new = [*training.begin(), *training.run(25)]
    feed = feed_of(tmp_path, reader)
    feed.start()
    feed.refresh()
    present = feed.build_screen_data(View())
    ahead = replace(present, now_ns=present.cursor.recorded_ns + 5 * SECOND)
    assert shift_by_parts(ahead, -1) == present.cursor.recorded_ns - 2 * SECOND, "the clock is ahead of the records"
    feed.move_cursor(TimeCursor.freeze)
    frozen = feed.build_screen_data(View())
    assert frozen.cursor.time_ns is not None
    assert shift_by_parts(frozen, -1) == frozen.cursor.time_ns - 2 * SECOND
    feed.move_cursor(lambda cursor: cursor.seek(shift_by_parts(frozen, -1)))
    past = feed.build_screen_data(View())
    assert past.cursor.is_looking_back
    assert not any((past.can_toggle, past.can_pause, past.can_type))
    assert feed.toggle_refusal() == feed.pause_refusal(False) == "an earlier time is shown: esc goes back to now"


def test_the_state_of_very_many_ranks_is_read_in_every_other_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("dpmon.ui.live_run.time.perf_counter", lambda: now[0])
    feed = feed_of(tmp_path, FakeReader(tmp_path))
    feed.start()
    reads: list[float] = []
    for count, times in ((1, [0.0, 1.0, 2.0, 3.0, 4.0]), (MAX_FULLY_READ + 1, [5.0, 7.0, 9.0])):
        state = RunAnalysis().with_facts(has_many=count > MAX_FULLY_READ)

        def build(*_: Any, state: RunAnalysis = state) -> RunAnalysis:
            reads.append(now[0])
            return state

        monkeypatch.setattr("dpmon.ui.live_run.RunAnalysis", build)
        reads.clear()
        for _ in range(5):
            feed.refresh()
            feed.finish_drawing()
            now[0] += 1.0
        assert reads == times
    for range_s in (30, 600):
        feed.build_screen_data(View(range_s=range_s))
    assert len(reads) == 5, "a new range is read at once"

"""Panels, findings, report and summary name steps in which the script waited for input."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from dpmon.cli.summary import summary_lines
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.store.events import EVENTS, EventRow
from dpmon.store.history_writer import HistoryWriter, WriteBatch
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.time_axis import TimeAxis, build_chart_columns
from support.format_readers import report_json_of, report_text
from support.history_builders import Recording, read_report, write_run_directory
from support.record_builders import SECOND, Training
from support.screen_states import screen_text

PID = 4242
"""The process id of a Training."""
Wait = tuple[float, float]


def with_waits(*seconds: float, mode: str = "single") -> tuple[Training, list[Row], list[Wait]]:
    """A hundred steps of 20 ms, one in which the script waited for so long, and so on; the waits (s)."""
    training = Training(mode=mode, step_ns=SECOND // 50)
    payloads, waits = [*training.begin(), *training.run(100)], []
    for wait in seconds:
        usual = training.shares[mode]["backward"]
        training.shares[mode]["backward"] = int(wait * SECOND) * 100 // training.step_ns
        began = training.now
        payloads += training.step()
        training.shares[mode]["backward"] = usual
        # As it was seen: it began a moment before, and went on for a moment.
        waits.append((began / SECOND + 0.3, (training.now - began) / SECOND - 0.6))
        payloads += training.run(100)
    return training, payloads, waits


def wait_events(waits: Sequence[Wait], pid: int = PID) -> list[Row]:
    return [Event("input", {"pid": pid, "t_s": at, "waited_s": took}) for at, took in waits]


def recorded(payloads: Sequence[Row], waits: Sequence[Wait], pid: int = PID, span_s: int = 120) -> RunAnalysis:
    return Recording().add(payloads).add(wait_events(waits, pid), -1).state(span_s=span_s)


def drawn(state: RunAnalysis) -> str:
    return " ".join(screen_text(ScreenData(state, state.newest_ns, is_command_alive=True), 120, 60).split())


def test_the_batch_panel_names_a_wait_and_not_the_phase_it_fell_into() -> None:
    _, payloads, waits = with_waits(12.0, 8.0)
    assert "more than usual in waiting for input" in drawn(recorded(payloads, waits))
    assert "more than usual in backward" in drawn(recorded(payloads, []))
    assert "more than usual in backward" in drawn(recorded(payloads, waits, pid=PID + 1)), "a launcher's own"
    short = [(waits[0][0], 2.0)]
    assert "more than usual in backward" in drawn(recorded(payloads, short)), "most of it was something else"


def test_a_wait_is_a_gap_in_the_history() -> None:
    _, payloads, waits = with_waits(12.0, 8.0)
    without, with_gaps = (recorded(payloads, known_waits).processes[0] for known_waits in ([], waits))
    assert max(column.wall_ns / column.count for column in without.columns) > SECOND // 2
    assert max(column.wall_ns / column.count for column in with_gaps.columns) < SECOND // 20
    assert sum(column.count for column in with_gaps.columns) == sum(column.count for column in without.columns)
    for column in with_gaps.columns:
        assert sum(column.phases) == column.wall_ns
    waited_seconds = {second for start, took in waits for second in range(int(start) + 1, int(start + took))}
    for process, expected_gaps in ((with_gaps, waited_seconds), (without, set())):
        columns = build_chart_columns(process, TimeAxis(2, 30, 29), 28).columns
        assert {column.second for column in columns if not column.count} == expected_gaps


def test_a_report_blames_nobody_for_a_wait(state: Path) -> None:
    training, payloads, waits = with_waits(12.0, 8.0)
    seconds = training.now / SECOND
    blamed = read_report(write_run_directory({0: payloads}, seconds=seconds, id="one"))
    assert [each.kind for each in blamed.findings] == ["long steps"]
    story = read_report(directory := write_run_directory({0: payloads, -1: wait_events(waits)}, seconds=seconds))
    assert story.findings == []
    said = report_json_of(story)["inputs"]
    assert [(one["process"], one["t_s"], one["seconds"]) for one in said] == [
        (0, pytest.approx(at), pytest.approx(took)) for at, took in waits
    ]
    words = "waited for a line of input 2 times, for"
    assert words in " ".join(" ".join(report_text(directory, 100)).split())
    assert any(line.startswith(words) for line in summary_lines(directory, story.health.exit_info))


def test_a_stall_beside_a_wait_is_still_found(state: Path) -> None:
    training, payloads, waits = with_waits(12.0, 8.0)
    story = read_report(write_run_directory({0: payloads, -1: wait_events(waits[:1])}, seconds=training.now / SECOND))
    (found,) = story.findings
    assert found.kind == "long steps"
    assert found.text.startswith("One step took")


def test_a_script_that_waits_at_its_end_was_not_silent(state: Path) -> None:
    training, payloads, _ = with_waits()
    end = training.now / SECOND
    assert [
        each.kind for each in read_report(write_run_directory({0: payloads}, seconds=end + 90, id="one")).findings
    ] == ["quiet"]
    waits = [(end + 1, 80.0)]
    assert read_report(write_run_directory({0: payloads, -1: wait_events(waits)}, seconds=end + 90)).findings == []


@pytest.mark.parametrize("kind", ["input", "stall", "loader"])
def test_a_script_that_waits_or_stalls_all_day_does_not_fill_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("dpmon.store.events.MAX_LASTING", 50)
    writer = HistoryWriter.open(tmp_path, {}, 1 << 16)
    for first in range(0, 2000, 100):
        batch = WriteBatch()
        for n in range(first + 1, first + 101):
            batch.add(EVENTS, EventRow(n, None, kind, n * SECOND, '{"pid": 1}'))
        writer.write(batch)
    writer.close()
    with closing(sqlite3.connect(tmp_path / "history.sqlite")) as db:
        ids = [number for (number,) in db.execute("SELECT id FROM events ORDER BY id")]
    assert ids[-1] == 2000
    assert 50 <= len(ids) < 1500

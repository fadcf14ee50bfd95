"""The line of progress of a headless run, and lines of its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.status_stream import ProgressReporter
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.run.run_reader import PauseState
from support.history_builders import Recording, write_run_directory
from support.record_builders import step_row
from support.run_harness import STATUS_NOW_NS, fake_status_reader, stop_status_clock

_SECOND = 10**9


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_status_clock(monkeypatch)


def just_after(reader: Any, rows: Iterable[Row | Event]) -> None:
    """Set the clock to the end of the last step."""
    ends = [row.start_ns + row.wall_ns for row in rows if isinstance(row, Step)]
    reader.info.start_ns = STATUS_NOW_NS - max(ends, default=0)


def step(
    number: int, samples: int | None = 30, mode: str = "dp", every_ms: int = 100, start_ns: int | None = None
) -> Row:
    """Return a step that ends when the next one begins."""
    wall = every_ms * 10**6
    start = number * wall if start_ns is None else start_ns
    phases = (-1, wall // 2, wall // 4, -1)
    return step_row(mode, number, start, wall, samples, phases)


def line(*processes: Iterable[Row]) -> str:
    """Return the line of Progress for the rows of each process, just after the last step."""
    rows = {number: list(own) for number, own in enumerate(processes)}
    reader = fake_status_reader(write_run_directory(rows, status=None))
    just_after(reader, (row for own in rows.values() for row in own))
    return ProgressReporter(reader).line()


def test_a_stalled_run_says_which_rank_stands_where(state: Path) -> None:
    stall = Event("stall", {"t_s": 60.0, "since_s": 50.0, "text": "rank 1 in save (t.py:3)", "ranks": []})
    reader = fake_status_reader(
        write_run_directory({0: [step(n) for n in range(1, 21)], -1: [stall]}, status=None), {0: ("backward", 1)}
    )
    reader.info.start_ns = STATUS_NOW_NS - 80 * _SECOND
    lines = ProgressReporter(reader)
    assert lines.line().startswith("step 20")
    assert lines.line() == "stalled for 30.0 s: rank 1 in save (t.py:3)"


def test_step_speed_and_mode(state: Path) -> None:
    assert line([step(n) for n in range(1, 21)]) == "step 20  10.0 steps/s  300 samples/s  dp"


def test_virtual_replicas_are_called_so_only_under_dp(state: Path) -> None:
    mode = Event("mode", {"process": 0, "mode": "dp", "virtual": True})
    assert line([mode, step(1)]).endswith("  dp (virtual)")
    assert line([mode, step(1, mode="single")]).endswith("  single")


def test_unknown_samples_are_not_added_up(state: Path) -> None:
    assert "samples" not in line([step(1), step(2, samples=None)])


def test_ranks_step_together(state: Path) -> None:
    who = {"t_s": 0.0, "world": 4}
    ranks = [[Event("process", {**who, "process": n, "rank": n}), *map(step, range(1, 11))] for n in range(4)]
    assert line(*ranks) == "step 10  4 processes  10.0 steps/s  1.20k samples/s  dp"


def test_ranks_have_no_mode(state: Path) -> None:
    who = {"process": 0, "t_s": 0.0}
    steps = [step(1, mode="single"), step(2, mode="single")]
    assert line([Event("process", {**who, "rank": 0, "world": 2}), *steps]).endswith("samples/s")
    assert line([Event("process", {**who, "world": 1}), *steps]).endswith("  single")


class Going:
    """A live run, whose store gets rows of one process as they are added."""

    def __init__(self, activities: Mapping[int, tuple[str, int]] | None = None) -> None:
        directory = write_run_directory({}, status=None)
        self._recording = Recording(0, directory)
        self.reader = fake_status_reader(directory, activities)
        self.progress = ProgressReporter(self.reader)

    def takes(self, *rows: Row) -> str:
        """Return the line just after these rows."""
        self._recording.add(rows)
        just_after(self.reader, rows)
        return self.progress.line()


def test_each_line_has_the_rate_of_the_last_ten_seconds(state: Path) -> None:
    run = Going({0: ("data", STATUS_NOW_NS)})
    assert run.takes(*[step(n) for n in range(1, 11)]).startswith("step 10  10.0 steps/s")
    assert run.progress.line() == "training"
    slow = [step(n, start_ns=_SECOND + (n - 10) * _SECOND // 2, every_ms=500) for n in range(11, 41)]
    assert run.takes(*slow).startswith("step 40  2.00 steps/s")


def test_the_time_of_a_long_gap_is_in_the_line_after_it(state: Path) -> None:
    run = Going({0: ("other", 0)})
    run.takes(*[step(n) for n in range(1, 11)])
    last = step(11, start_ns=21 * _SECOND + _SECOND // 10, every_ms=900)
    assert run.takes(last).startswith("step 11  0.10 steps/s  2.86 samples/s (60.0 within steps)"), "of two steps"


def test_a_line_long_after_the_last_step_says_so(state: Path) -> None:
    reader = fake_status_reader(write_run_directory({0: [step(1), step(2)]}, status=None))
    reader.info.start_ns = STATUS_NOW_NS - 9 * _SECOND
    assert ProgressReporter(reader).line() == "step 2  no step has finished for 9 s  dp"


def test_a_line_after_an_evaluation_has_the_rate_of_the_training(state: Path) -> None:
    run = Going()
    at = number = 0
    lines = []
    for count, wall, trains in (
        (50, _SECOND // 100, False),
        (60, _SECOND // 10, True),
        (400, _SECOND // 100, False),
        (60, _SECOND // 5, True),
    ):
        rows = []
        for _ in range(count):
            number += 1
            rows.append(step_row("single", number, at, wall, 16, (-1, 10, 5 if trains else -1, -1)))
            at += wall
        lines.append(run.takes(*rows))
    evaluated = "evaluation: no training step has finished for 4 s"
    assert [said.split("  ")[1] for said in lines] == ["100 steps/s", "10.0 steps/s", evaluated, "5.00 steps/s"]


def test_without_steps_it_says_what_is_waited_for(state: Path) -> None:
    assert line() == "starting"
    reader = fake_status_reader(write_run_directory({}, status=None))
    progress = ProgressReporter(reader)
    reader.startup_stage = lambda: ("importing torch", STATUS_NOW_NS - 3 * 10**9)
    assert progress.line() == "starting: importing torch"
    reader.startup_stage = lambda: ("torch imported", STATUS_NOW_NS)
    assert progress.line() == "starting: waiting for the first step"
    since = STATUS_NOW_NS - 12 * 10**9
    doing = fake_status_reader(reader.directory, {0: ("data", since)})
    doing.pause_state = lambda: PauseState(since_ns=since)
    assert ProgressReporter(doing).line() == "paused for 12.0 s"


def test_a_long_step_says_where_it_is(state: Path) -> None:
    doing: dict[int, tuple[str, int]] = {0: ("data", STATUS_NOW_NS - 12 * _SECOND)}
    reader = fake_status_reader(write_run_directory({0: [step(1), step(2)]}, status=None), doing)
    reader.info.start_ns = STATUS_NOW_NS - 15 * _SECOND
    progress = ProgressReporter(reader)
    assert progress.line().startswith("step 2")
    assert progress.line() == "waiting for data for 12.0 s"
    doing[0] = ("backward", STATUS_NOW_NS - 12 * _SECOND)
    assert progress.line() == "training: in backward for 12.0 s"


def test_the_line_after_the_last_step_does_not_wait_for_a_first_step(state: Path) -> None:
    now = STATUS_NOW_NS
    last = step(96, mode="single", start_ns=6 * _SECOND, every_ms=1000)
    reader = fake_status_reader(write_run_directory({0: [last]}, status=None), {0: ("ended", 0), 1: ("ended", 0)})
    reader.info.start_ns = now - 13 * _SECOND
    reader.startup_stage = lambda: ("torch imported", now - 60 * 10**9)
    progress = ProgressReporter(reader)
    assert progress.line().startswith("step 96")
    assert progress.line() == "idle for 6.00 s: no call since step 96; the training process has ended"
    reader.startup_stage = lambda: ("importing torch", now)  # the next training of the same command
    assert progress.line() == "starting: importing torch"


def test_a_wait_for_input_is_shown(state: Path) -> None:
    reader = fake_status_reader(write_run_directory({}, status=None), {0: ("backward", STATUS_NOW_NS - 12 * 10**9)})
    reader.input_wait_start_ns = lambda: STATUS_NOW_NS - 11 * 10**9
    assert ProgressReporter(reader).line() == "waiting for input for 11.0 s"

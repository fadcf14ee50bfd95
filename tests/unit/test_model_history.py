"""Columns of steps over time: no step is lost, columns keep their place, and their number is bounded."""

from __future__ import annotations

import pytest
from stored import Recording, state_of
from synthetic import SECOND, Training

from dpmon.model.history import COLUMNS, Columns, pictured
from dpmon.model.state import Process
from dpmon.record.kinds import Step


def steps_of(walls: list[int], mode: str = "dp", each_ns: int | None = None) -> list[Step]:
    """Return consecutive steps, or steps that end every `each_ns`."""
    found, now = [], 0
    for number, wall in enumerate(walls, start=1):
        now += wall if each_ns is None else each_ns
        found.append(
            Step(
                0, None, number, mode, now - wall, wall, 4, {"data": wall // 4, "forward": wall - wall // 4, "other": 0}
            )
        )
    return found


def process_of(walls: list[int], span_s: int, each_ns: int | None = None) -> Process:
    process = state_of(steps_of(walls, each_ns=each_ns), span_s=span_s).focus
    assert process is not None
    return process


def test_a_range_takes_only_what_ended_within_it() -> None:
    walls = [3_000_000] * 60 + [1_000_000] * 30
    last, whole = (process_of(walls, span, SECOND).ranged for span in (30, 0))
    assert last.steps == 30
    assert last.median_ns == pytest.approx(1_000_000, rel=0.004)
    assert whole.median_ns == pytest.approx(3_000_000, rel=0.004)


@pytest.mark.parametrize("span", [30, 120, 600, 0])
def test_a_picture_has_room_and_loses_no_step_of_its_range(span: int) -> None:
    process = process_of([2_000_000] * 3000, span, SECOND // 2)
    for width in (1, 7, 60, 108, 188):
        picture = pictured(process, span, width)
        assert 0 < len(picture.columns) <= picture.places <= width
        if span == 0:
            assert sum(column.count for column in picture.columns) == 3000
        assert [column.second for column in picture.columns] == sorted({column.second for column in picture.columns})
        assert picture.columns[-1].second + picture.seconds > process.columns[-1].second, "the newest is there"


@pytest.mark.parametrize("span", [120, 600, 0])
def test_a_run_that_is_shorter_than_its_range_fills_the_chart(span: int) -> None:
    for seconds in (2, 9, 18, 53, 71, 115):
        process = process_of([200_000_000] * 5 * seconds, span)
        for width in (60, 108, 188):
            live, over = (pictured(process, span, width, over=ended) for ended in (False, True))
            assert live.places * 0.8 <= len(live.columns) <= live.places, "a fifth is free at most"
            assert len(over.columns) == over.places


def test_the_history_of_a_whole_run_stays_small_and_exact() -> None:
    process = process_of([100_000_000] * 30_000, 0)
    assert 100 < len(process.columns) <= COLUMNS
    assert sum(column.count for column in process.columns) == 30_000
    assert sum(column.wall_ns for column in process.columns) == 30_000 * 100_000_000


def test_columns_that_are_over_are_read_once_and_are_the_same() -> None:
    """They equal columns that are read again for each picture, also after going back in time."""
    training = Training(step_ns=SECOND // 5)
    recording = Recording().add(training.begin())
    kept = Columns()
    for number in range(40):
        recording.add(training.run(20))
        if number % 9 == 8:
            recording.add(training.switch("single" if training.mode == "dp" else "dp"))
        store, end = recording.store(), training.now // SECOND
        for end_s in (end + 1, end - 7 if number % 5 == 4 else end + 1):
            for width in (1, 10):
                begin = max(end_s - 60, 0) if width == 1 else 0
                fresh = Columns().read(store, 0, begin, end_s, width)
                assert (kept if width == 1 else Columns()).read(store, 0, begin, end_s, width) == fresh
    assert len(kept._closed) <= 60

"""Columns of steps over time: no step is lost, columns keep their place, and their number is bounded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dpmon.model.run_process import Process
from dpmon.model.step_history import COLUMNS
from dpmon.record.record_types import Step
from dpmon.ui.time_axis import TimeAxis, build_chart_columns, fit_axis, resample
from support.history_builders import snapshot_of_rows
from support.record_builders import SECOND


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
    process = snapshot_of_rows(steps_of(walls, each_ns=each_ns), span_s=span_s).representative
    assert process is not None
    return process


def test_a_range_takes_only_what_ended_within_it() -> None:
    walls = [3_000_000] * 60 + [1_000_000] * 30
    last, whole = (process_of(walls, span, SECOND).ranged for span in (30, 0))
    assert last.steps == 30
    assert last.median_ns == pytest.approx(1_000_000, rel=0.004)
    assert whole.median_ns == pytest.approx(3_000_000, rel=0.004)


def axis_for(process: Process, span_s: int, over: bool = False) -> TimeAxis:
    return fit_axis(process.began_ns // SECOND, process.columns[-1].second, span_s, process.column_s, over)


@pytest.mark.parametrize("span", [30, 120, 600, 0])
def test_a_picture_has_room_and_loses_no_step_of_its_range(span: int) -> None:
    process = process_of([2_000_000] * 3000, span, SECOND // 2)
    axis = axis_for(process, span)
    shown = [column for column in process.columns if column.second >= axis.start_s]
    for width in (1, 7, 60, 108, 188):
        picture = build_chart_columns(process, axis, width)
        assert 0 < len(picture.columns) <= picture.part_count <= width
        assert sum(column.count for column in picture.columns) == sum(column.count for column in shown)
        assert span == 0 or axis.end_s - axis.start_s == span
        assert sum(column.count for column in shown) == 3000 or axis.now_s - axis.start_s >= span * 0.9 - 1
        assert [column.second for column in picture.columns] == sorted({column.second for column in picture.columns})
        newest = axis.part_at(process.columns[-1].second, picture.part_count)
        assert len(picture.columns) == newest + 1, "the newest is there"


@pytest.mark.parametrize("span", [120, 600, 0])
def test_a_run_that_is_shorter_than_its_range_fills_the_chart(span: int) -> None:
    for seconds in (17, 20, 31, 53, 71, 115):
        process = process_of([200_000_000] * 5 * seconds, span)
        for width in (60, 108, 188):
            live, over = (
                build_chart_columns(process, axis_for(process, span, ended), width) for ended in (False, True)
            )
            assert live.part_count * 4 // 5 <= len(live.columns) <= live.part_count, "a fifth is free at most"
            assert len(over.columns) == over.part_count


def test_an_axis_grows_in_steps_and_then_moves_by_pages() -> None:
    axes = [fit_axis(7, now, 120) for now in range(7, 500)]
    for before, after in pairwise(axes):
        assert before.end_s <= after.end_s, "it never shrinks"
        assert before.start_s <= after.start_s <= after.now_s < after.end_s
    grown = {axis.end_s for axis in axes if axis.start_s == 7}
    assert max(grown) == 127
    assert len(grown) < 15
    assert min(grown) == 7 + 16
    assert {axis.start_s for axis in axes} == set(range(7, 403, 12))


def test_samples_and_steps_of_one_time_stand_under_each_other() -> None:
    """A slow second and a busy second at the same time have the same cell, whatever is known before and after."""
    process = process_of([SECOND // 10] * 300 + [SECOND] * 3 + [SECOND // 10] * 200, 120)
    for span, over in ((30, False), (120, True), (0, False)):
        axis = axis_for(process, span, over)
        for width in (17, 60, 109, 188):
            picture = build_chart_columns(process, axis, width)
            slow = [at for at, one in enumerate(picture.columns) if one.count and one.wall_ns / one.count > 2 * 10**8]
            cells = {axis.cell_at(axis.start_of_part(at, picture.part_count), width) for at in slow}
            values = [float(30 < second <= 33) for second in range(10, 53)]
            busy = {at for at, value in enumerate(resample(values, 52, axis, width)) if value}
            assert cells <= busy if axis.start_s < 31 else not cells
    assert resample([1.0] * 5, 4, TimeAxis(0, 10, 4), 10) == [1.0] * 5
    assert resample([1.0, None, 3.0], 4, TimeAxis(0, 10, 4), 5) == [None, 1.0, 3.0]
    assert resample([1.0], 4, TimeAxis(3, 5, 4), 6) == [None] * 3 + [1.0] * 3
    assert resample([1.0], 4, TimeAxis(3, 5, 4), 0) == []


def test_the_history_of_a_whole_run_stays_small_and_exact() -> None:
    process = process_of([100_000_000] * 30_000, 0)
    assert 100 < len(process.columns) <= COLUMNS
    assert sum(column.count for column in process.columns) == 30_000
    assert sum(column.wall_ns for column in process.columns) == 30_000 * 100_000_000

"""Steps over time: exact sums, an even draw for the medians, ranges of time, and a size that stays the same."""

from __future__ import annotations

import copy
import random
import sys

import pytest
from synthetic import SECOND, Training, decoded

from dpmon.model import State, fold
from dpmon.model.history import add_step, columns_of, figures, pictured
from dpmon.model.state import (
    COLUMNS_KEPT,
    LONG_KEPT,
    NEWEST_COLUMNS,
    NOT_RUN,
    PHASES,
    SAMPLED,
    SAMPLED_NEWEST,
    Process,
    StepSample,
)
from dpmon.model.stats import summary
from dpmon.record.codec import Step


def sample(number: int, end_ns: int, wall_ns: int = 1000, samples: int | None = 4) -> StepSample:
    phases = [NOT_RUN] * len(PHASES)
    phases[0], phases[5] = wall_ns // 4, wall_ns - wall_ns // 4
    return StepSample(number, end_ns, wall_ns, samples, tuple(phases))


def process_of(walls: list[int], mode: str = "dp", each_ns: int | None = None) -> Process:
    """Steps one after the other, of the given durations or spread `each_ns` apart."""
    process, now = Process(0), 0
    for number, wall in enumerate(walls):
        now += wall if each_ns is None else each_ns
        add_step(process, sample(number, now, wall), mode)
    return process


def test_figures_of_few_steps_are_those_of_all_of_them() -> None:
    training = Training(step_ns=150_000_000)
    state = State()
    for record in decoded([*training.begin(), *training.run(120)]):
        state = fold(state, record)
    process = state.focus()
    assert process is not None
    ours, plain = figures(process, "dp", 600), summary(list(process.modes["dp"].steps))
    assert ours.sampled == ours.steps == 120
    assert ours.phases == plain.phases
    assert ours[2:4] == plain[2:4]
    assert ours.rate is not None
    walls = sum(step.wall_ns for step in process.modes["dp"].steps)
    assert ours.rate.samples_per_s == pytest.approx(120 * 30 * SECOND / walls)
    assert ours.span_ns == plain.span_ns


def test_medians_of_many_steps_come_from_an_even_draw() -> None:
    chance = random.Random(3)
    walls = [int(chance.lognormvariate(0, 0.4) * 2_000_000) for _ in range(40_000)]
    process = process_of(walls)
    found = figures(process, "dp", 0)
    assert found.steps == 40_000
    assert found.sampled <= 1100
    ordered = sorted(walls)
    assert found.median_ns == pytest.approx(ordered[20_000], rel=0.05)
    assert found.p95_ns == pytest.approx(ordered[38_000], rel=0.12)
    assert found.phases[0].share == pytest.approx(0.25, abs=0.001)
    assert found.rate.samples_per_s == pytest.approx(160_000 / sum(walls) * SECOND)


def test_a_draw_does_not_prefer_long_steps() -> None:
    """What is drawn is drawn by count, not by time: nine steps of ten are short."""
    process = process_of([1_000_000 if i % 10 else 50_000_000 for i in range(20_000)])
    found = figures(process, "dp", 120)
    assert found.median_ns == 1_000_000
    assert found.p95_ns == 50_000_000


def test_a_range_takes_only_what_ended_within_it() -> None:
    process = process_of([3_000_000] * 60 + [1_000_000] * 30, each_ns=SECOND)
    assert figures(process, "dp", 30).median_ns == 1_000_000
    assert figures(process, "dp", 30).steps == 30
    assert figures(process, "dp", 0).median_ns == 3_000_000
    assert figures(process, "single", 30).steps == 0


def test_the_mode_is_kept_apart_and_unknown_samples_are_no_zeros() -> None:
    process = process_of([5_000_000] * 20, each_ns=SECOND)
    now = 21 * SECOND
    for number in range(20):
        add_step(process, sample(number, now + number * SECOND, 9_000_000, None), "single")
    assert figures(process, "dp", 0).median_ns == 5_000_000
    assert figures(process, "single", 0).median_ns == 9_000_000
    assert figures(process, "single", 0).rate.samples_per_s is None
    assert list(dict.fromkeys(c.mode for c in pictured(process, 120, 100).columns)) == ["dp", "single"]


@pytest.mark.parametrize("span", [30, 120, 600, 0])
@pytest.mark.parametrize("width", [1, 7, 60, 108, 188])
def test_a_picture_has_room_and_loses_no_step_of_its_range(span: int, width: int) -> None:
    process = process_of([2_000_000] * 3000, each_ns=SECOND // 2)
    picture = pictured(process, span, width)
    assert 0 < len(picture.columns) * picture.cells <= width
    counts = sum(column.count for column in picture.columns)
    if span == 0:
        assert counts == 3000
    assert [column.second for column in picture.columns] == sorted({column.second for column in picture.columns})
    assert picture.columns[-1].second + picture.seconds > process.columns[-1].second, "the newest is there"


def test_the_history_of_a_whole_run_stays_small_and_exact() -> None:
    process = process_of([100_000_000] * 30_000)
    assert len(process.columns) == COLUMNS_KEPT
    assert len(process.long) <= LONG_KEPT
    columns = columns_of(process, 0)
    assert sum(column.count for column in columns) == 30_000
    assert sum(column.wall_ns for column in columns) == 30_000 * 100_000_000
    for kept in (process.columns, process.long):
        assert all(len(column.sampled) <= SAMPLED for column in list(kept)[:-NEWEST_COLUMNS])
        assert all(len(column.sampled) <= SAMPLED_NEWEST for column in kept)
    assert all(column.sampled for column in columns)


@pytest.mark.parametrize("span", [0, 30])
def test_the_median_of_a_short_run_is_that_of_its_steps(span: int) -> None:
    """A few hundred steps within some seconds, of two kinds: none is left out by chance."""
    walls = [4_000_000 if number % 3 else 9_000_000 for number in range(360)]
    found = figures(process_of(walls), "dp", span)
    assert (found.sampled, found.steps) == (360, 360)
    assert found.median_ns == 4_000_000
    fast = figures(process_of([1_000_000] * 20_000), "dp", span)
    assert 250 < fast.sampled < 600


def test_memory_is_flat_over_a_million_steps() -> None:
    process, now = Process(0), 0

    def weight() -> int:
        columns = [*process.columns, *process.long]
        return sum(sys.getsizeof(c.sampled) + len(c.sampled) * 500 + 500 for c in columns)

    weights = []
    for number in range(1_000_000):
        # Two modes by turns, now and then with every step.
        mode = "dp" if number // (1 if number % 100_000 < 2000 else 20_000) % 2 else "single"
        now += 50_000_000
        if number % 10:
            process.columns[-1].count += 1  # the rest of the second's steps, without the time they take here
        else:
            add_step(process, sample(number, now), mode)
        if number % 250_000 == 249_999:
            weights.append(weight())
    assert max(weights[1:]) <= weights[0] * 1.5
    assert weights[-1] < 4_000_000


def test_a_copy_stays_as_it_is_and_shares_the_samples() -> None:
    process = process_of([2_000_000] * 5000)
    still = copy.deepcopy(process)
    before = figures(still, "dp", 0)
    for number in range(3000):
        add_step(process, sample(number, (11 + number) * SECOND), "dp")
    assert figures(still, "dp", 0) == before
    assert still.columns[0].sampled[0] is not None


def test_a_few_steps_of_each_second_are_not_those_that_ended_first() -> None:
    """Of the steps that lie over a second's begin more are long ones: whoever draws them first shows too much."""
    state, number = State(), 0

    def steps(at: int, walls: list[int]) -> int:
        nonlocal state, number
        for wall in walls:
            number += 1
            state = fold(state, Step(0, None, number, "single", at, wall, 30, {"other": wall}))
            at += wall
        return at

    at = 0
    for _ in range(100):
        at = steps(at, [519_000_000, *[60_000_000] * 8])
    steps(at, [2_000_000] * 500)
    process = state.focus()
    assert process is not None
    found = figures(process, "single", 120)
    assert found.steps == 1400
    assert found.median_ns == 60_000_000

"""The longest steps of a time range: which they are, and what was long in them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from dpmon.model.run_events import RunEvents
from dpmon.model.slow_steps import INPUT, SlowSteps, read_slow_steps
from dpmon.record.record_types import Batches, Event, Step
from dpmon.record.schema import WARM_UP_STEPS
from dpmon.store.step_stats import StatsWindow
from dpmon.store.store_queries import Store
from dpmon.ui.panels.longest_steps import step_rows
from dpmon.ui.step_list import StepList
from dpmon.ui.styled_rows import row_width
from support.history_builders import Recording, open_store_with
from support.rank_builders import MS, ddp_rank_steps, make_ranks, record_ddp_ranks, startup_rows
from support.record_builders import SECOND
from support.screen_harness import open_screen
from support.screen_states import rows_text

USUAL = {"data": 2 * MS, "forward": 20 * MS, "backward": 60 * MS, "optimizer": 10 * MS, "other": 8 * MS}
LONG = {40: {"data": 900 * MS}, 70: {"other": 400 * MS}, 71: {"backward": 360 * MS}, 90: {"forward": 120 * MS}}


def steps(count: int = 100, long: dict[int, dict[str, int]] = LONG) -> list[Step]:
    found, now = [], SECOND
    for number in range(1, count + 1):
        phases = {**USUAL, **long.get(number, {})}
        wall = sum(phases.values())
        found.append(Step(0, None, number, "single", now, wall, 4, phases))
        now += wall
    return found


def read(rows: Store, processes: list[int], begin_ns: int, most: int) -> SlowSteps:
    figures = StatsWindow(rows).step_stats("single")
    waits = RunEvents.read(rows).inputs
    return read_slow_steps(rows, processes, begin_ns, figures, waits, most)


def found_in(records: list[Step], begin_ns: int = 0, most: int = 3, t_ns: int | None = None) -> SlowSteps:
    return read(open_store_with(records).as_of(t_ns), [0], begin_ns, most)


def test_the_longest_steps_come_first_with_the_phase_that_made_them_long() -> None:
    made = steps()
    found = found_in(made, most=4)
    assert [(one.step, one.phase) for one in found.steps] == [
        (40, "data"), (70, "other"), (71, "backward"), (90, "forward"),
    ]  # fmt: skip
    for one in found.steps:
        own = made[one.step - 1]
        assert (one.start_ns, one.wall_ns, one.rank) == (own.start_ns, own.wall_ns, None)
        assert one.excess_ns == pytest.approx(own.wall_ns - 100 * MS, rel=0.02)
    assert found.since_ns is None


def test_only_steps_of_the_range_up_to_the_time_of_the_picture_count() -> None:
    made = steps()
    end_of = {step.step: step.start_ns + step.wall_ns for step in made}
    assert [one.step for one in found_in(made, begin_ns=end_of[40]).steps] == [70, 71, 90]
    assert [one.step for one in found_in(made, begin_ns=end_of[40] - 1).steps] == [40, 70, 71]
    before = found_in(made, t_ns=end_of[71] - 1).steps
    assert {40, 70} < {one.step for one in before}
    assert all(one.end_ns < end_of[71] for one in before)


def test_steps_that_settle_do_not_count_and_a_wait_for_input_is_named() -> None:
    made = steps(long={WARM_UP_STEPS: {"forward": 900 * MS}, 30: {"data": 700 * MS}})
    assert [(one.step, one.phase) for one in found_in(made, most=1).steps] == [(30, "data")]
    wait = Event("input", {"pid": 4242, "t_s": made[29].start_ns / SECOND, "waited_s": 0.6})
    waited = open_store_with([Event("process", {"process": 0, "pid": 4242}), *made, wait])
    (one,) = read(waited, [0], 0, 1).steps
    assert (one.step, one.phase, one.excess_ns) == (30, INPUT, pytest.approx(600 * MS, rel=0.01))


def test_of_the_steps_of_one_synchronized_pass_the_rank_that_delayed_the_others_counts() -> None:
    run, _ = record_ddp_ranks(4, slow=2, phase="data", steps=60)
    found = read(run.store(), list(range(4)), 0, 10)
    assert {one.rank for one in found.steps} == {2}
    assert {one.phase for one in found.steps} == {"data"}
    assert len({one.step for one in found.steps}) == 10


def test_the_step_that_waits_for_an_evaluation_of_another_rank_counts() -> None:
    """The straggler was late before its step began, so its own step is short."""
    ranks, run = make_ranks(2), Recording()
    for rank in ranks:
        run.add(startup_rows(rank, 2, {}), rank.process, rank.process)
    for number, rows in enumerate(islice(ddp_rank_steps(ranks), 100), start=1):
        for rank, own_rows in zip(ranks, rows, strict=True):
            run.add(own_rows, rank.process, rank.process)
        if number in (25, 50, 75):
            ranks[0].now += 3 * SECOND
    found = read(run.store(), [0, 1], 0, 4).steps
    assert [(step.rank, step.phase) for step in found[:3]] == [(1, "sync")] * 3
    assert {step.step for step in found[:3]} == {26, 51, 76}
    assert all(step.wall_ns == pytest.approx(3 * SECOND, rel=0.02) for step in found[:3])
    assert found[3].wall_ns < SECOND


@pytest.mark.parametrize("width", [40, 60, 96])
def test_the_rows_fit_and_say_when_how_long_and_what(width: int) -> None:
    rows = step_rows(found_in(steps()), width)
    assert max(row_width(row) for row in rows) <= max(width, 49)
    text = rows_text(rows)
    assert "40" in text[1]
    assert "998 ms  data +898 ms" in text[1]


async def test_a_step_is_chosen_and_the_picture_goes_there(tmp_path: Path) -> None:
    async with open_screen(tmp_path) as on:
        await on.shows("step 200")
        end_ns = on.app.live_run.state.newest_ns
        on.app.live_run._clock = lambda: end_ns + 18 * SECOND // 10
        await on.press("l")
        await on.until(
            lambda: isinstance(on.app.screen, StepList) and on.app.screen.slow_steps is not None, "the steps"
        )
        listed = on.app.screen
        assert isinstance(listed, StepList)
        assert listed.slow_steps is not None
        second = listed.slow_steps.steps[1]
        await on.press("down", "enter")
        await on.shows(" ago")
        process = on.app.data_to_draw().process
        assert process is not None
        assert process.last_step is not None
        assert process.last_step.step == second.step
        await on.press("escape")
        await on.shows("step 200")


def test_a_step_of_an_epoch_says_which_batch_it_used() -> None:
    def of_epochs(step: Step) -> Step:
        return step._replace(batches=Batches((step.step - 1) // 50, 1, 50, 1))

    made = [of_epochs(step) for step in steps()]
    found = found_in(made, most=4)
    assert [(one.step, one.epoch, one.batch, one.batches) for one in found.steps] == [
        (40, 1, 40, 50), (70, 2, 20, 50), (71, 2, 21, 50), (90, 2, 40, 50),
    ]  # fmt: skip
    rows = rows_text(step_rows(found, 76))
    assert rows[0].endswith("batch")
    assert [row.split()[-2:] for row in rows_text(step_rows(found, 59))[1:]] == [
        ["e1", "40/50"], ["e2", "20/50"], ["e2", "21/50"], ["e2", "40/50"],
    ]  # fmt: skip
    assert not any("e2" in row for row in rows_text(step_rows(found, 50))), "there is no room"
    assert {one.epoch for one in found_in(steps()).steps} == {None}

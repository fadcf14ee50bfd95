"""Which of several processes a run shows: the one that trains now, and always the same of those that train together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Step
from dpmon.record.shared_names import DDP
from dpmon.ui.panels import panel_communication, panel_ranks
from dpmon.ui.scenes import RANKS, choose_scene
from dpmon.ui.screen_data import ScreenData, format_mode_and_devices
from support.history_builders import Recording
from support.rank_builders import record_ddp_ranks, with_world_size
from support.record_builders import SECOND, Training

LOOKS = 30


def began(row: Row) -> int:
    return row.start_ns if isinstance(row, Step) else 0


def ended(row: Row) -> int:
    return row.start_ns + row.wall_ns if isinstance(row, Step) else 0


def numbered(one: Training, steps: int) -> list[Row]:
    return [*one.begin(), *one.run(steps)]


def recorded(*runs: Sequence[Row]) -> Recording:
    """Record a run of these processes, with the numbers in their records."""
    recording = Recording()
    for run in runs:
        begin = run[0]
        assert isinstance(begin, Event)
        recording.add(run, begin.data["process"], begin.data["rank"])
    return recording


def in_time(*runs: Sequence[Row]) -> Iterator[tuple[RunAnalysis, int]]:
    """Yield the state of a run of these processes at many times, and the time."""
    recording = recorded(*runs)
    ends = sorted({ended(record) for run in runs for record in run})
    for at in (*ends[:: max(len(ends) // LOOKS, 1)], ends[-1]):
        yield recording.state(at, span_s=30), at


def focused(state: RunAnalysis) -> int:
    process = state.representative
    assert process is not None
    return process.process


def test_a_training_that_follows_another_one_stands_for_the_run_soon() -> None:
    first = Training(process=0, step_ns=SECOND // 100)
    before = numbered(first, 500)
    second = Training(process=1, step_ns=SECOND // 100, start_ns=first.now + SECOND, seed=2)
    state, changes, shown = RunAnalysis(), 0, 0
    for state, at in in_time(before, numbered(second, 500)):
        changes += focused(state) != shown
        shown = focused(state)
        assert shown == 1 or at < first.now + 3 * SECOND
    assert changes == 1
    assert [each.process for each in state.training_processes] == [1]
    assert not panel_ranks.is_shown(ScreenData(state, state.newest_ns)), "they never trained side by side"


def test_processes_that_train_together_stay_active_together() -> None:
    """Ranks, and processes without a rank; one of them slow, one of them late, and with steps of many seconds."""
    for ranks, step_ns in ((True, SECOND // 100), (False, SECOND // 100), (True, 9 * SECOND), (False, 9 * SECOND)):
        runs = []
        for number in range(3):
            slow, late = (3 if number == 1 else 1), number * step_ns // 2
            one = Training(process=number, rank=number if ranks else None, step_ns=step_ns * slow,
                           start_ns=2 * SECOND + late, seed=number)  # fmt: skip
            runs.append(numbered(one, 100))
        end = min(ended(run[-1]) for run in runs)
        assert {focused(state) for state, at in in_time(*runs) if at < end} == {0}


# ------------------------------------------------------------------------------------------------ a second process


def with_an_evaluation(*, within: bool = False) -> tuple[Training, list[list[Row]]]:
    """Return a training and its evaluation: after 500 steps, the training starts it, waits 8 s, and goes on.

    `within`: the wait is in a step, after its call; else between two steps.
    """
    first = Training(process=0, step_ns=SECOND // 100)
    payloads = [*first.begin(), *first.run(500)]
    evaluation = Training(process=1, step_ns=SECOND // 100, start_ns=first.now + SECOND, seed=2)
    during = numbered(evaluation, 800)
    pause = evaluation.now + SECOND // 10 - first.now
    if within:
        usual = first.shares["dp"]["backward"]
        first.shares["dp"]["backward"] = pause * 120 // first.step_ns
        payloads += first.step()
        first.shares["dp"]["backward"] = usual
    else:
        first.now += pause
    payloads += first.run(500)
    return evaluation, [payloads, during]


def test_a_training_that_goes_on_after_its_evaluation_stands_for_the_run_again() -> None:
    for within in (False, True):
        _, runs = with_an_evaluation(within=within)
        seen: list[list[int]] = []
        for state, _ in in_time(*runs):
            shown = [each.process for each in state.training_processes]
            if seen[-1:] != [shown]:
                seen.append(shown)
            # From the record alone, as in a playback, the evaluation is shown for half a minute after its last step.
            assert shown == [] or focused(state) == (1 if shown == [1] else 0)
        assert seen == [[], [0], [0, 1], [1], [0, 1]], (within, seen)


def test_an_evaluation_that_has_ended_is_no_rank_from_then_on() -> None:
    evaluation, runs = with_an_evaluation()
    after = [record for record in runs[0] if began(record) > evaluation.now]
    recording = recorded(runs[0][: -len(after)], runs[1])

    def trains(*over: int) -> list[int]:
        return [each.process for each in recording.state(ended=over).training_processes]

    assert trains() == [1]
    assert trains(1) == [1], "the training has not gone on yet"
    recording.add(after[:1])
    assert trains(1) == [0], "at once, not half a minute later"
    assert trains(0, 1) == [0, 1], "of those that have ended all"


def test_a_rank_without_a_successor_is_left_behind_by_those_that_were_started_again() -> None:
    """An elastic job of three ranks goes on with two."""
    old = [Training(process=rank, rank=rank, seed=rank) for rank in range(3)]
    runs = [numbered(one, 400) for one in old]
    start = max(one.now for one in old) + SECOND
    new = [Training(process=3 + rank, rank=rank, seed=9 + rank, start_ns=start + rank * SECOND) for rank in range(2)]
    runs += [numbered(one, 1500) for one in new]
    recording = recorded(*runs)
    assert [each.process for each in recording.state().training_processes] == [3, 4]
    for tenths in range(10, 30):
        state = recording.state(start + tenths * SECOND // 10, ended=(0, 1, 2))
        assert {each.process for each in state.training_processes} <= {3, 4}


def test_ranks_that_all_wait_for_one_stay_ranks() -> None:
    """Rank 0 evaluates for ten seconds; all go on after it, a moment apart, also soon after a restart."""
    old = [Training(process=rank, rank=rank, seed=rank) for rank in range(3)]
    runs = [numbered(one, 100) for one in old]
    start = max(one.now for one in old) + 3 * SECOND
    for rank in range(3):
        one = Training(process=3 + rank, rank=rank, seed=9 + rank, start_ns=start + rank * SECOND // 5)
        before = [*one.begin(), *one.run(1000)]
        one.now += 10 * SECOND + rank * SECOND // 10
        runs.append([*before, *one.run(1000)])
    later = [(state, at) for state, at in in_time(*runs) if at > start + 3 * SECOND]
    assert later
    for state, at in later:
        assert [each.process for each in state.training_processes] == [3, 4, 5], at


# ------------------------------------------------------------------------------------------------ ranks that wait


def evaluation_of_rank_0(*, steps: int = 400) -> tuple[Recording, int, int]:
    """Record two ranks, of which rank 0 then evaluates its bare model for a minute: from when, until when (ns)."""
    recording = Recording()
    ranks = [
        Training(
            process=rank, rank=rank, mode="single", via=DDP, devices=("cpu",), virtual=False, step_ns=SECOND // 100
        )
        for rank in range(2)
    ]
    for one in ranks:
        recording.add([*(with_world_size(row, 2) for row in one.begin()), *one.run(200)], one.process, one.rank)
    first, start = ranks[0], ranks[0].now
    first.via, first.step_ns = None, 100 * SECOND // steps
    recording.add([row for _ in range(steps) for row in first.step(evaluates=True)], 0, 0)
    return recording, start, first.now


def test_a_rank_without_records_for_long_stays_a_rank() -> None:
    recording, start, end = evaluation_of_rank_0()
    assert end - start > 45 * SECOND
    for at in (start, start + 10 * SECOND, start + 31 * SECOND, end):
        for ended in ((), (1,), (0, 1)):
            state = recording.state(at, ended)
            assert [each.rank for each in state.training_processes] == [0, 1], (at, ended)
            screen = ScreenData(state, at)
            assert format_mode_and_devices(screen.process) == ("ddp ×2", "cpu")
            scene = choose_scene(screen)
            assert (scene.name, scene.second_panel, scene.fourth_panel) == (RANKS, panel_ranks, panel_communication)


def test_a_process_without_a_rank_that_trains_nothing_is_no_rank_of_the_run() -> None:
    """An evaluation that a rank starts, or the process that has started the ranks and evaluates after them."""
    recording, _, end = evaluation_of_rank_0()
    helper = Training(process=2, mode="single", via=None, devices=("cpu",), step_ns=SECOND // 10, start_ns=end + SECOND)
    recording.add([*helper.begin(), *(row for _ in range(100) for row in helper.step(evaluates=True))], 2)
    for ended in ((), (2,), (0, 1), (0, 1, 2)):
        assert [each.process for each in recording.state(ended=ended).training_processes] == [0, 1], ended


def test_a_training_without_ranks_takes_over_from_ranks_that_trained_before() -> None:
    recording, _, end = evaluation_of_rank_0()
    later = Training(process=2, mode="single", via=None, devices=("cpu",), step_ns=SECOND // 10, start_ns=end + SECOND)
    recording.add([*later.begin(), *later.run(100)], 2)
    for ended in ((), (0, 1), (0, 1, 2)):
        assert [each.process for each in recording.state(ended=ended).training_processes] == [2], ended


def test_the_communication_of_the_last_training_steps_is_shown_while_a_rank_evaluates() -> None:
    recording, end = record_ddp_ranks(2, slow=1)
    while_training = recording.state().communication
    one = Training(rank=0, mode="single", via=None, devices=("cuda:0",), step_ns=SECOND // 2, start_ns=end)
    one.steps, one.defined = 400, {str(number): number for number in range(100)}
    recording.add([row for _ in range(120) for row in one.step(evaluates=True)], 0, 0)
    for over in (False, True):
        communication = recording.state(over=over).communication
        assert while_training is not None
        assert communication is not None
        assert communication.missing is None
        assert communication.exposed_ns == pytest.approx(while_training.exposed_ns, rel=0.1)
        assert [rank.joined > 0 for rank in communication.ranks] == [True, True]

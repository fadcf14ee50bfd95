"""Playback shows what had happened up to its time, wherever its clock is set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import ProcessInfo
from dpmon.record.record_types import Event
from dpmon.run.run_reader import RunReader
from dpmon.span_ring import SpanRing
from dpmon.ui.live_run import LiveRun
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.time_cursor import SPEEDS, TimeCursor
from support.history_builders import PLAYBACK_STEPS, Recording, write_playback_run
from support.record_builders import SECOND, Training, pause_event
from support.screen_harness import ManualClock


class Played:
    """A run that is played back."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.run = LiveRun(directory, lambda: RunReader(directory), clock)
        self.run.start()
        self.screen()

    @property
    def cursor(self) -> TimeCursor:
        return self.run.cursor

    def screen(self) -> ScreenData:
        self.run.refresh()
        return self.run.build_screen_data(View())

    def state(self) -> RunAnalysis:
        """Return the state at the time of the playback."""
        return self.screen().state

    def last_step(self) -> int:
        steps = [process.last_step for process in self.state().processes.values()]
        return max((step.step for step in steps if step is not None), default=0)

    def seek(self, at_s: float) -> None:
        self.run.move_cursor(lambda cursor: cursor.seek(int(at_s * SECOND)))

    def step(self, direction: int) -> int:
        """Go to the next or the previous step, and return the number of the last step."""
        end_ns = self.run.find_step_end_ns(self.cursor.position_ns, forward=direction > 0)
        if end_ns is not None:
            self.run.move_cursor(lambda cursor: cursor.seek(end_ns))
        return self.last_step()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def played(state: Path, clock: ManualClock) -> Played:
    return Played(write_playback_run(), clock)


def test_a_playback_opens_at_the_end(played: Played) -> None:
    screen = played.screen()
    assert not screen.cursor.is_playing
    assert screen.cursor.position_ns == screen.elapsed_ns == 301 * SECOND
    assert played.last_step() == PLAYBACK_STEPS
    assert screen.exit_info is not None
    assert screen.exit_info.status == 0
    assert screen.is_over


def test_no_process_of_the_run_is_asked(played: Played) -> None:
    """Else all would count as ended from the first step on."""
    SpanRing(str(played.run.directory / "process-0.ring"), process=0, rank=-1, world=-1, slots=64)
    played.seek(20)
    screen = played.screen()
    assert screen.activities == {}
    assert screen.state.ended == frozenset()
    assert (screen.can_pause, screen.can_toggle, screen.can_type) == (False, False, False)
    assert played.run.pause_refusal(is_requested=False)


def test_from_the_beginning_in_real_time(played: Played, clock: ManualClock) -> None:
    played.run.move_cursor(lambda cursor: cursor.seek(0).play())
    screen = played.screen()
    assert (screen.elapsed_ns, screen.exit_info, screen.is_over) == (0, None, False)
    assert played.last_step() == 0
    for second in range(1, 400):
        clock.pass_s(1)
        played.run.refresh()
        assert played.cursor.position_ns == min(second, 301) * SECOND
        if second % 40 == 0:
            assert played.last_step() == min(2 * second, PLAYBACK_STEPS)
    assert not played.cursor.is_playing
    assert played.cursor.is_playback
    assert played.screen().exit_info is not None


@pytest.mark.parametrize("speed_steps", [-3, 1, 3, 9])
def test_speeds(played: Played, clock: ManualClock, speed_steps: int) -> None:
    played.run.move_cursor(lambda cursor: cursor.seek(0).play())
    for _ in range(abs(speed_steps)):
        played.run.move_cursor(lambda cursor: cursor.change_speed(1 if speed_steps > 0 else -1))
    assert played.cursor.speed == SPEEDS[min(3 + speed_steps, len(SPEEDS) - 1)]
    clock.pass_s(2)
    wanted = min(int(2 * played.cursor.speed * SECOND), 301 * SECOND)
    assert played.last_step() == min(wanted * 2 // SECOND, PLAYBACK_STEPS)
    assert played.cursor.position_ns == pytest.approx(wanted, abs=2)
    played.run.move_cursor(TimeCursor.stop)
    clock.pass_s(100)
    played.run.refresh()
    assert played.cursor.position_ns == pytest.approx(wanted, abs=2)


@pytest.mark.parametrize("at_s", [0, 0.4, 1, 77.3, 150, 299.9, 301, 999, -5])
def test_wherever_the_clock_is_set(played: Played, clock: ManualClock, at_s: float) -> None:
    played.seek(at_s)
    state = played.state()
    reached = min(max(at_s, 0), 301)
    assert played.last_step() == min(int(reached * 2), PLAYBACK_STEPS)
    assert [warning.text for warning in state.warnings] == (["half-way"] if reached >= 150 else [])
    assert state.newest_ns <= reached * SECOND
    assert sorted(number for number, process in state.processes.items() if process.info != ProcessInfo(number)) == (
        [0, 1] if reached >= 0.1 else []
    )
    if reached >= 1:
        newest = min(int(reached), 300)
        assert state.host.second == newest
        assert len(state.host.util) == newest


def test_the_figures_of_a_time_are_those_of_the_seconds_before_it(played: Played) -> None:
    for at_s in (10.0, 150.7, 299.0):
        played.seek(at_s)
        process = played.state().processes[0]
        # Two steps a second, by two processes alternately.
        assert process.ranged.steps == pytest.approx(min(at_s, 120), abs=2)
        assert max(column.second for column in process.columns) <= at_s


def test_the_state_in_a_pause_and_in_a_wait_for_input_is_said_from_events() -> None:
    training = Training(step_ns=SECOND // 10)
    rows = [*training.begin(), *training.run(20)]
    paused_s = training.now / SECOND
    rows.append(pause_event(paused_s, 20))
    training.now += 5 * SECOND
    rows.append(pause_event(training.now / SECOND, 20, 5.0))
    rows += training.run(20)
    waiting_s = training.now / SECOND
    training.now += 5 * SECOND
    run = Recording().add([*rows, *training.run(20)])
    run.add([Event("input", {"pid": 4242, "t_s": waiting_s, "waited_s": 5.0})], -1)

    def word(at_s: float) -> str:
        at_ns = int(at_s * SECOND)
        return ScreenData(run.state(at_ns), at_ns, is_command_alive=True).run_state.word

    assert [word(paused_s + offset) for offset in (-0.5, 3, 5.5)] == ["training", "paused", "training"]
    assert [word(waiting_s + offset) for offset in (-0.5, 3, 5.5)] == ["training", "waiting for input", "training"]


def test_a_step_at_a_time(played: Played) -> None:
    played.seek(10.000000001)
    for expected in (21, 22, 23):
        assert played.step(1) == expected
    assert played.step(-1) == 22
    played.seek(301)
    assert played.step(1) == PLAYBACK_STEPS
    assert played.cursor.time_ns is None
    assert played.step(-1) == PLAYBACK_STEPS
    played.seek(0)
    played.step(-1)
    assert played.cursor.position_ns == 0


def test_stages_of_the_time_before_the_first_batch(played: Played) -> None:
    start_ns = played.run.info.start_ns if played.run.info is not None else 0
    played.seek(0.5)
    assert played.screen().startup_stage == ("importing torch", max(7 - start_ns, 0))
    played.seek(2)
    assert played.screen().startup_stage == ("torch imported", SECOND - start_ns)


# ------------------------------------------------------------------------------------------------ the cursor alone

NOW = TimeCursor(present_ns=60 * SECOND, recorded_ns=60 * SECOND)
ENDED = replace(NOW, has_ended=True)


def test_a_live_run_is_frozen_and_looked_back_to_until_it_returns_to_now() -> None:
    frozen = NOW.freeze()
    assert (frozen.is_frozen, frozen.is_looking_back, frozen.time_ns) == (True, False, 60 * SECOND)
    later = replace(frozen, present_ns=70 * SECOND)
    back = later.seek(40 * SECOND)
    assert (back.is_frozen, back.is_looking_back, back.frozen_ns, back.is_playback) == (False, True, 60 * SECOND, False)
    assert NOW.seek(40 * SECOND) == replace(back, present_ns=60 * SECOND)
    assert back.can_return
    assert back.seek(60 * SECOND) == later.return_to_present() == replace(NOW, present_ns=70 * SECOND)


def test_a_live_run_is_played_from_an_earlier_time_until_now() -> None:
    played = NOW.seek(40 * SECOND).play()
    assert (played.is_playback, played.frozen_ns, played.can_return) == (True, None, True)
    assert played.advance(5 * SECOND).time_ns == 45 * SECOND
    assert played.seek(-5).time_ns == 0
    assert played.advance(30 * SECOND) == NOW


def test_an_ended_run_is_played_back_wherever_it_is_moved_to() -> None:
    assert ENDED.seek(70 * SECOND) == ENDED
    played = ENDED.seek(40 * SECOND)
    assert (played.is_playback, played.is_looking_back, played.can_return) == (True, False, False)
    assert played.return_to_present() == replace(ENDED, is_playback=True)
    frozen_before = replace(NOW.freeze(), has_ended=True)
    assert frozen_before.seek(40 * SECOND) == played

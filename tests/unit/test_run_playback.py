"""Playback shows what had happened up to its time, wherever its clock is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.model.run_events import ProcessInfo
from dpmon.model.run_snapshot import RunSnapshot
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.record.record_types import Event
from dpmon.span_ring import SpanRing
from dpmon.store.store_opening import open_store
from dpmon.ui.playback import Player
from dpmon.ui.screen_data import ScreenData
from support.history_builders import PLAYBACK_STEPS, Recording, write_playback_run
from support.record_builders import SECOND, Training, pause_event
from support.screen_harness import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def player(state: Path, clock: ManualClock) -> Player:
    return Player(write_playback_run(), clock)


def shown(player: Player) -> RunSnapshot:
    """Return the state at the time of the playback."""
    with open_store(player.directory) as store:
        return SnapshotBuilder().build(store.as_of(player.position_ns))


def last_step(state: RunSnapshot) -> int:
    steps = [process.last_step for process in state.processes.values()]
    return max((step.step for step in steps if step is not None), default=0)


def test_a_playback_opens_at_the_end(player: Player) -> None:
    assert not player.is_playing
    assert player.position_ns == player.length_ns == 301 * SECOND
    assert last_step(shown(player)) == PLAYBACK_STEPS
    how = player.exit_info()
    assert how is not None
    assert how.status == 0
    assert player.is_command_alive() is False


def test_no_process_of_the_run_is_asked(player: Player) -> None:
    """Else all would count as ended from the first step on."""
    SpanRing(str(player.directory / "process-0.ring"), process=0, rank=-1, world=-1, slots=64)
    assert player.activities() == {}
    assert player.request_pause(True) == 0


def test_from_the_beginning_in_real_time(player: Player, clock: ManualClock) -> None:
    player.play()
    assert (player.position_ns, player.exit_info(), player.is_command_alive()) == (0, None, True)
    assert last_step(shown(player)) == 0
    for second in range(1, 400):
        clock.pass_s(1)
        assert player.position_ns == min(second, 301) * SECOND
        if second % 40 == 0:
            assert last_step(shown(player)) == min(2 * second, PLAYBACK_STEPS)
    assert not player.is_playing
    assert player.exit_info() is not None


@pytest.mark.parametrize("speed_steps", [-3, 1, 3, 9])
def test_speeds(player: Player, clock: ManualClock, speed_steps: int) -> None:
    player.play()
    for _ in range(abs(speed_steps)):
        player.change_speed(1 if speed_steps > 0 else -1)
    clock.pass_s(2)
    wanted = min(int(2 * player.speed * SECOND), player.length_ns)
    assert player.position_ns == pytest.approx(wanted, abs=2)
    assert last_step(shown(player)) == min(wanted * 2 // SECOND, PLAYBACK_STEPS)
    player.play(False)
    clock.pass_s(100)
    assert player.position_ns == pytest.approx(wanted, abs=2)


@pytest.mark.parametrize("at_s", [0, 0.4, 1, 77.3, 150, 299.9, 301, 999, -5])
def test_wherever_the_clock_is_set(player: Player, clock: ManualClock, at_s: float) -> None:
    player.seek(int(at_s * SECOND))
    state = shown(player)
    reached = min(max(at_s, 0), 301)
    assert last_step(state) == min(int(reached * 2), PLAYBACK_STEPS)
    assert [warning.text for warning in state.warnings] == (["half-way"] if reached >= 150 else [])
    assert state.newest_ns <= reached * SECOND
    assert sorted(number for number, process in state.processes.items() if process.info != ProcessInfo(number)) == (
        [0, 1] if reached >= 0.1 else []
    )
    if reached >= 1:
        newest = min(int(reached), 300)
        assert (state.host.t_ns, state.host.second) == (newest * SECOND, newest)
        assert len(state.host.util) == newest


def test_the_figures_of_a_time_are_those_of_the_seconds_before_it(player: Player) -> None:
    for at_s in (10.0, 150.7, 299.0):
        player.seek(int(at_s * SECOND))
        process = shown(player).processes[0]
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


def test_a_step_at_a_time(player: Player) -> None:
    player.seek(10 * SECOND + 1)
    for expected in (21, 22, 23):
        player.step(1)
        assert last_step(shown(player)) == expected
    player.step(-1)
    assert last_step(shown(player)) == 22
    player.seek(player.length_ns)
    player.step(1)
    assert player.position_ns == player.length_ns
    player.step(-1)
    assert last_step(shown(player)) == PLAYBACK_STEPS
    player.seek(0)
    player.step(-1)
    assert player.position_ns == 0


def test_stages_of_the_time_before_the_first_batch(player: Player) -> None:
    player.seek(SECOND // 2)
    assert player.startup_stage() == ("importing torch", 7)
    player.seek(2 * SECOND)
    assert player.startup_stage() == ("torch imported", SECOND)


def test_a_playback_accepts_no_requests(player: Player) -> None:
    assert (player.request_mode("dp"), player.request_pause(True), player.has_pending_request()) == (0, 0, False)
    assert player.pause_refusal()

"""Playback: what is given at a time is what had happened by then, wherever the clock is set, at bounded cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpmon.model import State, fold
from dpmon.record.codec import Event, Step
from dpmon.record.wire import pack_event, pack_step
from dpmon.ring import Ring
from dpmon.run.drain import Drain
from dpmon.run.playback import POLL_RECORDS, PlaybackReader
from dpmon.run.reader import RECENT_NS, RECENT_RECORDS
from dpmon.run.rundir import ExitInfo, RunError, RunInfo, create_run, save
from dpmon.run.tables import HISTORY_FILE

SECOND = 1_000_000_000
START = 50 * SECOND
STEPS = 600
"""Two a second, by two processes in turn."""


class Clock:
    """Real time, as the test says."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * SECOND)


def a_run(steps: int = STEPS, every_ns: int = SECOND // 2, pieces: int = 60) -> Path:
    info = RunInfo("", "n", ("c",), "s.py", "/", None, 1e9, START, "", False)
    directory, info = create_run(info)
    rings = [Ring(str(directory / f"process-{n}.ring"), process=n, start_ns=START) for n in range(2)]
    for ring, n in zip(rings, range(2), strict=True):
        ring.write(pack_event("process", {"process": n, "rank": n, "world": 2, "t_s": 0.1}))
    gpu = Ring(str(directory / "gpu.ring"), process=-1, start_ns=START)
    drain = Drain(directory, info, pytest.fail)
    for number in range(1, steps + 1):
        at = number * every_ns
        rings[number % 2].write(pack_step(1 + number % 2, number, START + at - 1000, 1000, 4, (1, 2, 3, 4)))
        if at % SECOND == 0:
            gpu.write(pack_event("host", {"t_s": at / SECOND, "cpu_pct": 5.0, "gpu_absent": "none"}))
        if number == steps // 2:
            rings[0].write(pack_event("warning", {"process": 0, "t_s": at / SECOND, "text": "half-way"}))
        if number % pieces == 0:
            drain.flush()
    drain.flush()
    drain.close()
    end = steps * every_ns + SECOND
    (directory / "stages.log").write_text(f"1 {START + 7} importing torch\n1 {START + SECOND} torch imported\n")
    save(directory, ExitInfo(0, None, 1e9, START + end, end / SECOND, "supervisor"))
    return directory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def player(state: Path, clock: Clock) -> PlaybackReader:
    return PlaybackReader(a_run(), clock)


def steps_in(records: list[Any]) -> list[int]:
    return [record.step for record in records if isinstance(record, Step)]


def test_it_stands_at_the_end_like_a_late_reader(player: PlaybackReader) -> None:
    assert not player.playing
    assert player.position_ns == player.length_ns == 301 * SECOND
    assert steps_in(player.poll()) == list(range(1, STEPS + 1))
    assert player.poll() == []
    how = player.exit()
    assert how is not None
    assert how.status == 0
    assert player.command_alive() is False


def test_from_the_beginning_in_real_time(player: PlaybackReader, clock: Clock) -> None:
    player.play()
    assert (player.position_ns, player.exit(), player.command_alive()) == (0, None, True)
    assert steps_in(player.poll()) == []
    seen: list[int] = []
    for second in range(1, 400):
        clock.pass_s(1)
        seen += steps_in(player.poll())
        assert player.position_ns == min(second, 301) * SECOND
        assert seen == list(range(1, min(2 * second, STEPS) + 1))
    assert player.generation == 1
    assert not player.playing
    assert player.exit() is not None


@pytest.mark.parametrize("speed_steps", [-3, 1, 3, 9])
def test_speeds(player: PlaybackReader, clock: Clock, speed_steps: int) -> None:
    player.play()
    player.poll()
    for _ in range(abs(speed_steps)):
        player.faster(1 if speed_steps > 0 else -1)
    clock.pass_s(2)
    wanted = min(int(2 * player.speed * SECOND), player.length_ns)
    assert player.position_ns == pytest.approx(wanted, abs=2)
    assert steps_in(player.poll()) == list(range(1, min(wanted * 2 // SECOND, STEPS) + 1))
    player.play(False)
    clock.pass_s(100)
    assert player.position_ns == pytest.approx(wanted, abs=2)


@pytest.mark.parametrize("at_s", [0, 0.4, 1, 77.3, 150, 299.9, 301, 999, -5])
def test_wherever_the_clock_is_set(player: PlaybackReader, clock: Clock, at_s: float) -> None:
    player.seek(0 if at_s > 290 else player.length_ns)
    player.poll()
    before = player.generation
    player.seek(int(at_s * SECOND))
    records = player.poll()
    reached = min(max(at_s, 0), 301)
    assert steps_in(records) == list(range(1, min(int(reached * 2), STEPS) + 1))
    texts = [r.data["text"] for r in records if isinstance(r, Event) and r.kind == "warning"]
    assert texts == (["half-way"] if reached >= 150 else [])
    hosts = [r.data["t_s"] for r in records if isinstance(r, Event) and r.kind == "host"]
    assert all(reached - RECENT_NS / SECOND - 600 <= t <= reached for t in hosts)
    assert player.generation > before
    state = State()
    for record in records:
        state = fold(state, record)
    assert sorted(state.processes) == ([0, 1] if reached >= 0.1 else [])
    player.play()
    if 0 < at_s < 299:
        clock.pass_s(1)
        assert len(steps_in(player.poll())) == 2


def test_a_step_at_a_time(player: PlaybackReader) -> None:
    player.seek(10 * SECOND + 1)
    player.poll()
    for expected in (21, 22, 23):
        player.step(1)
        assert steps_in(player.poll()) == [expected]
    player.step(-1)
    assert max(steps_in(player.poll())) == 22
    player.seek(player.length_ns)
    player.step(1)
    assert player.position_ns == player.length_ns
    player.step(-1)
    assert max(steps_in(player.poll())) == STEPS
    player.seek(0)
    player.step(-1)
    assert player.position_ns == 0


def test_more_than_a_picture_needs_is_skipped(state: Path, clock: Clock) -> None:
    """Forty thousand steps in twenty seconds, at a speed that brings them all between two pictures."""
    player = PlaybackReader(a_run(40_000, SECOND // 2000, 1000), clock)
    player.play()
    player.poll()
    for _ in range(9):
        player.faster(1)
    before = player.generation
    clock.pass_s(0.15)
    found = player.poll()
    assert player.generation == before + 1
    assert POLL_RECORDS < len(found) <= 4 * RECENT_RECORDS
    assert steps_in(found)[-RECENT_RECORDS:] == list(range(30_001 - RECENT_RECORDS, 30_001))


def test_stages_of_the_time_before_the_first_batch(player: PlaybackReader) -> None:
    player.seek(SECOND // 2)
    assert player.stage() == ("importing torch", START + 7)
    player.seek(2 * SECOND)
    assert player.stage() == ("torch imported", START + SECOND)


def test_nothing_can_be_asked_of_what_has_been(player: PlaybackReader) -> None:
    assert (player.request_mode("dp"), player.request_pause(True), player.pending()) == (0, 0, False)
    assert player.pause_refusal()


def test_without_a_history_there_is_nothing_to_play(state: Path) -> None:
    directory = a_run(10)
    (directory / HISTORY_FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(RunError, match="cannot be played back"):
        PlaybackReader(directory)
    (directory / HISTORY_FILE).unlink()
    with pytest.raises(RunError, match="cannot be played back"):
        PlaybackReader(directory)

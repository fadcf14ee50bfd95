"""The line of a headless run, and the words of its summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dpmon.cli.progress import Progress
from dpmon.record.codec import Event, Record, Step


class FakeReader:
    """What Progress asks of a reader."""

    def __init__(self, *polls: list[Record], activities: Mapping[int, tuple[str, int]] | None = None) -> None:
        self._polls = [*polls]
        self._activities = activities or {}
        self.reached: tuple[str, int] | None = None
        self.waits: int | None = None

    def poll(self) -> list[Record]:
        return self._polls.pop(0) if self._polls else []

    def activities(self) -> Mapping[int, tuple[str, int]]:
        return self._activities

    def waits_for_input(self) -> int | None:
        return self.waits

    def stage(self) -> tuple[str, int] | None:
        return self.reached


def step(number: int, process: int = 0, samples: int | None = 30, mode: str = "dp", every_ms: int = 100) -> Step:
    """A step that ends when the next one begins."""
    return Step(process, None, number, mode, number * every_ms * 10**6, every_ms * 10**6, samples, {})


def line(*polls: list[Record], **more: Any) -> str:
    """What Progress says of these records."""
    return Progress(FakeReader(*polls, **more)).line()  # type: ignore[arg-type]


def test_step_speed_and_mode() -> None:
    assert line([step(n) for n in range(1, 21)]) == "step 20  10.0 steps/s  300 samples/s  dp"


def test_virtual_replicas_are_called_so_only_under_dp() -> None:
    mode = Event("mode", {"mode": "dp", "virtual": True})
    assert line([mode, step(1)]).endswith("  dp (virtual)")
    assert line([mode, step(1, mode="single")]).endswith("  single")


def test_unknown_samples_are_not_added_up() -> None:
    assert "samples" not in line([step(1), step(2, samples=None)])


def test_ranks_step_together() -> None:
    records: list[Record] = [step(n, process) for n in range(1, 11) for process in range(4)]
    assert line(records) == "step 10  4 processes  10.0 steps/s  1.20k samples/s  dp"


def test_ranks_have_no_mode() -> None:
    assert line([Event("process", {"process": 0, "world": 2}), step(1, mode="single")]).endswith("samples/s")
    assert line([Event("process", {"process": 0, "world": 1}), step(1, mode="single")]).endswith("  single")


def test_all_that_has_come_is_one_line() -> None:
    assert line([step(1)], [step(2)], [step(3)]).startswith("step 3  10.0 steps/s")


def test_without_steps_it_says_what_is_waited_for() -> None:
    assert line() == "waiting for the first step"
    reader = FakeReader()
    reader.reached = ("importing torch", time.monotonic_ns() - 3 * 10**9)
    assert Progress(reader).line() == "importing torch (3 s)"  # type: ignore[arg-type]
    reader.reached = ("torch imported", time.monotonic_ns())
    assert Progress(reader).line() == "waiting for the first step, torch imported (0 s)"  # type: ignore[arg-type]
    since = time.monotonic_ns() - 12 * 10**9
    assert line(activities={0: ("data", since)}) == "no step for 12 s, in data"
    assert line(activities={0: ("paused", since)}) == "paused for 12 s"


def test_the_line_after_the_last_step_does_not_wait_for_a_first_step() -> None:
    now = time.monotonic_ns()
    last = Step(0, None, 96, "single", now - 6 * 10**9, 10**9, 30, {})
    reader = FakeReader([last], activities={0: ("ended", 0), 1: ("ended", 0)})
    reader.reached = ("torch imported", now - 60 * 10**9)
    progress = Progress(reader)  # type: ignore[arg-type]
    assert progress.line().startswith("step 96")
    assert progress.line() == "no step for 5 s, the training process has ended"
    reader.reached = ("importing torch", now)  # the next training of the same command
    assert progress.line() == "importing torch (0 s)"


def test_a_pause_is_no_part_of_the_speed() -> None:
    paused = {"process": 0, "paused": True, "paused_s": None}
    over = {"process": 0, "paused": False, "paused_s": 4.0}
    before: list[Record] = [Event("pause", {**over, "paused_s": 1000.0})]  # of no step that is counted
    records = [step(1), Event("pause", paused), Event("pause", over), step(42)]
    assert line([*before, *records]).startswith("step 42  10.0 steps/s")


def test_a_wait_for_input_is_said() -> None:
    reader = FakeReader(activities={0: ("backward", time.monotonic_ns() - 12 * 10**9)})
    reader.waits = time.monotonic_ns() - 11 * 10**9
    assert Progress(reader).line() == "waiting for input for 11 s"  # type: ignore[arg-type]

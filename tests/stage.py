"""The screen's application under Textual's pilot, over a reader that the test conducts."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from synthetic import SECOND, Training, decoded, host_event
from textual.pilot import Pilot

from dpmon.past import Drawn, Past
from dpmon.record.codec import Record
from dpmon.ui.look import COLOUR, UNICODE, Look
from dpmon.ui.monitor import Monitor

__all__ = ["LOOK", "FakeReader", "Stage", "stage"]

LOOK = Look(UNICODE, COLOUR, True)


class FakeReader:
    """A run that the test conducts: what it appends to `new` is what the next poll brings."""

    def __init__(self, directory: Path, mode_option: str = "auto") -> None:
        self.info = types.SimpleNamespace(
            id="20261120-141502-linear-7f3a",
            script="linear.py",
            start_ns=SECOND,
            python="/usr/bin/python3",
            options={"mode": mode_option},
            command_pid=None,
        )
        self.output_paths: tuple[Path, ...] = (directory / "output.log",)
        self.new: list[Record] = []
        self.missed = 0
        self.ended: Any = None
        self.is_alive: bool | None = True
        self.asked: list[str] = []
        self.unanswered = False
        self.pause = types.SimpleNamespace(wanted=False, pending=False, since_ns=None)
        self.no_pause: str | None = None
        self.doing: dict[int, tuple[str, int]] = {}
        self.polls = 0
        self.closed = False

    def refresh(self) -> Any:
        return self.info

    def past(self) -> Iterator[Past | Drawn]:
        return iter(())

    def of_both(self) -> Iterator[Drawn | None]:
        return iter(())

    def poll(self, most: int | None = None) -> list[Record]:
        self.polls += 1
        found, self.new = self.new[:most], self.new[most:] if most is not None else []
        return found

    def stage(self) -> tuple[str, int] | None:
        return None

    def waits_for_input(self) -> int | None:
        return None

    def activities(self) -> dict[int, tuple[str, int]]:
        return self.doing

    def exit(self) -> Any:
        return self.ended

    def command_alive(self) -> bool | None:
        return self.is_alive

    def request_mode(self, mode: str) -> int:
        self.asked.append(mode)
        self.unanswered = True
        return 1

    def pending(self) -> bool:
        return self.unanswered

    def request_pause(self, paused: bool) -> int:
        self.pause.wanted, self.pause.pending = paused, True
        return 1

    def pause_refusal(self) -> str | None:
        return self.no_pause

    def paused(self) -> Any:
        return self.pause

    def close(self) -> None:
        self.closed = True


class Stage:
    """An application under test, its pilot and the run it looks at."""

    def __init__(self, app: Monitor, pilot: Pilot[str], reader: FakeReader, training: Training) -> None:
        self.app, self.pilot, self.reader, self.training = app, pilot, reader, training

    def text(self) -> str:
        return "\n".join(self.app.text())

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, with a limit."""
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never came: {what}\n{self.text()}")

    async def shows(self, text: str) -> None:
        await self.until(lambda: text in self.text(), text)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    def end(self, status: int = 0, signal: str | None = None) -> None:
        self.reader.ended = types.SimpleNamespace(
            status=status, signal=signal, seconds=12.0, error=None, cause=None, stopped=False
        )
        self.reader.is_alive = False


@asynccontextmanager
async def stage(
    directory: Path, size: tuple[int, int] = (120, 40), steps: int = 200, **options: Any
) -> AsyncIterator[Stage]:
    reader = FakeReader(directory, **options)
    training = Training(devices=("cpu:0", "cpu:1"))
    if steps:
        reader.new = decoded([*training.begin(), *training.run(steps), host_event(1.0)], origin_ns=SECOND)
    app = Monitor(directory, LOOK, refresh=0.1, open_reader=lambda: reader)
    async with app.run_test(size=size) as pilot:
        on = Stage(app, pilot, reader, training)
        await on.until(lambda: reader.polls > 1, "the first polls")
        yield on
    app.feed.close()
    assert reader.closed

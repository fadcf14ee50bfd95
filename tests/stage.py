"""The screen's application under Textual's pilot, with a fake reader that the test controls."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from kept import draft
from running import LIMIT_S
from stored import Recording
from synthetic import SECOND, Training, decoded, host_event
from textual.geometry import Region
from textual.pilot import Pilot

from dpmon.record.record_types import Event, Record
from dpmon.run.run_directory import ExitInfo
from dpmon.store.store_queries import Store
from dpmon.ui.monitor import Monitor
from dpmon.ui.terminal_style import COLOR, UNICODE, TerminalStyle

LOOK = TerminalStyle(UNICODE, COLOR, True)


class FakeReader:
    """A run that the test controls: the screen reads records appended to `new` at its next update."""

    def __init__(self, directory: Path, mode_option: str = "auto") -> None:
        about = {"id": "20261120-141502-linear-7f3a", "python": "/usr/bin/python3", "options": {"mode": mode_option}}
        self.info = draft(**about, start_ns=SECOND, command_pid=None)
        self.output_paths: tuple[Path, ...] = (directory / "output.log",)
        self.recording = Recording()
        self.new: list[Record] = []
        self.ended: Any = None
        self.is_alive: bool | None = True
        self.asked: list[str] = []
        self.unanswered = False
        self.answered: tuple[int, int] | None = None
        self.pause = types.SimpleNamespace(wanted=False, pending=False, since_ns=None)
        self.no_pause: str | None = None
        self.doing: dict[int, tuple[str, int]] = {}
        self.looks = 0
        self.closed = False

    def refresh(self) -> Any:
        return self.info

    @contextmanager
    def open_store(self) -> Iterator[Store]:
        self.looks += 1
        new, self.new = self.new, []
        for process, records in groupby(new, key=_process_of):
            self.recording.add(records, process)
        yield self.recording.store()

    def startup_stage(self) -> tuple[str, int] | None:
        return None

    def waits_for_input(self) -> int | None:
        return None

    def activities(self) -> dict[int, tuple[str, int]]:
        return self.doing

    def exit_info(self) -> Any:
        return self.ended

    def command_alive(self) -> bool | None:
        return self.is_alive

    def node_replies(self) -> tuple[int, int] | None:
        return self.answered

    def request_records(self, processes: Collection[int]) -> None:
        self.asked.append(f"records of {list(processes)}")

    def request_sample(self) -> int:
        return 1

    def request_mode(self, mode: str) -> int:
        self.asked.append(mode)
        self.unanswered = True
        return 1

    def has_pending_request(self, doing: object = None) -> bool:
        return self.unanswered

    def request_pause(self, paused: bool) -> int:
        self.pause.wanted, self.pause.pending = paused, True
        return 1

    def pause_refusal(self, doing: object = None) -> str | None:
        return self.no_pause

    def pause_state(self, doing: object = None) -> Any:
        return self.pause

    def close(self) -> None:
        self.closed = True


def _process_of(record: Record) -> int:
    number = record.data.get("process") if isinstance(record, Event) else record.process
    return number if isinstance(number, int) else 0


async def until(condition: Callable[[], object], what: str, shown: Callable[[], str] = str) -> None:
    """Wait for a condition; fail with what is shown if it does not come."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}\n{shown()}"
        await asyncio.sleep(0.01)


class Stage:
    """An application under test, its pilot and the run that it shows."""

    def __init__(self, app: Monitor, pilot: Pilot[str], reader: FakeReader, training: Training) -> None:
        self.app, self.pilot, self.reader, self.training = app, pilot, reader, training

    def text(self) -> str:
        return "\n".join(self.app.text())

    async def until(self, condition: Callable[[], object], what: str) -> None:
        await until(condition, what, self.text)

    async def shows(self, text: str) -> None:
        await self.until(lambda: text in self.text(), text)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    def end(self, status: int = 0, signal: str | None = None, stopped: bool = False) -> None:
        self.reader.ended = ExitInfo(status, signal, 1.7e9, 12 * SECOND, 12.0, "supervisor", stopped=stopped)
        self.reader.is_alive = False


def placed(app: Monitor) -> bool:
    """Return whether every panel is where the picture has it, so that it can be clicked."""
    return bool(app.slots) and all(app.query_one(f"#{name}").region == Region(*at) for name, at in app.slots.items())


@asynccontextmanager
async def stage(
    directory: Path, size: tuple[int, int] = (120, 40), steps: int = 200, **options: Any
) -> AsyncIterator[Stage]:
    reader = FakeReader(directory, **options)
    training = Training(devices=("cpu:0", "cpu:1"))
    if steps:
        reader.new = decoded([*training.begin(), *training.run(steps), host_event(1.0)], origin_ns=SECOND)
    app = Monitor(directory, LOOK, refresh=0.1, open_reader=lambda: reader, open_store=reader.open_store)
    async with app.run_test(size=size) as pilot:
        on = Stage(app, pilot, reader, training)
        await on.until(lambda: reader.looks > 1, "the first looks")
        await on.until(lambda: placed(app) and (not steps or "batch" in app.slots), "the panels of the scene")
        yield on
    app.live_run.close()
    assert reader.closed

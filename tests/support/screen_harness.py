"""Runs the Textual app under a pilot with a fake reader, and in a pseudo-terminal with a run that the test writes."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from dpmon.record.history_rows import Row
from dpmon.run.activities import StartupStage
from dpmon.run.lifecycle import build_exit_info
from dpmon.run.run_directory import ExitInfo, write_info
from dpmon.span_ring import HeaderWord, SpanRing
from dpmon.store.store_queries import Store
from dpmon.ui.monitor import Monitor
from dpmon.ui.panel_view import PanelView
from support.history_builders import Recording, make_live_run, make_run_info
from support.record_builders import SECOND, Training, host_event
from support.run_harness import LIMIT_S, Dpmon, Terminal
from support.screen_states import STYLE


class FakeReader:
    """A run that the test controls: the screen reads rows appended to `new` at its next update."""

    def __init__(self, directory: Path, mode_option: str = "auto") -> None:
        about = {"id": "20261120-141502-linear-7f3a", "python": "/usr/bin/python3", "options": {"mode": mode_option}}
        self.info = make_run_info(**about, start_ns=SECOND, command_pid=None)
        self.output_paths: tuple[Path, ...] = (directory / "output.log",)
        self.recording = Recording(self.info.start_ns)
        self.new: list[Row] = []
        self.ended: Any = None
        self.is_alive: bool | None = True
        self.asked: list[str] = []
        self.unanswered = False
        self.answered: tuple[int, int] | None = None
        self.pause = types.SimpleNamespace(is_requested=False, is_pending=False, since_ns=None)
        self.no_pause: str | None = None
        self.doing: dict[int, tuple[str, int]] = {}
        self.looks = 0
        self.closed = False

    def as_reader(self) -> Any:
        """Return this object in the place of a RunReader."""
        return self

    def refresh(self) -> Any:
        return self.info

    @contextmanager
    def open_store(self) -> Iterator[Store]:
        self.looks += 1
        new, self.new = self.new, []
        self.recording.add(new)
        yield self.recording.store()

    def startup_stage(self) -> StartupStage | None:
        return None

    def input_wait_start_ns(self) -> int | None:
        return None

    def activities(self) -> dict[int, tuple[str, int]]:
        return self.doing

    def exit_info(self) -> Any:
        return self.ended

    def is_command_alive(self) -> bool | None:
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
        self.pause.is_requested, self.pause.is_pending = paused, True
        return 1

    def pause_refusal(self, doing: object = None) -> str | None:
        return self.no_pause

    def pause_state(self, doing: object = None) -> Any:
        return self.pause

    def close(self) -> None:
        self.closed = True


async def wait_until(condition: Callable[..., object], what: str, shown: Callable[[], str] = str) -> None:
    """Wait for a condition; fail with what is shown if it does not come."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}\n{shown()}"
        await asyncio.sleep(0.01)


class ScreenHarness:
    """An application under test, its pilot and the run that it shows."""

    def __init__(self, app: Monitor, pilot: Pilot[str], reader: FakeReader, training: Training) -> None:
        self.app, self.pilot, self.reader, self.training = app, pilot, reader, training

    def text(self) -> str:
        return "\n".join(self.app.text())

    async def until(self, condition: Callable[..., object], what: str) -> None:
        await wait_until(condition, what, self.text)

    async def shows(self, text: str) -> None:
        await self.until(lambda: text in self.text(), text)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def click(self, panel: str, x: int = 2, times: int = 1) -> None:
        """Click on the first row of a panel, `x` cells from its left edge."""
        slot = self.app.slots[panel]
        await self.pilot.click(offset=(slot.x + x, slot.y), times=times)

    def end(self, status: int = 0, signal: str | None = None, stopped: bool = False) -> None:
        self.reader.ended = ExitInfo(status, signal, 1.7e9, 12 * SECOND, 12.0, "supervisor", stopped=stopped)
        self.reader.is_alive = False


def is_laid_out(app: Monitor) -> bool:
    """Return whether the panels fill the screen, so that they can be clicked."""
    return bool(app.slots) and app.query_one(PanelView).size == app.size


@asynccontextmanager
async def open_screen(
    directory: Path, size: tuple[int, int] = (120, 40), steps: int = 200, **options: Any
) -> AsyncIterator[ScreenHarness]:
    reader = FakeReader(directory, **options)
    training = Training(devices=("cpu:0", "cpu:1"))
    if steps:
        reader.new = [*training.begin(), *training.run(steps), host_event(1.0)]
    app = Monitor(directory, STYLE, refresh=0.1, open_reader=reader.as_reader, open_store=reader.open_store)
    async with app.run_test(size=size) as pilot:
        on = ScreenHarness(app, pilot, reader, training)
        await on.until(lambda: reader.looks > 1, "the first looks")
        await on.until(lambda: is_laid_out(app) and (not steps or "batch" in app.slots), "the panels of the scene")
        yield on
    app.live_run.close()
    assert reader.closed


# ------------------------------------------------------------------------------------------------ a pseudo-terminal

WIDTH, HEIGHT = 120, 40
SHOW_RUN = """
import sys
from pathlib import Path
from dpmon.ui.app import run_screen
result = run_screen(Path(sys.argv[1]), refresh=float(sys.argv[2]))
print("RESULT", result)
"""


class TerminalRun:
    """A run's directory, written by this process in place of a training and a supervisor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = make_live_run(directory)
        self.start_ns = self.info.start_ns
        self.log = (directory / "output.log").open("ab", buffering=0)
        self.training = Training(devices=("cpu:0", "cpu:1", "cpu:2"), start_ns=time.monotonic_ns())
        self.recording: Recording | None = None
        self.control: SpanRing | None = None
        """The ring with requests to the training process; it has no spans."""

    def train(self, steps: int) -> None:
        """Record `steps` steps that end about now."""
        if self.recording is None or self.control is None:
            self.control = SpanRing(str(self.directory / "process-0.ring"), process=0, start_ns=self.start_ns, slots=64)
            self.recording = Recording(self.start_ns, self.directory)
            self.recording.add(self.training.begin())
        self.training.now = max(self.training.now, time.monotonic_ns() - steps * self.training.step_ns)
        self.recording.add(self.training.run(steps))
        self.control.words[HeaderWord.SPAN_START] = time.monotonic_ns()

    def end(self, status: int) -> None:
        """Write exit.json."""
        write_info(self.directory, build_exit_info(self.info, status, "supervisor"))


StartTerminal = Callable[..., Terminal]


def screen_terminals(run: TerminalRun) -> Iterator[StartTerminal]:
    """Yield a function that starts a terminal showing `run`; end all of them afterwards."""
    dpmon, started = Dpmon(run.directory, run.directory), list[Terminal]()

    def start(
        code: str = SHOW_RUN, refresh: float = 0.2, size: tuple[int, int] = (WIDTH, HEIGHT), **environ: str
    ) -> Terminal:
        argv = [sys.executable, "-c", code, str(run.directory), str(refresh)]
        usual = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
        usual["PYTHONUNBUFFERED"] = "1"  # else Python's own flush at its end changes the status if the terminal is gone
        started.append(Terminal(dpmon, argv=argv, size=(size[1], size[0]), **{**usual, **environ}))
        return started[-1]

    yield start
    dpmon.clean_up()
    for terminal in started:
        terminal.hang_up()


# ------------------------------------------------------------------------------------------------ playback


class ManualClock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * SECOND)


@asynccontextmanager
async def open_playback(
    directory: Path, clock: ManualClock, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Monitor, Pilot[str]]]:
    app = Monitor(directory, STYLE, refresh=600)
    app.live_run._clock = clock
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot
        app.live_run.close()


def shows_text(app: Monitor, text: str) -> bool:
    return any(text in row for row in app.text())

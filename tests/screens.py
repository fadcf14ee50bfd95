"""A run's directory written by the test, and a pseudo-terminal with the screen of that run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kept import live
from running import Dpmon, Terminal
from stored import Recording
from synthetic import Training

from dpmon.run.lifecycle import build_exit_info
from dpmon.run.run_directory import write_info
from dpmon.span_ring import HeaderWord, SpanRing

WIDTH, HEIGHT = 120, 40
SHOW = """
import sys
from pathlib import Path
from dpmon.ui.app import run_screen
result = run_screen(Path(sys.argv[1]), refresh=float(sys.argv[2]))
print("RESULT", result)
"""


class Run:
    """A run's directory, written by this process in place of a training and a supervisor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.info = live(directory)
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


Start = Callable[..., Terminal]


def terminals(run: Run) -> Iterator[Start]:
    """Yield a function that starts a terminal showing `run`; end all of them afterwards."""
    dpmon, started = Dpmon(run.directory, run.directory), list[Terminal]()

    def start(
        code: str = SHOW, refresh: float = 0.2, size: tuple[int, int] = (WIDTH, HEIGHT), **environ: str
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

"""A run's directory written by the test, and a pseudo-terminal with the screen of that run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from running import Dpmon, Terminal
from stored import Recording
from synthetic import Training

from dpmon.run import proc
from dpmon.span_ring import SpanRing, Word

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
        directory.chmod(0o700)
        self.start_ns = time.monotonic_ns()
        info = {
            "id": "20261120-141502-linear-7f3a",
            "name": "linear",
            "command": ["python", "linear.py"],
            "script": "linear.py",
            "cwd": "/",
            "python": sys.executable,
            "started_unix": time.time(),
            "start_ns": self.start_ns,
            "boot_id": proc.boot_id(),
            "headless": False,
            "options": {"mode": "auto"},
            "command_pid": os.getpid(),
            "command_started": proc.started(os.getpid()),
        }
        (directory / "run.json").write_text(json.dumps(info))
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
        self.control.words[Word.SPAN_START] = time.monotonic_ns()

    def end(self, status: int, signal_name: str | None = None) -> None:
        """Write exit.json."""
        now = time.monotonic_ns()
        ended = {"status": status, "signal": signal_name, "ended_unix": time.time(), "end_ns": now, "by": "supervisor"}
        ended["seconds"] = (now - self.start_ns) / 1e9
        (self.directory / "exit.json").write_text(json.dumps(ended))


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

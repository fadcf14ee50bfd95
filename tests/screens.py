"""A run's directory written by the test, and a pseudo-terminal with the screen of that run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyte
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


@dataclass
class Terminal:
    """A pseudo-terminal with the screen, and an emulator with the visible text."""

    pid: int
    fd: int
    screen: pyte.Screen
    stream: pyte.ByteStream
    raw: bytearray
    modes: Any
    status: int | None = None
    shown: str = ""

    def pump(self, seconds: float = 0.05) -> None:
        """Read what was written to the terminal."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if ready:
            with contextlib.suppress(OSError):
                data = os.read(self.fd, 1 << 16)
                self.raw += data
                with contextlib.suppress(TypeError):  # unknown to pyte: keys echoed while it is stopped
                    self.stream.feed(data)
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)

    def text(self) -> str:
        """The visible text. It is built only after a change, because that takes pyte milliseconds."""
        if self.screen.dirty:
            self.shown = "\n".join(self.screen.display)
            self.screen.dirty.clear()
        return self.shown

    def until(self, condition: Callable[[], bool], what: str, limit: float = 60.0) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"never came: {what}\n{self.text()}"
            self.pump()

    def shows(self, text: str) -> None:
        self.until(lambda: text in self.text(), text)

    def press(self, keys: str | bytes) -> None:
        """Send keys, even more than the terminal accepts at once; read its output meanwhile."""
        data = keys.encode() if isinstance(keys, str) else keys
        os.set_blocking(self.fd, False)
        deadline = time.monotonic() + 60
        while data:
            assert time.monotonic() < deadline, "the screen reads no keys"
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(self.fd, data) :]
            self.pump(0 if data else 0.001)

    def resize(self, columns: int, rows: int) -> None:
        """Resize the terminal."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def ended(self, limit: float = 60.0) -> int:
        self.until(lambda: self.status is not None, "the end of the screen", limit)
        before = -1
        while len(self.raw) > before:  # all that the terminal still holds
            before = len(self.raw)
            self.pump(0.1)
        assert self.status is not None
        return self.status

    def sane(self) -> None:
        """Check that the modes are restored, and that alternate screen, mouse reports and hidden cursor are off."""
        after = termios.tcgetattr(self.fd)
        assert after[:4] == self.modes[:4]
        raw = bytes(self.raw)
        for on, off in (
            (b"\x1b[?1049h", b"\x1b[?1049l"),
            (b"\x1b[?25l", b"\x1b[?25h"),
            (b"\x1b[?1000h", b"\x1b[?1000l"),
        ):
            assert raw.rfind(off) > raw.rfind(on), off


Start = Callable[..., Terminal]


def terminals(run: Run) -> Iterator[Start]:
    """Yield a function that starts a terminal showing `run`; end all of them afterwards."""
    open_ones: list[Terminal] = []

    def start(
        code: str = SHOW, refresh: float = 0.2, size: tuple[int, int] = (WIDTH, HEIGHT), **environ: str
    ) -> Terminal:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        modes = termios.tcgetattr(slave)
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
        env = {key: value for key, value in {**env, **environ}.items() if key != "NO_COLOR" or "NO_COLOR" in environ}
        pid = os.fork()
        if pid == 0:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(slave, number)
            os.closerange(3, 100)
            os.execve(sys.executable, [sys.executable, "-c", code, str(run.directory), str(refresh)], env)
        os.close(slave)
        screen = pyte.Screen(*size)
        terminal = Terminal(pid, master, screen, pyte.ByteStream(screen), bytearray(), modes)
        open_ones.append(terminal)
        return terminal

    yield start
    for terminal in open_ones:
        if terminal.status is None:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        with contextlib.suppress(OSError):
            os.close(terminal.fd)

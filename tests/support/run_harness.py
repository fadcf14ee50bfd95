"""Runs the real command line in separate processes, for tests that need a complete run, and waits for conditions."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar

import pytest

from dpmon.run import proc
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.run_directory import load_info
from dpmon.run.run_reader import PauseState, RunReader
from dpmon.run.run_registry import PERSISTENT_TMP, SHARED_MEMORY
from dpmon.run.stdin_terminal import is_reading_stdin
from support.preloaded_python import preload_python

Value = TypeVar("Value")
Size = TypeVar("Size", int, float)
POLL_S = 0.02
LIMIT_S = 100.0
"""Nothing takes so long, even on a busy machine."""
_IMPORTS = "import os, pathlib, signal, sys, time\n"
_WAIT = """\
pathlib.Path("began").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""
_PATIENT = (
    "import dpmon.run.run_signals as s; s.stop_run.__defaults__ = (None, 60.0)\n"
    "from dpmon.cli.main import entry; entry()"
)
LONG = os.environ.get("DPMON_LONG") == "1"
"""Whether tests have the sizes of the promised figures, not small ones."""


def scaled_size(short: Size, full: Size) -> Size:
    """Return `full` in a long run, else `short`."""
    return full if LONG else short


def report_measured(promise: str, text: str) -> None:
    """Print a measured figure (pytest -s shows it)."""
    print(f"\n{promise}: {text}", flush=True)


def wait_for(condition: Callable[..., Value | None], limit: float = LIMIT_S, what: str = "") -> Value:
    """Return the first true value of `condition`; fail with its last value after `limit` seconds.

    A condition may read a file that another process has yet to make.
    """
    until = time.monotonic() + limit
    value: Value | FileNotFoundError | None
    while True:
        try:
            value = condition()
        except FileNotFoundError as missing:
            value = missing
        else:
            if value:
                return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {limit} s: {what or condition} (it is {value!r})")
        time.sleep(POLL_S)


def end_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Terminate processes in this order, and kill those that go on for half a minute."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine that nothing listens on.

    Linux gives connections higher ports, so no connection takes one of these before the tested program does.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)


def wait_until_unsupervised(info: Mapping[str, Any]) -> None:
    """Wait for the end of the supervisor that is named in these contents of run.json."""
    wait_for(lambda: not proc.is_alive(info["supervisor_pid"], info["supervisor_started"]), what="the supervisor's end")


def wait_until_no_command_is_left() -> None:
    """Wait for the end of the commands that `NodeLinks` in this process started: each leads a session."""

    def left() -> list[proc.ProcessEntry]:
        children = (each for each in proc.read_process_table().values() if each.parent == os.getpid())
        return [each for each in children if each.pid == each.session and not each.is_dead]

    wait_for(lambda: not left(), 30, "the end of all commands")


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: bytes
    err: bytes

    @property
    def text(self) -> str:
        """Return its standard output as text."""
        return self.out.decode()

    @property
    def errors(self) -> str:
        """Return its standard error as text."""
        return self.err.decode("utf-8", "replace")


@dataclass
class Dpmon:
    """Starts dpmon in `cwd` with its own state directory; `clean_up` kills remaining processes of its runs."""

    state: Path
    cwd: Path
    python: str = sys.executable
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of the test with the state directory, without terminal size and color settings."""
        left_out = (
            *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"),
            *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONUNBUFFERED"),
        )
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        return {**env, "XDG_STATE_HOME": str(self.state), **(extra or {})}

    def warm(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Return options that run a script in a fork of a Python with torch (`preload_python`); none in a long run.

        Importing torch takes longer than most scripts. `env`: additional variables of that Python.
        """
        if LONG or self.python != sys.executable:
            return ()
        return "--python", preload_python(
            {**self.environment(env), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
        )

    def words(self, *words: object) -> list[str]:
        """Return the command line that runs dpmon."""
        script = shutil.which("dpmon", path=os.path.dirname(self.python))
        return [*([script] if script else [self.python, "-m", "dpmon"]), *map(str, words)]

    def start(
        self,
        *words: object,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.PIPE,
        env: Mapping[str, str] | None = None,
        before: str = "",
        argv: list[str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[bytes]:
        """Start dpmon in its own session, so that signals to the test's group do not reach it.

        `before`: commands that bash runs before it executes dpmon, such as a trap or a limit. `argv`: another command
        to run.
        """
        argv = argv or self.words(*words)
        process = subprocess.Popen(
            ["bash", "-c", f'{before}\nexec "$@"', "bash", *argv] if before else argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=more.pop("cwd", self.cwd),
            env=self.environment(env),
            start_new_session=more.pop("start_new_session", True),
            **more,
        )
        self.started.append(process)
        return process

    def run(self, *words: object, limit: float = LIMIT_S, input: bytes | None = None, **more: Any) -> CommandResult:
        """Run dpmon; fail if it does not end within `limit` seconds."""
        if input is not None:
            more["stdin"] = subprocess.PIPE
        process = self.start(*words, **more)
        try:
            out, err = process.communicate(input, timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"not over within {limit} s: {words}\n{err.decode()[-2000:]}") from None
        return CommandResult(process.returncode, out or b"", err or b"")

    def stop(self, run: str) -> CommandResult:
        """Run `dpmon stop`, with more patience after each signal: on a busy machine, a process needs time to end."""
        return self.run(argv=[self.python, "-c", _PATIENT, "stop", run])

    def script(self, text: str, name: str = "script.py") -> Path:
        """Write a script into the working directory."""
        path = self.cwd / name
        path.write_text(text)
        return path

    def waiting(self, end: str = "", begin: str = "", name: str = "script.py") -> Path:
        """Write a script that runs `begin`, waits for `go`, and runs `end`."""
        return self.script(f"{_IMPORTS}{begin}\n{_WAIT}{end}\n", name)

    def begun(self) -> None:
        """Wait until the script of `waiting` waits."""
        wait_for((self.cwd / "began").exists, what="the script's first line")

    def go(self) -> None:
        """Let the script of `waiting` go on."""
        (self.cwd / "go").touch()

    def kill_supervisor(self) -> dict[str, Any]:
        """Kill the supervisor of the newest run, and wait for its end; return run.json from before."""
        info = self.info()
        os.kill(info["supervisor_pid"], signal.SIGKILL)
        wait_until_unsupervised(info)
        return info

    def runs(self) -> list[Path]:
        """Return the directories of all runs by start time (names have only seconds)."""

        def start(directory: Path) -> tuple[str, float]:
            try:
                return directory.name[:15], float(json.loads((directory / "run.json").read_text())["started_unix"])
            except OSError:  # the run is being created
                return directory.name[:15], float("inf")

        return sorted((self.state / "dpmon" / "runs").glob("*"), key=start)

    def last(self) -> Path:
        """Return the directory of the newest run."""
        runs = self.runs()
        assert runs, "there is no run"
        return runs[-1]

    def info(self, directory: Path | None = None) -> dict[str, Any]:
        """Return run.json, after waiting for the start of the command."""

        def started() -> dict[str, Any] | None:
            runs = [directory] if directory is not None else self.runs()
            with contextlib.suppress(OSError, IndexError):
                found: dict[str, Any] = json.loads((runs[-1] / "run.json").read_text())
                return found if found["command_pid"] is not None else None
            return None

        found = wait_for(started, what="the command's start")
        assert found is not None
        return found

    def exit(self, limit: float = LIMIT_S) -> dict[str, Any]:
        """Return exit.json of the newest run, after waiting for it and for the last records."""

        def ended() -> dict[str, Any] | None:
            path = self.last() / "exit.json"
            how = json.loads(path.read_text()) if path.exists() else None
            return how if how is None or how["drained"] or not has_live_supervisor(load_info(self.last())) else None

        found = wait_for(ended, limit, "exit.json")
        assert found is not None
        return found

    def records(self, run: str = "last") -> list[dict[str, Any]]:
        """Return the records that `dpmon export` writes; if the run is over, wait for the last ones first.

        The foreground process waits at most five seconds for them.
        """
        if run == "last" and self.runs() and (self.last() / "exit.json").exists():
            self.exit()
        result = self.run("export", run)
        assert result.status == 0, result.errors
        return [json.loads(line) for line in result.out.splitlines()]

    def clean_up(self) -> None:
        """Kill all remaining processes (foregrounds, supervisors, commands), and delete runs outside the state."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for pid in self._leftovers():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        mark = f"{zlib.crc32(os.fsencode(self.state / 'dpmon' / 'runs')):08x}"
        for place in (PERSISTENT_TMP, tempfile.gettempdir(), SHARED_MEMORY):  # as dpmon.run's `fallback_directories`
            shutil.rmtree(Path(place) / f"dpmon-{os.getuid()}-{mark}", ignore_errors=True)

    def _leftovers(self) -> Iterator[int]:
        """Yield processes with this test's state directory in their command line or environment."""
        needle = str(self.state).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if needle in (entry / "cmdline").read_bytes() or needle in (entry / "environ").read_bytes():
                        yield int(entry.name)


# Makes the terminal on its standard input the controlling terminal of a new session, then executes the program.
_IN_TERMINAL = """\
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program in its own terminal, as the foreground job of a session; dpmon, unless `argv` is given."""

    def __init__(
        self,
        dpmon: Dpmon,
        *words: object,
        argv: list[str] | None = None,
        size: tuple[int, int] = (40, 120),
        **env: str,
    ) -> None:
        self.fd, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.modes = self.after = termios.tcgetattr(slave)
        """The terminal's modes before the program began, and after its end."""
        os.set_blocking(self.fd, False)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *(argv or dpmon.words(*words))],
            stdin=slave, stdout=slave, stderr=slave, cwd=dpmon.cwd,
            env=dpmon.environment({"TERM": "xterm-256color", **env}),
        )  # fmt: skip
        os.close(slave)
        dpmon.started.append(self.process)
        self.raw = bytearray()
        """Everything written to the terminal so far."""
        import pyte  # imported here, so that tests without a terminal do not need it

        self.screen = pyte.Screen(size[1], size[0])
        self._stream = pyte.ByteStream(self.screen)
        self._shown = ""

    @property
    def status(self) -> int | None:
        """The exit status; None while the program runs."""
        return self.process.poll()

    def type(self, keys: str | bytes) -> None:
        """Press keys, even more than the terminal accepts at once; read its output meanwhile."""
        left = keys.encode() if isinstance(keys, str) else keys

        def typed() -> bool:
            nonlocal left
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self.fd, left) :]
            self.take()
            return not left

        wait_for(typed, what="the program to read its keys")

    def take(self) -> bytearray:
        """Read new output; return everything written so far."""
        while self.fd >= 0 and select.select([self.fd], [], [], 0)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # the other end is closed
                break
            self.raw += data
            # pyte fails on some sequences that it does not know (private modes of newer terminals).
            with contextlib.suppress(Exception):
                self._stream.feed(data)
        return self.raw

    def picture(self) -> str:
        """Return the visible text."""
        self.take()
        if self.screen.dirty:  # only after a change, because it takes pyte milliseconds
            self._shown = "\n".join(line.rstrip() for line in self.screen.display)
            self.screen.dirty.clear()
        return self._shown

    def until(self, condition: Callable[..., object], what: str, limit: float = LIMIT_S) -> None:
        """Wait for a condition; read the program's output meanwhile."""
        try:
            wait_for(lambda: (self.take(), condition())[1], limit, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.picture()}") from None

    def writes(self, text: str, limit: float = LIMIT_S) -> None:
        """Wait until `text` has been written."""
        self.until(lambda: text.encode() in self.raw, f"{text!r} in {bytes(self.raw)!r}", limit)

    def shows(self, text: str, limit: float = LIMIT_S) -> None:
        """Wait until `text` is visible."""
        self.until(lambda: text in self.picture(), f"{text!r} on the screen", limit)

    def resize(self, columns: int, rows: int) -> None:
        """Resize the terminal."""
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal, also that of a running program."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def wait(self, limit: float = LIMIT_S) -> int:
        """Wait for the end, close the terminal and return the exit status."""
        self.until(lambda: self.status is not None, "the program's end", limit)
        self.take()
        if self.fd >= 0:
            self.after = termios.tcgetattr(self.fd)
        self.hang_up()
        return self.process.returncode

    def sane(self) -> None:
        """Check that the program restored the modes, and left alternate screen, mouse reports and hidden cursor."""
        assert self.after[:4] == self.modes[:4]
        for on, off in ((b"?1049h", b"?1049l"), (b"?25l", b"?25h"), (b"?1000h", b"?1000l")):
            restored = self.raw.rfind(b"\x1b[" + off) > self.raw.rfind(b"\x1b[" + on)
            assert restored, f"no {off!r} at the end of the output: {bytes(self.raw[-1000:])!r}"


# ------------------------------------------------------------------------------------------------ the clocked script

CLOCKED_SCRIPT = Path(__file__).resolve().parents[1] / "process" / "scripts" / "clocked.py"
MAX_RATE_ERROR = 0.02
"""Largest relative difference between a rate and the script's own."""
needs_visible_waits = pytest.mark.skipif(
    is_reading_stdin(os.getpid()) is None, reason="this kernel does not say in which system call a process is"
)


def pass_time(seconds: float) -> None:
    """Wait for `seconds`."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until)


def read_clocked_run(dpmon: Dpmon) -> RunReader:
    """Return a reader of the script's run, after waiting until the script trains."""
    wait_for((dpmon.cwd / "began").exists, what="the training")
    reader = RunReader(dpmon.last())
    reader.refresh()
    return reader


def switch_modes(reader: RunReader, *modes: str, seconds: float) -> None:
    """Let the script train in one mode after another, `seconds` in each."""
    for mode in modes:
        reader.request_mode(mode)
        wait_for(lambda: not reader.has_pending_request(), what="the answer")
        pass_time(seconds)


def pause_script(reader: RunReader, seconds: float) -> None:
    """Pause the script for `seconds`."""
    reader.request_pause(True)
    wait_for(lambda: reader.pause_state().since_ns, what="the pause")
    pass_time(seconds)
    reader.request_pause(False)
    wait_for(lambda: not reader.pause_state().is_pending, what="the end of the pause")


def end_clocked_run(dpmon: Dpmon, reader: RunReader, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Make the script end; return its output and that of dpmon."""
    (dpmon.cwd / "stop").touch()
    written = process.communicate(timeout=60)
    reader.close()
    return written


def answer_twice(dpmon: Dpmon, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Answer the two questions of the script, each after two seconds; return its output and that of dpmon."""
    assert process.stdin is not None
    for _ in range(2):
        wait_for((dpmon.cwd / "asked").exists, what="the question")
        (dpmon.cwd / "asked").unlink()
        pass_time(2)
        process.stdin.write(b"yes\n")
        process.stdin.flush()
    return process.communicate(timeout=60)


# ------------------------------------------------------------------------------------------------ scripts and commands


def plain_training_script(steps: int, rows: int = 6, *, wrapped: bool = False) -> str:
    """Return the text of a script that trains for `steps` steps; `wrapped`: in a DataParallel."""
    return f"""
import torch
model = torch.nn.Linear(4, 2)
model = torch.nn.DataParallel(model) if {wrapped} else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn({rows}, 4)).sum().backward()
    optimizer.step()
"""


def write_slow_script(dpmon: Dpmon, status: int = 0) -> None:
    """Write a script that waits, prints a line and ends with `status`."""
    dpmon.waiting(f"print('end of the training', flush=True)\npathlib.Path('done').touch()\nsys.exit({status})")


def put_dpmon_on_path(folder: Path) -> None:
    """Put `dpmon` and `torchrun` of this Python on PATH; it may lack their scripts."""
    folder.mkdir()
    for name, module in (("dpmon", "dpmon"), ("torchrun", "torch.distributed.run")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        script.chmod(0o755)


def find_new_supervisor(dpmon: Dpmon, old: dict[str, Any]) -> dict[str, Any] | None:
    """Return run.json of the newest run if it names another supervisor than `old`, else None."""
    info = json.loads((dpmon.last() / "run.json").read_text())
    return info if info["supervisor_pid"] != old["supervisor_pid"] else None


# ------------------------------------------------------------------------------------------------ status lines

STATUS_NOW_NS = 10**15


def stop_status_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of status lines always say STATUS_NOW_NS."""
    monkeypatch.setattr("dpmon.cli.status_stream.time", SimpleNamespace(monotonic_ns=lambda: STATUS_NOW_NS))


def append_to(lines: list[bytes]) -> Callable[[bytes], bool]:
    """Return a function that a StatusStream writes with: it appends each line to `lines`, and accepts it."""

    def write(line: bytes) -> bool:
        lines.append(line)
        return True

    return write


def fake_status_reader(directory: Path, activities: Mapping[int, tuple[str, int]] | None = None) -> Any:
    """Return the part of a reader that the lines need."""
    info = SimpleNamespace(start_ns=0, id="20261125-213000-train-3f2a", name="train", options={})
    nothing = {"startup_stage": lambda: None, "input_wait_start_ns": lambda: None, "pause_state": lambda: PauseState()}
    return SimpleNamespace(directory=directory, activities=lambda: activities or {}, info=info, **nothing)

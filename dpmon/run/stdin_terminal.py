"""Gives the command a terminal as standard input, unless the user pipes something into it; detects waits for a line.

The terminal is a pseudo-terminal, but not the command's controlling terminal. Scripts can ask for its size or wait for
a line. Lines come from a FIFO in the run's directory; any screen may write to it. The terminal's echo of the lines goes
to a log. There is no echo while a script has switched it off (to read a password).

The kernel shows the system call in which a process sleeps (proc(5), /proc/pid/syscall) to processes that may trace it.
The supervisor nearly always may, because it is the parent; a screen on a hardened machine may not. Only a wait in
read(2) is recognized. A wait in another call, such as a prompt library's select, looks like other work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dpmon.run import proc
from dpmon.run.safe_files import open_fifo, open_file, read_file

INPUT_FIFO = "input.fifo"
_CHUNK = 4096
_LOCAL_FLAGS = 3
"""Index of c_lflag in the list of termios.tcgetattr."""
_CONTROLS = {code: f"^{chr(code ^ 64)}".encode() for code in (*range(32), 127) if chr(code) not in "\t\n"}
WAITS_FILE = "waits-for-input"
"""A file that exists during a wait, with the wait's start and the time of the last check (monotonic ns, 20 digits)."""
_READ_CALL = {"x86_64": 0, "aarch64": 63, "riscv64": 63, "ppc64le": 3, "s390x": 3}.get(os.uname().machine)
"""The number of read(2) on this CPU architecture (syscalls(2) and the kernel's tables); None if unknown."""
_CHECK_S = 0.2
CHECK_DURING_WAIT_S = 0.05
"""Seconds between two checks, normally and during a wait. They limit the precision of the start and end of a wait."""
_VALID_NS = 10_000_000_000
"""How long WAITS_FILE is valid. It expires because a stopped or killed supervisor leaves the file behind."""


class InputTerminal:
    """The supervisor's end of the command's terminal, which forwards everything that is written to the FIFO."""

    def __init__(self, directory: Path, rows: int, columns: int, echo: Path | None = None) -> None:
        """Create the terminal and the FIFO. `echo`: the log for the echo; None: no log.

        Raises OSError if the machine has no free pseudo-terminal or the FIFO cannot be created.
        """
        # The supervisor leads a session without a controlling terminal. openpty does not give it one.
        self.master, self.slave = os.openpty()
        size = struct.pack("HHHH", max(rows, 1), max(columns, 1), 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
        os.set_blocking(self.master, False)
        path = directory / INPUT_FIFO
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # It is also opened for writing, so that a read does not report the end of file when the last screen closes.
        self.fifo = open_fifo(path, os.O_RDWR)
        self._waiting = b""
        self._echo = echo

    def register(self, poller: select.poll) -> None:
        """Register the descriptors of this terminal. While the command does not read, the writers of the FIFO wait."""
        poller.register(self.master, select.POLLIN | (select.POLLOUT if self._waiting else 0))
        poller.register(self.fifo, 0 if self._waiting else select.POLLIN)

    def forward_input(self) -> None:
        """Forward new input. Never blocks.

        Discards the terminal's echo, which is already in the log, and anything that the command writes to its standard
        input.
        """
        with contextlib.suppress(OSError):
            while os.read(self.master, _CHUNK):
                pass
        with contextlib.suppress(OSError):
            if not self._waiting:
                self._waiting = os.read(self.fifo, _CHUNK)
                # Write the echo before the command reads the line, so that the command's output follows it.
                self._append_echo(self._waiting)
            if self._waiting:
                self._waiting = self._waiting[os.write(self.master, self._waiting) :]

    def _append_echo(self, typed: bytes) -> None:
        """Append the echo of `typed` to the log, unless the command has switched it off. On a full disk, it is lost."""
        if self._echo is None or not termios.tcgetattr(self.slave)[_LOCAL_FLAGS] & termios.ECHO:
            return
        with contextlib.suppress(OSError), open(open_file(self._echo, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(b"".join(_CONTROLS.get(code) or bytes((code,)) for code in typed))


def has_echo_off(pid: int) -> bool:
    """Return whether a process has switched off the echo of its standard input's terminal (as getpass does)."""
    with contextlib.suppress(OSError, termios.error):  # it has ended; not a terminal
        fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            flags = termios.tcgetattr(fd)[_LOCAL_FLAGS]
        finally:
            os.close(fd)
        return bool(flags & termios.ICANON) and not flags & termios.ECHO
    return False


def send_input(directory: Path, data: bytes) -> bool:
    """Write `data`, including the end of line, to the command's standard input. Return False if that fails."""
    try:
        with open(open_fifo(directory / INPUT_FIFO, os.O_WRONLY), "wb", buffering=0) as fifo:
            return fifo.write(data) == len(data)
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------ waits for a line


def is_reading_stdin(pid: int) -> bool | None:
    """Return whether the process's first thread sleeps in a read of descriptor 0; None if unknown."""
    if _READ_CALL is None:
        return None
    try:
        fields = proc.read_proc_bytes(pid, "syscall").split()
    except OSError:
        return None
    is_in_call = len(fields) > 2 and fields[:2] == [b"%d" % _READ_CALL, b"0x0"]
    process = proc.read_process(pid) if is_in_call else None
    return process is not None and process.state not in "Tt"  # a stopped process reads nothing


def input_wait_start_ns(directory: Path) -> int | None:
    """Return when the command began to wait for input (monotonic ns), as its supervisor saw it; None if it does not."""
    try:
        start_ns, checked_ns = map(int, read_file(directory / WAITS_FILE, 64).split())
    except (OSError, ValueError):
        return None
    return start_ns if start_ns <= checked_ns and 0 <= time.monotonic_ns() - checked_ns < _VALID_NS else None


class InputWaitWatcher:
    """A watcher that maintains WAITS_FILE and reports each finished wait of at least a second.

    Of several processes that wait at the same time, it watches the first one.
    """

    def __init__(
        self, directory: Path, command_pid: int, report_wait: Callable[[int, int, int], None] = lambda *wait: None
    ) -> None:
        """Watch the command. `report_wait` receives the process, the start and the end (monotonic ns) of a wait."""
        self._path = directory / WAITS_FILE
        self._command_pid = command_pid
        self._report_wait = report_wait
        self._wait: tuple[int, int | None] | None = None
        """The process that waits, and how many times it had gone to sleep before; None outside a wait."""
        self._start_ns = self._end_ns = 0
        """The first and the last check that saw the current wait, which is never longer than it was."""
        self._next_check_s = 0.0
        self.close()  # remove the file of a killed supervisor

    def poll(self, now: float, rank_pids: Iterable[int] = ()) -> None:
        """Check whether the command or a rank waits, if a check is due, and write the result. `now`: monotonic s."""
        if now < self._next_check_s:
            return
        pid = next((pid for pid in (self._command_pid, *rank_pids) if is_reading_stdin(pid)), None)
        # A process that has worked between two checks has begun a new wait.
        wait = None if pid is None else (pid, proc.voluntary_switches(pid, pid))
        now_ns = time.monotonic_ns()
        if wait != self._wait:
            self.close()
            self._wait, self._start_ns = wait, now_ns
        if wait is not None:
            self._end_ns = now_ns
            self._write()
        self._next_check_s = now + (_CHECK_S if wait is None else CHECK_DURING_WAIT_S)

    def close(self) -> None:
        """End the current wait, if there is one, and delete the file."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._wait is not None and self._end_ns - self._start_ns >= 1_000_000_000:
            pid, _ = self._wait
            self._report_wait(pid, self._start_ns, self._end_ns)
        self._wait = None

    def _write(self) -> None:
        """Overwrite the file with contents of the same length, in one write: a reader sees the old or the new ones."""
        with contextlib.suppress(OSError), open(open_file(self._path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(b"%020d %020d" % (self._start_ns, self._end_ns))  # on a full disk the wait is not reported

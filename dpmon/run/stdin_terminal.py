"""The command's standard input: a terminal, unless the user pipes something into it; and whether it waits for a line.

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
from collections.abc import Callable
from pathlib import Path

from dpmon.run import proc
from dpmon.run.safe_files import open_fifo, open_file, read_file, remove_file

INPUT_FIFO = "input.fifo"
_CHUNK = 4096
_CONTROLS = {code: f"^{chr(code ^ 64)}".encode() for code in (*range(32), 127) if chr(code) not in "\t\n"}
WAITS_FILE = "waits-for-input"
"""Exists during a wait. Contains the start of the wait and the time of the last check (monotonic ns, 20 digits each).
"""
_READ_CALL = {"x86_64": 0, "aarch64": 63, "riscv64": 63, "ppc64le": 3, "s390x": 3}.get(os.uname().machine)
"""The number of read(2), by machine (syscalls(2) and the kernel's tables)."""
_EVERY_S = 0.2
CLOSE_S = 0.05
"""Seconds between two checks, normally and during a wait. They limit the precision of a wait's start and end."""
_REPORTED_NS = 1_000_000_000
"""Shortest wait that is reported, once it is over."""
_VALID_NS = 10_000_000_000
"""How long the file's contents are valid. They expire because a stopped or killed supervisor leaves the file behind."""


class InputTerminal:
    """The supervisor's end: gives the command a terminal and forwards everything written to the FIFO."""

    def __init__(self, directory: Path, rows: int, columns: int, echo: Path | None = None) -> None:
        """`echo`: the log for the echo; None: no log.

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
        # Also opened for writing, so that a read does not report its end when the last screen has gone.
        self.fifo = open_fifo(path, os.O_RDWR)
        self._waiting = b""
        self._echo = echo

    def register(self, poller: select.poll) -> None:
        """Register the descriptors that this terminal must watch now."""
        events = select.POLLIN | (select.POLLOUT if self._waiting else 0)
        poller.register(self.master, events)
        if self._waiting:  # the command does not read: let the writers of the FIFO wait
            with contextlib.suppress(KeyError):
                poller.unregister(self.fifo)
        else:
            poller.register(self.fifo, select.POLLIN)

    def forward_input(self) -> None:
        """Forward new input. Never blocks.

        Discards the terminal's echo, which is already in the log, and anything that the command writes to its input.
        """
        with contextlib.suppress(OSError):
            while os.read(self.master, _CHUNK):
                pass
        with contextlib.suppress(OSError):
            if not self._waiting:
                self._waiting = os.read(self.fifo, _CHUNK)
                # Write the echo before the command reads the line, so that the command's output follows it.
                self._append_echo(self._echo_of(self._waiting))
            if self._waiting:
                self._waiting = self._waiting[os.write(self.master, self._waiting) :]

    def _echo_of(self, typed: bytes) -> bytes:
        """The terminal's echo of `typed`, by its current settings (ECHO and ECHONL of termios(3)).

        The command may have changed these settings.
        """
        if self._echo is None or not typed:
            return b""
        try:
            flags = termios.tcgetattr(self.slave)[3]
        except termios.error:
            return b""
        if flags & termios.ECHO:
            return b"".join(_CONTROLS.get(code) or bytes((code,)) for code in typed)
        return b"\n" * typed.count(b"\n") if flags & termios.ECHONL and flags & termios.ICANON else b""

    def _append_echo(self, echoed: bytes) -> None:
        """Append to the log, to which the command writes as well; a full disk loses only the echo."""
        if self._echo is None or not echoed:
            return
        flags = os.O_WRONLY | os.O_APPEND
        with contextlib.suppress(OSError), open(open_file(self._echo, flags), "ab", buffering=0) as file:
            file.write(echoed)


def has_echo_off(pid: int) -> bool:
    """Whether a process has switched off the echo of the terminal of its standard input (getpass does)."""
    try:
        fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        flags = termios.tcgetattr(fd)[3]
    except termios.error:  # not a terminal
        return False
    finally:
        os.close(fd)
    return bool(flags & termios.ICANON) and not flags & termios.ECHO


def send_input(directory: Path, data: bytes) -> bool:
    """Write `data`, including the end of line, to the command's standard input; False if that fails."""
    try:
        fd = open_fifo(directory / INPUT_FIFO, os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.write(fd, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------------ waits for a line


def is_reading_stdin(pid: int) -> bool | None:
    """Whether the process's first thread sleeps in a read of descriptor 0; None if unknown."""
    if _READ_CALL is None:
        return None
    try:
        fields = proc.read_proc_file(pid, "syscall").split()
    except OSError:
        return None
    return len(fields) > 2 and fields[0] == b"%d" % _READ_CALL and fields[1] == b"0x0"


def input_wait_start_ns(directory: Path) -> int | None:
    """When the command began to wait for input (monotonic ns), as its supervisor saw it; None if it does not wait."""
    try:
        fields = read_file(directory / WAITS_FILE, 64).split()
    except OSError:
        return None
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    since, seen = map(int, fields)
    return since if since <= seen and 0 <= time.monotonic_ns() - seen < _VALID_NS else None


class InputWaitWatcher:
    """Maintains the file WAITS_FILE; calls `tell` with start and end (ns) of each finished wait that is long enough."""

    def __init__(self, directory: Path, pid: int, tell: Callable[[int, int], None] = lambda since, seen: None) -> None:
        self._path = directory / WAITS_FILE
        self._pid = pid
        self._tell = tell
        self._since: int | None = None
        self._seen = self._asked = 0
        """When the process was last seen waiting, and when it was last checked (monotonic ns)."""
        self._began = 0
        self._sleeps: int | None = None
        self._next = 0.0
        self.close()  # remove the file of a killed supervisor

    def poll(self, now: float) -> None:
        """If a check is due, make it and write the result. `now`: monotonic s."""
        if now < self._next:
            return
        reads = is_reading_stdin(self._pid) is True
        sleeps, asked = proc.voluntary_switches(self._pid, self._pid) if reads else None, time.monotonic_ns()
        before, self._asked = self._asked or asked, asked
        if not reads:
            if self._since is not None:
                self.close()
        else:
            if self._since is None or sleeps != self._sleeps:  # the process worked in between, so this is a new wait
                self._end_wait()
                # The wait began between two checks.
                self._since, self._sleeps, self._began = asked, sleeps, (before + asked) // 2
            self._seen = asked
            self._write(self._since, asked)
        self._next = now + (_EVERY_S if self._since is None else CLOSE_S)

    def close(self) -> None:
        """End the current wait, if there is one, and delete the file."""
        self._end_wait()
        with contextlib.suppress(OSError):
            remove_file(self._path)

    def _end_wait(self) -> None:
        if self._since is not None and self._seen - self._since >= _REPORTED_NS:
            self._tell(self._began, (self._seen + max(self._asked, self._seen)) // 2)
        self._since = None

    def _write(self, since: int, seen: int) -> None:
        """Overwrite the old content with one of the same length. This is a single write: a reader sees old or new."""
        flags = os.O_WRONLY | os.O_CREAT
        with contextlib.suppress(OSError):
            fd = open_file(self._path, flags)
            with open(fd, "wb", buffering=0) as file:
                file.write(b"%020d %020d" % (since, seen))  # on a full disk the wait is not reported

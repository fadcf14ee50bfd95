"""The terminal that the command has as its standard input when nobody pipes anything into it.

A pseudo-terminal that is not the command's controlling terminal: scripts that ask for its size or wait for a line find
what they expect. Lines come from a fifo in the run's directory, which any screen may write to. They are noted in a log
as the terminal echoes them: while a script has switched the echo off (it reads a password) not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from pathlib import Path

from dpmon.run.files import open_fifo, open_file

INPUT_FIFO = "input.fifo"
_CHUNK = 4096
_CONTROLS = {code: f"^{chr(code ^ 64)}".encode() for code in (*range(32), 127) if chr(code) not in "\t\n"}


class Terminal:
    """The supervisor's end: gives the command a terminal and forwards what is written into the fifo."""

    def __init__(self, directory: Path, rows: int, columns: int, echo: Path | None = None) -> None:
        """`echo`: the log for what is echoed; None: nothing is noted (that it would be is left to be asked for).

        Raises OSError if the machine has no pseudo-terminal left or the fifo cannot be made.
        """
        # openpty does not make it the controlling terminal, though the supervisor leads a session without one.
        self.master, self.slave = os.openpty()
        try:
            size = struct.pack("HHHH", max(rows, 1), max(columns, 1), 0, 0)
            fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
            os.set_blocking(self.master, False)
            path = directory / INPUT_FIFO
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Opened for writing too, so that it never reads as ended when the last screen has gone.
            self.fifo = open_fifo(path, os.O_RDWR)
        except BaseException:
            os.close(self.master)
            os.close(self.slave)
            raise
        self._waiting = b""
        self._echo = echo

    def register(self, poller: select.poll) -> None:
        """Ask `poller` for what concerns this terminal now."""
        events = select.POLLIN | (select.POLLOUT if self._waiting else 0)
        poller.register(self.master, events)
        if self._waiting:  # the command does not read: let the writers of the fifo wait
            with contextlib.suppress(KeyError):
                poller.unregister(self.fifo)
        else:
            poller.register(self.fifo, select.POLLIN)

    def serve(self) -> None:
        """Forward what has come, and throw away the echo, which is noted by then, and what the command wrote into its
        own input. Never blocks.
        """
        with contextlib.suppress(OSError):
            while os.read(self.master, _CHUNK):
                pass
        with contextlib.suppress(OSError):
            if not self._waiting:
                self._waiting = os.read(self.fifo, _CHUNK)
                # Before the command reads it: what it then prints comes after it.
                self._note(self._echoed(self._waiting))
            if self._waiting:
                self._waiting = self._waiting[os.write(self.master, self._waiting) :]

    def _echoed(self, typed: bytes) -> bytes:
        """What the terminal makes of `typed` as it is set now, by the command if need be (termios(3): ECHO, ECHONL)."""
        if self._echo is None or not typed:
            return b""
        try:
            flags = termios.tcgetattr(self.slave)[3]
        except termios.error:
            return b""
        if flags & termios.ECHO:
            return b"".join(_CONTROLS.get(code) or bytes((code,)) for code in typed)
        return b"\n" * typed.count(b"\n") if flags & termios.ECHONL and flags & termios.ICANON else b""

    def _note(self, echoed: bytes) -> None:
        """Append to the log, which the command writes into as well; a full disk costs the echo, nothing else."""
        if self._echo is None or not echoed:
            return
        flags = os.O_WRONLY | os.O_APPEND
        with contextlib.suppress(OSError), open(open_file(self._echo, flags), "ab", buffering=0) as file:
            file.write(echoed)


def hides_input(pid: int) -> bool:
    """Whether a process has told the terminal that is its standard input not to echo lines (getpass does)."""
    try:
        fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        flags = termios.tcgetattr(fd)[3]
    except termios.error:  # it is no terminal
        return False
    finally:
        os.close(fd)
    return bool(flags & termios.ICANON) and not flags & termios.ECHO


def send_input(directory: Path, data: bytes) -> bool:
    """Write `data` to the command's standard input (a line's end included); False if nobody takes it."""
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

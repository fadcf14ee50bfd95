"""The command's standard input: a terminal, unless the user pipes something into it.

It is a pseudo-terminal, but not the command's controlling terminal. Scripts can ask for its size or wait for a line.
Lines come from a FIFO in the run's directory; any screen may write to it. The terminal's echo of the lines goes to a
log. There is no echo while a script has switched it off (to read a password).
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
    """The supervisor's end: gives the command a terminal and forwards everything written to the FIFO."""

    def __init__(self, directory: Path, rows: int, columns: int, echo: Path | None = None) -> None:
        """`echo`: the log for the echo; None: no log.

        Raises OSError if the machine has no free pseudo-terminal or the FIFO cannot be created.
        """
        # The supervisor leads a session without a controlling terminal. openpty does not give it one.
        self.master, self.slave = os.openpty()
        try:
            size = struct.pack("HHHH", max(rows, 1), max(columns, 1), 0, 0)
            fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
            os.set_blocking(self.master, False)
            path = directory / INPUT_FIFO
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Also opened for writing, so that a read does not report its end when the last screen has gone.
            self.fifo = open_fifo(path, os.O_RDWR)
        except BaseException:
            os.close(self.master)
            os.close(self.slave)
            raise
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

    def serve(self) -> None:
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
                self._note(self._echoed(self._waiting))
            if self._waiting:
                self._waiting = self._waiting[os.write(self.master, self._waiting) :]

    def _echoed(self, typed: bytes) -> bytes:
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

    def _note(self, echoed: bytes) -> None:
        """Append to the log, to which the command writes as well; a full disk loses only the echo."""
        if self._echo is None or not echoed:
            return
        flags = os.O_WRONLY | os.O_APPEND
        with contextlib.suppress(OSError), open(open_file(self._echo, flags), "ab", buffering=0) as file:
            file.write(echoed)


def hides_input(pid: int) -> bool:
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

"""The terminal that the command has as its standard input when nobody pipes anything into it.

A pseudo-terminal without echo that is not the command's controlling terminal: scripts that ask for its size or wait
for a line find what they expect. Lines come from a fifo in the run's directory, which any screen may write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from pathlib import Path

__all__ = ["INPUT_FIFO", "Terminal", "send_input"]

INPUT_FIFO = "input.fifo"
_CHUNK = 4096


class Terminal:
    """The supervisor's end: gives the command a terminal and forwards what is written into the fifo."""

    def __init__(self, directory: Path, rows: int, columns: int) -> None:
        """Raises OSError if the machine has no pseudo-terminal left or the fifo cannot be made."""
        # openpty does not make it the controlling terminal, though the supervisor leads a session without one.
        self.master, self.slave = os.openpty()
        try:
            attributes = termios.tcgetattr(self.slave)
            attributes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK | termios.ECHONL)
            termios.tcsetattr(self.slave, termios.TCSANOW, attributes)
            size = struct.pack("HHHH", max(rows, 1), max(columns, 1), 0, 0)
            fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
            os.set_blocking(self.master, False)
            path = directory / INPUT_FIFO
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # Opened for writing too, so that it never reads as ended when the last screen has gone.
            self.fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            os.close(self.master)
            os.close(self.slave)
            raise
        self._waiting = b""

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
        """Forward what has come, and throw away what the command wrote into its own input. Never blocks."""
        with contextlib.suppress(OSError):
            while os.read(self.master, _CHUNK):
                pass
        with contextlib.suppress(OSError):
            if not self._waiting:
                self._waiting = os.read(self.fifo, _CHUNK)
            if self._waiting:
                self._waiting = self._waiting[os.write(self.master, self._waiting) :]


def send_input(directory: Path, data: bytes) -> bool:
    """Write `data` to the command's standard input (a line's end included); False if nobody takes it."""
    try:
        fd = os.open(directory / INPUT_FIFO, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return os.write(fd, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(fd)

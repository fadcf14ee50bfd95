"""Restores the terminal when a signal or a hang-up ends the screen.

Textual restores the terminal when the application exits, but not on SIGTERM, SIGHUP or SIGQUIT, and it spins when the
terminal has gone. A SIGINT can end it in the middle of its exit: ctrl+c is a key at first, and a signal as soon as the
terminal is restored. So these signals ask the application to exit, and a thread ends the process if it still runs a
second later. If the user leaves, the thread waits longer for a terminal that accepts no output, but not forever.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNAL_PATIENCE_S = 1.0
_LEAVE_PATIENCE_S = 5.0
_RESTORE = (
    b"\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1004l\x1b[?2004l\x1b[<u"
    b"\x1b[m\x1b[?1049l\x1b[?25h"
)


class Leaving:
    """Signal handlers and the watch over the terminal, from `begin` to `end`."""

    def __init__(self, ask: Callable[[int], bool]) -> None:
        """`ask` makes the application exit with a status, if it runs, and returns whether it does.

        A signal handler calls it.
        """
        self._ask = ask
        self._before: dict[int, Any] = {}
        self._modes: list[Any] | None = None
        self._timer: threading.Timer | None = None
        self._last_status = 0
        self._begun = False
        self.status = 0
        """128+N after a signal; 0 without one."""

    def begin(self) -> None:
        """Remember the terminal's modes and install the handlers; call it before anything changes the terminal."""
        self._begun = True
        with contextlib.suppress(termios.error, OSError, ValueError):
            self._modes = termios.tcgetattr(sys.__stdin__.fileno()) if sys.__stdin__ else None
        for number in SIGNALS:
            # An ignored hang-up (nohup) stays ignored; polling detects the vanished terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Restore the handlers and cancel the deadline."""
        self._begun = False
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self.go(128 + number)
        elif self._timer is None and not self.go(128 + number):
            self.end()
            raise KeyboardInterrupt  # no application is there yet: end its start
        # Else ctrl+c was pressed again, and the application exits already.

    def go(self, status: int) -> bool:
        """Exit with `status`: ask first, and end the process a second later if it still runs.

        Returns whether the application could be asked.
        """
        if not self.status:
            self.status = status
            self._within(_SIGNAL_PATIENCE_S, status)
        return self._ask(status)

    def start_deadline(self, status: int) -> None:
        """The user leaves: if the application has not ended after a few seconds, end the process with `status`."""
        if self._begun and self._timer is None:
            self._within(_LEAVE_PATIENCE_S, status)

    def _within(self, seconds: float, status: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._last_status = status
        self._timer = threading.Timer(seconds, self._force)
        self._timer.daemon = True
        self._timer.start()

    def _force(self) -> None:
        with contextlib.suppress(Exception):
            stream = sys.__stderr__
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                with contextlib.suppress(OSError):
                    os.write(stream.fileno(), _RESTORE)
                os.set_blocking(stream.fileno(), True)
        with contextlib.suppress(Exception):
            if self._modes is not None and sys.__stdin__ is not None:
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._modes)
        os._exit(self._last_status)


def terminal_gone() -> bool:
    """Whether the terminal of standard input has hung up."""
    if sys.__stdin__ is None:
        return False
    try:
        poll = select.poll()
        poll.register(sys.__stdin__.fileno(), 0)
        return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True

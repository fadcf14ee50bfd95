"""How the screen goes when it is told to from outside: the terminal is given back, whatever happens.

Textual restores the terminal when its application exits, but not on SIGTERM, SIGHUP or SIGQUIT, and it spins when the
terminal has gone. So these signals ask it to exit, and a thread sees to it that the process is gone a second later. A
user's own wish to leave waits longer for a terminal that takes nothing, but not for ever.
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

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PATIENCE_S = 1.0
_WISHED_PATIENCE_S = 5.0
_RESTORE = (
    b"\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1004l\x1b[?2004l\x1b[<u"
    b"\x1b[m\x1b[?1049l\x1b[?25h"
)


class Leaving:
    """Signal handlers and the watch over the terminal, from `begin` to `end`."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """`ask` makes the application exit with a status; it is called from a signal handler."""
        self._ask = ask
        self._before: dict[int, Any] = {}
        self._modes: list[Any] | None = None
        self._timer: threading.Timer | None = None
        self._last_status = 0
        self._begun = False
        self.status = 0
        """128+N where a signal asked; 0 where none did."""

    def begin(self) -> None:
        """Remember the terminal's modes and take the signals; call it before the terminal is changed."""
        self._begun = True
        with contextlib.suppress(termios.error, OSError, ValueError):
            self._modes = termios.tcgetattr(sys.__stdin__.fileno()) if sys.__stdin__ else None
        for number in SIGNALS:
            # With the hang-up ignored (nohup) it stays ignored; the vanished terminal is seen by polling.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Give the signals back; what was to happen later happens no more."""
        self._begun = False
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.go(128 + number)

    def go(self, status: int) -> None:
        """Exit with `status`: ask first, and be gone in a second whatever the answer."""
        if not self.status:
            self.status = status
            self._within(_PATIENCE_S, status)
        self._ask(status)

    def wished(self, status: int) -> None:
        """The application is on its way out, as its user wished: with `status` it is gone in seconds, in any case."""
        if self._begun and self._timer is None:
            self._within(_WISHED_PATIENCE_S, status)

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
    """Whether standard input was hung up."""
    if sys.__stdin__ is None:
        return False
    try:
        poll = select.poll()
        poll.register(sys.__stdin__.fileno(), 0)
        return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True

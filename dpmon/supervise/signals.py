"""Handles signals in the foreground and the supervisor. Imports little, because the command starts only afterwards.

If dpmon was started with SIGCHLD ignored, the kernel reaps children itself, and their status is lost. A handler that
does nothing makes the kernel keep the status. The command gets the signal ignored again, as it would without dpmon.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a foreground without a screen passes on to the command; a hang-up only ends the foreground."""
_PR_SET_CHILD_SUBREAPER = 36


def become_reaper() -> None:
    """Make orphans among this process's descendants its children; do nothing on systems without this call."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def remember_signals(early: list[int]) -> None:
    """Keep the signals that arrive before the command is started: a quick Ctrl-C must not leave it running."""
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: early.append(number))


_was_ignored = False


def keep_statuses() -> None:
    """Keep the statuses of this process's children from now on; call it in the main thread."""
    global _was_ignored
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        _was_ignored = True
        signal.signal(signal.SIGCHLD, lambda *_: None)


def ignored_again() -> Callable[[], None] | None:
    """A function for a child to call before exec (`preexec_fn`); None if it needs none.

    Only for a process without threads: between fork and exec other threads could hold locks.
    """
    return _ignore if _was_ignored else None


def _ignore() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

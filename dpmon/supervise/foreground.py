"""What the foreground sets up before there is a supervisor; light, since the command waits for it."""

from __future__ import annotations

import contextlib
import ctypes
import signal

__all__ = ["FORWARDED", "become_reaper", "remember_signals"]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What a foreground without a screen passes on to the command; a hang-up only ends the foreground."""
_PR_SET_CHILD_SUBREAPER = 36


def become_reaper() -> None:
    """Have orphans among this process's descendants become its children; does nothing where that is not known."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def remember_signals(early: list[int]) -> None:
    """Keep what is sent to the command before there is one: a quick Ctrl-C must not leave it running."""
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: early.append(number))

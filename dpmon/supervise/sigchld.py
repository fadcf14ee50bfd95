"""SIGCHLD, where dpmon was started with it ignored: then the kernel reaps children itself, and no status is left.

A handler that does nothing makes the kernel keep the status. What dpmon starts is given the signal ignored again, as it
would have it alone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

__all__ = ["ignored_again", "keep_statuses"]

_was_ignored = False


def keep_statuses() -> None:
    """Have the statuses of this process's children kept, from now on; in the main thread."""
    global _was_ignored
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        _was_ignored = True
        signal.signal(signal.SIGCHLD, lambda *_: None)


def ignored_again() -> Callable[[], None] | None:
    """What a child calls before it becomes another program (`preexec_fn`); None where nothing needs doing.

    Only for a process without threads: between fork and exec others could hold locks.
    """
    return _ignore if _was_ignored else None


def _ignore() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

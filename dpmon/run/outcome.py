"""How the command ended, told by the supervisor to the foreground that started it, without a file.

A pipe that nobody has to read. The directory of a run may be deleted, unmounted or full; the exit status of the script
still reaches whoever waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from dataclasses import asdict, replace

from dpmon.run.rundir import ExitInfo

__all__ = ["open_pipe", "read_outcome", "tell_outcome"]

_MAX_TEXT = 200


def open_pipe() -> tuple[int, int]:
    """The foreground's end and the supervisor's, both closed on exec until somebody makes them inheritable."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


def tell_outcome(fd: int, how: ExitInfo) -> None:
    """Write `how` in one piece (PIPE_BUF holds it) and close the pipe; a reader that has gone is no matter."""
    texts = {name: text[:_MAX_TEXT] for name in ("error", "cause", "unknown") if (text := getattr(how, name))}
    with contextlib.suppress(OSError):  # Python ignores SIGPIPE
        os.write(fd, json.dumps(asdict(replace(how, **texts))).encode()[: select.PIPE_BUF])
    with contextlib.suppress(OSError):
        os.close(fd)


def read_outcome(fd: int) -> ExitInfo | None:
    """What was told; None if nothing was. Never waits."""
    try:
        return ExitInfo(**json.loads(os.read(fd, select.PIPE_BUF)))
    except (OSError, ValueError, TypeError):
        return None

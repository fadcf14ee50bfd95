"""Passes the command's outcome from the supervisor to the foreground that started it, through a pipe.

The directory of a run may be deleted, unmounted or full. The exit status of the script still reaches the process that
waits for it. The supervisor goes on if nobody reads the pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from dataclasses import asdict, replace

from dpmon.run.rundir import ExitInfo

_MAX_TEXT = 200


def open_pipe() -> tuple[int, int]:
    """The foreground's end and the supervisor's; both close on exec until they are made inheritable."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


def send_outcome(fd: int, how: ExitInfo) -> None:
    """Write `how` in one piece (it fits into PIPE_BUF) and close the pipe; a missing reader is ignored."""
    texts = {name: text[:_MAX_TEXT] for name in ("error", "cause", "unknown") if (text := getattr(how, name))}
    with contextlib.suppress(OSError):  # Python ignores SIGPIPE
        os.write(fd, json.dumps(asdict(replace(how, **texts))).encode()[: select.PIPE_BUF])
    with contextlib.suppress(OSError):
        os.close(fd)


def read_outcome(fd: int) -> ExitInfo | None:
    """The outcome, or None if nothing was written. Never waits."""
    try:
        return ExitInfo(**json.loads(os.read(fd, select.PIPE_BUF)))
    except (OSError, ValueError, TypeError):
        return None

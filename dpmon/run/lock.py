"""The supervisor's lock: only one process supervises a run. The lock is released when that process dies."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.files import open_file
from dpmon.run.rundir import ExitInfo, RunInfo

_LOCK_FILE = "supervisor.lock"
UNSUPPORTED = -1
SILENT_S = 86400.0
"""A run of another machine without a write for this many seconds is over: a supervisor writes every second."""


def take_lock(directory: Path) -> int | None:
    """A descriptor that holds the lock until its last copy is closed; None if another process holds it.

    UNSUPPORTED if the file system has no locks or cannot create the file: then nothing prevents a second supervisor.
    """
    try:
        fd = open_file(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT)
    except OSError:
        return UNSUPPORTED
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else UNSUPPORTED
    return fd


def supervised(info: RunInfo) -> bool:
    """Whether the supervisor named in run.json is alive, even if it is suspended."""
    return info.boot_id == proc.boot_id() and proc.is_running(info.supervisor_pid, info.supervisor_started)


def goes_on_elsewhere(directory: Path, info: RunInfo, how: ExitInfo | None) -> bool:
    """Whether another machine that shares the directory owns the run, and may still be running it.

    This machine cannot see the run's processes, and perhaps not even its locks.
    """
    if (how is not None and how.drained) or info.host in ("", proc.host()) or info.boot_id == proc.boot_id():
        return False
    newest = 0.0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return True
    return time.time() - newest < SILENT_S


def needs_supervisor(directory: Path, info: RunInfo, how: ExitInfo | None) -> bool:
    """Whether a run's record is unfinished and no supervisor is alive to finish it. Only `take_lock` makes sure."""
    return (how is None or not how.drained) and not supervised(info) and not goes_on_elsewhere(directory, info, how)

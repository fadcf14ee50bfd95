"""Who supervises a run: one process at a time, held by a lock that dies with its holder."""

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
"""A supervisor writes every second; a run of another machine that has not been written to for so long is over."""


def take_lock(directory: Path) -> int | None:
    """A descriptor that holds the lock until its last copy is closed; None if somebody else holds it.

    UNSUPPORTED where the file system has no locks or takes no file: then nobody is kept out.
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
    """Whether the supervisor that run.json names lives (a stopped one does)."""
    return info.boot_id == proc.boot_id() and proc.is_running(info.supervisor_pid, info.supervisor_started)


def goes_on_elsewhere(directory: Path, info: RunInfo, how: ExitInfo | None) -> bool:
    """Whether another machine that shares the directory has the run, and may still be at it.

    Its processes are not to be seen from here, and its locks may not be either.
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
    """Whether a run goes on, or has ended, with nobody to finish its record; the lock has the last word."""
    return (how is None or not how.drained) and not supervised(info) and not goes_on_elsewhere(directory, info, how)

"""Which old runs are deleted: never one that goes on, never one that is kept, the oldest first.

One large run must not cost a person all the others. So for their size only those are deleted that take more than their
share (the bytes by the runs that may be there: as long as all keep to it they fit), and never the newest few.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dpmon.config import ConfigError, load
from dpmon.run.condition import goes_on, run_state
from dpmon.run.files import open_file, remove_file
from dpmon.run.lock import take_lock
from dpmon.run.lookup import list_runs
from dpmon.run.rundir import RunError, RunInfo, load_info

_KEEP_FILE = "keep"
_GONE = ".gone-"
NEWEST = 5
"""So many runs are not deleted for their size, whatever it is: what one has just done is what one looks at."""


class Limits(NamedTuple):
    """How many runs, and how many bytes of them, are kept; kept and running ones count, but are not deleted."""

    runs: int = 200
    bytes: int = 10 << 30

    @property
    def share(self) -> int:
        """A run that takes no more bytes is not deleted for its size."""
        return self.bytes // max(self.runs, 1)


def limits(environ: Mapping[str, str]) -> Limits:
    """What was set in the environment or the configuration, else what is usual; a mistake in them keeps the usual.

    The one place that knows where these come from.
    """
    try:
        settings = load(environ)
    except ConfigError:  # said to whoever starts a run or looks at one
        return Limits()
    usual = Limits()
    return Limits(
        usual.runs if settings.keep_runs is None else settings.keep_runs,
        usual.bytes if settings.keep_bytes is None else settings.keep_bytes,
    )


def keep(directory: Path, kept: bool = True) -> None:
    """Mark a run as one that is never deleted by itself, or take the mark away; RunError if that cannot be written."""
    path = directory / _KEEP_FILE
    try:
        if kept:
            os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
        else:
            with contextlib.suppress(FileNotFoundError):
                remove_file(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def is_kept(directory: Path) -> bool:
    """Whether the run carries the mark."""
    return os.path.lexists(directory / _KEEP_FILE)


def remove(directory: Path, info: RunInfo) -> None:
    """Delete a run; RunError if it goes on or cannot be deleted."""
    problem = _delete(directory, info)
    if problem is not None:
        raise RunError(problem)


def prune_runs(limit: Limits, current: Path) -> list[Path]:
    """Delete the oldest runs beside `current` until the rest is within `limit`, as far as can be; what was deleted.

    Only runs of the directory that `current` is in are looked at.
    """
    _sweep(current.parent)
    runs = [(directory, info) for directory, info in list_runs() if directory.parent == current.parent]
    sizes = {directory: _size(directory) for directory, _ in runs}
    count, total = len(runs), sum(sizes.values())
    newest = {directory for directory, _ in runs[-NEWEST:]}
    gone = []
    for directory, info in runs:
        if count <= limit.runs and total <= limit.bytes:
            break
        if directory == current or is_kept(directory):
            continue
        if count <= limit.runs and (directory in newest or sizes[directory] <= limit.share):
            continue
        if _delete(directory, info) is None:
            gone.append(directory)
        elif os.path.lexists(directory):
            continue
        # Or another supervisor that has just ended was quicker: one less all the same.
        count, total = count - 1, total - sizes[directory]
    return gone


def _delete(directory: Path, info: RunInfo) -> str | None:
    """None once it is deleted, else why not."""
    with contextlib.suppress(RunError):
        info = load_info(directory)  # the sizes of many runs were looked at since
    if goes_on(info):
        return f"{directory.name} is running; dpmon stop {info.id} ends it"
    state, _ = run_state(directory, info)
    if state == "elsewhere":
        return f"{directory.name} is on another machine, which may be at it"
    if state == "starting":
        return f"{directory.name} is being started"
    lock = take_lock(directory)
    if lock is None:  # it is being started, or taken over, at this moment
        return f"{directory.name} is in use"
    try:
        # First out of everybody's sight, so that nobody meets half a run.
        hidden = directory.with_name(_GONE + directory.name)
        os.rename(directory, hidden)
        with contextlib.suppress(FileNotFoundError):  # somebody else sweeps
            shutil.rmtree(hidden)
    except OSError as error:
        return f"{directory} cannot be deleted: {error.strerror}"
    finally:
        if lock >= 0:
            os.close(lock)
    return None


def _sweep(runs: Path) -> None:
    """Delete what a killed process of ours has left half deleted."""
    with contextlib.suppress(OSError):
        for entry in runs.glob(_GONE + "*"):
            if not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)


def _size(directory: Path) -> int:
    """Bytes on the disk."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total

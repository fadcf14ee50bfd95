"""Deletes old runs, the oldest first, but never live or protected ones. The newest few are not deleted for size."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dpmon.config import ConfigError, load_settings
from dpmon.run.lifecycle import has_live_supervisor, is_live, run_state, take_lock, wait_until
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info
from dpmon.run.run_registry import list_runs
from dpmon.run.safe_files import open_file

_KEEP_FILE = "keep"
_DELETED_PREFIX = ".gone-"
_MAX_FINISH_S = 10.0
"""How long to wait for a supervisor that has recorded the end of its run. It usually exits within 0.2 s."""
PROTECTED_NEWEST = 5
"""Number of newest runs that are never deleted for their size: the user is most likely to look at them."""


class Limits(NamedTuple):
    """The maximum number of runs, and of bytes in total. Protected and live runs count, but are not deleted."""

    runs: int = 200
    bytes: int = 10 << 30


def load_limits(environ: Mapping[str, str]) -> Limits:
    """Return the limits from the environment or the configuration file, else the defaults, also if it is invalid."""
    with contextlib.suppress(ConfigError):  # commands that start or show a run report it
        settings = load_settings(environ)
        overrides = {"runs": settings.keep_runs, "bytes": settings.keep_bytes}
        return Limits()._replace(**{name: value for name, value in overrides.items() if value is not None})
    return Limits()


def set_protected(directory: Path, protected: bool = True) -> None:
    """Mark a run as protected from automatic deletion, or remove the mark. Raises RunError if that fails."""
    path = directory / _KEEP_FILE
    try:
        if protected:
            os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def is_protected(directory: Path) -> bool:
    """Return whether the run is marked as protected."""
    return os.path.lexists(directory / _KEEP_FILE)


def delete_run(directory: Path, run_info: RunInfo) -> None:
    """Delete a run. Waits for a supervisor that is just finishing. Raises RunError if it is live or that fails."""
    if load_exit(directory) is not None:
        wait_until(lambda: not has_live_supervisor(load_info(directory)), _MAX_FINISH_S)
    if (problem := _delete(directory, run_info)) is not None:
        raise RunError(problem)


def prune_runs(limits: Limits, current: Path) -> list[Path]:
    """Delete the oldest runs except `current` until the rest is within `limits`, if possible.

    Considers only the runs in the directory that contains `current`. Returns the deleted ones.
    """
    _delete_leftovers(current.parent)
    runs = [(directory, run_info) for directory, run_info in list_runs() if directory.parent == current.parent]
    sizes = {directory: _size(directory) for directory, _ in runs}
    count, total = len(runs), sum(sizes.values())
    newest = {directory for directory, _ in runs[-PROTECTED_NEWEST:]}
    deleted = []
    for directory, run_info in runs:
        if count <= limits.runs and total <= limits.bytes:
            break
        if directory == current or is_protected(directory):
            continue
        if count <= limits.runs and directory in newest:
            continue
        if _delete(directory, run_info) is None:
            deleted.append(directory)
        elif os.path.lexists(directory):
            continue
        # If another supervisor deleted it first, that counts as well.
        count, total = count - 1, total - sizes[directory]
    return deleted


def _delete(directory: Path, run_info: RunInfo) -> str | None:
    """Delete a run. Return None, or the reason if that failed."""
    with contextlib.suppress(RunError):
        run_info = load_info(directory)  # again, because measuring many runs took time
    if is_live(run_info) and run_info.nodes:
        return f"{directory.name} mirrors other runs; kill {run_info.supervisor_pid} ends the mirror, not the training"
    if is_live(run_info):
        return f"{directory.name} is running; dpmon stop {run_info.id} ends it"
    state, _ = run_state(directory, run_info)
    if state == "elsewhere":
        return f"{directory.name} is on another node, which may still run it"
    if state == "starting" or (lock := take_lock(directory)) is None:  # it may be taken over at this moment
        return f"{directory.name} is in use"
    try:
        # Rename it first, so that no reader sees half a run.
        hidden = directory.with_name(_DELETED_PREFIX + directory.name)
        os.rename(directory, hidden)
        with contextlib.suppress(FileNotFoundError):  # another process cleans up as well
            shutil.rmtree(hidden)
    except OSError as error:
        return f"{directory} cannot be deleted: {error.strerror}"
    finally:
        os.close(lock)
    return None


def _delete_leftovers(runs: Path) -> None:
    """Delete the directories that an interrupted deletion left behind."""
    with contextlib.suppress(OSError):
        for entry in runs.glob(_DELETED_PREFIX + "*"):
            if not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)


def _size(directory: Path) -> int:
    """Return the size on disk in bytes."""
    try:
        return sum(path.lstat().st_blocks * 512 for path in directory.iterdir())
    except OSError:  # it is being deleted
        return 0

"""Starts the supervisor of a run in the background, independent of the caller."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import dpmon
from dpmon.run.condition import command_alive
from dpmon.run.files import open_file
from dpmon.run.lock import needs_supervisor, take_lock
from dpmon.run.rundir import load_exit, load_info
from dpmon.supervise.outcome import open_pipe
from dpmon.supervise.signals import ignored_again

FINISH_S = 10.0
"""Longest wait until the record of a run is complete; some milliseconds per megabyte are usual."""

# The interpreter is isolated (-I): neither the current directory nor PYTHON* may put a user's random.py before the
# standard library's. The folder of dpmon comes right after the standard library, the rest of the caller's path last.
_BOOT = """\
import sys
directory, how, outcome, home, *places = sys.argv[1:]
at = next((i for i, p in enumerate(sys.path) if p.endswith("-packages")), len(sys.path))
sys.path.insert(at, home)
sys.path += [p for p in places if p not in sys.path]
from dpmon.supervise.supervisor import main
main(directory, how, outcome)
"""
TAKE_OVER = "take over"


class Started(NamedTuple):
    """A supervisor, and the descriptor of the command's outcome (dpmon.supervise.outcome)."""

    process: subprocess.Popen[bytes]
    outcome: int


def start_supervisor(directory: Path, *, stdin: bool) -> Started:
    """Start the supervisor for the run in `directory`; with `stdin`, the command gets dpmon's own input.

    OSError if it cannot be started.
    """
    # Take the lock before the process exists, so that the run never seems to have lost its supervisor.
    lock = take_lock(directory)
    ours, theirs = open_pipe()
    try:
        for fd in (lock, theirs):
            if fd is not None and fd >= 0:
                os.set_inheritable(fd, True)
        # The supervisor passes dpmon's own signal settings on to the command.
        how = "" if lock is None else str(lock)
        return Started(_start(directory, how, str(theirs), stdin=stdin, before=ignored_again()), ours)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
        if lock is not None and lock >= 0:
            os.close(lock)


def take_over(directory: Path) -> subprocess.Popen[bytes]:
    """Start a supervisor for a run that has lost its own. It ends at once if another one was quicker.

    OSError if it cannot be started.
    """
    helper = _start(directory, TAKE_OVER, "", stdin=False)
    _helpers.append(helper)
    return helper


def ensure_supervisor(directory: Path) -> None:
    """Start a supervisor if the run has none.

    If the run is over, the supervisor only reads the rest of its rings. Wait for that, at most FINISH_S.
    """
    info = load_info(directory)
    if not needs_supervisor(directory, info, load_exit(directory)):
        return
    try:
        helper = take_over(directory)
    except OSError:  # a full or read-only disk: the rings are read as they are
        return
    if not command_alive(info):
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(FINISH_S)


_helpers: list[subprocess.Popen[bytes]] = []
"""Supervisors that may outlive this process. Python warns about a running process whose Popen is collected."""


def _is_here(place: str) -> bool:
    """Whether a path is the current directory, which may have been deleted."""
    try:
        return os.path.samefile(place, os.curdir)
    except OSError:
        return not os.path.isabs(place)


def _start(
    directory: Path, how: str, outcome: str, *, stdin: bool, before: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    home = str(Path(dpmon.__file__).resolve().parent.parent)
    places = [place for place in sys.path if place and not _is_here(place)]
    bytecode = ["-B"] if sys.dont_write_bytecode else []  # the user's setting, which -I would ignore
    try:
        log = open_file(directory / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # another kind of file is in its place, or the disk is full: the run matters more than its log
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", *bytecode, "-c", _BOOT, str(directory), how, outcome, home, *places],
            # Inside another run it must not look like one of that run's processes: `dpmon stop` would end it.
            env={name: value for name, value in os.environ.items() if name != "DPMON_RUN"},
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            close_fds=False,
            start_new_session=True,
            preexec_fn=before,
        )
    finally:
        os.close(log)

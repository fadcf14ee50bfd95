"""Starts the supervisor of a run, in the background and apart from everything of the caller."""

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
"""How long to wait for the record of a run to be completed; a few milliseconds a megabyte are usual."""

# The interpreter is isolated (-I): neither the current directory nor PYTHON* may put a user's random.py before the
# standard library's. dpmon's own place comes right after the standard library, the caller's other places last.
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
    """A supervisor, and the descriptor from which the command's outcome is read (dpmon.supervise.outcome)."""

    process: subprocess.Popen[bytes]
    outcome: int


def start_supervisor(directory: Path, *, stdin: bool) -> Started:
    """Start the supervisor for the run in `directory`; with `stdin`, dpmon's own input is passed on to the command.

    OSError if it cannot be started.
    """
    # Held from before there is a process, so that nobody takes the run for one whose supervisor was killed.
    lock = take_lock(directory)
    ours, theirs = open_pipe()
    try:
        for fd in (lock, theirs):
            if fd is not None and fd >= 0:
                os.set_inheritable(fd, True)
        # It passes on to the command how dpmon was started.
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
    """Start a supervisor for a run that has none any more; it leaves at once if another one is there first.

    OSError if it cannot be started.
    """
    helper = _start(directory, TAKE_OVER, "", stdin=False)
    _helpers.append(helper)
    return helper


def look_after(directory: Path) -> None:
    """See to it that somebody keeps the record of a run: start a supervisor if the run has none.

    Of a run that is over nothing is left to do but to take over what its rings hold: that is waited for, for a while.
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
    bytecode = ["-B"] if sys.dont_write_bytecode else []  # a wish that -I would not let through
    try:
        log = open_file(directory / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:  # something else is in its place, or the disk is full: the run matters more than its log
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

"""The state of a run, in one word; the lock of its supervisor; how it ended, in the form of exit.json."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit
from dpmon.run.safe_files import open_file

_LOCK_FILE = "supervisor.lock"
EVENTS_FILE = "events.log"
"""The ids of the told events; locked by the process that tells them (dpmon.notify)."""
ELSEWHERE = "elsewhere"
UNSUPPORTED = -1
SILENT_S = 86400.0
"""A run of another machine without a write for this many seconds is over: a supervisor writes every second."""
YOUNG_S = 60.0
"""A run younger than this may still start its command, even on a slow machine."""


def take_lock(directory: Path, name: str = _LOCK_FILE) -> int | None:
    """A descriptor that holds the lock until its last copy is closed; None if another process holds it.

    UNSUPPORTED if the file system has no locks or cannot create the file: then nothing prevents a second supervisor.
    """
    try:
        fd = open_file(directory / name, os.O_RDWR | os.O_CREAT)
    except OSError:
        return UNSUPPORTED
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else UNSUPPORTED
    return fd


def has_live_supervisor(info: RunInfo) -> bool:
    """Whether the supervisor named in run.json is alive, even if it is suspended."""
    return info.boot_id == proc.boot_id() and proc.is_running(info.supervisor_pid, info.supervisor_started)


def may_be_live_elsewhere(directory: Path, info: RunInfo, how: ExitInfo | None) -> bool:
    """Whether another machine that shares the directory owns the run, and may still be running it.

    This machine cannot see the run's processes, and perhaps not even its locks.
    """
    if (how is not None and how.drained) or info.host in ("", proc.host_name()) or info.boot_id == proc.boot_id():
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
    return (
        (how is None or not how.drained)
        and not has_live_supervisor(info)
        and not may_be_live_elsewhere(directory, info, how)
    )


def is_command_alive(info: RunInfo) -> bool | None:
    """Whether the command runs; None while its start is not recorded. Of a mirror: whether the mirror runs."""
    if info.nodes:
        return has_live_supervisor(info)
    if info.command_pid is None:
        return None
    return info.boot_id == proc.boot_id() and proc.is_running(info.command_pid, info.command_started)


def is_live(info: RunInfo) -> bool:
    """Whether the command or the supervisor of a run is alive, as far as this machine can see."""
    return bool(is_command_alive(info)) or has_live_supervisor(info)


def run_state(directory: Path, info: RunInfo) -> tuple[str, ExitInfo | None]:
    """The state in a word, and how the run ended, if it has.

    If the run has ended, the word is from `outcome_word`. Otherwise it is starting, running, ending, or one of these:
    unsupervised (the command runs, but its supervisor or the mirror of its machines was killed; `dpmon attach` starts
    another one); elsewhere (on another machine that shares the directory; this machine does not know whether it runs);
    lost (ended without a record of its end).
    """
    # Check the processes before exit.json: then everything that they wrote before they ended is visible.
    alive, watched = is_command_alive(info), has_live_supervisor(info)
    how = load_exit(directory)
    if how is not None:
        return outcome_word(how), how
    if may_be_live_elsewhere(directory, info, how):
        return ELSEWHERE, None
    if info.nodes and info.boot_id == proc.boot_id():
        return "running" if watched else "unsupervised", None
    if alive:
        return "running" if watched else "unsupervised", None
    if alive is None and (watched or time.time() - info.started_unix < YOUNG_S):
        return "starting", None
    return "ending" if watched else "lost", None


def signal_name(number: int) -> str:
    """The name of a signal; its number for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_info(info: RunInfo, returncode: int, by: str, error: str | None = None, *, drained: bool = True) -> ExitInfo:
    """The end of a run that ended just now; `returncode` as in subprocess (negative: the number of a signal)."""
    end = time.monotonic_ns()
    return ExitInfo(
        status=returncode & 0xFF if returncode >= 0 else 128 - returncode,
        signal=signal_name(-returncode) if returncode < 0 else None,
        ended_unix=time.time(),
        end_ns=end,
        seconds=(end - info.start_ns) / 1e9,
        by=by,
        error=error,
        drained=drained,
    )


def unknown_exit(info: RunInfo, by: str, why: str, end_ns: int) -> ExitInfo:
    """An end without a known status, at `end_ns` (monotonic, as precise as possible)."""
    seconds = max(end_ns - info.start_ns, 0) / 1e9
    return ExitInfo(
        status=None,
        signal=None,
        ended_unix=info.started_unix + seconds,
        end_ns=end_ns,
        seconds=seconds,
        by=by,
        unknown=why,
    )


BY_YOU = "stopped by you"
"""What sentences say in place of "stopped"."""


def outcome_word(how: ExitInfo) -> str:
    """One word for an end: finished, stopped (by the user), interrupted (SIGINT), killed (another signal), failed.

    "ended" if the status is unknown.
    """
    if how.stopped:
        return "stopped"
    if how.status is None:
        return "ended"
    if how.signal is not None:
        return "interrupted" if how.signal == "SIGINT" else "killed"
    return "finished" if how.status == 0 else "failed"

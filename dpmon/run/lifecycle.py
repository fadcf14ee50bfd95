"""The state of a run in one word, the lock of its supervisor, and its end in the form of exit.json."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dpmon.record.shared_names import ELSEWHERE
from dpmon.run import proc
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit
from dpmon.run.safe_files import open_file

EVENTS_FILE = "events.log"
"""The ids of the events that were notified; locked by the notifier (dpmon.notify)."""
UNSUPERVISED = "unsupervised"
"""The state of a run whose command runs, but whose supervisor (or the mirror of its nodes) was killed."""
SILENT_S = 86400.0
"""A run of another machine that has written nothing for this long has ended: a supervisor writes every second."""
STUCK_SUPERVISOR_S = 5.0
"""A supervisor that has not recorded the command's end after this time is stopped or stuck."""
YOUNG_S = 60.0
"""A run younger than this may still have to start its command, even on a slow machine."""


def wait_until(condition: Callable[[], object], limit_s: float, interval_s: float = 0.02) -> bool:
    """Wait until the condition is true, at most `limit_s`. Return whether it is true at the end."""
    deadline_s = time.monotonic() + limit_s
    while not (is_met := bool(condition())) and time.monotonic() < deadline_s:
        time.sleep(interval_s)
    return is_met


def take_lock(directory: Path, name: str = "supervisor.lock") -> int | None:
    """Take a lock. Return a descriptor that holds it until its last copy is closed; None if another process holds it.

    If the file cannot be created or the file system has no locks, nothing prevents a second holder.
    """
    try:
        fd = open_file(directory / name, os.O_RDWR | os.O_CREAT)
    except OSError:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(fd)
            return None
    return fd


def is_locked(directory: Path, name: str) -> bool:
    """Return whether another process holds a lock."""
    if (fd := take_lock(directory, name)) is not None:
        os.close(fd)
    return fd is None


def has_live_supervisor(run_info: RunInfo) -> bool:
    """Return whether the supervisor named in run.json is alive, even if it is suspended."""
    return run_info.boot_id == proc.boot_id() and proc.is_running(run_info.supervisor_pid, run_info.supervisor_started)


def is_finishing(run_info: RunInfo, exit_info: ExitInfo) -> bool:
    """Return whether the supervisor of an ended run is writing its last records, unless it is stuck."""
    is_late = time.monotonic_ns() > exit_info.end_ns + STUCK_SUPERVISOR_S * 1e9
    return not exit_info.drained and not is_late and has_live_supervisor(run_info)


def may_be_live_elsewhere(directory: Path, run_info: RunInfo, exit_info: ExitInfo | None) -> bool:
    """Return whether another machine that shares the directory owns the run, and may still be running it.

    This machine cannot see the run's processes, and possibly not even its locks.
    """
    is_complete = exit_info is not None and exit_info.drained
    if is_complete or run_info.host in ("", proc.host_name()) or run_info.boot_id == proc.boot_id():
        return False
    try:
        last_write_s = max((path.lstat().st_mtime for path in directory.iterdir()), default=0.0)
    except OSError:
        return True
    return time.time() - last_write_s < SILENT_S


def needs_supervisor(directory: Path, run_info: RunInfo, exit_info: ExitInfo | None) -> bool:
    """Return whether a run's history is incomplete and no live supervisor is known; `take_lock` decides for sure."""
    return (
        (exit_info is None or not exit_info.drained)
        and not has_live_supervisor(run_info)
        and not may_be_live_elsewhere(directory, run_info, exit_info)
    )


def is_command_alive(run_info: RunInfo) -> bool | None:
    """Return whether the command runs; None while its start is not recorded. For a mirror: whether the mirror runs."""
    if run_info.nodes:
        return has_live_supervisor(run_info)
    if run_info.command_pid is None:
        return None
    return run_info.boot_id == proc.boot_id() and proc.is_running(run_info.command_pid, run_info.command_started)


def is_live(run_info: RunInfo) -> bool:
    """Return whether the command or the supervisor of a run is alive, as far as this machine can see."""
    return bool(is_command_alive(run_info)) or has_live_supervisor(run_info)


def run_state(directory: Path, run_info: RunInfo) -> tuple[str, ExitInfo | None]:
    """Return the state in a word, and how the run ended (None if it has not).

    If the run has ended, the word is from `outcome_word`. Otherwise it is starting, running, ending, or one of these:
    unsupervised (the command runs, but its supervisor or the mirror of its nodes was killed; `dpmon attach` starts
    another one); elsewhere (on another machine that shares the directory; this machine does not know whether it runs);
    lost (ended without a record of its end).
    """
    # Check the processes before exit.json: then everything that they wrote before they ended is visible.
    command_alive, has_supervisor = is_command_alive(run_info), has_live_supervisor(run_info)
    exit_info = load_exit(directory)
    if exit_info is not None:
        return outcome_word(exit_info), exit_info
    if may_be_live_elsewhere(directory, run_info, exit_info):
        return ELSEWHERE, None
    if command_alive or (run_info.nodes and run_info.boot_id == proc.boot_id()):
        return "running" if has_supervisor else UNSUPERVISED, None
    if command_alive is None and (has_supervisor or time.time() - run_info.started_unix < YOUNG_S):
        return "starting", None
    return "ending" if has_supervisor else "lost", None


def signal_name(signal_number: int) -> str:
    """Return the name of a signal; for a real-time signal, "signal" and its number."""
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


def build_exit_info(run_info: RunInfo, returncode: int, by: str, error: str | None = None) -> ExitInfo:
    """Return the record of a run's end just now. `returncode` is as in subprocess (negative: a signal's number)."""
    end_ns = time.monotonic_ns()
    return ExitInfo(
        status=returncode & 0xFF if returncode >= 0 else 128 - returncode,
        signal=signal_name(-returncode) if returncode < 0 else None,
        ended_unix=time.time(),
        end_ns=end_ns,
        seconds=(end_ns - run_info.start_ns) / 1e9,
        by=by,
        error=error,
    )


def build_unknown_exit(run_info: RunInfo, by: str, reason: str, end_ns: int) -> ExitInfo:
    """Return the record of an end with unknown status at `end_ns` (monotonic, as precise as possible)."""
    seconds = max(end_ns - run_info.start_ns, 0) / 1e9
    ended_unix = run_info.started_unix + seconds
    return ExitInfo(None, None, ended_unix=ended_unix, end_ns=end_ns, seconds=seconds, by=by, unknown=reason)


def has_succeeded(exit_info: ExitInfo | None) -> bool:
    """Return whether the command is known to have ended with status 0."""
    return exit_info is not None and exit_info.status == 0


def outcome_word(exit_info: ExitInfo) -> str:
    """Return a word for an end: finished, stopped (by the user), interrupted (SIGINT), killed (by a signal) or failed.

    "ended" if the status is unknown.
    """
    if exit_info.stopped:
        return "stopped"
    if exit_info.status is None:
        return "ended"
    if exit_info.signal is not None:
        return "interrupted" if exit_info.signal == "SIGINT" else "killed"
    return "finished" if exit_info.status == 0 else "failed"

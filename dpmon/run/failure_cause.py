"""Finds why a run failed: the first process that failed, the first exception, or a lack of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from dpmon.run.activities import iter_ring_activities, read_startup_ranks
from dpmon.run.lifecycle import signal_name
from dpmon.run.process_notes import Note, UncaughtException, read_notes, read_uncaught_exceptions
from dpmon.run.run_directory import RunInfo

STATUSES = "statuses.log"
"""Notes of the supervisor: the status (as in subprocess) of each process that it saw end with a nonzero status."""
_UNCAUGHT_STATUS = 1
"""Python's exit status after an uncaught exception."""
_SIGNAL_EXCEPTION = "SignalException"
"""torchrun raises it after a signal, and then passes the signal on to its ranks."""
_LAUNCHER_EXCEPTIONS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", _SIGNAL_EXCEPTION)
"""Exceptions that torchrun and mp.spawn raise because one of their processes has ended."""
_POSSIBLE_LAUNCHER_EXCEPTIONS = (*_LAUNCHER_EXCEPTIONS, "CalledProcessError")
"""`accelerate launch` raises CalledProcessError; a script may raise it too."""
_MAX_EXIT_DELAY_NS = 50_000_000
"""How late the supervisor may see the end of a process, if it or the machine is busy. A rank that lost its connection
notes its exception within milliseconds, so the two times alone do not show which came first."""


class RankExit(NamedTuple):
    """The end of a rank with a nonzero status."""

    pid: int
    at_ns: int
    """Time at which the supervisor saw that it had ended (monotonic ns)."""
    status: int
    """Exit status; negative if a signal ended the rank, as in subprocess."""
    rank: int

    @property
    def text(self) -> str:
        """Rank and status: "rank 1 was ended by SIGABRT"."""
        if self.status >= 0:
            return f"rank {self.rank} exited with status {self.status}"
        return f"rank {self.rank} was ended by {signal_name(-self.status)}"


class FirstFailure(NamedTuple):
    """The first failure of a run; at least one of the two is known."""

    rank_exit: RankExit | None
    """The end of a rank, unless it came after the first exception."""
    exception: UncaughtException | None
    """The first exception."""

    def sentence(self, cwd: str) -> str:
        """Return the end of the rank and the exception, as far as they are known, as text."""
        exit_text = None if self.rank_exit is None else self.rank_exit.text
        exception_text = None if self.exception is None else self.exception.sentence(cwd)
        return "; ".join(filter(None, (exit_text, exception_text)))


def find_first_failure(directory: Path, run_info: RunInfo, status: int | None) -> FirstFailure | None:
    """Return why a run that ended with `status` failed; None if no exception and no status of a rank explains it.

    The reason is the exception of the command itself, unless that only reports that another process ended. None also if
    the command noted an exception but its status is not 1: the tracer notes Python's last exception, and `code` or
    IPython may have handled it long before the script called sys.exit.
    """
    exceptions = sorted(read_uncaught_exceptions(directory), key=lambda exception: exception.at_ns)
    command_exception = next((exception for exception in exceptions if exception.pid == run_info.command_pid), None)
    if command_exception is not None and status != _UNCAUGHT_STATUS:
        return None
    if command_exception is not None and command_exception.kind not in _POSSIBLE_LAUNCHER_EXCEPTIONS:
        return FirstFailure(None, command_exception)
    stages = read_notes(directory / "stages.log")
    first_stage_ns = {note.pid: note.at_ns for note in reversed(stages)}
    child_exceptions = [
        exception
        for exception in exceptions
        if exception.kind not in (*_LAUNCHER_EXCEPTIONS, "KeyboardInterrupt") and exception is not command_exception
    ]
    if command_exception is None and run_info.command_pid in first_stage_ns:
        # The command ended by sys.exit, so it may have handled the exception of a child. Only an exception of a rank
        # counts, because a failed rank ends its launcher.
        child_exceptions = [exception for exception in child_exceptions if exception.rank is not None]
    rank_exits: list[RankExit] = []
    if command_exception is None or command_exception.kind != _SIGNAL_EXCEPTION:
        rank_exits = _read_rank_exits(directory, stages)
    pids_with_exception = {exception.pid for exception in exceptions}
    silent_exits = [rank_exit for rank_exit in rank_exits if rank_exit.pid not in pids_with_exception]
    # A launcher that restarts its ranks reports the last attempt. Take the first failure of that attempt, because
    # later ones are usually consequences.
    failures: list[UncaughtException | RankExit] = [*child_exceptions, *silent_exits]
    _, newest_pid = max(((failure.at_ns, failure.pid) for failure in failures), default=(0, 0))
    attempt_start_ns = first_stage_ns.get(newest_pid, 0)
    first_exception = next((each for each in child_exceptions if each.at_ns >= attempt_start_ns), None)
    first_exit = next((each for each in silent_exits if each.at_ns >= attempt_start_ns), None)
    if first_exit is not None and (
        first_exception is None or _rank_exit_came_first(first_exit, first_exception, rank_exits)
    ):
        return FirstFailure(first_exit, first_exception)
    first_exception = first_exception or command_exception
    return None if first_exception is None else FirstFailure(None, first_exception)


def _rank_exit_came_first(rank_exit: RankExit, exception: UncaughtException, rank_exits: list[RankExit]) -> bool:
    """Return whether the rank ended before the exception, after which a launcher ends the other ranks."""
    exit_ns = min((other.at_ns for other in rank_exits if other.pid == exception.pid), default=rank_exit.at_ns + 1)
    return rank_exit.at_ns < exit_ns and rank_exit.at_ns < exception.at_ns + _MAX_EXIT_DELAY_NS


def _read_rank_exits(directory: Path, stages: list[Note]) -> list[RankExit]:
    """Return the ends of ranks with a nonzero status, in the order in which the supervisor saw them."""
    notes = read_notes(directory / STATUSES)
    if not notes:
        return []
    ranks = {pid: rank for pid, (rank, _) in read_startup_ranks(stages).items()}
    ranks |= {ring.pid: ring.rank for ring, _, _ in iter_ring_activities(directory) if ring.rank is not None}
    return [RankExit(note.pid, note.at_ns, int(note.text), ranks[note.pid]) for note in notes if note.pid in ranks]


def _oom_kill_file() -> Path:
    """Return where the kernel counts the processes of our cgroup that it killed for lack of memory, or those of all."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            path = Path(f"/sys/fs/cgroup{line.removeprefix('0::')}/memory.events")
            if line.startswith("0::") and path.exists():
                return path
    return Path("/proc/vmstat")


def count_oom_kills(path: Path | None = None) -> int:
    """Return how many processes were killed for lack of memory so far; 0 if the kernel does not count them."""
    path = path or _oom_kill_file()
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill ([0-9]+)$", path.read_text(), re.MULTILINE):
            return int(match[1])
    return 0

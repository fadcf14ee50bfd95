"""Why a run failed: the first of its processes that failed, the first exception, or a lack of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dpmon.run.activities import iter_ring_activities
from dpmon.run.lifecycle import signal_name
from dpmon.run.process_notes import Note, UncaughtException, read_notes, read_uncaught_exceptions
from dpmon.run.run_directory import RunInfo

STATUSES = "statuses.log"
"""Notes of the supervisor: the status (as in subprocess) of each process that it saw end with a status other than 0."""
_MAX_BYTES = 1 << 18
_UNCAUGHT_STATUS = 1
"""Python's exit status after an uncaught exception."""
_SIGNALLED = "SignalException"
"""torchrun raises it after a signal; it then passes the signal on to its ranks."""
_OF_LAUNCHERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", _SIGNALLED)
"""Exceptions that torchrun and mp.spawn raise because one of their processes has ended."""
_MAYBE_OF_LAUNCHERS = (*_OF_LAUNCHERS, "CalledProcessError")
"""`accelerate launch` raises CalledProcessError; a script may raise it too."""
_RANK = re.compile(r"\brank ([0-9]{1,6}) of [0-9]+")
"""In the stage "joining the process group"."""
_SEEN_LATE_NS = 50_000_000
"""Longest delay until the supervisor sees the end of a process, if it or the machine is busy. A rank that lost its
connection notes its exception within milliseconds, so the two times alone do not show which came first."""
_STATUS = re.compile(r"-?[0-9]{1,3}")


class RankExit(NamedTuple):
    """The end of a rank with a status other than 0."""

    pid: int
    at_ns: int
    """Monotonic time in ns at which the supervisor saw that it had ended."""
    status: int
    """As in subprocess: negative for the number of a signal."""
    rank: int

    @property
    def text(self) -> str:
        """Rank and status: "rank 1 was ended by SIGABRT"."""
        if self.status >= 0:
            return f"rank {self.rank} exited with status {self.status}"
        return f"rank {self.rank} was ended by {signal_name(-self.status)}"


class FirstFailure(NamedTuple):
    """Why a run failed; at least one of the two is known."""

    death: RankExit | None
    """The end of a rank, unless it came after the first exception."""
    raised: UncaughtException | None
    """The first exception."""

    def sentence(self, cwd: str) -> str:
        """The end of the rank and the exception, as far as they are known."""
        raised = "" if self.raised is None else self.raised.sentence(cwd)
        if self.death is None:
            return raised
        return f"{self.death.text}; {raised}" if raised else self.death.text


def find_first_failure(directory: Path, info: RunInfo, status: int | None) -> FirstFailure | None:
    """Why a run that ended with `status` failed; None if no exception and no status of a rank explains it.

    This is the exception of the command itself, unless it only reports that another process ended. None also if the
    command noted an exception but its status is not 1: the tracer notes Python's last exception, and `code` or IPython
    may have handled it long before the script called sys.exit.
    """
    found = sorted(read_uncaught_exceptions(directory), key=lambda one: one.at_ns)
    own = next((one for one in found if one.pid == info.command_pid), None)
    if own is not None and status != _UNCAUGHT_STATUS:
        return None
    if own is not None and own.kind not in _MAYBE_OF_LAUNCHERS:
        return FirstFailure(None, own)
    stages = read_notes(directory / "stages.log", _MAX_BYTES)
    begun = {note.pid: note.at_ns for note in reversed(stages)}
    others = [
        one for one in found if one.kind not in _OF_LAUNCHERS and one is not own and one.kind != "KeyboardInterrupt"
    ]
    if own is None and info.command_pid in begun:
        # The command ended by sys.exit, so it may have handled the exception of a child. Only an exception of a rank
        # counts, because a failed rank ends its launcher.
        others = [one for one in others if one.rank is not None]
    deaths = [] if own is not None and own.kind == _SIGNALLED else _read_rank_exits(directory, stages)
    told = {one.pid for one in found}
    silent = [one for one in deaths if one.pid not in told]
    # A launcher that restarts its ranks reports the last attempt. Take the first failure of that attempt, because
    # later ones are mostly consequences.
    times = [*((one.at_ns, one.pid) for one in others), *((one.at_ns, one.pid) for one in silent)]
    _, newest = max(times, default=(0, 0))
    attempt = begun.get(newest, 0)
    raised = next((one for one in others if one.at_ns >= attempt), None)
    death = next((one for one in silent if one.at_ns >= attempt), None)
    if death is not None and (raised is None or _rank_exit_came_first(death, raised, deaths)):
        return FirstFailure(death, raised)
    raised = raised or own
    return None if raised is None else FirstFailure(None, raised)


def _rank_exit_came_first(death: RankExit, raised: UncaughtException, deaths: list[RankExit]) -> bool:
    """Whether the death came first. If not, it may follow from the exception: a launcher then ends the other ranks."""
    ended = min((one.at_ns for one in deaths if one.pid == raised.pid), default=death.at_ns + 1)
    return death.at_ns < ended and death.at_ns < raised.at_ns + _SEEN_LATE_NS


def _read_rank_exits(directory: Path, stages: list[Note]) -> list[RankExit]:
    """The ranks that the supervisor saw end with a status other than 0, in this order."""
    notes = [note for note in read_notes(directory / STATUSES, _MAX_BYTES) if _STATUS.fullmatch(note.text)]
    if not notes:
        return []
    ranks = {note.pid: int(match[1]) for note in stages if (match := _RANK.search(note.text)) is not None}
    ranks |= {ring.pid: ring.rank for ring, _, _ in iter_ring_activities(directory) if ring.rank is not None}
    return [RankExit(note.pid, note.at_ns, int(note.text), ranks[note.pid]) for note in notes if note.pid in ranks]


class OomKillCounter:
    """Counts the processes that the kernel has killed for lack of memory on this machine since its creation."""

    def __init__(self, path: Path = Path("/proc/vmstat")) -> None:
        self._path = path
        self._before = _oom_kills(path)

    def cause(self, signal: str | None) -> str | None:
        """Why a command was probably killed by `signal`; None if no process was killed for lack of memory."""
        killed = _oom_kills(self._path) - self._before
        if signal != "SIGKILL" or killed <= 0:
            return None
        return f"out of memory: the kernel killed {killed} of this machine's processes during the run"


def _oom_kills(path: Path) -> int:
    """The number of such processes since boot; 0 on a kernel that does not count them."""
    try:
        found = re.search(r"^oom_kill ([0-9]+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0

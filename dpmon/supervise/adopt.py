"""How a supervisor watches the command: as its own child, or as a process that a killed supervisor started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dpmon.ring_file import RingError
from dpmon.run import proc
from dpmon.run.ending import exit_info, unknown_exit
from dpmon.run.pidfd import open_pidfd, wait_status
from dpmon.run.rings import ProcessRing
from dpmon.run.rundir import ExitInfo, RunInfo, load_exit, ring_paths
from dpmon.run.signalling import is_named
from dpmon.run.uncaught import uncaught_in

PATIENCE_S = 2.0
"""Longest wait until another source knows the status: the foreground, which reaps the command, or the kernel."""
_REAPED = "a process other than its supervisor had reaped it"
_LOST = "the command's supervisor was killed before the command ended"


class Child:
    """A command that this process has started.

    It is not reaped until `release`: if this process is killed earlier, the foreground can still reap it.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._returncode: int | None = None
        self._lost = False
        self.pid = process.pid

    def over(self) -> bool:
        """Whether the command has ended. Does not reap it."""
        if self._returncode is None and not self._lost:
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._lost = True
                return True
            if ended is not None:
                by_itself = ended.si_code == os.CLD_EXITED
                self._returncode = ended.si_status if by_itself else -ended.si_status
        return self._lost or self._returncode is not None

    def ending(self, info: RunInfo) -> ExitInfo:
        """How the command ended, from the kernel; unknown if another process has reaped it."""
        if self._returncode is None:
            return unknown_exit(info, "supervisor", _REAPED, time.monotonic_ns())
        return exit_info(info, self._returncode, "supervisor")

    def release(self) -> None:
        """Reap the command."""
        self._process.wait()


class Adopted:
    """A command after its supervisor was killed. As it is not our child, its status comes from other sources."""

    def __init__(self, directory: Path, info: RunInfo) -> None:
        assert info.command_pid is not None
        self._directory = directory
        self.pid = info.command_pid
        self._started = info.command_started
        same_boot = info.boot_id == proc.boot_id()
        self._seen_alive = same_boot and proc.is_running(self.pid, self._started)
        self._pidfd = open_pidfd(self.pid) if self._seen_alive else None
        self._same_boot = same_boot
        # Read the time of the last sign of life before dpmon writes to these files again.
        self._last_ns = last_sign(directory, info).end_ns

    def over(self) -> bool:
        """Whether the command has ended, reaped or not. A later process with the same id does not count."""
        return not self._same_boot or not proc.is_running(self.pid, self._started)

    def ending(self, info: RunInfo) -> ExitInfo:
        """How the command ended, from the foreground that reaped it, the kernel, or its last record; else unknown."""
        now = time.monotonic_ns()
        until = time.monotonic() + PATIENCE_S
        while self._same_boot:
            found = load_exit(self._directory)
            if found is not None:
                return found
            status = self._status()
            if status is not None:
                return exit_info(info, os.waitstatus_to_exitcode(status), "supervisor")
            if not self._seen_alive or time.monotonic() > until:
                break
            time.sleep(0.02)
        return self._from_record(info, now)

    def release(self) -> None:
        """Do nothing: another process reaps the command, which is not a child of this one."""

    def _status(self) -> int | None:
        status = wait_status(self._pidfd) if self._pidfd is not None else None
        return proc.status_of_dead(self.pid, self._started) if status is None else status

    def _from_record(self, info: RunInfo, now: int) -> ExitInfo:
        """How the command ended, according to its own last record: normally, or with which exception."""
        if not self._same_boot:
            return unknown_exit(info, "supervisor", "the machine was restarted", self._last_ns)
        sign = last_sign(self._directory, info)
        end = now if self._seen_alive else self._last_ns
        if sign.exception is not None:
            status = -signal.SIGINT if sign.exception == "KeyboardInterrupt" else 1
            return replace(exit_info(info, status, "tracer"), end_ns=end, seconds=(end - info.start_ns) / 1e9)
        if sign.ended is None:
            return unknown_exit(info, "supervisor", _LOST, end)
        if sign.ended:
            return unknown_exit(info, "supervisor", f"{_LOST}; the command's Python ended normally", end)
        return unknown_exit(info, "supervisor", f"{_LOST}; the command's Python was killed or called os._exit", end)


class Sign(NamedTuple):
    """The last sign of life of the training in the run's own files."""

    end_ns: int
    ended: bool | None
    """Whether the command's Python ended normally; None without a record."""
    exception: str | None
    """The class name of an uncaught exception."""


def last_sign(directory: Path, info: RunInfo) -> Sign:
    """The last sign of life of the run. `end_ns` is on the monotonic clock of the boot in which the run began."""
    ended: bool | None = None
    end = info.start_ns + int(_last_output(directory, info) * 1e9)
    for process, path in ring_paths(directory):
        if process < 0:
            continue
        with contextlib.suppress(RingError, OSError), contextlib.closing(ProcessRing(str(path))) as ring:
            what, since = ring.activity()
            if ring.pid == info.command_pid:
                ended = what == "ended"
            end = max(end, since)
    return Sign(end, ended, uncaught_in(directory, info.command_pid))


def _last_output(directory: Path, info: RunInfo) -> float:
    """Seconds after the run's start at which its output was last written; 0 if unknown."""
    found = 0.0
    for name in ("output.log", "stdout.log", "stderr.log"):
        with contextlib.suppress(OSError):
            found = max(found, (directory / name).lstat().st_mtime - info.started_unix)
    return found


def find_command(directory: Path) -> proc.ProcessEntry | None:
    """Search for the command of a run. Its killed supervisor may have started it without recording the process."""
    leaders = (process for pid, process in proc.every_process().items() if process.session == pid and not process.dead)
    return min(
        (process for process in leaders if is_named(process.pid, directory)),
        key=lambda process: process.started,
        default=None,
    )

"""What the foreground does for the run: passes signals on, and takes over the exit if the supervisor was killed.

The foreground is a subreaper, so that the command becomes its child when the supervisor dies: then it can still learn
how the command ended, and write exit.json itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from dpmon.run import proc
from dpmon.run.ending import exit_info
from dpmon.run.lock import needs_supervisor
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, load_exit, save
from dpmon.run.start import take_over

__all__ = ["Guard"]

SUCCESSORS = 3
STALLED_S = 5.0
"""A supervisor that has not noticed the command's end for so long is stopped or stuck: the exit is read from /proc."""


class Guard:
    """Watches the supervisor that this process started."""

    def __init__(self, directory: Path, supervisor: subprocess.Popen[bytes]) -> None:
        self._directory = directory
        self._supervisor = supervisor
        self._reader = RunReader(directory)
        self._found: int | None = None
        self.outcome: ExitInfo | None = None
        """How the run ended, where this process had to find out itself."""
        self._dead_since: float | None = None
        self._successor: subprocess.Popen[bytes] | None = None
        self._successors = 0
        self.lost: str | None = None
        """Why nothing will ever be known of how the run ended, once that is certain."""

    @property
    def info(self) -> RunInfo:
        """What run.json says now."""
        return self._reader.refresh()

    def exit(self) -> ExitInfo | None:
        """How the run ended, from whoever wrote it down; None while that is not known."""
        return self._reader.exit() or self.outcome

    @property
    def supervised(self) -> bool:
        """Whether the supervisor lives."""
        return self._supervisor.poll() is None

    @property
    def killed(self) -> bool:
        """Whether a signal has ended the supervisor."""
        return (self._supervisor.poll() or 0) < 0

    def command_pid(self) -> int | None:
        """The command's process, from run.json or, where that could not be written, by looking for it."""
        info = self._reader.refresh()
        if info.command_pid is not None:
            return info.command_pid
        if self._found is None:
            parents = (self._supervisor.pid, os.getpid())
            for pid, process in proc.every_process().items():
                if process.parent in parents and process.session == pid and pid != self._supervisor.pid:
                    self._found = pid
        return self._found

    def send(self, number: int) -> bool:
        """Send a signal to the command's process group; False if it is not there (yet, or any more).

        What programs use to talk to each other (SIGUSR1, SIGUSR2) goes to the command alone: its children, which
        expect none, would die of it.
        """
        pid = self.command_pid()
        if pid is None or not proc.alive(pid, self._reader.info.command_started):
            return False
        try:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(pid, number)
            else:
                os.killpg(pid, number)
        except OSError:
            return False
        return True

    def look(self) -> None:
        """Reap what must be reaped, and record the command's exit if the supervisor cannot; call it often."""
        supervised = self.supervised
        if self.outcome is not None or load_exit(self._directory) is not None:
            return
        if supervised:
            self._reap_orphans()
            self._look_for_stall()
            return
        pid = self.command_pid()
        if pid is not None:
            self._replace()
        if pid is None:
            self._record(
                exit_info(self._reader.info, 2, "foreground", "the supervisor ended before it started the command")
            )
            return
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            if not proc.alive(pid, self._reader.info.command_started):
                self._give_up()
            return
        if found:
            self._record(exit_info(self._reader.info, os.waitstatus_to_exitcode(status), "foreground", drained=False))
        self._reap_orphans()

    def _record(self, how: ExitInfo) -> None:
        self.outcome = how
        if self._reader.exit() is None:  # a new supervisor may have been quicker
            with contextlib.suppress(OSError):
                save(self._directory, how)
        self._replace()  # what the rings hold goes into the history, even if it ended a moment ago

    def _replace(self) -> None:
        """Start another supervisor in the place of one that was killed; a few times, in case something kills them."""
        if self._successors >= SUCCESSORS or self.supervised:
            return
        if self._successor is not None and self._successor.poll() is None:
            return
        if not needs_supervisor(self._directory, self._reader.refresh(), load_exit(self._directory)):
            return
        self._successors += 1
        with contextlib.suppress(OSError):
            self._successor = take_over(self._directory)

    def _look_for_stall(self) -> None:
        """Read the status of a command that has ended from the process table if the supervisor does not reap it."""
        info = self.info
        if info.command_pid is None:
            return
        status = proc.status_of_dead(info.command_pid, info.command_started)
        now = time.monotonic()
        if status is None:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        elif now - self._dead_since > STALLED_S:
            self._record(exit_info(info, os.waitstatus_to_exitcode(status), "foreground", drained=False))

    def _give_up(self) -> None:
        """The command has gone and is not to be reaped here: the new supervisor may know more, else nobody will."""
        if self._successor is None or self._successor.poll() is not None:
            self.lost = "the supervisor was killed, and the command's exit status with it"

    def _reap_orphans(self) -> None:
        """Reap what the command left behind; not children of this process's own doing, which share its session."""
        own = os.getsid(0)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in (self._supervisor.pid, self.command_pid()):
                return
            process = proc.read(ended.si_pid)
            if process is None or process.session == own:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

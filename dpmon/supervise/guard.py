"""The foreground's part in a run: it passes signals on, and records the exit if the supervisor was killed.

`dpmon attach`, which only shows a run, also makes sure that the run has a supervisor: `keep_supervised`.

The foreground is a subreaper: the command becomes its child when the supervisor dies. So it can still learn how the
command ended, and write exit.json itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dpmon.run import proc
from dpmon.run.ending import exit_info
from dpmon.run.lock import needs_supervisor
from dpmon.run.proc import ProcessEntry
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, load_exit, load_info, save
from dpmon.run.signalling import command_of, find_members, send, send_to_all, send_to_group
from dpmon.supervise.outcome import read_outcome
from dpmon.supervise.start import Started, take_over

SUCCESSORS = 3
BETWEEN_S = 1.0
"""Time between two attempts: a new supervisor needs some time to write itself into run.json."""
LOOK_S = 0.4
UNSTARTED_S = 2.0
"""Shortest wait for a command that a killed supervisor may just have forked. The command leads its own session.

The wait lasts longer while a child remains in the supervisor's session."""
STALLED_S = 5.0
"""A supervisor that has not recorded the command's end for this long is stopped or stuck."""


class Successors:
    """Replaces killed supervisors, SUCCESSORS times at most, in case something kills each of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tries = 0
        self._not_before = 0.0
        self.newest: subprocess.Popen[bytes] | None = None
        """The supervisor that was started last, whether or not it still runs."""

    @property
    def at_work(self) -> bool:
        """Whether a supervisor started here is alive."""
        return self.newest is not None and self.newest.poll() is None

    @property
    def exhausted(self) -> bool:
        """Whether no further supervisor will be started."""
        return self._tries >= SUCCESSORS

    @property
    def may_recover(self) -> bool:
        """Whether a supervisor started here is alive, or another one may be started soon."""
        return self.at_work or (not self.exhausted and time.monotonic() < self._not_before)

    def start_if_needed(self, info: RunInfo, how: ExitInfo | None) -> None:
        """Start a supervisor if the run has none; `info` and `how`: the current contents of run.json and exit.json."""
        now = time.monotonic()
        if self.exhausted or self.at_work or now < self._not_before:
            return
        if not needs_supervisor(self._directory, info, how):
            return
        self._tries += 1
        self._not_before = now + BETWEEN_S
        with contextlib.suppress(OSError):
            self.newest = take_over(self._directory)


@contextlib.contextmanager
def keep_supervised(directory: Path) -> Iterator[None]:
    """During the block, on another thread, replace the run's supervisor if it is killed, until the run is over."""
    done = threading.Event()
    watch = threading.Thread(target=_keep_supervised, args=(directory, done), name="dpmon guard", daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()


def _keep_supervised(directory: Path, done: threading.Event) -> None:
    successors = Successors(directory)
    while not successors.exhausted:
        with contextlib.suppress(Exception):  # the screen goes on whatever fails here
            how = load_exit(directory)
            if how is not None and how.drained:
                return
            successors.start_if_needed(load_info(directory), how)
        if done.wait(LOOK_S):
            return


class Guard:
    """Watches the supervisor that this process started."""

    def __init__(self, reader: RunReader, started: Started) -> None:
        self._directory = reader.directory
        self._supervisor = started.process
        self._pipe = started.outcome
        self._reader = reader
        self._found: ProcessEntry | None = None
        self.outcome: ExitInfo | None = None
        """How the run ended, if no file has it: reported by the supervisor, or found by this process."""
        self._outcome_read: ExitInfo | None = None
        self._outcome_read_at = 0.0
        """The outcome read from the supervisor's pipe, which can be read only once, and when it was read."""
        self._dead_since: float | None = None
        self._unstarted_since: float | None = None
        self._successors = Successors(reader.directory)
        self.lost: str | None = None
        """Why nobody can find out how the run ended; None while somebody still can."""

    @property
    def info(self) -> RunInfo:
        """The current contents of run.json."""
        return self._reader.refresh()

    def exit(self) -> ExitInfo | None:
        """How the run ended, from any source; None while unknown."""
        how = self._reader.exit() or self.outcome
        if how is not None and how.status is None and self.outcome is not None:
            how = self.outcome  # a new supervisor recorded an unknown end before this process recorded the status
        if how is not None and self.outcome is None and load_exit(self._directory) is None:
            # The supervisor wrote it into its ring, and was then killed. Other threads of it may still be ending.
            how = replace(how, drained=False)
            self._record(how)
        return how

    @property
    def supervised(self) -> bool:
        """Whether any thread of the supervisor lives. Until the last one ends, it holds its lock and its children."""
        return self._supervisor.poll() is None

    @property
    def killed(self) -> bool:
        """Whether a signal has ended the supervisor."""
        return (self._supervisor.poll() or 0) < 0

    def command_pid(self) -> int | None:
        """The command's process id, from run.json, or from a search if run.json could not be written."""
        info = self._reader.refresh()
        if info.command_pid is not None:
            return info.command_pid
        if self._found is None:
            parents = (self._supervisor.pid, os.getpid())
            for pid, process in proc.every_process().items():
                if process.parent in parents and process.session == pid and pid != self._supervisor.pid:
                    self._found = process
        return None if self._found is None else self._found.pid

    def _known(self) -> RunInfo:
        """The contents of run.json; if it could not be written, with the command's process added."""
        info, found = self._reader.info, self._found
        if info.command_pid is None and found is not None:
            return replace(info, command_pid=found.pid, command_started=found.started)
        return info

    def send(self, number: int) -> bool:
        """Send a signal to the command's process group; False if it has not started or has gone.

        SIGUSR1 and SIGUSR2 go to the command alone, because they would kill children that do not expect them. SIGKILL
        goes to all processes of the run, because the command can no longer end the others.
        """
        if self.command_pid() is None or (command := command_of(self._known())) is None or command.dead:
            return False
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            return send(command, number)
        if number == signal.SIGKILL:
            members = find_members(self._directory, self._known(), over=False)
            send_to_all(members, command.pid, number)
            return True
        return send_to_group(command, number)

    def look(self) -> bool:
        """Reap orphans, and record the command's exit if the supervisor cannot. Call it often.

        Returns whether the supervisor was alive at the start of this call; it may end at any moment.
        """
        supervised = self.supervised
        if self.outcome is None and load_exit(self._directory) is None:
            self._read_pipe()
            if supervised:
                self._reap_orphans()
                self._look_for_stall()
            else:
                self._stand_in()
        return supervised

    def _read_pipe(self) -> None:
        if self._outcome_read is None:
            self._outcome_read = read_outcome(self._pipe)
            self._outcome_read_at = time.monotonic()

    def _stand_in(self) -> None:
        """Do the remaining work of a supervisor that ended early."""
        if self._outcome_read is not None:  # the supervisor could not write exit.json
            self._record(self._outcome_read)
            return
        pid = self.command_pid()
        if pid is not None:
            self._replace()
        if pid is None:
            self._look_for_start()
            return
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            if not proc.is_running(pid, self._known().command_started):
                self._give_up()
            return
        if ended is not None:
            # Reap it only after its status is recorded, so that a new supervisor finds one or the other.
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._record(exit_info(self._reader.info, status, "foreground", drained=False))
            os.waitpid(pid, 0)
        self._reap_orphans()

    def _look_for_start(self) -> None:
        """Report that the command was not started, once it is certain that it will not appear."""
        now = time.monotonic()
        self._unstarted_since = self._unstarted_since or now
        if now - self._unstarted_since >= UNSTARTED_S and not self._forked():
            why = "the supervisor ended before it started the command"
            self._record(exit_info(self._reader.info, 2, "foreground", why))

    def _forked(self) -> bool:
        """Whether a living child may yet become the command: it is still in the supervisor's session."""
        own = self._supervisor.pid
        return any(
            process.session == own and pid != own and not process.dead for pid, process in proc.every_process().items()
        )

    def _record(self, how: ExitInfo) -> None:
        self.outcome = how
        with contextlib.suppress(OSError):
            self._save(how)
        self._replace()  # the history still needs the contents of the rings, even if the run ended a moment ago

    def _save(self, how: ExitInfo) -> None:
        """Write exit.json unless a new supervisor has already recorded a status."""
        if load_exit(self._directory) is None:
            with contextlib.suppress(FileExistsError):
                save(self._directory, how, anew=True)
        found = load_exit(self._directory)  # None if it is damaged
        if found is None or (found.status is None and how.status is not None):
            save(self._directory, how)

    def _replace(self) -> None:
        """Start another supervisor in place of a killed one."""
        if not self.supervised:
            self._successors.start_if_needed(self._reader.refresh(), load_exit(self._directory))

    def _look_for_stall(self) -> None:
        """Record the end of the command if the supervisor does not.

        The supervisor may have reported the end through its pipe and then stalled. Otherwise the process table shows
        that the command is dead.
        """
        now = time.monotonic()
        if self._outcome_read is not None:
            if now - self._outcome_read_at > STALLED_S:
                self._record(replace(self._outcome_read, drained=False))
            return
        info = self.info
        if info.command_pid is None:
            return
        status = proc.status_of_dead(info.command_pid, info.command_started)
        if status is None:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        elif now - self._dead_since > STALLED_S:
            self._record(exit_info(info, os.waitstatus_to_exitcode(status), "foreground", drained=False))

    def _give_up(self) -> None:
        """Set `lost`, unless a new supervisor may still find out how the command ended."""
        if not self._successors.may_recover:
            self.lost = "the supervisor was killed, so the command's exit status is lost"

    def _reap_orphans(self) -> None:
        """Reap the processes that the command left behind, but not this process's own children (its own session)."""
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

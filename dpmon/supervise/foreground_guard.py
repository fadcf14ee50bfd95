"""The foreground's part in a run: it passes signals on, and records the end if no supervisor can.

The foreground is a subreaper: the command becomes its child when the supervisor has ended. The supervisor never reaps
the command, so the foreground can always learn how it ended, even if the run's directory was deleted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from dpmon.run import proc
from dpmon.run.lifecycle import build_exit_info, build_unknown_exit
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_signals import find_members, find_run_command, send_signal, send_to_all
from dpmon.supervise.command_process import find_command
from dpmon.supervise.start_supervisor import SupervisorTakeover

LOOK_S = 0.2
STALLED_S = 5.0
"""A supervisor that has not recorded the command's end for this long is stopped or stuck."""
_NOT_STARTED = "the supervisor ended before it started the command"
_LOST = "the supervisor was killed, and another process had reaped the command"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a foreground without a screen passes on to the command; a hang-up only ends the foreground."""
_PR_SET_CHILD_SUBREAPER = 36


def become_reaper() -> None:
    """Make orphans among this process's descendants its children; do nothing on systems without this call."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def remember_signals(early: list[int]) -> None:
    """Keep the signals that arrive before the command is started: a quick Ctrl-C must not leave it running."""
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: early.append(number))


@contextlib.contextmanager
def poll_in_background(look: Callable[[], object]) -> Iterator[None]:
    """Call `look` again and again on another thread during the block."""
    over = threading.Event()

    def keep_looking() -> None:
        while not over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # the screen goes on whatever fails here
                look()

    threading.Thread(target=keep_looking, name="dpmon guard", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class SupervisorGuard:
    """Watches the supervisor that this process started."""

    def __init__(self, reader: RunReader, supervisor: subprocess.Popen[bytes]) -> None:
        self._directory = reader.directory
        self._reader = reader
        self._supervisor = supervisor
        self._successor = SupervisorTakeover(reader.directory)
        self._dead_since: float | None = None
        self._found: proc.ProcessEntry | None = None
        self.outcome: ExitInfo | None = None
        """How the run ended, if this process found out and no supervisor had recorded it."""

    @property
    def info(self) -> RunInfo:
        """The current contents of run.json."""
        return self._reader.refresh()

    @property
    def is_supervisor_killed(self) -> bool:
        """Whether the supervisor was killed, or failed."""
        return self._supervisor.poll() not in (None, 0)

    @property
    def is_takeover_killed(self) -> bool:
        """Whether the supervisor that took over was killed, or failed, too. No other one is started here."""
        return self._successor.killed

    def exit_info(self) -> ExitInfo | None:
        """How the run ended, from any source; None while unknown."""
        how = self._reader.exit_info()
        if how is not None and not how.drained and self._supervisor.poll() is None:
            # The supervisor is writing the last records, unless it is stopped or stuck.
            how = how if time.monotonic_ns() > how.end_ns + STALLED_S * 1e9 else None
        # A new supervisor may have recorded an unknown end before this process recorded the status.
        return self.outcome if how is None or (how.status is None and self.outcome is not None) else how

    def send(self, number: int) -> bool:
        """Send a signal to the command's process group; False if it has not started or has gone.

        SIGUSR1 and SIGUSR2 go to the command alone, because they would kill children that do not expect them. SIGKILL
        goes to all processes of the run, because the command can no longer end the others.
        """
        info = self._with_command()
        if (command := find_run_command(self._directory, info)) is None or command.is_dead:
            return False
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            return send_signal(command, number)
        if number == signal.SIGKILL:
            send_to_all(find_members(self._directory, info, run_ended=False), command.pid, number)
            return True
        return send_signal(command, number, group=True)

    def poll(self) -> None:
        """Replace a killed supervisor, record the command's end if no supervisor does, and reap orphans.

        To be called often.
        """
        supervised = self._supervisor.poll() is None
        if not supervised:
            self._successor.start_if_needed()
        if self.outcome is None and load_exit(self._directory) is None:
            how = self._exit_of_stuck_supervisor() if supervised else self._exit_without_supervisor()
            if how is not None:
                self._record_exit(how)
        self._reap_orphans()

    def _exit_of_stuck_supervisor(self) -> ExitInfo | None:
        """How the command ended, if its supervisor is alive but has not recorded the end for STALLED_S."""
        # At first, the supervisor is about to write run.json.
        info = self._with_command() if time.monotonic_ns() > self.info.start_ns + STALLED_S * 1e9 else self.info
        now = time.monotonic()
        status = None if info.command_pid is None else proc.unreaped_wait_status(info.command_pid, info.command_started)
        if status is None:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        elif now - self._dead_since > STALLED_S:
            return build_exit_info(info, os.waitstatus_to_exitcode(status), "foreground")
        return None

    def _exit_without_supervisor(self) -> ExitInfo | None:
        """How the command ended without its supervisor; None while it runs, or while a new supervisor may know."""
        info = self._with_command()
        pid = info.command_pid
        if pid is None:
            # The supervisor may just have started it, and the new one searches for it.
            return None if self._successor.is_running else build_exit_info(info, 2, "foreground", _NOT_STARTED)
        try:
            returncode = proc.ended_child_status(pid)
        except ChildProcessError:
            if self._successor.is_running or proc.is_running(pid, info.command_started):
                return None
            return build_unknown_exit(info, "foreground", _LOST, time.monotonic_ns())
        return None if returncode is None else build_exit_info(info, returncode, "foreground")

    def _with_command(self) -> RunInfo:
        """The contents of run.json; if the supervisor could not write the command into it, search for the command."""
        info = self.info
        if info.command_pid is not None:
            return info
        if self._found is None:  # the command may have ended, and have left another process of the run behind
            found = filter(None, (find_command(self._directory), self._ended_child()))
            self._found = min(found, key=lambda process: process.start_s, default=None)
        if self._found is None:
            return info
        return replace(info, command_pid=self._found.pid, command_started=self._found.start_s)

    def _ended_child(self) -> proc.ProcessEntry | None:
        """The command, if it has ended and this process has adopted it: it has no environment any more."""
        mine = (
            process
            for process in proc.read_process_table().values()
            if process.parent == os.getpid() and process.is_dead
        )
        leaders = (process for process in mine if process.session == process.pid)
        ours = (self._supervisor.pid, self._successor.pid)
        return min((p for p in leaders if p.pid not in ours), key=lambda process: process.start_s, default=None)

    def _record_exit(self, how: ExitInfo) -> None:
        # A new supervisor may have recorded the end meanwhile; otherwise nobody has read the rest of the rings.
        recorded = load_exit(self._directory)
        self.outcome = replace(how, drained=recorded is not None and recorded.drained)
        if recorded is None or recorded.status is None:
            with contextlib.suppress(OSError):
                write_info(self._directory, self.outcome)

    def _reap_orphans(self) -> None:
        """Reap the processes that the command left behind, and the command itself once its end is recorded.

        This process's own children, which are in its session, are left alone.
        """
        supervised = self._supervisor.poll() is None
        command, own = (self.info if supervised else self._with_command()).command_pid, os.getsid(0)
        while command is not None:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in (self._supervisor.pid, self._successor.pid):
                return  # Popen reaps these
            if ended.si_pid == command and self.outcome is None and load_exit(self._directory) is None:
                return
            process = proc.read_process(ended.si_pid)
            if process is None or process.session == own:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)

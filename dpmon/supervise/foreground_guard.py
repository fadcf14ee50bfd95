"""What the foreground process does for a run: it forwards signals, and records the end if no supervisor can.

The foreground is a subreaper: when the supervisor has ended, the command becomes its child. The supervisor never reaps
the command, so the foreground can always learn its status, even if the run's directory was deleted.
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
from dpmon.run.lifecycle import STUCK_SUPERVISOR_S, build_exit_info, build_unknown_exit
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_signals import find_members, find_run_command, send_signal, send_to_all
from dpmon.supervise.command_process import find_command
from dpmon.supervise.start_supervisor import SupervisorTakeover

POLL_INTERVAL_S = 0.2
_NOT_STARTED = "the supervisor ended before it started the command"
_REAPED_ELSEWHERE = "the supervisor was killed, and another process had reaped the command"
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a foreground without a screen forwards to the command. A hang-up only ends the foreground."""
_PR_SET_CHILD_SUBREAPER = 36


def become_reaper() -> None:
    """Make this process the parent of orphaned descendants. Does nothing on systems without this call."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def remember_signals(early_signals: list[int]) -> None:
    """Add signals that arrive before the command starts to `early_signals`, so that an early Ctrl-C still ends it."""
    for signal_number in FORWARDED_SIGNALS:
        if signal.getsignal(signal_number) != signal.SIG_IGN:
            signal.signal(signal_number, lambda number, _: early_signals.append(number))


@contextlib.contextmanager
def poll_in_background(poll: Callable[[], object]) -> Iterator[None]:
    """Call `poll` every POLL_INTERVAL_S on another thread while the block runs."""
    has_ended = threading.Event()

    def poll_until_end() -> None:
        while not has_ended.wait(POLL_INTERVAL_S):
            with contextlib.suppress(Exception):  # an error here must not affect the screen
                poll()

    threading.Thread(target=poll_until_end, name="dpmon guard", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


class SupervisorGuard:
    """Guard of the supervisor that this process has started."""

    def __init__(self, reader: RunReader, supervisor: subprocess.Popen[bytes]) -> None:
        self._directory = reader.directory
        self._reader = reader
        self._supervisor = supervisor
        self._takeover = SupervisorTakeover(reader.directory)
        self._dead_since: float | None = None
        self._command: proc.ProcessEntry | None = None
        self.outcome: ExitInfo | None = None
        """How the run ended, if no supervisor has recorded it and this process has; otherwise None."""

    @property
    def info(self) -> RunInfo:
        """The current contents of run.json."""
        return self._reader.refresh()

    @property
    def is_supervisor_killed(self) -> bool:
        """Whether the supervisor was killed or failed."""
        return self._supervisor.poll() not in (None, 0)

    @property
    def is_takeover_killed(self) -> bool:
        """Whether the replacement supervisor was also killed or failed. No further one is started."""
        return self._takeover.is_killed

    def exit_info(self) -> ExitInfo | None:
        """Return how the run ended, from any source; None if it is not known yet."""
        recorded = self._reader.exit_info()
        if recorded is not None and not recorded.drained and self._supervisor.poll() is None:
            # The supervisor is writing the last records, unless it is stopped or stuck.
            is_stuck = time.monotonic_ns() > recorded.end_ns + STUCK_SUPERVISOR_S * 1e9
            recorded = recorded if is_stuck else None
        # A new supervisor may have recorded an unknown end before this process recorded the status.
        if recorded is None or (recorded.status is None and self.outcome is not None):
            return self.outcome
        return recorded

    def send(self, signal_number: int) -> bool:
        """Send a signal to the command's process group. Return False if the command has not started or has ended.

        SIGUSR1 and SIGUSR2 go only to the command, because they would kill child processes that do not handle them.
        SIGKILL goes to all processes of the run, because the command can no longer end the others.
        """
        run_info = self._with_command()
        if (command := find_run_command(self._directory, run_info)) is None or command.is_dead:
            return False
        if signal_number in (signal.SIGUSR1, signal.SIGUSR2):
            return send_signal(command, signal_number)
        if signal_number == signal.SIGKILL:
            send_to_all(find_members(self._directory, run_info, run_ended=False), command.pid, signal_number)
            return True
        return send_signal(command, signal_number, group=True)

    def poll(self) -> None:
        """Replace a killed supervisor, record the command's end if no supervisor does, and reap orphans.

        Must be called several times per second.
        """
        has_supervisor = self._supervisor.poll() is None
        if not has_supervisor:
            self._takeover.start_if_needed()
        if self.outcome is None and load_exit(self._directory) is None:
            exit_info = self._exit_of_stuck_supervisor() if has_supervisor else self._exit_without_supervisor()
            if exit_info is not None:
                self._record_exit(exit_info)
        self._reap_orphans()

    def _exit_of_stuck_supervisor(self) -> ExitInfo | None:
        """Return how the command ended, if its living supervisor fails to record it for STUCK_SUPERVISOR_S."""
        # In the first seconds, the supervisor may not have written the command to run.json yet.
        is_early = time.monotonic_ns() <= self.info.start_ns + STUCK_SUPERVISOR_S * 1e9
        run_info = self.info if is_early else self._with_command()
        now_s, pid = time.monotonic(), run_info.command_pid
        status = None if pid is None else proc.unreaped_wait_status(pid, run_info.command_started)
        if status is None:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now_s
        elif now_s - self._dead_since > STUCK_SUPERVISOR_S:
            return build_exit_info(run_info, os.waitstatus_to_exitcode(status), "foreground")
        return None

    def _exit_without_supervisor(self) -> ExitInfo | None:
        """Return how the command ended without supervisor; None if it runs, or a new supervisor may record it."""
        run_info = self._with_command()
        pid = run_info.command_pid
        if pid is None:
            # The supervisor may have started the command just before it ended. The new one searches for it.
            return None if self._takeover.is_running else build_exit_info(run_info, 2, "foreground", _NOT_STARTED)
        try:
            returncode = proc.ended_child_status(pid)
        except ChildProcessError:
            if self._takeover.is_running or proc.is_running(pid, run_info.command_started):
                return None
            return build_unknown_exit(run_info, "foreground", _REAPED_ELSEWHERE, time.monotonic_ns())
        return None if returncode is None else build_exit_info(run_info, returncode, "foreground")

    def _with_command(self) -> RunInfo:
        """Return the contents of run.json. If the command is missing there, search for its process and add it."""
        run_info = self.info
        if run_info.command_pid is not None:
            return run_info
        if self._command is None:  # the command may have ended and left another process of the run behind
            candidates = filter(None, (find_command(self._directory), self._ended_child()))
            self._command = min(candidates, key=lambda process: process.start_s, default=None)
        if self._command is None:
            return run_info
        return replace(run_info, command_pid=self._command.pid, command_started=self._command.start_s)

    def _ended_child(self) -> proc.ProcessEntry | None:
        """Return the ended command if it is a child of this process, else None. An ended process has no environment."""
        dead_children = (
            process
            for process in proc.read_process_table().values()
            if process.parent == os.getpid() and process.is_dead
        )
        session_leaders = (process for process in dead_children if process.session == process.pid)
        supervisor_pids = (self._supervisor.pid, self._takeover.pid)
        candidates = (process for process in session_leaders if process.pid not in supervisor_pids)
        return min(candidates, key=lambda process: process.start_s, default=None)

    def _record_exit(self, exit_info: ExitInfo) -> None:
        # A new supervisor may have recorded the end meanwhile. Otherwise, the rest of the rings was not read.
        recorded = load_exit(self._directory)
        self.outcome = replace(exit_info, drained=recorded is not None and recorded.drained)
        if recorded is None or recorded.status is None:
            with contextlib.suppress(OSError):
                write_info(self._directory, self.outcome)

    def _reap_orphans(self) -> None:
        """Reap the processes that the command left behind, and the command itself after its end was recorded.

        Does not reap this process's own children, which are in its session.
        """
        has_supervisor = self._supervisor.poll() is None
        command_pid, own_session = (self.info if has_supervisor else self._with_command()).command_pid, os.getsid(0)
        while command_pid is not None:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None or child.si_pid in (self._supervisor.pid, self._takeover.pid):
                return  # Popen reaps these
            if child.si_pid == command_pid and self.outcome is None and load_exit(self._directory) is None:
                return
            process = proc.read_process(child.si_pid)
            if process is None or process.session == own_session:
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.si_pid, os.WNOHANG)

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
from dpmon.run.lifecycle import STUCK_SUPERVISOR_S, build_exit_info, build_unknown_exit, is_finishing
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_signals import find_members, find_run_command, send_signal, send_to_all
from dpmon.supervise.start_supervisor import SupervisorTakeover

POLL_INTERVAL_S = 0.2
_NOT_STARTED = "the supervisor ended before it started the command"
_REAPED_ELSEWHERE = "the supervisor was killed, and another process had reaped the command"
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a foreground without a screen forwards to the command. A hang-up only ends the foreground."""


def become_reaper() -> None:
    """Make this process the parent of orphaned descendants. Does nothing on systems without this call."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


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
        self._supervisor_start_s = proc.start_time_s(supervisor.pid) or 0.0
        self._takeover = SupervisorTakeover(reader.directory)
        self._command: proc.ProcessEntry | None = None
        """The command, if it is not in run.json."""
        self._dead_since_s: float | None = None
        """When this process first saw that the command had ended (monotonic s)."""
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
        """Return how the run ended, from any source; None if it is not known yet, or its last records are written."""
        recorded = self._reader.exit_info()
        # A new supervisor may have recorded an unknown end before this process recorded the status.
        if recorded is None or (recorded.status is None and self.outcome is not None):
            return self.outcome
        return None if is_finishing(self.info, recorded) else recorded

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
        if self._supervisor.poll() is not None:
            self._takeover.start_if_needed()
        is_recorded = self.outcome is not None or load_exit(self._directory) is not None
        # In the first seconds, the supervisor may not have written the command to run.json yet.
        is_early = time.monotonic_ns() <= self.info.start_ns + STUCK_SUPERVISOR_S * 1e9
        if self._supervisor.poll() is None and is_early:
            return
        run_info = self._with_command()
        if not is_recorded and (exit_info := self._unrecorded_exit(run_info)) is not None:
            # A new supervisor may have recorded the end meanwhile. Otherwise, the rest of the rings was not read.
            recorded = load_exit(self._directory)
            self.outcome = replace(exit_info, drained=recorded is not None and recorded.drained)
            if recorded is None or recorded.status is None:
                with contextlib.suppress(OSError):
                    write_info(self._directory, self.outcome)
            is_recorded = True
        self._reap_orphans(None if is_recorded else run_info.command_pid)

    def _unrecorded_exit(self, run_info: RunInfo) -> ExitInfo | None:
        """Return how the command ended; None if it has not, or if a supervisor will soon record it."""
        pid, start_s = run_info.command_pid, run_info.command_started
        has_supervisor = self._supervisor.poll() is None or self._takeover.is_running
        if pid is None:
            # The supervisor may have started the command just before it ended. The new one searches for it.
            return None if has_supervisor else build_exit_info(run_info, 2, "foreground", _NOT_STARTED)
        if proc.is_running(pid, start_s):
            return None
        now_s = time.monotonic()
        self._dead_since_s = self._dead_since_s or now_s
        process = proc.read_process(pid)
        is_child = process is not None and process.parent == os.getpid()
        if has_supervisor and not is_child and now_s - self._dead_since_s <= STUCK_SUPERVISOR_S:
            return None
        status = proc.exit_status(pid, start_s)
        if status is not None:
            return build_exit_info(run_info, status, "foreground")
        return None if is_child else build_unknown_exit(run_info, "foreground", _REAPED_ELSEWHERE, time.monotonic_ns())

    def _with_command(self) -> RunInfo:
        """Return the contents of run.json. If the command is missing there, search for its process and add it.

        The command leads a session. It is a child of the supervisor or, after that has ended, of this process, and it
        is the first such child, because the other ones are started later by the supervisor or the command.
        """
        run_info = self.info
        if run_info.command_pid is not None:
            return run_info
        if self._command is None:
            supervisor_pids = (self._supervisor.pid, self._takeover.pid)
            candidates = [
                process
                for pid, process in proc.read_process_table().items()
                if pid == process.session and pid not in supervisor_pids
                if process.parent in (os.getpid(), self._supervisor.pid) and process.start_s >= self._supervisor_start_s
            ]
            self._command = min(candidates, key=lambda process: process.start_s, default=None)
        if self._command is None:
            return run_info
        return replace(run_info, command_pid=self._command.pid, command_started=self._command.start_s)

    def _reap_orphans(self, command_pid: int | None) -> None:
        """Reap the processes that the command left behind. `command_pid`: the command, while its end is not recorded.

        Does not reap this process's own children, which are in its session.
        """
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            # Popen reaps the supervisors.
            if child is None or child.si_pid in (self._supervisor.pid, self._takeover.pid, command_pid):
                return
            process = proc.read_process(child.si_pid)
            if process is None or process.session == os.getsid(0):
                return
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.si_pid, os.WNOHANG)

"""Starts the command as it would run without dpmon, and records how it and the run's other processes end.

The command's status goes to exit.json. The status of any other process comes from the kernel, so it is recorded only if
the process ends while this supervisor watches it, and only if it is not 0. A process that is killed by a signal records
nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import dpmon
from dpmon.run import proc
from dpmon.run.activities import iter_ring_activities
from dpmon.run.failure_cause import STATUSES
from dpmon.run.lifecycle import build_exit_info, build_unknown_exit, wait_until
from dpmon.run.proc import open_pidfd
from dpmon.run.process_notes import NoteReader, add_note
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, output_paths
from dpmon.run.run_signals import belongs_to_run
from dpmon.run.safe_files import open_file
from dpmon.run.stdin_terminal import InputTerminal
from dpmon.supervise.start_supervisor import sigchld_restorer

_SITE = Path(dpmon.__file__).resolve().parent / "tracer" / "site"
_SUPERVISOR_KILLED = "the command's supervisor was killed before the command ended"


def command_environment(run_info: RunInfo, directory: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the command's environment: `base`, and the variables that load and configure the tracer.

    Changes PYTHONPATH. Sets DPMON_*, PYTHONUNBUFFERED and, for a run with a screen, variables that request color.
    """
    variables = {name: value for name, value in base.items() if not name.startswith("DPMON_")}
    python_path = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = f"{_SITE}{os.pathsep}{python_path}" if python_path else str(_SITE)
    # Keep an empty value, because the user has set it. To Python, it means the same as an unset variable.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    variables["DPMON_RUN"] = str(directory)
    variables["DPMON_START_NS"] = str(run_info.start_ns)
    variables["DPMON_BOOT"] = run_info.boot_id
    variables["DPMON_MODE"] = str(run_info.options.get("mode") or "auto")
    for option in ("replicas", "devices", "batch_dim", "loss", "replay"):
        value = run_info.options.get(option)
        if value is not None:
            variables[f"DPMON_{option.upper()}"] = str(value)
    color_variables = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE")
    if not run_info.headless and not any(name in variables for name in color_variables):
        variables["FORCE_COLOR"] = variables["CLICOLOR_FORCE"] = "1"
    return variables


def start_command(
    run_info: RunInfo, directory: Path, terminal: InputTerminal | None, environment: Mapping[str, str]
) -> int:
    """Start the command in its own session and return its process id. Raises OSError if it cannot be started.

    This process never reaps the command, so that the foreground, which is a subreaper, can always learn its status. The
    command writes directly to the log files. It inherits the descriptors that dpmon got from the user's shell, as
    `<(...)` requires. Descriptors that dpmon opened itself are closed on exec.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log_fds = [open_file(path, flags) for path in output_paths(directory, run_info)]
    try:
        process = subprocess.Popen(
            run_info.command,
            stdin=None if terminal is None else terminal.slave,
            stdout=log_fds[0],
            stderr=log_fds[-1],
            env=command_environment(run_info, directory, environment),
            close_fds=False,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=sigchld_restorer(),
        )
    finally:
        for fd in log_fds:
            os.close(fd)
    process.returncode = 0  # otherwise, Popen would reap the command when this object is freed
    return process.pid


class WatchedCommand:
    """The command of a run, started by this process or by a killed supervisor. This process never reaps it."""

    def __init__(self, directory: Path, run_info: RunInfo, pid: int, start_s: float | None) -> None:
        self._directory = directory
        self.pid = pid
        self._start_s = start_s
        self._is_same_boot = run_info.boot_id == proc.boot_id()
        self._was_alive = self._is_same_boot and proc.is_running(pid, start_s)
        self._pidfd = open_pidfd(pid) if self._was_alive else None
        self.last_ns = last_sign_of_life_ns(directory, run_info)  # read before dpmon writes to these files again
        """The last known sign of life of the command (monotonic ns)."""

    def has_ended(self) -> bool:
        """Return whether the command has ended, reaped or not. A later process with the same id does not count."""
        with contextlib.suppress(ChildProcessError):
            return proc.ended_child_status(self.pid) is not None
        return not self._is_same_boot or not proc.is_running(self.pid, self._start_s)

    def _exit_status(self) -> int | None:
        return proc.exit_status(self.pid, self._start_s, self._pidfd) if self._is_same_boot else None

    def exit_info(self, run_info: RunInfo) -> ExitInfo:
        """Return how the command ended: from its parent or the kernel; otherwise an unknown end."""
        end_ns = time.monotonic_ns() if self._was_alive else self.last_ns
        if self._was_alive:
            wait_until(lambda: self._exit_status() is not None or load_exit(self._directory), 2.0)
        if (status := self._exit_status()) is not None:
            return build_exit_info(run_info, status, "supervisor")
        reason = _SUPERVISOR_KILLED if self._is_same_boot else "the machine was restarted"
        return load_exit(self._directory) or build_unknown_exit(run_info, "supervisor", reason, end_ns)


def last_sign_of_life_ns(directory: Path, run_info: RunInfo) -> int:
    """Return the time of the training's last sign of life in the run's files (monotonic ns of the run's boot)."""
    times_ns = [run_info.start_ns, *(since_ns for _, _, since_ns in iter_ring_activities(directory))]
    for path in output_paths(directory, run_info):
        with contextlib.suppress(OSError):
            times_ns.append(run_info.start_ns + int((path.lstat().st_mtime - run_info.started_unix) * 1e9))
    return max(times_ns)


def find_command(directory: Path) -> proc.ProcessEntry | None:
    """Find the command of a run, if its supervisor was killed before recording it; None if there is none."""
    leaders = (
        process for pid, process in proc.read_process_table().items() if process.session == pid and not process.is_dead
    )
    return min(
        (process for process in leaders if belongs_to_run(process.pid, directory)),
        key=lambda process: process.start_s,
        default=None,
    )


def note_unrecorded(directory: Path, command_pid: int, reasons_by_pid: dict[int, str]) -> None:
    """Warn about Python processes of the run that cannot write to its private directory, once for each reason.

    Skips processes that are recorded, and their children, such as loader workers, which need no access.
    `reasons_by_pid`: the reasons found so far; this call adds to it.
    """
    recorded_pids = {ring.pid for ring, *_ in iter_ring_activities(directory)}
    for pid, process in proc.process_tree(command_pid).items():
        if pid in recorded_pids or pid in reasons_by_pid or process.parent in recorded_pids:
            continue
        with contextlib.suppress(OSError, LookupError):  # the process has ended
            program, _, _ = proc.read_proc_bytes(pid, "cmdline").partition(b"\0")
            if b"python" not in os.path.basename(program):
                continue
            _, _, after_uid = proc.read_proc_bytes(pid, "status").partition(b"\nUid:")
            uid = int(after_uid.split()[1])  # real, effective, saved, of the file system
            root_directory = f"/proc/{pid}/root"
            if uid != os.geteuid():
                reason = f"as another user (uid {uid})"
            elif os.path.exists(f"{root_directory}/") and not os.path.exists(f"{root_directory}{directory}"):
                reason = "with another root directory"
            else:
                continue
            if reason not in reasons_by_pid.values():
                add_note(directory, f"a Python process runs {reason}, so dpmon cannot record what it trains", pid=pid)
                add_note(directory, f"running {reason}, which cannot be recorded", "stages.log", pid)
            reasons_by_pid[pid] = reason


_MAX_WATCHED = 256
"""How many processes are watched at once, at most."""


class ProcessExitWatcher:
    """Watcher of all processes that have recorded a startup stage, as each process that imports torch does."""

    def __init__(self, directory: Path, command_pid: int, poller: select.poll) -> None:
        """`poller`: the supervisor waits with it, and calls `record_exits` when it returns."""
        self._directory = directory
        self._poller = poller
        self._seen_pids = {command_pid}
        self._watched: dict[int, tuple[int, float | None]] = {}
        """Process id and start of each watched process, by its pidfd."""
        self._stage_notes = NoteReader(directory / "stages.log")

    def close(self) -> None:
        """Record the last exits, and stop watching."""
        self.record_exits()
        for fd in [*self._watched]:
            self._forget(fd)

    def watch_new_processes(self) -> None:
        """Start to watch new processes. Must be called several times per second."""
        for pid in {note.pid for note in self._stage_notes.read_new()} - self._seen_pids:
            self._seen_pids.add(pid)
            if len(self._watched) == _MAX_WATCHED or (fd := open_pidfd(pid)) is None:
                continue
            # The process id may have been reused: the process belongs to the run only if its environment names the run.
            if belongs_to_run(pid, self._directory):
                self._watched[fd] = pid, proc.start_time_s(pid)
                self._poller.register(fd, select.POLLIN)
            else:
                os.close(fd)

    def watched_pids(self) -> list[int]:
        """Return the ids of the watched processes, which may have ended."""
        return [pid for pid, _ in self._watched.values()]

    def record_exits(self) -> None:
        """Record the exit statuses of the watched processes that have ended, unless they are 0."""
        for fd in [fd for fd, _ in self._poller.poll(0) if fd in self._watched]:
            pid, start_s = self._watched[fd]
            status = proc.exit_status(pid, start_s, fd)
            self._forget(fd)
            if status:
                add_note(self._directory, str(status), STATUSES, pid)

    def _forget(self, fd: int) -> None:
        del self._watched[fd]
        self._poller.unregister(fd)
        os.close(fd)

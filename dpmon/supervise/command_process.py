"""Starts the command as it would run without dpmon, watches it and the run's other processes, and learns how they end.

The command's own status is in exit.json. The status of any other process comes from the kernel, so it is noted only if
the process ends while this supervisor watches, and only if it is not 0: a process that a signal kills leaves no note of
its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import dpmon
from dpmon.run import proc
from dpmon.run.activities import iter_ring_activities, read_startup_stages
from dpmon.run.failure_cause import STATUSES
from dpmon.run.lifecycle import build_exit_info, build_unknown_exit
from dpmon.run.proc import open_pidfd, wait_status_from_pidfd
from dpmon.run.process_notes import add_note, read_uncaught_exceptions
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit
from dpmon.run.run_signals import belongs_to_run
from dpmon.run.safe_files import open_file
from dpmon.run.stdin_terminal import InputTerminal
from dpmon.supervise.start_supervisor import sigchld_restorer

_SITE = Path(dpmon.__file__).resolve().parent / "tracer" / "site"
PATIENCE_S = 2.0
"""Longest wait until another source knows the status: the foreground, whose child the command is, or the kernel."""
_LOST = "the command's supervisor was killed before the command ended"


def command_environment(info: RunInfo, directory: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """The command's environment: `outer`, and the variables that load and configure the tracer.

    Changes PYTHONPATH; sets DPMON_*, PYTHONUNBUFFERED and, for a run with a screen, variables that ask for color.
    """
    env = {name: value for name, value in outer.items() if not name.startswith("DPMON_")}
    old = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{_SITE}{os.pathsep}{old}" if old else str(_SITE)
    # Keep an empty value: Python treats it like an unset one, but the user has set it.
    env.setdefault("PYTHONUNBUFFERED", "1")
    env["DPMON_RUN"] = str(directory)
    env["DPMON_START_NS"] = str(info.start_ns)
    env["DPMON_BOOT"] = info.boot_id
    env["DPMON_MODE"] = str(info.options.get("mode") or "auto")
    for option in ("replicas", "devices", "batch_dim", "loss", "replay"):
        value = info.options.get(option)
        if value is not None:
            env[f"DPMON_{option.upper()}"] = str(value)
    color = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE")
    if not info.headless and not any(name in env for name in color):
        env["FORCE_COLOR"] = env["CLICOLOR_FORCE"] = "1"
    return env


def _log(path: Path) -> int:
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def start_command(info: RunInfo, directory: Path, terminal: InputTerminal | None, outer: Mapping[str, str]) -> int:
    """Start the command in its own session and return its process id; OSError if it cannot be started.

    This process never reaps it, so that the foreground, which is a subreaper, can always learn how it ended. Its output
    goes straight into the log files. It inherits the descriptors that the user's shell gave to dpmon, which `<(...)`
    needs. Descriptors that dpmon opened itself are closed on exec.
    """
    if info.headless:
        out, err = _log(directory / "stdout.log"), _log(directory / "stderr.log")
    else:
        out = err = _log(directory / "output.log")
    try:
        process = subprocess.Popen(
            info.command,
            stdin=None if terminal is None else terminal.slave,
            stdout=out,
            stderr=err,
            env=command_environment(info, directory, outer),
            close_fds=False,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=sigchld_restorer(),
        )
    finally:
        os.close(out)
        if err != out:
            os.close(err)
    process.returncode = 0  # nobody waits with it, and without this it would reap the command when it is collected
    return process.pid


class WatchedCommand:
    """The command of a run, which this process or a killed supervisor has started. It is never reaped here."""

    def __init__(self, directory: Path, info: RunInfo, pid: int, started: float | None) -> None:
        self._directory = directory
        self.pid = pid
        self._started = started
        self._same_boot = info.boot_id == proc.boot_id()
        self._seen_alive = self._same_boot and proc.is_running(pid, started)
        self._pidfd = open_pidfd(pid) if self._seen_alive else None
        self.last_ns = last_sign_of_life_ns(directory, info)  # before dpmon writes to these files again
        """The last known sign of life of the command (monotonic ns)."""
        self._returncode: int | None = None

    def has_ended(self) -> bool:
        """Whether the command has ended, reaped or not. A later process with the same id does not count."""
        if self._returncode is None:
            try:
                self._returncode = proc.ended_child_status(self.pid)
            except ChildProcessError:
                return not self._same_boot or not proc.is_running(self.pid, self._started)
        return self._returncode is not None

    def exit_info(self, info: RunInfo) -> ExitInfo:
        """How the command ended, from its parent, the kernel, or its own last note; otherwise an unknown end."""
        now = time.monotonic_ns()
        until = time.monotonic() + PATIENCE_S
        while True:
            if self._returncode is not None:
                return build_exit_info(info, self._returncode, "supervisor")
            if (found := load_exit(self._directory)) is not None:
                return found
            if not self._same_boot:
                return build_unknown_exit(info, "supervisor", "the machine was restarted", self.last_ns)
            status = None if self._pidfd is None else wait_status_from_pidfd(self._pidfd)
            status = proc.unreaped_wait_status(self.pid, self._started) if status is None else status
            if status is not None:
                return build_exit_info(info, os.waitstatus_to_exitcode(status), "supervisor")
            if not self._seen_alive or time.monotonic() > until:
                break
            time.sleep(0.02)
        end = now if self._seen_alive else self.last_ns
        raised = next((one.kind for one in read_uncaught_exceptions(self._directory) if one.pid == self.pid), None)
        if raised is None:
            return build_unknown_exit(info, "supervisor", _LOST, end)
        how = build_exit_info(info, -signal.SIGINT if raised == "KeyboardInterrupt" else 1, "tracer")
        return replace(how, end_ns=end, seconds=(end - info.start_ns) / 1e9)


def last_sign_of_life_ns(directory: Path, info: RunInfo) -> int:
    """The last sign of life of the training in the run's own files, on the monotonic clock of that boot (ns)."""
    end = info.start_ns
    for name in ("output.log", "stdout.log", "stderr.log"):
        with contextlib.suppress(OSError):
            end = max(end, info.start_ns + int(((directory / name).lstat().st_mtime - info.started_unix) * 1e9))
    return max([end, *(since for _, _, since in iter_ring_activities(directory))])


def find_command(directory: Path) -> proc.ProcessEntry | None:
    """Search for the command of a run. Its killed supervisor may have started it without recording the process."""
    leaders = (
        process for pid, process in proc.read_process_table().items() if process.session == pid and not process.is_dead
    )
    return min(
        (process for process in leaders if belongs_to_run(process.pid, directory)),
        key=lambda process: process.start_s,
        default=None,
    )


def note_unrecorded(directory: Path, command: int, noted: dict[int, str]) -> None:
    """Warn of the Python processes of the run that cannot write to its private directory, once for each reason.

    Recorded processes can, and their children, such as loader workers, need not. `noted`: reasons so far, by process.
    """
    recorded = {ring.pid for ring, *_ in iter_ring_activities(directory)}
    for pid, process in proc.process_tree(command).items():
        if pid in recorded or pid in noted or process.parent in recorded:
            continue
        with contextlib.suppress(OSError, LookupError):  # it has ended
            if b"python" not in os.path.basename(proc.read_proc_file(pid, "cmdline").partition(b"\0")[0]):
                continue
            uid = int(proc.read_proc_file(pid, "status").partition(b"\nUid:")[2].split()[1])
            root = f"/proc/{pid}/root"
            if uid != os.geteuid():
                how = f"as another user (uid {uid})"
            elif os.path.exists(f"{root}/") and not os.path.exists(f"{root}{directory}"):
                how = "with another root directory"
            else:
                continue
            if how not in noted.values():
                add_note(directory, f"a Python process runs {how}, so dpmon cannot record what it trains", pid=pid)
                add_note(directory, f"running {how}, which cannot be recorded", "stages.log", pid)
            noted[pid] = how


_MOST = 256
"""Most processes to watch at once."""


class ProcessExitWatcher:
    """Watches each process of the run that has noted a stage. Every process that imports torch notes one."""

    def __init__(self, directory: Path, command: int, poller: select.poll) -> None:
        """`poller`: the supervisor waits with it, and calls `note` when it wakes."""
        self._directory = directory
        self._poller = poller
        self._known = {command}
        self._watched: dict[int, tuple[int, float | None]] = {}
        """By descriptor: process id and start of each watched process."""
        self._size = -1

    def close(self) -> None:
        """Note the last ends, and watch no longer."""
        self.record_exits()
        for fd in [*self._watched]:
            self._forget(fd)

    def watch_new_processes(self) -> None:
        """Look for new processes; to be called several times a second."""
        try:
            size = (self._directory / "stages.log").lstat().st_size
        except OSError:
            return
        if size == self._size:
            return
        self._size = size
        for pid in read_startup_stages(self._directory).keys() - self._known:
            if len(self._watched) >= _MOST:
                break
            self._known.add(pid)
            # A number in a file proves nothing: a process belongs to the run only if its environment names the run.
            if (fd := open_pidfd(pid)) is None:
                continue
            self._watched[fd] = pid, proc.start_time_s(pid)
            if belongs_to_run(pid, self._directory):
                self._poller.register(fd, select.POLLIN)
            else:
                self._forget(fd)

    def record_exits(self) -> None:
        """Note the watched processes that have ended."""
        at_ns = time.monotonic_ns()
        for fd in [fd for fd, _ in self._poller.poll(0) if fd in self._watched]:
            pid, started = self._watched[fd]
            status = proc.unreaped_wait_status(pid, started)
            status = wait_status_from_pidfd(fd) if status is None else status
            self._forget(fd)
            if status:
                with contextlib.suppress(OSError):
                    log = open_file(self._directory / STATUSES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    with open(log, "ab") as file:
                        file.write(b"%d %d %d\n" % (pid, at_ns, os.waitstatus_to_exitcode(status)))

    def _forget(self, fd: int) -> None:
        del self._watched[fd]
        with contextlib.suppress(KeyError):
            self._poller.unregister(fd)
        os.close(fd)

"""The background process of a run: starts the command, keeps its history, records how it ended.

It runs in its own session and outlives the terminal. The training never waits for the supervisor, and goes
on unchanged if the supervisor stops.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpmon.config import ConfigError, load_settings
from dpmon.run import proc
from dpmon.run.failure_cause import OomKillCounter, find_first_failure
from dpmon.run.lifecycle import YOUNG_S, build_exit_info, build_unknown_exit, needs_supervisor, take_lock
from dpmon.run.proc import open_pidfd
from dpmon.run.process_notes import WarningsLog
from dpmon.run.run_directory import ExitInfo, load_exit, load_info, output_paths, write_info
from dpmon.run.run_registry import file_system
from dpmon.run.safe_files import open_file, remove_file
from dpmon.run.stdin_terminal import INPUT_FIFO, InputTerminal, InputWaitWatcher
from dpmon.supervise.command_process import (
    ProcessExitWatcher,
    WatchedCommand,
    find_command,
    last_sign_of_life_ns,
    note_unrecorded,
    start_command,
)
from dpmon.supervise.output_space import OutputSpaceReserver
from dpmon.supervise.start_supervisor import ARGUMENT, TAKE_OVER, NotifierLauncher, keep_child_statuses, lost_settings

if TYPE_CHECKING:
    from dpmon.gpu.device_sampler import DeviceSampler
    from dpmon.store.ring_drain import RingDrain
    from dpmon.supervise.prometheus_file import PrometheusFile


LEAVE_S = 2.0
LAST_OUTPUT = 1 << 20
"""Bytes of the script's newest output that are kept even on a full disk."""
SPARE_FILE, SPARE_BYTES = "spare", 1 << 16
LITTLE_HISTORY = 32 << 20
"""Limit of a history in memory, if the user has not chosen this place."""
DRAIN_S = 0.05
"""Longest wait between two reads of the rings. With dpmon.store.ring_drain.COMMIT_S, it limits how long a record takes
to reach the history. A ring is full in 0.3 s at 100,000 spans a second, so it must be read more often."""
LOOK_S = 0.2
"""Time between two checks of everything that changes rarely."""
UNRECORDED_S = 5.0
"""Time between two searches for processes that cannot be recorded: each may read the whole process table."""


def _log(text: str) -> None:
    # On a full disk there is no place left for messages.
    with contextlib.suppress(OSError):
        os.write(2, f"{time.strftime('%F %T')} {text}\n".encode("utf-8", "replace"))


class Supervisor:
    """One run from the start of its command, or from the takeover after a killed supervisor, to its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._info = load_info(directory)
        self._terminal: InputTerminal | None = None
        self._leave_at: float | None = None
        self._oom = OomKillCounter()
        self._warnings = WarningsLog(directory)
        # The command for events and the metrics file come from the user's own settings, which include the options of
        # the command line (dpmon.cli.launch), and never from the directory, which may come from another person.
        metrics = os.environ.get("DPMON_METRICS")
        self._metrics_file = os.path.abspath(metrics) if metrics else None
        self._has_event_command = False
        with contextlib.suppress(ConfigError):
            command = load_settings(os.environ).on_event
            self._has_event_command = command is not None and shutil.which(command[0]) is not None

    def run(self, lock: int | None) -> None:
        """Start the command and stay until it has ended. `lock`: the descriptor that holds the run's lock."""
        inherited = _inherited_descriptors()
        if lock is None:
            take_lock(self._directory)
        else:  # the command must not inherit it
            os.set_inheritable(lock, False)
            inherited.remove(lock)
        self._handle_signals()
        try:
            if self._info.options.get("stdin") != "inherit":
                # Without a screen the user's terminal echoes the input, and the log is for the script's output alone.
                echo = None if self._info.headless else self._directory / "output.log"
                rows, columns = self._info.options.get("window", (24, 80))
                self._terminal = InputTerminal(self._directory, min(rows, 9999), min(columns, 9999), echo)
            command = tuple(os.environ.pop(f"{ARGUMENT}{at}", word) for at, word in enumerate(self._info.command))
            info = replace(self._info, command=command)  # never saved
            pid = start_command(info, self._directory, self._terminal, os.environ)
        except OSError as error:
            text = f"{self._info.command[0]} cannot be started: {error.strerror or error}"
            _log(text)
            self._record_exit(build_exit_info(self._info, 2, "supervisor", text))
            return
        self._detach(inherited)
        started = proc.start_time_s(pid)
        self._record_command_started(pid, started)
        self._supervise_command(WatchedCommand(self._directory, self._info, pid, started))

    def take_over(self) -> None:
        """Continue a run until its end, after its supervisor was killed, if no other supervisor does."""
        if take_lock(self._directory) is None:
            return
        self._info = load_info(self._directory)
        if not needs_supervisor(self._directory, self._info, load_exit(self._directory)):
            return
        self._handle_signals()
        self._detach([])
        pid, started = self._info.command_pid, self._info.command_started
        if pid is None:
            found = find_command(self._directory)
            if found is not None:
                pid, started = found.pid, found.start_s
            elif time.time() - self._info.started_unix < YOUNG_S:
                return  # the command is about to be started
        # The killed supervisor's terminal is gone, so nothing can be typed any more.
        with contextlib.suppress(OSError):
            remove_file(self._directory / INPUT_FIFO)
        self._record_command_started(pid, started)
        if pid is None:
            why = "the supervisor was killed before it recorded what it started"
            self._record_exit(
                build_unknown_exit(self._info, "supervisor", why, last_sign_of_life_ns(self._directory, self._info))
            )
        else:
            self._supervise_command(WatchedCommand(self._directory, self._info, pid, started), late=True)

    # ------------------------------------------------------------------------------------------ start

    def _handle_signals(self) -> None:
        keep_child_statuses()
        # Handlers, not SIG_IGN: the command would inherit an ignored signal, but not a handler. Signals that
        # dpmon itself found ignored (nohup) stay ignored, as they would without dpmon.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle_leave_signal)

    def _handle_leave_signal(self, *_: object) -> None:
        # At a shutdown all processes are signalled at once: wait a moment, to see the command's end too.
        if self._leave_at is None:
            self._leave_at = time.monotonic() + LEAVE_S

    def _detach(self, inherited: list[int]) -> None:
        """Detach from the caller, and close descriptors that only the command needs.

        An open end of a pipe here would keep its reader waiting.
        """
        for fd in inherited:
            with contextlib.suppress(OSError):
                os.close(fd)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.close(null)
        os.chdir("/")  # the directory may be unmounted or deleted during the run
        os.umask(0o077)
        with contextlib.suppress(OSError):  # if processors are scarce, the training comes first
            os.nice(5)

    def _record_command_started(self, pid: int | None, started: float | None) -> None:
        self._info = replace(
            self._info,
            supervisor_pid=os.getpid(),
            supervisor_started=proc.start_time_s(os.getpid()),
            command_pid=pid,
            command_started=started,
        )
        try:
            write_info(self._directory, self._info)
        except OSError as error:
            _log(f"run.json cannot be written: {error}")

    # ------------------------------------------------------------------------------------------ watch

    def _supervise_command(self, command: WatchedCommand, *, late: bool = False) -> None:
        from dpmon.gpu.device_sampler import DeviceSampler
        from dpmon.store.history_writer import LIMIT_BYTES
        from dpmon.store.ring_drain import RingDrain  # loads sqlite while the command loads torch, not before
        from dpmon.supervise.stall_watch import StallWatch

        in_memory = "elsewhere" in self._info.options and file_system(self._directory) in ("tmpfs", "ramfs")
        limit = LITTLE_HISTORY if in_memory else LIMIT_BYTES
        drain = RingDrain(self._directory, self._info, limit)
        sampler = DeviceSampler(drain.emit, lambda: command.pid)
        metrics = self._metrics(drain.warn)
        room = OutputSpaceReserver(output_paths(self._directory, self._info), drain.warn, LAST_OUTPUT)
        self._reserve_exit_space()
        teller = NotifierLauncher(self._directory, drain.warn, wanted=self._has_event_command)
        teller.poll(time.monotonic())
        if late:
            self._catch_up(command, drain, sampler, has_event_command=self._has_event_command or teller.is_at_work())
        else:
            sampler.start()
            elsewhere = self._info.options.get("elsewhere")
            if isinstance(elsewhere, str):
                drain.warn(elsewhere)
        poller = self._poller(command.pid)
        reads = InputWaitWatcher(
            self._directory, command.pid, lambda *wait: self._record_wait(drain, command.pid, *wait)
        )
        ends = ProcessExitWatcher(self._directory, command.pid, poller)
        stalls = StallWatch(self._directory, self._info, drain, adopted=late)
        drain.on_memory_event = sampler.add_torch_memory
        ended, look_at, search_at = False, 0.0, 0.0
        noted: dict[int, str] = {}
        while self._leave_at is None or time.monotonic() < self._leave_at:
            now = time.monotonic()
            if now >= look_at:
                look_at = now + LOOK_S
                ended = command.has_ended()
                for text in self._warnings.read_new():
                    drain.warn(text)
                room.poll()
                teller.poll(now)
                ends.watch_new_processes()
                if now >= search_at:
                    search_at = now + UNRECORDED_S
                    note_unrecorded(self._directory, command.pid, noted)
            busy = drain.poll(now)
            reads.poll(now)
            stalls.poll()
            if metrics is not None:
                metrics.tick(now)
            if ended:
                break
            if self._terminal is not None:
                self._terminal.register(poller)
            if poller.poll(0 if busy else DRAIN_S * 1000):
                look_at = 0.0  # the command may have ended
                ends.record_exits()  # at once, because the order of ends and exceptions matters
                if self._terminal is not None:
                    self._terminal.forward_input()
        stalls.close()
        ends.close()
        how = self._find_ending(command) if command.has_ended() else None
        reads.close()
        room.close(nobody_writes=how is not None and not proc.process_tree(command.pid))
        if how is not None:
            self._finish(how, drain, sampler, metrics)
        else:
            drain.flush()
            if metrics is not None:
                metrics.wait()
            drain.close()
            sampler.stop()

    def _record_wait(self, drain: RingDrain, pid: int, since_ns: int, seen_ns: int) -> None:
        """Record a finished wait of the command for a line of input, so that its step is not called slow."""
        seconds = (since_ns - self._info.start_ns) / 1e9
        drain.emit("input", {"pid": pid, "t_s": seconds, "waited_s": (seen_ns - since_ns) / 1e9})

    def _reserve_exit_space(self) -> None:
        """Reserve space for exit.json, so that it can be written even on a full disk."""
        path = self._directory / SPARE_FILE
        with contextlib.suppress(OSError):
            fd = open_file(path, os.O_WRONLY | os.O_CREAT)
            with open(fd, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, SPARE_BYTES)

    def _catch_up(
        self, command: WatchedCommand, drain: RingDrain, sampler: DeviceSampler, *, has_event_command: bool
    ) -> None:
        """Read the rest of the rings after the killed supervisor's position, and report the gap."""
        drain.flush()
        self._warnings.already_recorded.update(drain.warnings_kept())
        has_metrics = self._metrics_file is not None
        for text in lost_settings(self._info, has_event_command=has_event_command, has_metrics=has_metrics):
            if text not in self._warnings.already_recorded:
                drain.warn(text)
        last_ns = drain.last_sample_ns()
        command.last_ns = max(command.last_ns, self._info.start_ns + drain.newest_ns())
        if command.has_ended():
            return
        since = "" if last_ns is None else f" after {last_ns / 1e9:.0f} s"
        now = (time.monotonic_ns() - self._info.start_ns) / 1e9
        text = f"the supervisor was killed{since}; another one goes on from {now:.0f} s: no device samples in between"
        drain.warn(text)
        sampler.start()

    def _poller(self, pid: int) -> select.poll:
        """A poller for the wait between two drains. The end of the command, or typed input, ends the wait."""
        poller = select.poll()
        fd = open_pidfd(pid)
        if fd is not None:  # without it, the end is noticed a moment later
            poller.register(fd, select.POLLIN)
        return poller

    def _metrics(self, warn: Callable[[str], None]) -> PrometheusFile | None:
        """The writer of the metrics file, if one was requested."""
        if self._metrics_file is None:
            return None
        from dpmon.supervise.prometheus_file import PrometheusFile, metrics_path

        return PrometheusFile(metrics_path(self._metrics_file, self._info), self._directory, warn)

    def _find_ending(self, command: WatchedCommand) -> ExitInfo:
        """Find out how the command ended, and why. Record it at once, before any work that may fail or take long."""
        how = command.exit_info(self._info)
        how = how if how.cause is not None else replace(how, cause=self._find_exit_cause(how))
        with contextlib.suppress(OSError):
            remove_file(self._directory / SPARE_FILE)
        self._record_exit(replace(how, drained=False))
        return how

    def _finish(self, how: ExitInfo, drain: RingDrain, sampler: DeviceSampler, metrics: PrometheusFile | None) -> None:
        drain.flush(over=True)
        data = {"status": how.status, "signal": how.signal, "t_s": how.seconds}
        data |= {name: text for name in ("unknown", "cause") if (text := getattr(how, name)) is not None}
        if not drain.has_exit_record():  # else a supervisor that was killed later has recorded it
            drain.emit("exit", data)
        drain.flush()
        if metrics is not None:
            metrics.wait()  # the journal is deleted only if no other connection is open
        drain.close()
        self._record_exit(replace(how, drained=True))
        if metrics is not None:
            metrics.write_final(how)
        sampler.stop()
        # The run is over, so this cannot delay it.
        from dpmon.run.retention import load_limits, prune_runs

        for gone in prune_runs(load_limits(os.environ), self._directory):
            _log(f"deleted {gone.name}: too old, or too large")

    def _record_exit(self, how: ExitInfo) -> None:
        try:
            write_info(self._directory, how)
        except OSError as error:
            _log(f"exit.json cannot be written: {error}")

    def _find_exit_cause(self, how: ExitInfo) -> str | None:
        """The cause of the command's end, if known. An error in the search must not lose the status."""
        try:
            if (cause := self._oom.cause(how.signal)) or not how.status or how.signal is not None:
                return cause
            first = find_first_failure(self._directory, self._info, how.status)
            return None if first is None else first.sentence(self._info.cwd)
        except Exception:  # noqa: BLE001 - whatever it is, the status is known
            _log(f"no cause of the command's end: {traceback.format_exc()}")
            return None


def _inherited_descriptors() -> list[int]:
    """Open descriptors beyond the usual three, before dpmon opens any here."""
    found = map(int, os.listdir("/proc/self/fd"))
    # The listing has its own descriptor, which is closed by now.
    return [fd for fd in found if fd > 2 and os.path.lexists(f"/proc/self/fd/{fd}")]


def main(directory: str, how: str) -> None:
    """Supervise the run in `directory`. `how`: TAKE_OVER, or the descriptor that holds the run's lock, "" if none."""
    try:
        supervisor = Supervisor(Path(directory))
        if how == TAKE_OVER:
            supervisor.take_over()
        else:
            supervisor.run(int(how) if how.isdecimal() else None)
    except Exception:  # noqa: BLE001 - the training goes on
        _log(traceback.format_exc())
        os._exit(1)  # do not wait for threads

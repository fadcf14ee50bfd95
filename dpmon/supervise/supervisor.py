"""The background process of a run: starts the command, writes the history, and records how the command ended.

It runs in its own session and outlives the terminal. The training never waits for the supervisor, and continues
unchanged if the supervisor stops.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpmon.config import ConfigError, load_settings
from dpmon.run import proc
from dpmon.run.failure_cause import count_oom_kills, find_first_failure
from dpmon.run.lifecycle import (
    EVENTS_FILE,
    YOUNG_S,
    build_exit_info,
    build_unknown_exit,
    is_locked,
    needs_supervisor,
    take_lock,
    wait_until,
)
from dpmon.run.proc import open_pidfd
from dpmon.run.process_notes import READ_BYTES, NoteReader, read_uncaught_exceptions, traceback_line
from dpmon.run.run_directory import ExitInfo, RunInfo, load_exit, load_info, output_paths, write_info
from dpmon.run.safe_files import open_file, read_tail
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
from dpmon.supervise.start_supervisor import (
    COLLECTION_THRESHOLD,
    SECRET_PREFIX,
    TAKE_OVER,
    NotifierLauncher,
    keep_child_statuses,
    lost_settings,
)

if TYPE_CHECKING:
    from dpmon.gpu.device_sampler import DeviceSampler
    from dpmon.store.ring_drain import RingDrain
    from dpmon.supervise.prometheus_file import PrometheusFile


SHUTDOWN_GRACE_S = 2.0
MAX_LOCK_WAIT_S = 10.0
"""How long to wait for the run's lock, which the first reader of an ended run holds while it completes the history."""
SPARE_FILE, SPARE_BYTES = "spare", 1 << 16
MAX_DRAIN_WAIT_S = 0.05
"""Longest wait between two reads of the rings. With dpmon.store.ring_drain.COMMIT_S, it limits how long a record takes
to reach the history. At 100,000 spans per second, a ring is full in 0.3 s, so it must be read more often."""
CHECK_INTERVAL_S = 0.2
"""Time between two checks of things that rarely change."""
SEARCH_INTERVAL_S = 5.0
"""Time between two searches for processes that cannot be recorded. Each search may read the whole process table."""


def _log(text: str) -> None:
    # On a full disk, messages are lost.
    with contextlib.suppress(OSError):
        os.write(2, f"{time.strftime('%F %T')} {text}\n".encode("utf-8", "replace"))


class Supervisor:
    """The supervisor of one run, from its start, or from the death of an earlier supervisor, to its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run_info = load_info(directory)
        self._terminal: InputTerminal | None = None
        self._leave_at: float | None = None
        self._oom_kills_before = count_oom_kills()
        self._warning_notes = NoteReader(directory / "warnings.log")
        """Warnings of training processes that have no ring, or had none yet."""
        self._recorded_warnings: set[str] = set()
        """Texts that an earlier supervisor has already recorded."""
        # The command for events and the metrics file come from the user's own settings, which include the options of
        # the command line (dpmon.cli.launch), and never from the directory, which may come from another person.
        metrics_file = os.environ.get("DPMON_METRICS")
        self._metrics_file = os.path.abspath(metrics_file) if metrics_file else None
        self._has_event_command = False
        with contextlib.suppress(ConfigError):
            self._has_event_command = load_settings(os.environ).on_event is not None

    def run(self, lock_fd: int) -> None:
        """Start the command and supervise it until its end. `lock_fd`: holds the run's lock."""
        inherited_fds = _inherited_descriptors()
        inherited_fds.remove(lock_fd)
        os.set_inheritable(lock_fd, False)  # the command must not inherit it
        self._handle_signals()
        try:
            if self._run_info.options.get("stdin") != "inherit":
                # Without a screen, the user's terminal echoes the input, and the log contains only the script's output.
                echo_file = None if self._run_info.headless else self._directory / "output.log"
                rows, columns = self._run_info.options.get("window", (24, 80))
                self._terminal = InputTerminal(self._directory, min(rows, 9999), min(columns, 9999), echo_file)
            arguments = enumerate(self._run_info.command)
            command = tuple(os.environ.pop(f"{SECRET_PREFIX}{index}", argument) for index, argument in arguments)
            run_info = replace(self._run_info, command=command)  # never written to a file: it may contain secrets
            pid = start_command(run_info, self._directory, self._terminal, os.environ)
        except OSError as error:
            text = f"{self._run_info.command[0]} cannot be started: {error.strerror or error}"
            _log(text)
            self._write(build_exit_info(self._run_info, 2, "supervisor", text))
            return
        self._detach(inherited_fds)
        start_s = proc.start_time_s(pid)
        self._record_command_started(pid, start_s)
        self._supervise_command(WatchedCommand(self._directory, self._run_info, pid, start_s))

    def take_over(self) -> None:
        """Supervise a run whose supervisor was killed, until its end. Return if another supervisor does it.

        A reader that adds the contents of the rings to the history has the lock meanwhile, so wait for it.
        """
        if not wait_until(lambda: take_lock(self._directory) is not None or not self._is_needed(), MAX_LOCK_WAIT_S):
            return
        if not self._is_needed():
            return
        self._handle_signals()
        self._detach([])
        pid, start_s = self._run_info.command_pid, self._run_info.command_started
        if pid is None:
            process = find_command(self._directory)
            if process is not None:
                pid, start_s = process.pid, process.start_s
            elif time.time() - self._run_info.started_unix < YOUNG_S:
                return  # the command is about to be started
        # The terminal was closed with the killed supervisor, so input can no longer be typed.
        with contextlib.suppress(OSError):
            (self._directory / INPUT_FIFO).unlink()
        self._record_command_started(pid, start_s)
        if pid is None:
            reason = "the supervisor was killed before it recorded what it started"
            last_ns = last_sign_of_life_ns(self._directory, self._run_info)
            self._write(build_unknown_exit(self._run_info, "supervisor", reason, last_ns))
        else:
            self._supervise_command(WatchedCommand(self._directory, self._run_info, pid, start_s), is_takeover=True)

    def _is_needed(self) -> bool:
        self._run_info = load_info(self._directory)
        return needs_supervisor(self._directory, self._run_info, load_exit(self._directory))

    # ------------------------------------------------------------------------------------------ start

    def _handle_signals(self) -> None:
        keep_child_statuses()

        def leave_soon(signal_number: int, _: object) -> None:
            # At a shutdown, all processes get a signal at once. Wait a moment to record the command's end too.
            if self._leave_at is None and signal_number != signal.SIGHUP:
                self._leave_at = time.monotonic() + SHUTDOWN_GRACE_S

        # Handlers instead of SIG_IGN, because the command would inherit an ignored signal. Signals that were already
        # ignored when dpmon was started (nohup) stay ignored, as they would without dpmon.
        for signal_number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(signal_number) != signal.SIG_IGN:
                signal.signal(signal_number, leave_soon)

    def _detach(self, inherited_fds: list[int]) -> None:
        """Detach from the caller, and close the descriptors that only the command needs.

        The reader of a pipe would wait for its end as long as a descriptor of the pipe is open here.
        """
        for fd in inherited_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null_fd, 0)
        os.close(null_fd)
        os.chdir("/")  # the directory may be unmounted or deleted during the run
        os.umask(0o077)
        with contextlib.suppress(OSError):  # if CPU cores are scarce, the training comes first
            os.nice(5)

    def _record_command_started(self, pid: int | None, start_s: float | None) -> None:
        self._run_info = replace(
            self._run_info,
            supervisor_pid=os.getpid(),
            supervisor_started=proc.start_time_s(os.getpid()),
            command_pid=pid,
            command_started=start_s,
        )
        self._write(self._run_info)

    def _write(self, content: RunInfo | ExitInfo) -> None:
        """Write run.json or exit.json; on a full disk, the run continues without it."""
        try:
            write_info(self._directory, content)
        except OSError as error:
            _log(f"run.json or exit.json cannot be written: {error}")

    # ------------------------------------------------------------------------------------------ watch

    def _supervise_command(self, command: WatchedCommand, *, is_takeover: bool = False) -> None:
        from dpmon.gpu.device_sampler import DeviceSampler
        from dpmon.store.ring_drain import RingDrain  # loads sqlite while the command loads torch, not before
        from dpmon.supervise.memory_watch import MemoryWatch
        from dpmon.supervise.stall_watch import StallWatch

        drain = RingDrain(self._directory, self._run_info)
        sampler = DeviceSampler(drain.emit, lambda: command.pid)
        metrics = self._metrics(drain.warn)
        output_space = OutputSpaceReserver(output_paths(self._directory, self._run_info), drain.warn)
        self._reserve_exit_space()
        notifier = NotifierLauncher(self._directory, drain.warn, is_enabled=self._has_event_command)
        notifier.poll(time.monotonic())
        if is_takeover:
            self._catch_up(command, drain, sampler)
        else:
            sampler.start()
            place_warning = self._run_info.options.get("elsewhere")
            if isinstance(place_warning, str):
                drain.warn(place_warning)
        poller = select.poll()  # the command's end or typed input wakes it
        if (pidfd := open_pidfd(command.pid)) is not None:  # without a pidfd, the end is detected a little later
            poller.register(pidfd, select.POLLIN)
        input_waits = InputWaitWatcher(self._directory, command.pid, lambda *wait: self._record_wait(drain, *wait))
        exit_watcher = ProcessExitWatcher(self._directory, command.pid, poller)
        stall_watch = StallWatch(self._directory, self._run_info, drain, is_takeover=is_takeover)
        memory_watch = MemoryWatch(self._directory, drain)
        if metrics is not None:
            metrics.start()
        drain.on_memory_event = sampler.add_torch_memory
        has_ended, check_at, search_at = False, 0.0, 0.0
        reasons_by_pid: dict[int, str] = {}
        while self._leave_at is None or time.monotonic() < self._leave_at:
            now = time.monotonic()
            if now >= check_at:
                check_at = now + CHECK_INTERVAL_S
                has_ended = command.has_ended()
                for note in self._warning_notes.read_new():
                    if note.text not in self._recorded_warnings:
                        drain.warn(note.text)
                output_space.poll()
                notifier.poll(now)
                exit_watcher.watch_new_processes()
                if now >= search_at:
                    search_at = now + SEARCH_INTERVAL_S
                    note_unrecorded(self._directory, command.pid, reasons_by_pid)
            has_more = drain.poll(now)
            input_waits.poll(now, exit_watcher.watched_pids())
            stall_watch.poll()
            memory_watch.poll(now)
            if has_ended:
                break
            if self._terminal is not None:
                self._terminal.register(poller)
            if poller.poll(0 if has_more else MAX_DRAIN_WAIT_S * 1000):
                check_at = 0.0  # the command may have ended
                exit_watcher.record_exits()  # at once, because the order of exits and exceptions matters
                if self._terminal is not None:
                    self._terminal.forward_input()
        stall_watch.close()
        exit_watcher.close()
        exit_info = self._find_ending(command) if command.has_ended() else None
        input_waits.close()
        output_space.close(nobody_writes=exit_info is not None and not proc.process_tree(command.pid))
        if exit_info is not None:
            self._finish(exit_info, drain, sampler, metrics)
        else:
            drain.flush()
            if metrics is not None:
                metrics.stop()
            drain.close()
            sampler.stop()

    def _record_wait(self, drain: RingDrain, pid: int, start_ns: int, end_ns: int) -> None:
        """Record that process `pid` waited for a line of input, so that its step is not reported as slow."""
        start_s = (start_ns - self._run_info.start_ns) / 1e9
        drain.emit("input", {"pid": pid, "t_s": start_s, "waited_s": (end_ns - start_ns) / 1e9})

    def _reserve_exit_space(self) -> None:
        """Reserve space for exit.json, so that it can be written even on a full disk."""
        with contextlib.suppress(OSError):
            fd = open_file(self._directory / SPARE_FILE, os.O_WRONLY | os.O_CREAT)
            with open(fd, "wb"):
                os.posix_fallocate(fd, 0, SPARE_BYTES)

    def _catch_up(self, command: WatchedCommand, drain: RingDrain, sampler: DeviceSampler) -> None:
        """Read the rings from the killed supervisor's position on, and warn of the time without device samples."""
        drain.flush()
        self._recorded_warnings = {data["text"] for data in drain.recorded_events("warning")}
        # The notifier of the killed supervisor may still run.
        has_event_command, has_metrics = is_locked(self._directory, EVENTS_FILE), self._metrics_file is not None
        for text in lost_settings(self._run_info, has_event_command=has_event_command, has_metrics=has_metrics):
            if text not in self._recorded_warnings:
                drain.warn(text)
        last_ns = drain.last_sample_ns()
        command.last_ns = max(command.last_ns, self._run_info.start_ns + drain.newest_ns())
        if command.has_ended():
            return
        after = "" if last_ns is None else f" after {last_ns / 1e9:.0f} s"
        now = (time.monotonic_ns() - self._run_info.start_ns) / 1e9
        drain.warn(
            f"the supervisor was killed{after}; another one continues from {now:.0f} s: no device samples in between,"
            " and the step that was open may be missing"
        )
        sampler.start()

    def _metrics(self, warn: Callable[[str], None]) -> PrometheusFile | None:
        """Return the writer of the metrics file; None if the user has set no file."""
        if self._metrics_file is None:
            return None
        from dpmon.supervise.prometheus_file import PrometheusFile, metrics_path

        return PrometheusFile(metrics_path(self._metrics_file, self._run_info), self._directory, warn)

    def _find_ending(self, command: WatchedCommand) -> ExitInfo:
        """Find out how the command ended, and why. Record it at once, before any work that may fail or take long."""
        exit_info = command.exit_info(self._run_info)
        if exit_info.cause is None:
            exit_info = replace(exit_info, cause=self._find_exit_cause(exit_info))
        with contextlib.suppress(OSError):
            (self._directory / SPARE_FILE).unlink()
        self._write(replace(exit_info, drained=False))
        return exit_info

    def _finish(
        self, exit_info: ExitInfo, drain: RingDrain, sampler: DeviceSampler, metrics: PrometheusFile | None
    ) -> None:
        from dpmon.supervise.memory_watch import add_memory_note

        drain.flush(command_ended=True)
        with contextlib.suppress(Exception):  # the status must not be lost
            output = read_tail(output_paths(self._directory, self._run_info)[-1], READ_BYTES).decode("utf-8", "replace")
            exit_info = replace(exit_info, cause=add_memory_note(exit_info.cause, drain, output))
        data = {"status": exit_info.status, "signal": exit_info.signal, "t_s": exit_info.seconds}
        data |= {name: text for name in ("unknown", "cause") if (text := getattr(exit_info, name)) is not None}
        if not drain.recorded_events("exit"):  # otherwise, a supervisor that was killed later has recorded it
            drain.emit("exit", data)
        drain.flush()
        if metrics is not None:
            metrics.stop()  # the journal is deleted only if no other connection is open
        drain.close()
        self._write(replace(exit_info, drained=drain.failure is None))
        if metrics is not None:
            metrics.write(exit_info)
        sampler.stop()
        # After the run has ended, this cannot delay it.
        from dpmon.run.retention import load_limits, prune_runs

        for directory in prune_runs(load_limits(os.environ), self._directory):
            _log(f"deleted {directory.name}: too old, or too large")

    def _find_exit_cause(self, exit_info: ExitInfo) -> str | None:
        """Return the cause of the command's end; None if unknown. Never raises, because the status must not be lost."""
        try:
            killed = count_oom_kills() - self._oom_kills_before
            lack_text = f"out of memory: the kernel killed {killed} of this machine's processes during the run"
            if exit_info.signal == "SIGKILL" and killed > 0:
                return lack_text
            if not exit_info.status or exit_info.signal is not None:
                return None
            failure = find_first_failure(self._directory, self._run_info, exit_info.status)
            if failure is not None:
                sentence = failure.sentence(self._run_info.cwd)
                was_killed = killed > 0 and ("SIGKILL" in sentence or "signal: Killed" in sentence)
                return f"{sentence}; {lack_text}" if was_killed else sentence
            if read_uncaught_exceptions(self._directory):  # they were handled
                return None
            # A script that failed before it imported torch has noted nothing.
            *_, error_output = output_paths(self._directory, self._run_info)
            return traceback_line(read_tail(error_output, READ_BYTES))
        except Exception:  # noqa: BLE001 - the status is recorded in any case
            _log(f"no cause of the command's end: {traceback.format_exc()}")
            return None


def _inherited_descriptors() -> list[int]:
    """Return the open descriptors above 2. Must be called before dpmon opens any itself."""
    descriptors = map(int, os.listdir("/proc/self/fd"))
    # The descriptor of the listing itself is closed by now.
    return [fd for fd in descriptors if fd > 2 and os.path.lexists(f"/proc/self/fd/{fd}")]


def main(directory: str, argument: str) -> None:
    """Supervise the run in `directory`. `argument`: TAKE_OVER, or the descriptor with the run's lock."""
    gc.set_threshold(COLLECTION_THRESHOLD)
    try:
        supervisor = Supervisor(Path(directory))
        if argument == TAKE_OVER:
            supervisor.take_over()
        else:
            supervisor.run(int(argument))
    except Exception:  # noqa: BLE001 - the training continues
        _log(traceback.format_exc())
        os._exit(1)  # do not wait for threads

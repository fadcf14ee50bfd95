"""The background process that watches a run and starts the user's command for each of its events.

It reads only what every reader can read, so each check finds all events of the run again, also after a restart.
events.log lists the events for which the command was started. Each id is written there before the command starts. So if
this process is killed in between, the user misses an event, but the command never starts twice for the same event.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from dpmon.config import load_settings
from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.run_analysis import RunAnalysis, RunCaches
from dpmon.notify.run_notifications import Notification, find_notifications
from dpmon.record.safe_json import number_member
from dpmon.record.schema import SECOND
from dpmon.report.health import assess_health
from dpmon.report.outcome import LOST
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.process_notes import add_note
from dpmon.run.run_directory import EXIT_FILE, RunError, RunInfo
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.run.run_signals import SUPERVISES
from dpmon.sanitize import to_safe_json
from dpmon.store.store_opening import open_store
from dpmon.supervise.start_supervisor import START_DIRECTORY

CHECK_INTERVAL_S = 2.0
WAIT_INTERVAL_S = 0.1
FINDINGS_INTERVAL_S = 60.0
MAX_FINDINGS_SHARE = 0.01
"""Largest share of the time that the search for findings may take."""
UNSUPERVISED_S = 10.0
"""How long a run may be without a supervisor before no further records are expected. If it has no process then, it has
ended, even without a recorded end."""
UNSUPERVISED = Finding(
    "unsupervised", "dpmon's background process was killed: nothing is recorded", "", "dpmon attach starts another", 1.0
)
MAX_COMMAND_S = 60.0
"""A command that runs for longer than this is killed."""
MAX_TURN_S = 3.0
"""A command starts after the one before it has ended, but waits no longer than this: a command may hang."""
MAX_RUNNING = 4
_MAX_LOG_BYTES = 1 << 24


class SentLog:
    """The ids of the events for which the command was started. Only the process that holds the file's lock uses it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        content = os.pread(fd, _MAX_LOG_BYTES, 0)
        whole_lines = content[: content.rfind(b"\n") + 1]
        os.ftruncate(fd, len(whole_lines))
        self.ids = dict.fromkeys(whole_lines.decode("utf-8", "replace").splitlines())

    def add(self, event_id: str) -> None:
        """Add an id. Raises OSError if it cannot be written."""
        line = f"{event_id}\n".encode()
        end_offset = os.lseek(self._fd, 0, os.SEEK_END)
        if os.write(self._fd, line) < len(line):
            os.ftruncate(self._fd, end_offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.ids[event_id] = None


class _RunningCommand(NamedTuple):
    process: subprocess.Popen[bytes]
    type: str
    start_s: float


class NotificationCommands:
    """The queue of notifications, and the commands that were started for them."""

    def __init__(self, directory: Path, run_info: RunInfo, sent_log: SentLog, command: Sequence[str]) -> None:
        self._directory = directory
        self._run_info = run_info
        self._command = command
        self._sent_log = sent_log
        self._start_directory = os.environ.pop(START_DIRECTORY, "/")
        self._queue: list[Notification] = []
        self._running: list[_RunningCommand] = []
        self._has_warned = False

    @property
    def is_busy(self) -> bool:
        """Whether notifications are queued or commands are running."""
        return bool(self._queue or self._running)

    def notify(self, notifications: Iterable[Notification]) -> None:
        """Queue the notifications that have not been sent yet, replacing any that are still queued."""
        self._queue = [
            notification
            for notification in notifications
            if notification.id_in(self._run_info.id) not in self._sent_log.ids
        ]
        self.poll()

    def poll(self) -> None:
        """Start commands for queued notifications, and kill commands that take too long. Never blocks."""
        now_s = time.monotonic()
        for command in list(self._running):
            status = command.process.poll()
            if status is not None:
                self._running.remove(command)
            if status:
                self._warn_once(f"it ended with status {status} ({command.type})")
            elif status is None and now_s >= command.start_s + MAX_COMMAND_S:
                self._warn_once(f"it was killed after {MAX_COMMAND_S:.0f} s ({command.type})")
                with contextlib.suppress(OSError):
                    os.killpg(command.process.pid, signal.SIGKILL)
        while self._queue and len(self._running) < MAX_RUNNING:
            if self._running and now_s < self._running[-1].start_s + MAX_TURN_S:
                return
            self._start(self._queue.pop(0), now_s)

    def _start(self, notification: Notification, now_s: float) -> None:
        event_id = notification.id_in(self._run_info.id)
        try:
            self._sent_log.add(event_id)
        except OSError as error:  # the next check tries again
            self._warn_once(f"not started, because {notification.type} cannot be recorded: {error.strerror}")
            return
        try:
            fd = os.memfd_create("event")  # unlike a pipe or a file on disk, it is never full
            with open(fd, "w+b") as body:
                body.write(to_safe_json(to_cloudevent(notification, event_id, self._run_info)).encode() + b"\n")
                body.seek(0)
                process = subprocess.Popen(
                    self._command,
                    stdin=body,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=self._start_directory if os.path.isdir(self._start_directory) else "/",
                    start_new_session=True,
                )
        except OSError as error:
            self._warn_once(f"it cannot be started: {error.strerror or error}")
            return
        self._running.append(_RunningCommand(process, notification.type, now_s))

    def _warn_once(self, text: str) -> None:
        """Warn only once: a command that fails once usually keeps failing."""
        if not self._has_warned:
            self._has_warned = True
            add_note(self._directory, f"the event command {self._command[0]}: {text}")


def to_cloudevent(notification: Notification, event_id: str, run_info: RunInfo) -> dict[str, object]:
    """Return a notification as a JSON object of CloudEvents 1.0 (https://github.com/cloudevents/spec)."""
    time_unix = time.time() if notification.at_s is None else run_info.started_unix + notification.at_s
    return {
        "specversion": "1.0",
        "id": event_id,
        "source": f"/dpmon/{run_info.host}",
        "type": notification.type,
        "subject": run_info.id,
        "time": datetime.fromtimestamp(time_unix, UTC).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {"run": run_info.id, "name": short_name(run_info), "script": run_info.script, **notification.data},
    }


def main(directory_text: str, lock: str) -> None:
    """Start the user's command for each event of a run, until its end. `lock`: descriptor of the locked events.log."""
    directory, lock_fd = Path(directory_text), int(lock)
    os.set_inheritable(lock_fd, False)
    with contextlib.suppress(OSError):
        os.nice(5)  # the training comes first
    command = load_settings(os.environ).on_event
    assert command is not None, "the supervisor starts this process only if there is a command"
    os.environ.pop(SUPERVISES, None)  # the commands for events do not need it
    with closing(RunReader(directory)) as reader:
        run_until_end(reader, SentLog(lock_fd), command)


def run_until_end(reader: RunReader, sent_log: SentLog, command: Sequence[str]) -> None:
    """Start the command for each event of a run, until the run and the last command have ended."""
    directory, run_info = reader.directory, reader.info
    commands = NotificationCommands(directory, run_info, sent_log, command)
    alive_minutes = number_member(run_info.options, "alive_minutes")
    alive_s = 60.0 * alive_minutes if alive_minutes else None
    caches = RunCaches()
    findings: list[Finding] = []
    stalls: Sequence[RecordedStall] = ()
    newest_ns = -1
    findings_at_s = time.monotonic() + FINDINGS_INTERVAL_S
    supervised_s = time.monotonic()
    while directory.is_dir():  # otherwise, the user has deleted the run
        start_s = time.monotonic()
        run_info, exit_info = reader.refresh(), reader.exit_info()
        has_supervisor = has_live_supervisor(run_info)
        is_over = exit_info is not None and (exit_info.drained or not has_supervisor)
        if exit_info is None and has_supervisor:
            supervised_s = start_s
        is_unsupervised = start_s - supervised_s >= UNSUPERVISED_S
        try:
            with open_store(directory) as store:
                run = RunAnalysis(store, ended=ended_processes(reader.activities()), caches=caches)
                health = assess_health(reader, run)
                stalls, newest_ns = run.stalls, run.newest_ns
                if start_s >= findings_at_s:
                    findings = find_all(run)
                    search_s = time.monotonic() - start_s
                    findings_at_s = start_s + max(FINDINGS_INTERVAL_S, search_s / MAX_FINDINGS_SHARE)
        except (HistoryError, RunError):
            health = assess_health(reader, RunAnalysis())
        # The end is an event when its record is complete, or will never be.
        if health.end is None or is_over or is_unsupervised:
            is_over = is_over or health.end == LOST
            is_unrecorded = is_unsupervised and exit_info is None and not is_over
            elapsed_s, fields = (time.monotonic_ns() - run_info.start_ns) / SECOND, health.fields()
            all_findings = [*findings, UNSUPERVISED] if is_unrecorded else findings
            notifications = find_notifications(stalls, newest_ns, health, elapsed_s, all_findings, alive_s)
            commands.notify(event._replace(data={**event.data, "health": fields}) for event in notifications)
        next_check_s = start_s + (CHECK_INTERVAL_S if exit_info is None else WAIT_INTERVAL_S)
        while commands.is_busy if is_over else time.monotonic() < next_check_s:
            time.sleep(WAIT_INTERVAL_S)
            commands.poll()
            if exit_info is None and os.path.lexists(directory / EXIT_FILE):
                break
        if is_over:
            return

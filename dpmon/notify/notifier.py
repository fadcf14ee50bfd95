"""The background process that watches a run and starts the user's command for each of its events.

It reads what every reader can read, so it finds all events again in each look, also when it begins anew. events.log
says which of them were told. The id of an event is written there before the command starts: a process that was killed
in between leaves an event that is missed, but no event is told twice.
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
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from dpmon.config import load_settings
from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.finding import Finding
from dpmon.model.run_snapshot import RunSnapshot, SnapshotRequest
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.notify.run_notifications import Notification, NotificationFinder
from dpmon.record.safe_json import number_member
from dpmon.record.schema import SECOND
from dpmon.report.health import LOST, assess_health
from dpmon.report.report_data import analyze_run
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.process_notes import add_note
from dpmon.run.run_directory import EXIT_FILE, RunError, RunInfo
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.run.run_signals import SUPERVISES
from dpmon.sanitize import to_safe_json
from dpmon.store.store_opening import open_store
from dpmon.supervise.start_supervisor import START_DIRECTORY

EVERY_S = 2.0
SHORT_S = 0.1
FINDINGS_S = 60.0
FINDINGS_SHARE = 0.01
"""Most share of the time that the search for findings may take."""
ALONE_S = 10.0
"""After this time nobody is expected to complete the record: a run without processes is over, even without an end."""
ALONE = Finding(
    "unsupervised", "dpmon's background process was killed: nothing is recorded", "", "dpmon attach starts another", 1.0
)
LIMIT_S = 60.0
"""Longest time of a command; then it is killed."""
IN_TURN_S = 3.0
"""A command waits for the one before it, but no longer than this: one that hangs does not hold the others up."""
MOST_AT_ONCE = 4
_MAX_LOG = 1 << 24


class SentLog:
    """The ids of the told events. Only one process at a time has the file: it holds its lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        data = os.pread(fd, _MAX_LOG, 0)
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(fd, len(whole))
        self.ids = dict.fromkeys(whole.decode("utf-8", "replace").splitlines())

    def add(self, name: str) -> None:
        """Add an id; OSError if there is no room for it."""
        line = f"{name}\n".encode()
        end = os.lseek(self._fd, 0, os.SEEK_END)
        if os.write(self._fd, line) < len(line):
            os.ftruncate(self._fd, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.ids[name] = None


class _RunningCommand(NamedTuple):
    process: subprocess.Popen[bytes]
    type: str
    since_s: float


class NotificationCommands:
    """Starts the command for one event after the other."""

    def __init__(self, directory: Path, info: RunInfo, log: SentLog, command: Sequence[str]) -> None:
        self._directory = directory
        self._info = info
        self._command = command
        self._log = log
        self._start_directory = os.environ.pop(START_DIRECTORY, "/")
        self._waiting: list[Notification] = []
        self._running: list[_RunningCommand] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        self._complained = False

    @property
    def busy(self) -> bool:
        """Whether events wait or commands run."""
        return bool(self._waiting or self._running)

    def notify(self, events: Iterable[Notification]) -> None:
        """Tell those of the events that were not told before. Replaces events that still wait."""
        self._waiting = [event for event in events if event.id_in(self._info.id) not in self._log.ids]
        self.poll()

    def poll(self) -> None:
        """Start commands, and end those that take too long. Never waits."""
        now = time.monotonic()
        for each in list(self._running):
            status = each.process.poll()
            if status is None and now < each.since_s + LIMIT_S:
                continue
            self._running.remove(each)
            if status is None:
                with contextlib.suppress(OSError):
                    os.killpg(each.process.pid, signal.SIGKILL)
                self._killed.append(each.process)
                self._warn_once(f"it was killed after {LIMIT_S:.0f} s ({each.type})")
            elif status:
                self._warn_once(f"it ended with status {status} ({each.type})")
        self._killed = [process for process in self._killed if process.poll() is None]
        while self._waiting and len(self._running) < MOST_AT_ONCE:
            if self._running and now < self._running[-1].since_s + IN_TURN_S:
                return
            self._start(self._waiting.pop(0), now)

    def _start(self, event: Notification, now: float) -> None:
        name = event.id_in(self._info.id)
        try:
            self._log.add(name)
        except OSError as error:  # the next look tries again
            self._warn_once(f"not started, because {event.type} cannot be recorded: {error.strerror}")
            return
        try:
            fd = os.memfd_create("event")  # neither a full pipe nor a full disk stops it
            with open(fd, "w+b") as body:
                body.write(to_safe_json(to_cloudevent(event, name, self._info)).encode() + b"\n")
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
        self._running.append(_RunningCommand(process, event.type, now))

    def _warn_once(self, text: str) -> None:
        """Warn once: a command that fails once mostly fails always."""
        if not self._complained:
            self._complained = True
            add_note(self._directory, f"the event command {self._command[0]}: {text}")


def to_cloudevent(event: Notification, name: str, info: RunInfo) -> dict[str, object]:
    """An event in the form of CloudEvents 1.0 (https://github.com/cloudevents/spec)."""
    at = time.time() if event.at_s is None else info.started_unix + event.at_s
    return {
        "specversion": "1.0",
        "id": name,
        "source": f"/dpmon/{info.host}",
        "type": event.type,
        "subject": info.id,
        "time": datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {"run": info.id, "name": short_name(info), "script": info.script, **event.data},
    }


def main(directory_text: str, lock: str) -> None:
    """Tell the events of a run until its end. `lock`: the descriptor of events.log, which holds its lock."""
    directory, fd = Path(directory_text), int(lock)
    os.set_inheritable(fd, False)
    with contextlib.suppress(OSError):
        os.nice(5)  # the training comes first
    command = load_settings(os.environ).on_event
    assert command is not None, "the supervisor starts this process only if there is a command"
    os.environ.pop(SUPERVISES, None)  # the commands for events do not need it
    with closing(RunReader(directory)) as reader:
        run_until_end(reader, SentLog(fd), command)


def run_until_end(reader: RunReader, log: SentLog, command: Sequence[str]) -> None:
    """Tell the events of a run until it is over and its last command has ended."""
    directory, info = reader.directory, reader.info
    commands = NotificationCommands(directory, info, log, command)
    alive = number_member(info.options, "alive_minutes")
    happenings, snapshots, state = (
        NotificationFinder(60.0 * alive if alive else None, log.ids),
        SnapshotBuilder(),
        RunSnapshot(),
    )
    found: list[Finding] = []
    findings_at = time.monotonic() + FINDINGS_S
    alone_at: float | None = None
    while directory.is_dir():  # else the user has deleted the run
        began = time.monotonic()
        info, how = reader.refresh(), reader.exit_info()
        over = how is not None and (how.drained or not has_live_supervisor(info))
        if over or has_live_supervisor(info):  # else a reader would copy the whole history
            with contextlib.suppress(HistoryError, RunError), open_store(directory) as store:
                state = snapshots.build(store, SnapshotRequest(), ended_processes(reader.activities()))
                if began >= findings_at:
                    facts = analyze_run(store, directory, None)
                    facts.query_everything()
                    found = find_all(facts)
                    findings_at = began + max(FINDINGS_S, (time.monotonic() - began) / FINDINGS_SHARE)
        now = assess_health(reader, state)
        alone_at = None if how is None and has_live_supervisor(info) else alone_at or began + ALONE_S
        alone = alone_at is not None and began >= alone_at
        if now.end is None or over or alone:  # the end is told when its record is complete, or is not going to be
            over = over or now.end == LOST
            elapsed_s, does = (time.monotonic_ns() - info.start_ns) / SECOND, now.fields()
            events = happenings.find(
                state, now, elapsed_s, [*found, ALONE] if alone and how is None and not over else found
            )
            commands.notify(event._replace(data={**event.data, "health": does}) for event in events)
        again_at = began + (EVERY_S if how is None else SHORT_S)
        while commands.busy if over else time.monotonic() < again_at:
            time.sleep(SHORT_S)
            commands.poll()
            if how is None and os.path.lexists(directory / EXIT_FILE):
                break
        if over:
            return

"""The background process that watches a run and tells its events. It reads what every reader can read.

An event is told at most once: a file of its name, created before the command starts, claims it. A teller that was
killed in between leaves the claim behind, so that event is missed. The command inherits a lock on the claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections import deque
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from dpmon.cleaning import json_text
from dpmon.errors import HistoryError
from dpmon.model.findings import findings
from dpmon.model.snapshot import Snapshots
from dpmon.model.state import State, Wanted, ended_of
from dpmon.report.collect import facts_of
from dpmon.report.health import health
from dpmon.run import proc
from dpmon.run.condition import run_state
from dpmon.run.files import open_file
from dpmon.run.notes import add_warning
from dpmon.run.reader import RunReader
from dpmon.run.rundir import RunError, RunInfo, load_info
from dpmon.store.opened import open_store
from dpmon.tell.happened import Happened, Happenings

EVERY_S = 1.0
FINDINGS_S = 60.0
LIMIT_S = 60.0
"""Longest time of a command; then it is killed."""
MOST_AT_ONCE = 4
MOST_WAITING = 256
CLAIMS, LOCK_FILE = "told", "teller.lock"


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    name: str
    until_s: float


class EventCommands:
    """Starts the command for each event, a few at a time."""

    def __init__(self, directory: Path, info: RunInfo, command: list[str]) -> None:
        self._claims = directory / CLAIMS
        self._directory = directory
        self._info = info
        self._command = command
        self._waiting: deque[Happened] = deque(maxlen=MOST_WAITING)
        self._known: set[tuple[str, str]] = set()
        self._running: list[_Running] = []
        self._failed = False

    def tell(self, event: Happened) -> None:
        """Tell an event, unless it was told before."""
        key = (event.type, event.key)
        if key not in self._known:
            self._known.add(key)
            self._waiting.append(event)

    @property
    def busy(self) -> bool:
        """Whether events wait or commands run."""
        return bool(self._waiting or self._running)

    def look(self) -> None:
        """Start waiting events, and end commands that take too long. Never waits."""
        now = time.monotonic()
        for one in list(self._running):
            status = one.process.poll()
            if status is None and now < one.until_s:
                continue
            self._running.remove(one)
            if status is None:
                with contextlib.suppress(OSError):
                    os.killpg(one.process.pid, 9)
                one.process.wait()
                self._complain(f"it was killed after {LIMIT_S:.0f} s ({one.name})")
            elif status:
                self._complain(f"it ended with status {status} ({one.name})")
        while self._waiting and len(self._running) < MOST_AT_ONCE:
            self._start(self._waiting.popleft(), now)

    def _start(self, event: Happened, now: float) -> None:
        identity = f"{self._info.id}/{event.type}/{event.key}".rstrip("/")
        try:
            claim = self._claim(identity)
        except FileExistsError:
            return
        except OSError as error:
            self._complain(f"the event {event.type} cannot be claimed: {error.strerror or error}")
            return
        try:
            with tempfile.TemporaryFile() as body:
                body.write(json_text(envelope(event, identity, self._info)).encode() + b"\n")
                body.seek(0)
                process = subprocess.Popen(
                    self._command,
                    stdin=body,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=self._info.cwd if os.path.isdir(self._info.cwd) else "/",
                    start_new_session=True,
                    pass_fds=(claim,),
                )
            self._running.append(_Running(process, event.type, now + LIMIT_S))
        except OSError as error:
            self._complain(f"it cannot be started: {error.strerror or error}")
        finally:
            os.close(claim)

    def _claim(self, identity: str) -> int:
        """Create the file that claims an event; FileExistsError if it was claimed before."""
        with contextlib.suppress(FileExistsError):
            self._claims.mkdir(0o700)
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        fd = open_file(self._claims / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, f"{identity}\n".encode())
        return fd

    def _complain(self, text: str) -> None:
        """Warn once: a command that fails once mostly fails always."""
        if not self._failed:
            self._failed = True
            add_warning(self._directory, f"the event command {self._command[0]}: {text}")


def envelope(event: Happened, identity: str, info: RunInfo) -> dict[str, object]:
    """An event in the form of CloudEvents 1.0 (https://github.com/cloudevents/spec)."""
    return {
        "specversion": "1.0",
        "id": identity,
        "source": f"/dpmon/{info.host or proc.host()}",
        "type": event.type,
        "subject": info.id,
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {"run": info.id, "name": info.name, "script": info.script, **event.data},
    }


def main(directory_text: str, _: str) -> None:
    """Tell the events of a run until its end. Ends at once if another process does."""
    directory = Path(directory_text)
    info = load_info(directory)
    command = [str(word) for word in info.options.get("on_event") or ()]
    alive = info.options.get("alive_minutes")
    lock = open_file(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):
        os.nice(5)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    if not command:
        return
    commands = EventCommands(directory, info, command)
    watch, snapshots = Happenings(60.0 * alive if alive else None), Snapshots()
    findings_at = FINDINGS_S
    with closing(RunReader(directory)) as reader:
        while True:
            began = time.monotonic()
            state = State()
            found = None
            elapsed = (time.monotonic_ns() - info.start_ns) / 1e9
            with contextlib.suppress(HistoryError, RunError), open_store(directory) as store:
                state = snapshots.take(store, Wanted(), ended_of(reader.activities()))
                if elapsed >= findings_at:
                    findings_at = elapsed + FINDINGS_S
                    facts = facts_of(store, directory, None)
                    facts.complete()
                    found = findings(facts)
            now = health(directory, reader.refresh(), reader, state)
            for event in watch.look(state, now, elapsed, found):
                commands.tell(event._replace(data={**event.data, "health": now.fields()}))
            commands.look()
            over = now.end is not None and run_state(directory, info)[1] is not None
            while over and commands.busy:
                time.sleep(0.05)
                commands.look()
            if over:
                return
            time.sleep(max(EVERY_S - (time.monotonic() - began), 0.1))

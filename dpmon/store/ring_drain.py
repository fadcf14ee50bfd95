"""Moves the records of the training processes, and those of the supervisor itself, into the history."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, RecordError
from dpmon.record.schema import SECOND
from dpmon.run.proc import is_alive
from dpmon.run.run_directory import RunInfo, ring_paths
from dpmon.span_ring import RingError
from dpmon.store.history_schema import RingRow
from dpmon.store.history_writer import LIMIT_BYTES, HistoryWriter
from dpmon.store.process_accounts import ProcessAccounts
from dpmon.store.query_results import event_from_row
from dpmon.store.ring_intake import RingIntake
from dpmon.store.span_source import SpanSource
from dpmon.store.write_batch import WriteBatch

COMMIT_S = 0.5
"""Time between two commits while records arrive: each packs the tallies of its second again."""
MANY_RINGS = 16
"""With more rings than this, there is one commit per second of the run, so that each tally is written once."""
TAKE_S = 0.2
"""Seconds between two reads with more than MANY_RINGS rings, unless one fills faster than it is read."""
_AFTER_S = 0.1
"""With more than MANY_RINGS rings, a commit waits this long after the end of a second for its records."""
FIND_S = 0.2
"""Time between two searches for new rings."""
GONE_S = 1.0
"""Time between two checks that a process is alive."""
COMMIT_ROWS = 1 << 12
"""Commit at this many rows: fewer than a ring holds, so that a kill loses nothing."""
HOLD_BYTES = 32 << 20
"""Most memory (approximate) for records while the history cannot be written; newer records stay in the rings."""
_ROW_BYTES = 1024
"""Approximate memory of a row, or of the sums of one second."""
MAX_OWN = 4096
"""Most records of the supervisor that wait for the history. Further ones are counted as missed."""
RETRY_S = 5.0
WARN_AGAIN_S = 300.0
"""Shortest time between two warnings about failures: writes to a full disk may succeed and fail in turn."""
_AWAITED = ("mode", "pause", "warning", "stall")
"""Events that a user waits for; they are committed at once."""
_OWN = "supervisor"
"""Name of the supervisor's row among the rings. It has no ring: the row counts its missed records."""


class RingDrain:
    """All rings of one run, and the records taken from them since the last write."""

    def __init__(
        self,
        directory: Path,
        info: RunInfo,
        limit_bytes: int = LIMIT_BYTES,
        history: HistoryWriter | None = None,
    ) -> None:
        """`history`: the history to write; None: the history in the run's directory, limited to `limit_bytes`."""
        self._directory = directory
        self._info = info
        self._in_memory = history is not None
        self._limit_bytes = limit_bytes
        self._history: HistoryWriter | None = None
        self._kept: dict[str, RingRow] = {}
        """The rows of the rings in the history."""
        self._sources: dict[str, tuple[SpanSource, RingIntake]] = {}
        self._refused: set[str] = set()
        """Rings that could not be read at the last try."""
        self._own: deque[Event] = deque()
        """Records of the supervisor that are not in the batch yet."""
        self._own_missed = 0
        """Number of records of this supervisor that were dropped."""
        self._batch = WriteBatch()
        self._accounts = ProcessAccounts()
        self._next_id = 1
        self._gone: Collection[str] = ()
        """The rings with processes that were gone at the last check."""
        self._find_at = self._refused_at = 0.0
        self._look_at = 0.0
        self._take_at = 0.0
        self._commit_at = 0.0
        self._retry_at = 0.0
        self.failure: Exception | None = None
        """Why the history cannot be written now; None if it can."""
        self._silent_until = 0.0
        self._told_damage = False
        self.on_memory_event: Callable[[Mapping[str, Any], int], None] = lambda data, pid: None
        """Called with the data and the process id of each `memory` event of a training process. It names the GPUs."""
        if history is not None:
            self._resume_history(history)

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the supervisor, from any thread. `t_s` (s since the run's start) is added if missing."""
        if "t_s" not in data:
            data = {"t_s": (time.monotonic_ns() - self._info.start_ns) / 1e9, **data}
        if len(self._own) < MAX_OWN:
            self._own.append(Event(kind, data))
        else:
            self._own_missed += 1

    def warn(self, text: str, process: int | None = None) -> None:
        """Record a warning, perhaps of a process. A reader, which only adds to its copy of a history, records none."""
        if not self._in_memory:
            self.emit("warning", {"process": process, "text": text})

    def poll(self, now: float) -> bool:
        """Take new records, and write if a commit is due. Return whether more records are ready. `now`: monotonic s."""
        if self._history is None and not self._open(now):
            return False
        more = False
        if self._has_room():
            if now >= self._find_at:
                self._find_at = now + FIND_S
                self._find_rings(now)
            if now >= min(self._take_at, self._commit_at):
                more = self._read_rings(now)
                self._take_at = now + TAKE_S if len(self._sources) > MANY_RINGS and not more else now
            self._read_own_records()
        if now >= self._commit_at or self._batch.rows >= COMMIT_ROWS:
            self._write(now)
        return more and self._has_room()

    def _has_room(self) -> bool:
        batch = self._batch
        return batch.characters + _ROW_BYTES * (batch.rows + len(batch.steps_by_tally)) < HOLD_BYTES

    def flush(self, over: bool = False, last: bool = False) -> None:
        """Take and write all records in the rings, in a limited number of reads.

        `over`: the command has ended; include the last records of processes that ended with it. `last`: no supervisor
        continues this history; include the open steps of processes that outlive the command.
        """
        now = time.monotonic()
        self._find_at = self._refused_at = self._look_at = self._take_at = self._retry_at = 0.0
        for _ in range(64):
            if not self.poll(now):
                break
        if self._history is None:
            return
        self._look_at = 0.0  # a process may have ended a moment ago
        if last:
            self._gone, self._look_at = self._sources.keys(), math.inf
        for _ in range(64 * over):
            if not self._has_room() or not self._read_rings(now):
                break
        self._write(now)

    def warnings_kept(self) -> list[str]:
        """Return the texts of the supervisor's warnings in the history."""
        return [str(data.get("text")) for data in self._events("kind = 'warning' AND process IS NULL")]

    def last_sample_ns(self) -> int | None:
        """Return the time of the last device sample in the history (ns since the run's start) or None."""
        newest = self._rows("SELECT CAST(max(t_ns) AS INTEGER) FROM events WHERE kind IN ('host', 'device')")
        return next((at for (at,) in newest), None)

    def newest_ns(self) -> int:
        """Return the end of the newest device sample or step in the history (ns since the run's start); 0: none."""
        newest = self._rows("SELECT start_ns + wall_ns FROM steps ORDER BY id DESC LIMIT 999")
        return max(self.last_sample_ns() or 0, *(int(end) for (end,) in newest), 0)

    def last_steps(self) -> dict[int, int | None]:
        """Return the number of the last step of each process."""
        return {source.row.process: source.row.last_step for source, _ in self._sources.values()}

    def gpus(self) -> list[Mapping[str, Any]]:
        """Return the newest sample of each GPU."""
        found: dict[Any, Mapping[str, Any]] = {}
        for data in self._events("kind = 'device' ORDER BY id DESC LIMIT 64"):
            found.setdefault(data.get("index"), data)
        return list(found.values())

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the last record of a stall."""
        return None if self._history is None else self._history.last_stall()

    def has_exit_record(self) -> bool:
        """Return whether the history has the end of the command."""
        return bool(self._rows("SELECT 1 FROM events WHERE kind = 'exit' LIMIT 1"))

    def _events(self, which: str) -> Iterator[Mapping[str, Any]]:
        """Yield the data of some events, up to the first damaged one."""
        with suppress(HistoryError):
            for row in self._rows(f"SELECT json FROM events WHERE {which}"):
                yield event_from_row(row).data

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if the history cannot be read."""
        with suppress(HistoryError):
            return [] if self._history is None else self._history.rows(query)
        return []

    def close(self) -> None:
        """Close history and rings; `flush` first."""
        if self._history is not None:
            self._history.close()
            self._history = None
        for source, _ in self._sources.values():
            source.close()

    # ------------------------------------------------------------------------------------------ rings

    def _find_rings(self, now: float) -> None:
        known = {*self._sources}
        if now < self._refused_at:
            known |= self._refused
        else:  # an incomplete ring may be complete now: its writer was stopped, or its disk is slow
            self._refused_at = now + RETRY_S
        for path in ring_paths(self._directory, known):
            kept = self._kept.get(path.name)
            try:
                source = SpanSource(path, kept)
            except (RingError, OSError) as error:
                # A new ring may be incomplete: its header follows a moment later.
                if path.name not in self._refused and time.time() - _modified(path) > RETRY_S:
                    self._refused.add(path.name)
                    self.warn(f"{path.name} cannot be read: {error}", int(path.stem.rpartition("-")[2]))
                continue
            intake = RingIntake(source.row, self._info.start_ns, self._accounts)
            self._sources[path.name] = source, intake
            self._look_at = 0.0
            if source.resumes and self._history is not None:
                with suppress(HistoryError):  # damaged; new records can still be recorded
                    intake.resume(self._history)

    def _read_rings(self, now: float) -> bool:
        """Take the new rows of all rings; return whether a ring filled faster than it was read."""
        if now >= self._look_at:
            self._look_at = now + GONE_S
            there = ((name, source) for name, (source, _) in self._sources.items() if not source.over)
            self._gone = {name for name, source in there if not is_alive(source.row.pid, None)}
        more = False
        for name, (source, intake) in self._sources.items():
            more = self._read_ring(source, intake, now, name in self._gone) or more
        return more

    def _read_ring(self, source: SpanSource, intake: RingIntake, now: float, gone: bool) -> bool:
        """Take the new rows of one ring; return whether it filled faster than it was read."""
        over = source.over
        try:
            rows, more = source.read_rows(int(now * 1e9), gone)
        except (RingError, OSError):
            return False
        for row in rows:
            if not self._add_row(intake, row):
                source.unreadable += 1
            if isinstance(row, Event) and row.kind == "memory":
                self.on_memory_event(row.data, source.row.pid)
        if source.over and not over:
            intake.finish_process(self._batch)
        return more

    def _read_own_records(self) -> None:
        """Take the supervisor's own records."""
        if not self._own:
            return
        row = RingRow(_OWN, -1, None, os.getpid())
        intake = RingIntake(row, self._info.start_ns, self._accounts)
        while self._own:
            if not self._add_row(intake, self._own.popleft()):
                self._own_missed += 1

    def _add_row(self, intake: RingIntake, row: Row) -> bool:
        """Put a row into the batch; return False if it is damaged."""
        try:
            if intake.add(self._batch, self._next_id, row):
                self._next_id += 1
        except RecordError:
            return False
        if isinstance(row, Event) and row.kind in _AWAITED:
            self._commit_at = 0.0
        return True

    # ------------------------------------------------------------------------------------------ history

    def _open(self, now: float) -> bool:
        if now < self._retry_at:
            return False
        meta = {"run": self._info.id, "start_ns": self._info.start_ns}
        try:
            history = HistoryWriter.open(self._directory, meta, self._limit_bytes)
            try:
                self._resume_history(history)
            except HistoryError:
                history.close()
                raise
        except (HistoryError, OSError) as error:
            self._handle_write_error(now, error)
            return False
        self._commit_at = now
        return True

    def _resume_history(self, history: HistoryWriter) -> None:
        """Write into a history that another supervisor may have begun."""
        self._accounts = ProcessAccounts()
        self._accounts.resume(history)
        self._kept = history.rings()
        self._next_id = history.next_id
        self._history = history

    def _write(self, now: float) -> None:
        if self._history is None or now < self._retry_at:
            return
        self._commit_at = self._next_commit(now)
        for source, _ in self._sources.values():
            source.update_position()
        rows = [source.row for source, _ in self._sources.values()]
        self._batch.rings = [row for row in rows if self._kept.get(row.name) != row]
        if self._own_missed:
            before = self._kept.get(_OWN)
            missed = self._own_missed + (0 if before is None else before.missed)
            self._batch.rings.append(RingRow(_OWN, -1, None, os.getpid(), missed=missed))
        if not (self._batch.rings or self._batch.events):
            return
        self._batch.now_s = (time.monotonic_ns() - self._info.start_ns) // SECOND
        try:
            self._history.write(self._batch)
        except HistoryError as error:
            self._handle_write_error(now, error)
            return
        self._kept.update((row.name, replace(row)) for row in self._batch.rings)
        self._batch = WriteBatch()
        self._own_missed = 0
        self.failure = None
        if self._history.damage is not None and not self._told_damage:
            self._told_damage = True
            self.warn(f"the history is damaged ({self._history.damage}); some of its sums leave out earlier steps")

    def _next_commit(self, now: float) -> float:
        if len(self._sources) <= MANY_RINGS:
            return now + COMMIT_S
        late = (now - self._info.start_ns / 1e9 - _AFTER_S) % 1.0
        return now - late + 1.0

    def _handle_write_error(self, now: float, error: Exception) -> None:
        """Warn once that the history cannot be written, and try again later; the run continues without it."""
        self._retry_at = now + RETRY_S
        if self.failure is None and now >= self._silent_until:
            self._silent_until = now + WARN_AGAIN_S
            self.warn(f"the history cannot be written ({error}); the run continues, but older records may be lost")
        self.failure = error


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0

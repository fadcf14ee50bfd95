"""Moves the records of the training processes, and those of the supervisor, into the history."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.run.proc import is_alive
from dpmon.run.run_directory import RunInfo, ring_paths
from dpmon.span_ring import RingError
from dpmon.store.database import DAMAGE
from dpmon.store.events import last_sample_ns, read_events
from dpmon.store.history_writer import LIMIT_BYTES, HistoryWriter, WriteBatch
from dpmon.store.memory_growth import MemoryTrend, read_memory_trends
from dpmon.store.process_accounts import ProcessAccounts
from dpmon.store.records import newest_record_ns
from dpmon.store.ring_intake import RingIntake
from dpmon.store.rings import RINGS, RingRow, read_rings
from dpmon.store.span_source import SpanSource
from dpmon.store.store_queries import Store

COMMIT_S = 0.5
"""Time between two commits while records arrive. Each commit packs the tallies of its second again."""
MANY_RINGS = 16
"""With more rings than this, there is one commit per second of the run, so that each tally is written only once."""
TAKE_S = 0.2
"""Seconds between two reads with more than MANY_RINGS rings, unless one fills faster than it is read."""
_AFTER_S = 0.1
"""With more than MANY_RINGS rings, a commit waits this long after the end of a second for its records."""
FIND_S = 0.2
"""Time between two searches for new rings."""
GONE_S = 1.0
"""Time between two checks that a process is alive."""
COMMIT_ROWS = 1 << 12
"""Commit at this many rows, which are fewer than a ring holds, so that a kill loses nothing."""
HOLD_ROWS = 1 << 14
"""Most rows in memory, about 30 MB, while the history cannot be written. Newer records stay in the rings."""
MAX_OWN = 4096
"""How many records of the supervisor may wait for the history. Further ones are counted as missed."""
RETRY_S = 5.0
_AWAITED = ("mode", "pause", "warning", "stall", "profile")
"""Events that a user waits for. They are committed at once."""
_OWN = "supervisor"
"""Name of the supervisor's row among the rings. It has no ring: the row counts its missed records."""


class RingDrain:
    """Reads all rings of one run, and writes their records into the history."""

    def __init__(self, directory: Path, run_info: RunInfo, limit_bytes: int = LIMIT_BYTES) -> None:
        """`limit_bytes`: size limit of the history."""
        self._directory = directory
        self._run_info = run_info
        self._limit_bytes = limit_bytes
        self._history: HistoryWriter | None = None
        self._stored_rows: dict[str, RingRow] = {}
        """The rows of the rings in the history."""
        self._sources: dict[str, tuple[SpanSource, RingIntake]] = {}
        self._reported: set[str] = set()
        """Names of the rings with a warning that they cannot be read, or are damaged."""
        self._own: deque[Event] = deque()
        """Records of the supervisor that are not in the batch yet."""
        self._own_missed = 0
        """Number of records of this supervisor that were dropped."""
        self._batch = WriteBatch(run_info.origin_s)
        self._accounts = ProcessAccounts()
        self._next_id = 1
        self._exited: Collection[str] = ()
        """Names of the rings whose processes had exited at the last check."""
        self._find_at_s = 0.0
        self._check_at_s = 0.0
        self._read_at_s = 0.0
        self._commit_at_s = 0.0
        self._retry_at_s = 0.0
        self.failure: Exception | None = None
        """Why the history cannot be written now; None if it can."""
        self._has_warned = False
        self.on_memory_event: Callable[[Mapping[str, Any], int], None] = lambda data, pid: None
        """Called with the data and the process id of each `memory` event of a training process. It names the GPUs."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the supervisor, from any thread. `t_s` (s since the run's start) is added if missing."""
        if "t_s" not in data:
            data = {"t_s": (time.monotonic_ns() - self._run_info.start_ns) / 1e9, **data}
        if len(self._own) < MAX_OWN:
            self._own.append(Event(kind, data))
        else:
            self._own_missed += 1

    def warn(self, text: str, process: int | None = None) -> None:
        """Record a warning, perhaps about a process."""
        self.emit("warning", {"process": process, "text": text})

    def poll(self, now_s: float) -> bool:
        """Read new records, and write if a commit is due. Return whether more records are ready. `now_s`: monotonic."""
        if self._history is None and not self._open(now_s):
            return False
        has_more = False
        if self._has_room():
            if now_s >= self._find_at_s:
                self._find_at_s = now_s + FIND_S
                self._find_rings()
            if now_s >= min(self._read_at_s, self._commit_at_s):
                has_more = self._read_rings(now_s)
                self._read_at_s = now_s + TAKE_S if len(self._sources) > MANY_RINGS and not has_more else now_s
            self._read_own_records()
        if now_s >= self._commit_at_s or self._batch.row_count >= COMMIT_ROWS:
            self._write(now_s)
        return has_more and self._has_room()

    def _has_room(self) -> bool:
        return self._batch.row_count < HOLD_ROWS

    def flush(self, command_ended: bool = False) -> None:
        """Read and write all records in the rings, in a limited number of reads.

        `command_ended`: also the open steps. What processes that outlive the command record later is given up.
        """
        now_s = time.monotonic()
        self._find_at_s = self._check_at_s = self._read_at_s = self._retry_at_s = 0.0
        for _ in range(64):
            if not self.poll(now_s):
                break
        if self._history is None:
            return
        if command_ended:
            self._exited, self._check_at_s = self._sources.keys(), math.inf
        for _ in range(64 * command_ended):
            if not self._has_room() or not self._read_rings(now_s):
                break
        self._write(now_s)
        if command_ended:
            with suppress(HistoryError):  # the write before it has warned
                self._history.merge_last_buckets()

    def last_sample_ns(self) -> int | None:
        """Return the time of the last device sample in the history (ns since the run's start); None if none."""
        with suppress(HistoryError):
            return None if self._history is None else last_sample_ns(self._history.connection)
        return None

    def newest_ns(self) -> int:
        """Return the time of the newest event or step in the history (ns since the run's start); 0 if none."""
        with suppress(HistoryError):
            return 0 if self._history is None else newest_record_ns(Store(self._history.connection))
        return 0

    def last_steps(self) -> dict[int, int | None]:
        """Return the number of each process's last step; None if it has none."""
        return {source.row.process: source.row.last_step for source, _ in self._sources.values()}

    def gpus(self) -> list[Mapping[str, Any]]:
        """Return the newest sample of each GPU."""
        return list({data.get("index"): data for data in self.recorded_events("device", limit=64)}.values())

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the last `stall` event; None if there is none."""
        return next(iter(self.recorded_events("stall", limit=1)), None)

    def memory_trends(self) -> list[MemoryTrend]:
        """Return the trend of the run's memory on the host and on each GPU; none if the history cannot be read."""
        with suppress(HistoryError):
            if self._history is not None:
                return read_memory_trends(Store(self._history.connection))
        return []

    def recorded_events(self, kind: str, limit: int = -1) -> list[Mapping[str, Any]]:
        """Return the data of the newest events of a kind, in order; none if the history cannot be read."""
        with suppress(HistoryError):
            if self._history is not None:
                return [event.data for event in read_events(Store(self._history.connection), kind, limit=limit)]
        return []

    def close(self) -> None:
        """Close the history and the rings. Call `flush` first."""
        if self._history is not None:
            self._history.close()
            self._history = None
        for source, _ in self._sources.values():
            source.close()

    # ------------------------------------------------------------------------------------------ rings

    def _find_rings(self) -> None:
        for path in ring_paths(self._directory, {*self._sources}):
            stored_row = self._stored_rows.get(path.name)
            try:
                source = SpanSource(path, stored_row)
            except (RingError, OSError) as error:
                # A new ring may be incomplete: its header follows a moment later, or later if its disk is slow.
                if time.time() - _modified(path) > RETRY_S:
                    self._warn_once(path.name, f"cannot be read: {error}", int(path.stem.rpartition("-")[2]))
                continue
            intake = RingIntake(source.row, self._run_info.start_ns, self._accounts)
            self._sources[path.name] = source, intake
            self._check_at_s = 0.0
            if self._history is not None:
                with suppress(HistoryError):  # the next write fails too, and warns
                    intake.resume(self._history.connection)

    def _read_rings(self, now_s: float) -> bool:
        """Read the new rows of all rings. Return whether a ring filled faster than it was read."""
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + GONE_S
            rows = {name: source.row for name, (source, _) in self._sources.items() if not source.over}
            self._exited = {name for name, row in rows.items() if not is_alive(row.pid, None)}
        has_more = False
        for name, (source, intake) in self._sources.items():
            has_more = self._read_ring(source, intake, now_s, name in self._exited) or has_more
        return has_more

    def _read_ring(self, source: SpanSource, intake: RingIntake, now_s: float, process_exited: bool) -> bool:
        """Read the new rows of one ring. Return whether it filled faster than it was read."""
        try:
            rows, has_more = source.read_rows(int(now_s * 1e9), process_exited)
            for row in rows:
                self._add_row(intake, row)
                if isinstance(row, Event) and row.kind == "memory":
                    self.on_memory_event(row.data, source.row.pid)
        except (RingError, OSError):
            return False
        except DAMAGE as error:
            trouble = f"is damaged ({error!r}); records are missing"
            self._warn_once(source.row.name, trouble, source.row.process)
            return False
        return has_more

    def _warn_once(self, ring_name: str, trouble: str, process: int) -> None:
        """Record a warning about a ring, if there is none yet."""
        if ring_name not in self._reported:
            self._reported.add(ring_name)
            self.warn(f"{ring_name} {trouble}", process)

    def _read_own_records(self) -> None:
        """Add the supervisor's own records to the batch."""
        if not self._own:
            return
        row = RingRow(_OWN, -1, None, os.getpid())
        intake = RingIntake(row, self._run_info.start_ns, self._accounts)
        while self._own:
            self._add_row(intake, self._own.popleft())

    def _add_row(self, intake: RingIntake, row: Row) -> None:
        """Add a row to the batch."""
        if intake.add(self._batch, self._next_id, row):
            self._next_id += 1
        if isinstance(row, Event) and row.kind in _AWAITED:
            self._commit_at_s = 0.0

    # ------------------------------------------------------------------------------------------ history

    def _open(self, now_s: float) -> bool:
        if now_s < self._retry_at_s:
            return False
        meta = {"run": self._run_info.id, "origin_s": self._run_info.origin_s}
        try:
            history = HistoryWriter.open(self._directory, meta, self._limit_bytes)
            try:
                self._resume_history(history)
            except BaseException:
                history.close()
                raise
        except (HistoryError, OSError, *DAMAGE) as error:
            self._handle_write_error(now_s, error)
            return False
        self._history = history
        self._commit_at_s = now_s
        return True

    def _resume_history(self, history: HistoryWriter) -> None:
        """Continue a history that an earlier supervisor may have started."""
        self._accounts = ProcessAccounts()
        self._accounts.resume(history.connection)
        self._stored_rows = read_rings(history.connection)
        self._next_id = history.next_id

    def _write(self, now_s: float) -> None:
        if self._history is None or now_s < self._retry_at_s:
            return
        self._commit_at_s = self._next_commit(now_s)
        for source, _ in self._sources.values():
            source.update_position()
        rows = [source.row for source, _ in self._sources.values()]
        rings = [row for row in rows if self._stored_rows.get(row.name) != row]
        if self._own_missed:
            stored_row = self._stored_rows.get(_OWN)
            missed = self._own_missed + (0 if stored_row is None else stored_row.missed)
            rings.append(RingRow(_OWN, -1, None, os.getpid(), missed=missed))
        self._batch.rows[RINGS] = rings
        if not self._batch.row_count:
            return
        try:
            self._history.write(self._batch)
        except HistoryError as error:
            self._handle_write_error(now_s, error)
            return
        self._stored_rows.update((row.name, replace(row)) for row in rings)
        self._batch = WriteBatch(self._run_info.origin_s)
        self._own_missed = 0
        self.failure = None

    def _next_commit(self, now_s: float) -> float:
        if len(self._sources) <= MANY_RINGS:
            return now_s + COMMIT_S
        overdue_s = (now_s - self._run_info.start_ns / 1e9 - _AFTER_S) % 1.0
        return now_s - overdue_s + 1.0

    def _handle_write_error(self, now_s: float, error: Exception) -> None:
        """Warn once that the history cannot be written, and try again later; the run continues without it."""
        self._retry_at_s = now_s + RETRY_S
        if not self._has_warned:  # on a full disk, writes may succeed and fail in turn
            self._has_warned = True
            self.warn(f"the history cannot be written ({error}); the run continues, but older records may be lost")
        self.failure = error


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0

"""Moves the records from the rings into the history."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dpmon.record.kinds import RecordError
from dpmon.record.wire import pack_event
from dpmon.ring_file import RingError
from dpmon.run.files import remove_file
from dpmon.run.proc import alive
from dpmon.run.rundir import RunInfo, ring_paths
from dpmon.store.accounts import Accounts
from dpmon.store.batch import Batch
from dpmon.store.intake import Intake
from dpmon.store.resume import resume_accounts, resume_intake, resume_rounds
from dpmon.store.sources import FrameSource, open_source
from dpmon.store.tables import HistoryError, RingRow
from dpmon.store.writer import LIMIT_BYTES, History

COMMIT_S = 0.2
"""Time between two commits while records arrive."""
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
COMMIT_BYTES = 1 << 19
"""Commit at this many bytes: fewer than a large ring holds, so that a kill loses nothing."""
HOLD_BYTES = 32 << 20
"""Most memory (approximate) for records while the history cannot be written; newer records stay in the rings."""
_RECORD_BYTES = 1024
"""Approximate memory of a decoded record without its payload."""
_SECOND_BYTES = 1024
"""Approximate memory of the sums of one second."""
RETRY_S = 5.0
WARN_AGAIN_S = 300.0
"""Shortest time between two warnings about failures: writes to a full disk may succeed and fail in turn."""
_MEMORY = pack_event("memory", {})[:-1]
"""First bytes of a memory event."""
_EXIT = pack_event("exit", {})[:-1]
_MOST_PUT_OFF = 32
_AWAITED = tuple(pack_event(kind, {})[:-1] for kind in ("mode", "pause", "warning"))
"""First bytes of events that a user waits for; they are committed at once."""


class _RingIntake:
    """A ring and the intake of its payloads."""

    def __init__(self, path: Path, row: RingRow | None, start_ns: int, accounts: Accounts) -> None:
        """Continue where `row` left off. Raises RingError or OSError."""
        self.ring = open_source(path, row)
        self.resumes = row is not None and row.pid == self.ring.pid
        """Whether the history already has records of this ring."""
        if row is None or not self.resumes:
            missed = 0 if row is None else row.missed + row.lost
            row = RingRow(path.name, self.ring.process, self.ring.rank, self.ring.pid, missed=missed)
        self.row = row
        self.intake = Intake(self.row, start_ns, accounts)
        self._missed_before = self.row.missed
        self.unreadable = 0
        self.gone = False
        """Whether its process was gone at the last check."""
        self.look_at = 0.0
        self.counted = self.ring.over
        """Whether all its calls are counted, even those outside steps."""
        self.put_off = 0
        """Number of times that the exit event was read. It is put back while other rings have unread records."""

    def note(self) -> None:
        """Update the row to the position that has been read."""
        self.row.missed = self._missed_before + self.ring.note(self.row) + self.unreadable

    def look(self, now: float) -> None:
        """Check from time to time whether its process is gone."""
        if now >= self.look_at and self.row.process >= 0 and not self.ring.over:
            self.look_at = now + GONE_S
            self.gone = not alive(self.ring.pid, None)


class Drain:
    """All rings of one run, and the records taken from them since the last write."""

    def __init__(
        self,
        directory: Path,
        info: RunInfo,
        warn: Callable[[str], None],
        limit_bytes: int = LIMIT_BYTES,
        history: History | None = None,
    ) -> None:
        """`history`: the history to write; None: the history in the run's directory, limited to `limit_bytes`."""
        self._directory = directory
        self._info = info
        self._warn = warn
        self._limit_bytes = limit_bytes
        self._history: History | None = None
        self._kept: dict[str, RingRow] = {}
        """The rows of the rings in the history."""
        self._sources: dict[str, _RingIntake] = {}
        self._refused: set[str] = set()
        self._taken: list[tuple[_RingIntake, list[bytes]]] = []
        """Payloads that were read from rings and are not in the batch yet."""
        self._batch = Batch()
        self._accounts = Accounts()
        self._bytes = 0
        """Bytes of payloads and sums that are not written yet."""
        self._records = 0
        """Payloads that are not written yet."""
        self._next_id = 1
        self._find_at = 0.0
        self._take_at = 0.0
        self._commit_at = 0.0
        self._retry_at = 0.0
        self.failure: Exception | None = None
        """Why the history cannot be written now; None if it can."""
        self._silent_until = 0.0
        self.on_memory_event: Callable[[bytes, int], None] = lambda payload, pid: None
        """Called with payload and pid for each `memory` event of a training process; the event names its GPUs."""
        if history is not None:
            self._go_on_in(history)

    def drain(self, now: float) -> bool:
        """Take new records, and write if a commit is due. Return whether more records are ready. `now`: monotonic s."""
        if self._history is None and not self._open(now):
            return False
        more = False
        if self._has_room():
            if now >= self._find_at:
                self._find_at = now + FIND_S
                self._find_rings()
            if now >= min(self._take_at, self._commit_at):
                for source in self._sources.values():
                    more = self._take(source, now) or more
                self._take_at = now + TAKE_S if len(self._sources) > MANY_RINGS and not more else now
        if now >= self._commit_at or self._bytes >= COMMIT_BYTES:
            self._write(now)
        return more and self._has_room()

    def _has_room(self) -> bool:
        return self._bytes + _RECORD_BYTES * self._records < HOLD_BYTES

    def flush(self, over: bool = False, last: bool = False) -> None:
        """Take and write all records in the rings, in a limited number of reads.

        `over`: the command has ended; include the last records of processes that ended with it. `last`: no supervisor
        continues this history; include the open steps of processes that outlive the command.
        """
        now = time.monotonic()
        self._find_at = self._take_at = self._retry_at = 0.0
        for source in self._sources.values():
            source.look_at = 0.0
        for _ in range(64):
            if not self.drain(now):
                break
        if self._history is None:
            return
        for source in self._sources.values() if over else ():
            source.look_at = 0.0  # the process may have ended a moment ago
            if last:
                source.gone, source.look_at = True, math.inf
            for _ in range(64):
                if not self._has_room() or not self._take(source, now):
                    break
        self._write(now)

    def drop_samples(self, current: str) -> None:
        """Delete the sample rings of killed supervisors that are completely in the history; keep `current`."""
        for name, source in self._sources.items():
            kept = self._kept.get(name)
            if (
                source.row.process < 0
                and name != current
                and kept is not None
                and isinstance(source.ring, FrameSource)
                and source.ring.is_in(kept)
            ):
                with suppress(OSError):
                    remove_file(self._directory / name)

    def warnings_kept(self) -> list[str]:
        """Return the texts of the supervisor's warnings in the history."""
        return [] if self._history is None else self._history.warnings()

    def last_sample_ns(self) -> int | None:
        """Return the time of the last device sample in the history (ns since the run's start) or None."""
        return None if self._history is None else self._history.last_sample_ns()

    def close(self) -> None:
        """Close history and rings; `flush` first."""
        if self._history is not None:
            self._history.close()
            self._history = None
        for source in self._sources.values():
            source.ring.close()

    # ------------------------------------------------------------------------------------------ rings

    def _find_rings(self) -> None:
        for _, path in ring_paths(self._directory, self._sources.keys() | self._refused):
            kept = self._kept.get(path.name)
            try:
                source = _RingIntake(path, kept and replace(kept), self._info.start_ns, self._accounts)
            except (RingError, OSError) as error:
                # A new ring may be incomplete: its header follows a moment later.
                if time.time() - _modified(path) > RETRY_S:
                    self._refused.add(path.name)
                    self._warn(f"{path.name} cannot be read: {error}")
                continue
            self._sources[path.name] = source
            if source.resumes and self._history is not None:
                with suppress(HistoryError):  # damaged; new records can still be recorded
                    resume_intake(self._history, source.intake)

    def _take(self, source: _RingIntake, now: float) -> bool:
        """Take the payloads of one ring; return whether it filled faster than it was read."""
        source.look(now)
        ring = source.ring
        try:
            payloads, more = ring.take(int(now * 1e9), source.gone)
        except (RingError, OSError):
            return False
        if source.row.process < 0 and any(payload.startswith(_EXIT) for payload in payloads):
            # Write the records from before the exit first: other rings may still hold some.
            source.put_off += 1
            if source.put_off < _MOST_PUT_OFF and isinstance(ring, FrameSource) and self._others_have_more():
                ring.put_back()
                return True
        self._add(source, payloads)
        return more

    def _others_have_more(self) -> bool:
        for source in self._sources.values():
            with suppress(RingError, OSError):
                if source.row.process >= 0 and source.ring.has_more():
                    return True
        return False

    def _add(self, source: _RingIntake, payloads: list[bytes]) -> None:
        """Note payloads of a ring. Decoding them later, all together before the write, is cheaper."""
        self._taken.append((source, payloads))
        self._records += len(payloads)
        self._bytes += sum(map(len, payloads))
        for payload in payloads:
            if payload.startswith(_AWAITED):
                self._commit_at = 0.0
            elif payload.startswith(_MEMORY):
                self.on_memory_event(payload, source.ring.pid)

    def _fill_batch(self) -> None:
        """Put all taken payloads into the batch."""
        batch, before = self._batch, len(self._batch.tallied)
        for source, payloads in self._taken:
            add = source.intake.add
            for payload in payloads:
                try:
                    if add(batch, self._next_id, payload):
                        self._next_id += 1
                except RecordError:
                    source.unreadable += 1
        self._taken.clear()
        for source in self._sources.values():
            if source.ring.over and not source.counted:
                source.counted = True
                source.intake.flush(batch)
        self._bytes += _SECOND_BYTES * (len(batch.tallied) - before)

    # ------------------------------------------------------------------------------------------ history

    def _open(self, now: float) -> bool:
        if now < self._retry_at:
            return False
        meta = {"run": self._info.id, "start_ns": self._info.start_ns}
        try:
            history = History.open(self._directory, meta, self._limit_bytes)
            try:
                self._go_on_in(history)
            except HistoryError:
                history.close()
                raise
        except (HistoryError, OSError) as error:
            self._fail(now, error)
            return False
        self._commit_at = now
        return True

    def _go_on_in(self, history: History) -> None:
        """Write into a history that another supervisor may have begun."""
        self._accounts = Accounts()
        resume_accounts(history, self._accounts)
        self._batch.joined += resume_rounds(history, self._accounts)
        self._kept = history.rings()
        self._next_id = history.next_id
        self._history = history

    def _write(self, now: float) -> None:
        if self._history is None or now < self._retry_at:
            return
        self._commit_at = self._next_commit(now)
        self._fill_batch()
        for source in self._sources.values():
            source.note()
        self._batch.rings = [source.row for name, source in self._sources.items() if self._kept.get(name) != source.row]
        if not self._batch.rings:
            return
        try:
            self._history.write(self._batch)
        except HistoryError as error:
            self._fail(now, error)
            return
        self._kept.update((row.name, replace(row)) for row in self._batch.rings)
        self._batch = Batch()
        self._bytes = self._records = 0
        self.failure = None

    def _next_commit(self, now: float) -> float:
        if len(self._sources) <= MANY_RINGS:
            return now + COMMIT_S
        late = (now - self._info.start_ns / 1e9 - _AFTER_S) % 1.0
        return now - late + 1.0

    def _fail(self, now: float, error: Exception) -> None:
        """Warn once that the history cannot be written, and try again later; the run continues without it."""
        self._retry_at = now + RETRY_S
        if self.failure is None and now >= self._silent_until:
            self._silent_until = now + WARN_AGAIN_S
            self._warn(f"the history cannot be written ({error}); the run continues, but older records may be lost")
        self.failure = error


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0

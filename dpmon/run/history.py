"""What a run keeps for good: history.sqlite. One writer (the supervisor), any number of readers.

    meta         key, value: schema, run, start_ns, limit_bytes, pruned (rows deleted to stay below it)
    rings        one row a ring: how far it was read (position, sequence), what was missed, what was counted
    definitions  process, number, value (JSON): layouts and sizes that calls refer to
    calls        id, process, call, step, mode, start_ns, wall_ns, rows, payload (as in the ring: dpmon.records)
    steps        id, process, step, mode, start_ns, wall_ns, samples, data_ns ... other_ns (NULL: did not run)
    events       id, process (NULL: the supervisor), kind, t_ns, json
    rollups      width (1 or 60 s), start_s, process, mode, steps, calls, samples, unknown (steps without samples),
                 last_step, low_ns, high_ns (of a step), step_ns, data_ns ... gather_ns (sums; NULL: did not run),
                 histogram (dpmon.run.rollup); what ended in that second or minute
    device_rollups  start_s (of a minute), device (index; -1: the host), name, count, total, low, high

What is older than there is room for is deleted: calls, steps and events first, but for a run's processes, modes,
warnings and exit; rollups are kept for ever, those of a second until they take a third of the room.

Times are ns since the run's start. Ids are drawn from one counter, so they give the order across the three
tables. A ring's position is written in the transaction that writes its records: whoever reads on from there misses
and repeats nothing. This file is the only user of sqlite3.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from dpmon.run.rollup import SERIES, WIDTHS, Gathered, Rollup

__all__ = ["HISTORY_FILE", "Batch", "History", "HistoryError", "Kept", "RingRow"]

HISTORY_FILE = "history.sqlite"
LIMIT_BYTES = 256 << 20
SCHEMA_VERSION = 2
_PRUNE_PART = 16
_LASTING = ("process", "mode", "exit", "warning", "pause")
"""Kinds of events that are never deleted: few, and what they say holds for all that follows."""
_PASSING = f"kind NOT IN ({','.join('?' * len(_LASTING))})"
_WARNINGS_KEPT = 10_000
_ROLLUPS_PART = 3
_ROW_BYTES = 150
"""What a row of rollups takes beside its histogram, roughly."""
_CACHED = 512

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rings (
    name TEXT PRIMARY KEY, process INTEGER, rank INTEGER, pid INTEGER, position INTEGER, sequence INTEGER,
    missed INTEGER, lost INTEGER, calls INTEGER, steps INTEGER, last_step INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS definitions (
    process INTEGER, number INTEGER, value TEXT, PRIMARY KEY (process, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY, process INTEGER, call INTEGER, step INTEGER, mode TEXT, start_ns INTEGER,
    wall_ns INTEGER, rows INTEGER, payload BLOB);
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY, process INTEGER, step INTEGER, mode TEXT, start_ns INTEGER, wall_ns INTEGER,
    samples INTEGER, data_ns INTEGER, forward_ns INTEGER, backward_ns INTEGER, optimizer_ns INTEGER,
    other_ns INTEGER);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, process INTEGER, kind TEXT, t_ns INTEGER, json TEXT);
CREATE TABLE IF NOT EXISTS rollups (
    width INTEGER, start_s INTEGER, process INTEGER, mode TEXT, steps INTEGER, calls INTEGER, samples INTEGER,
    unknown INTEGER, last_step INTEGER, low_ns INTEGER, high_ns INTEGER,
    {sums}, histogram BLOB,
    PRIMARY KEY (width, start_s, process, mode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS device_rollups (
    start_s INTEGER, device INTEGER, name TEXT, count INTEGER, total REAL, low REAL, high REAL,
    PRIMARY KEY (start_s, device, name)) WITHOUT ROWID;
""".format(sums=", ".join(f"{name}_ns INTEGER" for name in SERIES))
_ADD_DEVICE = """\
INSERT INTO device_rollups VALUES (?,?,?,?,?,?,?) ON CONFLICT (start_s, device, name) DO UPDATE SET
    count = count + excluded.count, total = total + excluded.total, low = min(low, excluded.low),
    high = max(high, excluded.high)"""


class HistoryError(Exception):
    """The history cannot be written or read: no room, damaged, not ours."""


@dataclass
class RingRow:
    """How far one ring has been taken over, as in the table `rings`."""

    name: str
    process: int
    rank: int | None
    pid: int
    position: int = 0
    sequence: int = 0
    missed: int = 0
    """Records that were overwritten before they were read, were damaged or could not be kept."""
    lost: int = 0
    """Records that the writer could not write."""
    calls: int = 0
    steps: int = 0
    last_step: int | None = None


@dataclass
class Batch:
    """Rows that are written together."""

    definitions: list[tuple[int, int, str]] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    rings: list[RingRow] = field(default_factory=list)
    rollups: dict[tuple[int, int, str], Gathered] = field(default_factory=dict)
    """By second, process and mode; only what this batch adds."""
    devices: dict[tuple[int, int, str], list[float]] = field(default_factory=dict)
    """Count, total, lowest and highest by minute (its first second), device and name."""

    def rollup(self, end_ns: int, process: int, mode: str) -> Gathered:
        """Where to add what ended at `end_ns`."""
        key = end_ns // 1_000_000_000, process, mode
        found = self.rollups.get(key)
        if found is None:
            found = self.rollups[key] = Gathered()
        return found

    def device(self, t_ns: int, device: int, name: str, value: float) -> None:
        """Add one value of a sample."""
        key = t_ns // 60_000_000_000 * 60, device, name
        found = self.devices.get(key)
        if found is None:
            self.devices[key] = [1, value, value, value]
        else:
            found[0] += 1
            found[1] += value
            found[2] = min(found[2], value)
            found[3] = max(found[3], value)


class History:
    """The writing end."""

    def __init__(self, directory: Path, meta: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES) -> None:
        """Open or make the history of the run in `directory`; raises HistoryError."""
        self._limit = limit_bytes
        self._cache: dict[tuple[int, int, int, str], Rollup] = {}
        """The rollups written last, as they stand in the database."""
        try:
            self._db = sqlite3.connect(
                directory / HISTORY_FILE, isolation_level=None, timeout=1.0, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise HistoryError(str(error)) from None
        try:
            self._prepare(meta)
        except sqlite3.Error as error:
            self._db.close()
            raise HistoryError(str(error)) from None

    def _prepare(self, meta: Mapping[str, Any]) -> None:
        run = self._db.execute
        run("PRAGMA journal_mode=WAL")
        # No fsync at all: a kill of this process loses nothing (the kernel holds the pages), a power cut ends
        # the training too; and a flush of a slow disk every few seconds is felt by a training that writes to it.
        run("PRAGMA synchronous=OFF")
        run("PRAGMA journal_size_limit=4194304")
        run("PRAGMA cache_size=-2000")
        self._db.executescript(_SCHEMA)
        rows = {"schema": SCHEMA_VERSION, "limit_bytes": self._limit, "pruned": 0, **meta}
        self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", rows.items())
        self._page_bytes: int = run("PRAGMA page_size").fetchone()[0]
        self.next_id: int = 1 + max(_last_ids(self._db))

    def rings(self) -> dict[str, RingRow]:
        """How far each ring was taken over by whoever wrote this history before."""
        return _rings(self._db)

    def definitions(self, process: int) -> list[tuple[int, Any]]:
        """Number and value of every definition of one process."""
        return list(_definitions(self._db, process))

    def warnings(self) -> list[str]:
        """The texts of the supervisor's own warnings."""
        try:
            rows = self._db.execute("SELECT json FROM events WHERE kind = 'warning' AND process IS NULL").fetchall()
        except sqlite3.Error:
            return []
        found = []
        for (text,) in rows:
            with suppress(ValueError, TypeError, AttributeError):
                found.append(str(json.loads(text).get("text")))
        return found

    def last_sample_ns(self) -> int | None:
        """The time of the newest sample of host or devices; None if there is none."""
        with suppress(sqlite3.Error):
            found = self._db.execute("SELECT max(t_ns) FROM events WHERE kind IN ('host', 'device')").fetchone()[0]
            return found if isinstance(found, int) else None
        return None

    def write(self, batch: Batch) -> None:
        """Write all of `batch` or nothing; raises HistoryError, and the same batch may be tried again."""
        many = self._db.executemany
        try:
            self._db.execute("BEGIN IMMEDIATE")
            many("INSERT OR REPLACE INTO definitions VALUES (?,?,?)", batch.definitions)
            many("INSERT INTO calls VALUES (?,?,?,?,?,?,?,?,?)", batch.calls)
            many("INSERT INTO steps VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", batch.steps)
            many("INSERT INTO events VALUES (?,?,?,?,?)", batch.events)
            many("INSERT OR REPLACE INTO rings VALUES (?,?,?,?,?,?,?,?,?,?,?)", map(astuple, batch.rings))
            many(_ADD_DEVICE, [(*key, *values) for key, values in batch.devices.items()])
            self._add_rollups(batch)
            if self._used_bytes() > self._limit:
                self._prune()
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._cache.clear()
            with suppress(sqlite3.Error):  # some errors have rolled back already
                self._db.execute("ROLLBACK")
            raise HistoryError(str(error)) from None

    def _add_rollups(self, batch: Batch) -> None:
        rows: dict[tuple[int, int, int, str], Rollup] = {}
        for (second, process, mode), gathered in batch.rollups.items():
            added = Rollup(second, process, mode)
            added.add(gathered)
            for width in WIDTHS:
                key = width, second // width * width, process, mode
                row = rows.get(key)
                if row is None:
                    row = rows[key] = self._cache.get(key) or self._rollup(key)
                row.merge(added)
        marks = ",".join("?" * (12 + len(SERIES)))
        self._db.executemany(
            f"INSERT OR REPLACE INTO rollups VALUES ({marks})", [row.row(key[0]) for key, row in rows.items()]
        )
        self._cache.update(rows)
        if len(self._cache) > _CACHED:
            self._cache = rows

    def _rollup(self, key: tuple[int, int, int, str]) -> Rollup:
        """A row as it was written before (by another supervisor, or long ago), or an empty one."""
        query = "SELECT * FROM rollups WHERE width = ? AND start_s = ? AND process = ? AND mode = ?"
        found = self._db.execute(query, key).fetchone()
        with suppress(ValueError):
            if found is not None:
                return Rollup.of_row(found)
        return Rollup(*key[1:])

    def _used_bytes(self) -> int:
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * self._page_bytes

    def _prune(self) -> None:
        """Delete the oldest sixteenth of what is there; the pages are used again, the file does not grow."""
        self._prune_rollups()
        firsts = [
            row[0]
            for row in self._db.execute(
                "SELECT min(id) FROM calls UNION ALL SELECT min(id) FROM steps"
                f" UNION ALL SELECT min(id) FROM events WHERE {_PASSING}",
                _LASTING,
            )
            if row[0] is not None
        ]
        if not firsts:
            return
        before = min(firsts) + max(1, (max(_last_ids(self._db)) - min(firsts)) // _PRUNE_PART)
        gone = self._db.execute("DELETE FROM calls WHERE id < ?", (before,)).rowcount
        gone += self._db.execute("DELETE FROM steps WHERE id < ?", (before,)).rowcount
        gone += self._db.execute(f"DELETE FROM events WHERE id < ? AND {_PASSING}", (before, *_LASTING)).rowcount
        self._db.execute("UPDATE meta SET value = value + ? WHERE key = 'pruned'", (gone,))

    def _prune_rollups(self) -> None:
        """Keep them, and the warnings, from taking all the room in runs of many days or processes."""
        run = self._db.execute
        for width in WIDTHS:
            query = "SELECT count(*), total(length(histogram)), min(start_s), max(start_s) FROM rollups WHERE width = ?"
            count, data, first, last = run(query, (width,)).fetchone()
            if count * _ROW_BYTES + data > self._limit / _ROLLUPS_PART:
                before = first + max((last - first) // 8, 1)
                run("DELETE FROM rollups WHERE width = ? AND start_s < ?", (width, before))
        count, first, last = run("SELECT count(*), min(start_s), max(start_s) FROM device_rollups").fetchone()
        if count * _ROW_BYTES > self._limit / _ROLLUPS_PART:
            run("DELETE FROM device_rollups WHERE start_s < ?", (first + max((last - first) // 8, 1),))
        run(
            "DELETE FROM events WHERE kind = 'warning' AND id <"
            " (SELECT id FROM events WHERE kind = 'warning' ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (_WARNINGS_KEPT,),
        )

    def close(self) -> None:
        """Close it, leaving one self-contained file if nobody else reads it now."""
        with suppress(sqlite3.Error):  # somebody reads: the last of them tidies up
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()


class Kept:
    """A snapshot of a history: what it holds at one instant, whatever is written meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Raises HistoryError if there is none or it cannot be read, FileNotFoundError if there is none."""
        path = directory / HISTORY_FILE
        if not path.is_file() or path.is_symlink():
            raise FileNotFoundError(path)
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        except sqlite3.Error as error:
            raise HistoryError(str(error)) from None
        try:
            self._db.execute("BEGIN")
            self.rings = _rings(self._db)
            self.last_id = max(_last_ids(self._db))
            row = self._db.execute("SELECT value FROM meta WHERE key = 'pruned'").fetchone()
            self.pruned = int(row[0]) if row else 0
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._db.close()
            raise HistoryError(str(error)) from None

    def definitions(self, process: int) -> list[tuple[int, Any]]:
        """Number and value of every definition of one process."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        return [(number, json.loads(value)) for number, value in self._all(query, (process,))]

    def rows(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Everything with an id above `after` in order: (id, table name, columns after the id ...)."""
        return heapq.merge(
            *(
                self._all(f"SELECT id, '{table}', * FROM {table} WHERE id > ? ORDER BY id", (after,))
                for table in ("calls", "steps", "events")
            )
        )

    def lasting(self, before: int, since_ns: int) -> Iterator[tuple[Any, ...]]:
        """Of the events up to the id `before`: those that still matter, and all after `since_ns`; as `rows`."""
        query = (
            "SELECT id, 'events', * FROM events WHERE id <= ?"
            " AND (kind IN ('process', 'mode', 'pause', 'warning', 'exit') OR t_ns > ?) ORDER BY id"
        )
        return self._all(query, (before, since_ns))

    def last_ns(self) -> int:
        """The time of the newest event, 0 if there is none."""
        for (found,) in self._all("SELECT max(t_ns) FROM events", ()):
            return int(found or 0)
        return 0

    def newest_ns(self) -> int:
        """When the last thing in the record was over."""
        found = 0
        for query in (
            "SELECT max(start_ns + wall_ns) FROM (SELECT * FROM steps ORDER BY id DESC LIMIT 1000)",
            "SELECT max(start_ns + wall_ns) FROM (SELECT * FROM calls ORDER BY id DESC LIMIT 1000)",
            "SELECT max(t_ns) FROM (SELECT * FROM events ORDER BY id DESC LIMIT 1000)",
        ):
            for (newest,) in self._all(query, ()):
                found = max(found, newest if isinstance(newest, int) else 0)
        return found

    def id_at(self, t_ns: int) -> int:
        """About the id of what was over at `t_ns`: found by halving, since ids are drawn as time goes."""
        low, high = 0, self.last_id + 1
        while high - low > 1:
            middle = (low + high) // 2
            at = self._time_from(middle)
            if at is None or at > t_ns:
                high = middle
            else:
                low = middle
        return low

    def _time_from(self, first: int) -> int | None:
        """When the first thing with this id or a higher one, whose time is known, was over; None if there is none."""
        found: list[tuple[int, int]] = []
        for query in (
            "SELECT id, start_ns + wall_ns FROM steps WHERE id >= ? ORDER BY id LIMIT 1",
            "SELECT id, start_ns + wall_ns FROM calls WHERE id >= ? ORDER BY id LIMIT 1",
            "SELECT id, t_ns FROM events WHERE id >= ? AND t_ns IS NOT NULL ORDER BY id LIMIT 1",
        ):
            found += [(number, at) for number, at in self._all(query, (first,)) if isinstance(at, int)]
        return min(found)[1] if found else None

    def step_end(self, near: int, t_ns: int, *, forward: bool) -> int | None:
        """The end of the first step after `t_ns` (or of the last one before it), looked for around the id `near`."""
        reach = 4096
        if forward:
            query = "SELECT min(start_ns + wall_ns) FROM (SELECT * FROM steps WHERE id >= ? ORDER BY id LIMIT ?)"
            query += " WHERE start_ns + wall_ns > ?"
            parameters = max(near - reach // 8, 0), reach, t_ns
        else:
            query = "SELECT max(start_ns + wall_ns) FROM (SELECT * FROM steps WHERE id <= ? ORDER BY id DESC LIMIT ?)"
            query += " WHERE start_ns + wall_ns < ?"
            parameters = near + reach // 8, reach, t_ns
        for (found,) in self._all(query, parameters):
            return found if isinstance(found, int) else None
        return None

    def rollups(self, width: int, since_s: int = 0) -> Iterator[Rollup]:
        """Those of seconds (width 1) or minutes (60) that start at `since_s` or later, in that order."""
        if not self._has("rollups"):
            return
        query = "SELECT * FROM rollups WHERE width = ? AND start_s >= ? ORDER BY start_s, process, mode"
        for row in self._all(query, (width, since_s)):
            with suppress(ValueError):
                yield Rollup.of_row(row)

    def first_second(self) -> int:
        """The first second of which there still is a rollup of its own; 0 if there is none."""
        if self._has("rollups"):
            for (found,) in self._all("SELECT min(start_s) FROM rollups WHERE width = 1", ()):
                return int(found or 0)
        return 0

    def has_steps(self, until: int) -> bool:
        """Whether steps were recorded up to the id `until`, though they may have been deleted since."""
        return self.pruned > 0 or any(self._all("SELECT 1 FROM steps WHERE id <= ? LIMIT 1", (until,)))

    def modes(self) -> Iterator[tuple[Any, ...]]:
        """Process and JSON of every event of a mode."""
        return self._all("SELECT process, json FROM events WHERE kind = 'mode' AND process IS NOT NULL", ())

    def steps_by_mode(self, until: int) -> list[tuple[int, str, int]]:
        """Process, mode and how many steps of it there are up to the id `until`."""
        query = "SELECT process, mode, count(*) FROM steps WHERE id <= ? GROUP BY process, mode ORDER BY process, mode"
        return [(process, mode, count) for process, mode, count in self._all(query, (until,))]

    def drawn_steps(self, after: int, until: int, process: int, mode: str, most: int) -> Iterator[tuple[Any, ...]]:
        """Steps of a mode with ids above `after` up to `until`, as in `rows`; `most`, by a hash of their ids."""
        query = (
            "SELECT id, 'steps', * FROM steps WHERE id > ? AND id <= ? AND process = ? AND mode = ?"
            " ORDER BY id * 2654435761 & 4294967295 LIMIT ?"
        )
        return self._all(query, (after, until, process, mode, most))

    def calls_of(self, before: int, process: int, step: int) -> Iterator[bytes]:
        """Payloads of the calls of a step that has the id `before`: they lie shortly before it."""
        query = "SELECT payload FROM calls WHERE id BETWEEN ? AND ? AND process = ? AND step = ?"
        return (payload for (payload,) in self._all(query, (before - 64, before, process, step)))

    def device_rollups(self) -> Iterator[tuple[Any, ...]]:
        """Rows of (start_s of a minute, device or -1 for the host, name, count, total, low, high), in that order."""
        if self._has("device_rollups"):
            yield from self._all("SELECT * FROM device_rollups ORDER BY start_s, device, name", ())

    def _has(self, table: str) -> bool:
        """Whether the table is there: a history of an earlier version may lack it."""
        return any(self._all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)))

    def _all(self, query: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        try:
            for row in self._db.execute(query, parameters):  # noqa: UP028 `yield from` would close the cursor
                yield row
        except sqlite3.Error as error:
            raise HistoryError(str(error)) from None

    def close(self) -> None:
        """Let go of the snapshot."""
        self._db.close()


def _definitions(db: sqlite3.Connection, process: int) -> Iterator[tuple[int, Any]]:
    for number, value in db.execute("SELECT number, value FROM definitions WHERE process = ?", (process,)):
        with suppress(ValueError, TypeError):
            yield number, json.loads(value)


def _last_ids(db: sqlite3.Connection) -> list[int]:
    query = " UNION ALL ".join(f"SELECT max(id) FROM {table}" for table in ("calls", "steps", "events"))
    return [row[0] or 0 for row in db.execute(query)]


def _rings(db: sqlite3.Connection) -> dict[str, RingRow]:
    columns = ", ".join(member.name for member in fields(RingRow))
    return {row[0]: RingRow(*row) for row in db.execute(f"SELECT {columns} FROM rings")}

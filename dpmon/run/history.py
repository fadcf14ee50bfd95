"""Writes what a run keeps for good: history.sqlite, by its supervisor alone (`tables` has what lies in it)."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from dpmon.record.plainjson import load_json
from dpmon.run.files import check_database
from dpmon.run.rollup import SERIES, WHOLE, WIDTHS, Gathered, Rollup
from dpmon.run.tables import (
    BEFORE_S,
    HISTORY_FILE,
    LASTING,
    SCHEMA,
    SCHEMA_VERSION,
    Bounds,
    HistoryError,
    RingRow,
    check_schema,
    check_version,
    definitions_in,
    last_ids,
    rings_in,
)

__all__ = ["LIMIT_BYTES", "Batch", "History"]

LIMIT_BYTES = 256 << 20
_PRUNE_PART = 16
_LASTING_KEPT = 10_000
_ROLLUPS_PART = 3
_ROW_BYTES = 180
"""What a row of rollups takes beside its histogram, roughly."""
_CACHED = 512
_LATER: Mapping[str, Mapping[str, str]] = {
    "steps": {"device": "BLOB", "copy_ns": "INTEGER", "copied_bytes": "INTEGER", "between_ns": "INTEGER"},
    "rings": {"first_id": "INTEGER", "last_id": "INTEGER"},
    "rollups": {"copy_ns": "INTEGER", "pace": "TEXT"},
}
"""Columns, in their order, that the first version's tables did not have."""
_ADD_DEVICE = """\
INSERT INTO device_rollups {} ON CONFLICT (start_s, device, name) DO UPDATE SET
    count = count + excluded.count, total = total + excluded.total, low = min(low, excluded.low),
    high = max(high, excluded.high)"""


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
        self._path = directory / HISTORY_FILE
        try:
            check_database(self._path, written=True)
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=1.0, check_same_thread=False)
        except (sqlite3.Error, OSError) as error:
            raise HistoryError(str(error)) from None
        try:
            self._bounds = Bounds(self._db, self._path)
            self._prepare(meta)
        except (sqlite3.Error, HistoryError, OSError, TypeError, ValueError) as error:
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
        check_schema(self._db)
        if run("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            check_version(self._db)
            # An index of an earlier version covers fewer events; and that version must not read what is written now.
            if run("UPDATE meta SET value = ? WHERE key = 'schema' AND value < ?", [SCHEMA_VERSION] * 2).rowcount:
                run("DROP INDEX IF EXISTS lasting")
        self._db.executescript(SCHEMA)
        for table, columns in _LATER.items():  # which a history lacks that an earlier version began
            there = {row[1] for row in run(f"PRAGMA table_info({table})")}
            for name, kind in columns.items():
                if name not in there:
                    run(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
        rows = {"schema": SCHEMA_VERSION, "limit_bytes": self._limit, "pruned": 0, **meta}
        self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", rows.items())
        self._page_bytes: int = run("PRAGMA page_size").fetchone()[0]
        self.next_id: int = 1 + max(last_ids(self._db))

    def rings(self) -> dict[str, RingRow]:
        """How far each ring was taken over by whoever wrote this history before."""
        return rings_in(self._db)

    def definitions(self, process: int) -> list[tuple[int, Any]]:
        """Number and value of every definition of one process."""
        return list(definitions_in(self._db, process))

    def warnings(self) -> list[str]:
        """The texts of the supervisor's own warnings."""
        try:
            rows = self._db.execute("SELECT json FROM events WHERE kind = 'warning' AND process IS NULL").fetchall()
        except sqlite3.Error:
            return []
        found = []
        for (text,) in rows:
            with suppress(ValueError, TypeError, AttributeError):
                found.append(str(load_json(text).get("text")))
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
        self._bounds.begin()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            many("INSERT OR REPLACE INTO definitions VALUES (?,?,?)", batch.definitions)
            many("INSERT INTO calls VALUES (?,?,?,?,?,?,?,?,?)", batch.calls)
            many("INSERT INTO steps VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", batch.steps)
            many("INSERT INTO events VALUES (?,?,?,?,?)", batch.events)
            many("INSERT OR REPLACE INTO rings VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", map(astuple, batch.rings))
            many(
                _ADD_DEVICE.format("VALUES (?,?,?,?,?,?,?)"), [(*key, *values) for key, values in batch.devices.items()]
            )
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
        self._insert_rollups(rows)
        self._cache.update(rows)
        if len(self._cache) > _CACHED:
            self._cache = rows

    def _insert_rollups(self, rows: Mapping[tuple[int, int, int, str], Rollup]) -> None:
        marks = ",".join("?" * (13 + len(SERIES)))
        self._db.executemany(
            f"INSERT OR REPLACE INTO rollups VALUES ({marks})", [row.row(key[0]) for key, row in rows.items()]
        )

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
                f" UNION ALL SELECT min(id) FROM events WHERE NOT ({LASTING})",
            )
            if row[0] is not None
        ]
        if not firsts:
            return
        before = min(firsts) + max(1, (max(last_ids(self._db)) - min(firsts)) // _PRUNE_PART)
        gone = self._db.execute("DELETE FROM calls WHERE id < ?", (before,)).rowcount
        gone += self._db.execute("DELETE FROM steps WHERE id < ?", (before,)).rowcount
        gone += self._db.execute(f"DELETE FROM events WHERE id < ? AND NOT ({LASTING})", (before,)).rowcount
        self._db.execute("UPDATE meta SET value = value + ? WHERE key = 'pruned'", (gone,))

    def _prune_rollups(self) -> None:
        """Keep rollups, and events that may be many, from taking all the room in runs of many days or processes."""
        run = self._db.execute
        for width in WIDTHS:
            query = "SELECT count(*), total(length(histogram)), min(start_s), max(start_s) FROM rollups WHERE width = ?"
            count, data, first, last = run(query, (width,)).fetchone()
            if count * _ROW_BYTES + data > self._limit / _ROLLUPS_PART:
                before = first + max((last - first) // 8, 1)
                if width == WIDTHS[-1]:
                    self._add_to_whole(before)
                else:
                    run("DELETE FROM rollups WHERE width = ? AND start_s < ?", (width, before))
        query = "SELECT count(*), min(start_s), max(start_s) FROM device_rollups WHERE start_s > ?"
        count, first, last = run(query, (BEFORE_S,)).fetchone()
        if count * _ROW_BYTES > self._limit / _ROLLUPS_PART:
            self._add_devices_up(first + max((last - first) // 8, 1))
        for kind in ("warning", "input", "loader"):  # events that last, and that a script can make any number of
            run(
                "DELETE FROM events WHERE kind = ? AND id <"
                " (SELECT id FROM events WHERE kind = ? ORDER BY id DESC LIMIT 1 OFFSET ?)",
                (kind, kind, _LASTING_KEPT),
            )

    def _add_devices_up(self, before: int) -> None:
        """Of what devices did in the minutes before this second leave one sum a device and name."""
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        sample = self._db.execute(query).fetchone()
        # What is there in full is told by itself.
        before = before if sample is None else min(before, sample[0] // 60_000_000_000 * 60)
        minutes = "FROM device_rollups WHERE start_s > ? AND start_s < ?"
        sums = f"SELECT ?, device, name, sum(count), total(total), min(low), max(high) {minutes} GROUP BY device, name"
        self._db.execute(_ADD_DEVICE.format(sums), (BEFORE_S, BEFORE_S, before))
        self._db.execute(f"DELETE {minutes}", (BEFORE_S, before))

    def _add_to_whole(self, before: int) -> None:
        """Of the minutes before this second leave one sum a process and mode, and nothing finer."""
        full = "SELECT min(start_ns + wall_ns) FROM (SELECT * FROM {} ORDER BY id LIMIT 100000)"
        ends = [self._db.execute(full.format(table)).fetchone()[0] for table in ("calls", "steps")]
        # What is there in full must not be in a sum that it cannot be taken out of.
        minute = WIDTHS[-1]
        before = min([before, *(end // 1_000_000_000 for end in ends if end is not None)]) // minute * minute
        whole: dict[tuple[int, int, int, str], Rollup] = {}
        query = "SELECT * FROM rollups WHERE width = ? AND start_s < ? ORDER BY start_s"
        for row in self._db.execute(query, (minute, before)).fetchall():
            with suppress(ValueError):
                found = Rollup.of_row(row)
                key = WHOLE, 0, found.process, found.mode
                if key not in whole:
                    whole[key] = self._rollup(key)
                whole[key].merge(found)
        self._insert_rollups(whole)
        self._db.execute("DELETE FROM rollups WHERE width IN (1, 60) AND start_s < ?", (before,))
        self._cache.clear()

    def close(self) -> None:
        """Close it, leaving one self-contained file if nobody else reads it now."""
        # If somebody still reads, the last reader cleans up.
        with suppress(sqlite3.Error, OSError):
            check_database(self._path, written=True)  # again: SQLite opens the journal only now
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()

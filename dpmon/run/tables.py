"""What a run keeps for good: history.sqlite. One writer (the supervisor), any number of readers.

    meta         key, value: schema, run, start_ns, limit_bytes, pruned (rows deleted to stay below it)
    rings        one row per ring: how far it was read (position, sequence), the counts of missed and other records,
                 the first and the last id of its calls and steps
    definitions  process, number, value (JSON): layouts and sizes that calls refer to
    calls        id, process, call, step, mode, start_ns, wall_ns, rows, payload (as in the ring: dpmon.record.codec)
    steps        id, process, step, mode, start_ns, wall_ns, samples, data_ns ... other_ns (NULL: did not run),
                 device (NULL, or its device times: dpmon.record.codec.step_times), copy_ns, copied_bytes (NULL: none),
                 between_ns (time since the previous step, without pauses: dpmon.rates.Gap; negative if both are
                 evaluation steps)
    events       id, process (NULL: the supervisor), kind, t_ns, json
    rollups      width (1 or 60 s; 0: see below), start_s, process, mode, steps, calls, samples, unknown (steps
                 without samples), last_step, low_ns, high_ns (of a step), step_ns, data_ns ... gather_ns (sums;
                 NULL: did not run), histogram (dpmon.run.rollup), copy_ns, pace (dpmon.rates.Pace); all steps that
                 ended in that second or minute
    device_rollups  start_s (of a minute; -1: see below), device (index; -1: the host), name, count, total, low, high

When the database reaches its size limit, the oldest rows are deleted: calls, steps and events first, except a run's
processes, modes, warnings, loaders and exit. Rollups stay longer: those of a second, and those of a minute, may each
take a third of the limit. Deleted minutes are added to one row per process and mode, with width 0 and start 0, which is
never deleted. The oldest device_rollups are deleted in the same way and added to rows that start at -1.

Times are ns since the run's start. Ids come from one counter, so they give the order across the three tables. A ring's
position is written in the transaction that writes its records, so a reader that continues from there misses and
repeats nothing. The only users of sqlite3 are this file, `history` (it writes) and `kept` (it reads).
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dpmon.record.plainjson import load_json
from dpmon.run.rollup import SERIES

__all__ = [
    "BEFORE_S",
    "HISTORY_FILE",
    "LASTING",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Bounds",
    "HistoryError",
    "RingRow",
    "check_schema",
    "check_version",
    "definitions_in",
    "last_ids",
    "rings_in",
]

BEFORE_S = -1
"""The start of device_rollups that are of all the time before the first minute that is left."""
HISTORY_FILE = "history.sqlite"
SCHEMA_VERSION = 5
LASTING = "kind IN ('process', 'mode', 'exit', 'warning', 'pause', 'input', 'loader')"
"""Events that outlive the steps around them (of warnings, waits and loaders the newest): they hold for what follows."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rings (
    name TEXT PRIMARY KEY, process INTEGER, rank INTEGER, pid INTEGER, position INTEGER, sequence INTEGER,
    missed INTEGER, lost INTEGER, calls INTEGER, steps INTEGER, last_step INTEGER,
    first_id INTEGER, last_id INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS definitions (
    process INTEGER, number INTEGER, value TEXT, PRIMARY KEY (process, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY, process INTEGER, call INTEGER, step INTEGER, mode TEXT, start_ns INTEGER,
    wall_ns INTEGER, rows INTEGER, payload BLOB);
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY, process INTEGER, step INTEGER, mode TEXT, start_ns INTEGER, wall_ns INTEGER,
    samples INTEGER, data_ns INTEGER, forward_ns INTEGER, backward_ns INTEGER, optimizer_ns INTEGER,
    other_ns INTEGER, device BLOB, copy_ns INTEGER, copied_bytes INTEGER,
    between_ns INTEGER);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, process INTEGER, kind TEXT, t_ns INTEGER, json TEXT);
CREATE TABLE IF NOT EXISTS rollups (
    width INTEGER, start_s INTEGER, process INTEGER, mode TEXT, steps INTEGER, calls INTEGER, samples INTEGER,
    unknown INTEGER, last_step INTEGER, low_ns INTEGER, high_ns INTEGER,
    {sums}, histogram BLOB, copy_ns INTEGER, pace TEXT,
    PRIMARY KEY (width, start_s, process, mode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS device_rollups (
    start_s INTEGER, device INTEGER, name TEXT, count INTEGER, total REAL, low REAL, high REAL,
    PRIMARY KEY (start_s, device, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lasting ON events (id) WHERE {lasting};
""".format(lasting=LASTING, sums=", ".join(f"{name}_ns INTEGER" for name in SERIES if name != "copy"))


_TABLES = frozenset(re.findall(r"TABLE IF NOT EXISTS (\w+)", SCHEMA))
_LOOK_STEPS = 100_000
"""Instructions of SQLite's virtual machine between two checks."""
_LARGEST = 1 << 30
_SMALLEST_ROW = 8
"""Fewest bytes of a row: its position in the page, its length and its id."""
_LONGEST_VALUE = 64 << 20


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
    first_id: int | None = None
    """Of its calls and steps, and the last; None: there are none, or an earlier version began it."""
    last_id: int | None = None


class Bounds:
    """Limits one query by the size of the database, because a damaged tree can have endless rows."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        """Watch `db`, the database at `path`, and do not let its schema run functions."""
        size = sum(part.stat().st_size for part in (path, Path(f"{path}-wal")) if part.exists())
        size = min(size, _LARGEST)
        self.rows = 10_000 + size // _SMALLEST_ROW
        self._most = (20_000_000 + 8 * size) // _LOOK_STEPS
        self._done = 0
        db.set_progress_handler(self._look, _LOOK_STEPS)
        db.execute("PRAGMA trusted_schema=OFF")
        if sys.version_info >= (3, 11):
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)

    def begin(self) -> None:
        """Start counting again: a query begins or has returned a row."""
        self._done = 0

    def _look(self) -> int:
        """SQLite calls this regularly; a result other than 0 interrupts the query."""
        self._done += 1
        return self._done > self._most


def check_schema(db: sqlite3.Connection) -> None:
    """HistoryError unless the database has only plain tables and indexes, without computed columns."""
    tables = set()
    for kind, name, root, sql in db.execute("SELECT type, name, rootpage, sql FROM sqlite_master"):
        if kind == "view" and name in _TABLES:
            raise HistoryError(f"{name} is a view, not a table")
        # The index of a primary key has no SQL text.
        plain = sql is None if kind == "index" and name.startswith("sqlite_autoindex_") else _is_plain(sql)
        if kind not in ("table", "index") or not root or not plain:
            raise HistoryError(f"it holds {str(name)[:60]}, which is not dpmon's")
        tables.add(name)
    for table in _TABLES & tables:
        # hidden is 2 or 3 for a computed column (SQLite's documentation of table_xinfo).
        if any(row[6] for row in db.execute(f"PRAGMA table_xinfo({table})")):
            raise HistoryError(f"a column of {table} is computed: it is not dpmon's")


def _is_plain(sql: Any) -> bool:
    return isinstance(sql, str) and sql.startswith(("CREATE TABLE ", "CREATE INDEX "))


def check_version(db: sqlite3.Connection) -> None:
    """HistoryError for the history of a later version, whose columns may mean something else."""
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is not None and isinstance(row[0], int) and row[0] > SCHEMA_VERSION:
        raise HistoryError(f"a later version of dpmon wrote it (schema {row[0]}; this one knows {SCHEMA_VERSION})")


def definitions_in(db: sqlite3.Connection, process: int) -> Iterator[tuple[int, Any]]:
    """Number and value of every definition of one process; damaged ones are left out."""
    for number, value in db.execute("SELECT number, value FROM definitions WHERE process = ?", (process,)):
        with suppress(ValueError, TypeError):
            yield number, load_json(value)


def last_ids(db: sqlite3.Connection) -> list[int]:
    """The highest id in each of the three tables that share them."""
    query = " UNION ALL ".join(f"SELECT max(id) FROM {table}" for table in ("calls", "steps", "events"))
    return [row[0] or 0 for row in db.execute(query)]


def rings_in(db: sqlite3.Connection) -> dict[str, RingRow]:
    """How far each ring was taken over, by its file's name."""
    there = {row[1] for row in db.execute("PRAGMA table_info(rings)")}
    names = [member.name for member in fields(RingRow)]
    # The last two are not there in a history of an earlier version.
    columns = ", ".join(name for name in names if name in there or name not in ("first_id", "last_id"))
    return {row[0]: RingRow(*row) for row in db.execute(f"SELECT {columns} FROM rings")}

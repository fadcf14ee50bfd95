"""What a run keeps for good: history.sqlite. One writer (the supervisor), any number of readers.

    meta         key, value: schema, run, start_ns, limit_bytes, pruned (rows deleted to stay below it)
    rings        one row per ring: how far it was read (position, sequence, lines), the counts of missed and other
                 records, the first and the last id of its calls and steps, the id of the first call that waits for its
                 step, the numbers of its last step and call, and the state of what assembles its spans
    definitions  process, number, value (JSON): layouts and sizes that calls refer to
    calls        id, process, call, step, mode, start_ns, wall_ns, rows, payload (as in the ring: dpmon.record.codec)
    steps        id, process, step, mode, start_ns, wall_ns, kind (dpmon.record.schema.KINDS), calls, each quantity,
                 the ns of each phase (NULL: did not run; those of its calls are sums), rest_ns (what the phases of its
                 calls leave of its forward), device (NULL, or its device times: dpmon.record.payloads.step_times),
                 spans (when its phases ran: dpmon.record.step_spans.kept_spans; NULL: an earlier version recorded it),
                 sync_number (of its last synchronised backward pass), exposed_ns and wait_ns (dpmon.store.rounds;
                 NULL: the other ranks' steps are not known)
    events       id, process (NULL: the supervisor), kind, t_ns, json
    collectives  id, process, number (of its span), definition (0: a sample, in which every collective was recorded),
                 phase, unended, step (0: none), start_ns, wall_ns, queued_ns, quantity: dpmon.record.wire.Collected
    collective_sums  start_s (of a second; -1: see below), process, definition, count of the collectives that began in
                 it (or of the samples), bytes (or collectives of the samples), ended (how many have a known end), and
                 of these the bytes and the ns in which they could run
    series       number, name: what the sketches of the tallies are of (dpmon.record.schema, and the replicas and
                 stages of calls: dpmon.store.parts)
    keys         process, mode, kind (dpmon.record.schema.KINDS), batch (samples a step): of all tallies, of those that
                 were deleted, too
    tallies      width (dpmon.store.tally.WIDTHS, s), start_s, process (-1: all), mode, kind, batch, and
                 dpmon.store.tally.Tally: all steps that ended in that time
    times        width, start_s, process, mode, ns of each activity in that time (dpmon.store.accounting)
    gaps         id, process, after_step, before_step, mode, begin_ns, end_ns, ns: the longer times between two steps
    shapes       calls by process, mode, kind, layout, virtual, sizes (JSON: the definitions of inputs and outputs, of
                 the call, then of each replica, or stage and sizes of each stage) and why a device time is missing
                 (dpmon.record.payloads.UNTIMED); beyond the first shapes of a process, sizes are 0: unknown
    device_rollups  start_s (of a minute; -1: see below), device (index; -1: the host), name, count, total, low, high

A tally of 10 s or more is made when its time is over: up to the second in meta's `whole_10`, `whole_60`, and so on.
Those that were deleted to save room began before meta's `pruned_1`, `pruned_10`, and so on; those of a day stay. What
is recorded late is added to every tally of its time.

When the database reaches its size limit, the oldest rows are deleted: calls, steps, collectives and events first,
except a run's processes, modes, warnings, loaders and exit. Tallies stay longer: those of each width may take their
part of the limit. The oldest device_rollups and collective_sums are added to rows that start at -1, and deleted.

Times are ns since the run's start. Ids come from one counter, so they give the order across the tables. A ring's
position is written in the transaction that writes its records, so a reader that continues from there misses and
repeats nothing.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dpmon.errors import DpmonError
from dpmon.record.plainjson import load_json
from dpmon.record.schema import EXPOSED, PHASES, QUANTITIES, SYNC_NUMBER, WAIT
from dpmon.store.accounting import ACTIVITIES
from dpmon.store.tally import COLUMNS

__all__ = [
    "ACTIVITY_COLUMNS",
    "BEFORE_S",
    "CALL_COLUMNS",
    "COLLECTIVE_COLUMNS",
    "COLLECTIVE_SUMS",
    "HISTORY_FILE",
    "LARGEST",
    "LASTING",
    "LASTING_KINDS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "STEP_COLUMNS",
    "Bounds",
    "HistoryError",
    "RingRow",
    "check_schema",
    "check_whole",
    "columns_of",
    "definitions_in",
    "last_ids",
    "rings_in",
    "size_of",
    "version_of",
]

BEFORE_S = -1
"""The start of device_rollups and collective_sums that are of all the time before the first that are left."""
HISTORY_FILE = "history.sqlite"
SCHEMA_VERSION = 7
LASTING_KINDS = ("process", "mode", "exit", "warning", "pause", "input", "loader", "ddp")
"""Events that outlive the steps around them (of some kinds the newest): they hold for what follows."""
LASTING = f"kind IN ({', '.join(repr(kind) for kind in LASTING_KINDS)})"
STEP_COLUMNS: Mapping[str, str] = {
    "id": "INTEGER PRIMARY KEY",
    **dict.fromkeys(("process", "step"), "INTEGER"),
    "mode": "TEXT",
    **dict.fromkeys(("start_ns", "wall_ns", "kind", "calls"), "INTEGER"),
    **dict.fromkeys((quantity.name for quantity in QUANTITIES), "INTEGER"),
    **dict.fromkeys((f"{phase.name}_ns" for phase in PHASES), "INTEGER"),
    "rest_ns": "INTEGER",
    "device": "BLOB",
    "spans": "BLOB",
    **dict.fromkeys((SYNC_NUMBER, *(f"{name}_ns" for name in (EXPOSED, WAIT))), "INTEGER"),
}
"""The columns of steps and their types."""
CALL_COLUMNS: Mapping[str, str] = {
    "id": "INTEGER PRIMARY KEY",
    **dict.fromkeys(("process", "call", "step"), "INTEGER"),
    "mode": "TEXT",
    **dict.fromkeys(("start_ns", "wall_ns", "rows"), "INTEGER"),
    "payload": "BLOB",
    **dict.fromkeys((f"{phase.name}_ns" for phase in PHASES if phase.of_call), "INTEGER"),
}
"""The columns of calls and their types."""
COLLECTIVE_COLUMNS: Mapping[str, str] = {
    "id": "INTEGER PRIMARY KEY",
    **dict.fromkeys(("process", "number", "definition", "phase", "unended", "step"), "INTEGER"),
    **dict.fromkeys(("start_ns", "wall_ns", "queued_ns", "quantity"), "INTEGER"),
}
"""The columns of collectives and their types."""
COLLECTIVE_SUMS = ("count", "bytes", "ended", "timed_bytes", "ran_ns")
"""The sums of collectives."""
ACTIVITY_COLUMNS = tuple(f"{name}_ns" for name in ACTIVITIES)


def _whole_numbers(names: Iterable[str]) -> str:
    return ", ".join(f"{name} INTEGER" for name in names)


SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rings (
    name TEXT PRIMARY KEY, process INTEGER, rank INTEGER, pid INTEGER, position INTEGER, sequence INTEGER,
    missed INTEGER, lost INTEGER, calls INTEGER, steps INTEGER, last_step INTEGER,
    first_id INTEGER, last_id INTEGER, held_id INTEGER, last_call INTEGER, lines INTEGER, state TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS definitions (
    process INTEGER, number INTEGER, value TEXT, PRIMARY KEY (process, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls ({call_columns});
CREATE TABLE IF NOT EXISTS steps ({step_columns});
CREATE TABLE IF NOT EXISTS collectives ({collective_columns});
CREATE TABLE IF NOT EXISTS collective_sums (
    start_s INTEGER, process INTEGER, definition INTEGER, {collective_sums},
    PRIMARY KEY (start_s, process, definition)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, process INTEGER, kind TEXT, t_ns INTEGER, json TEXT);
CREATE TABLE IF NOT EXISTS series (number INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE IF NOT EXISTS keys (
    process INTEGER, mode TEXT, kind INTEGER, batch INTEGER, PRIMARY KEY (process, mode, kind, batch)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tallies (
    width INTEGER, start_s INTEGER, process INTEGER, mode TEXT, kind INTEGER, batch INTEGER, {tally_columns},
    UNIQUE (width, start_s, process, mode, kind, batch));
CREATE TABLE IF NOT EXISTS times (
    width INTEGER, start_s INTEGER, process INTEGER, mode TEXT, {activities},
    PRIMARY KEY (width, start_s, process, mode)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gaps (
    id INTEGER PRIMARY KEY, process INTEGER, after_step INTEGER, before_step INTEGER, mode TEXT, begin_ns INTEGER,
    end_ns INTEGER, ns INTEGER);
CREATE TABLE IF NOT EXISTS shapes (
    process INTEGER, mode TEXT, kind INTEGER, layout INTEGER, virtual INTEGER, sizes TEXT, untimed INTEGER,
    calls INTEGER, PRIMARY KEY (process, mode, kind, layout, virtual, sizes, untimed)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS device_rollups (
    start_s INTEGER, device INTEGER, name TEXT, count INTEGER, total REAL, low REAL, high REAL,
    PRIMARY KEY (start_s, device, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lasting ON events (id) WHERE {lasting};
CREATE INDEX IF NOT EXISTS collected ON collectives (start_ns);
CREATE INDEX IF NOT EXISTS memory ON events (process, t_ns) WHERE kind = 'memory';
""".format(
    lasting=LASTING,
    step_columns=", ".join(f"{name} {kind}" for name, kind in STEP_COLUMNS.items()),
    call_columns=", ".join(f"{name} {kind}" for name, kind in CALL_COLUMNS.items()),
    collective_columns=", ".join(f"{name} {kind}" for name, kind in COLLECTIVE_COLUMNS.items()),
    collective_sums=_whole_numbers(COLLECTIVE_SUMS),
    tally_columns=_whole_numbers(COLUMNS[:-1]) + ", sketches BLOB",
    activities=_whole_numbers(ACTIVITY_COLUMNS),
)


_TABLES = frozenset(re.findall(r"TABLE IF NOT EXISTS (\w+)", SCHEMA))
_LOOK_STEPS = 100_000
"""Instructions of SQLite's virtual machine between two checks."""
_ENTRY_STEPS = 5_000
"""More instructions than it takes to write one entry of a batch, into the tallies of each width, too."""
LARGEST = 1 << 30
"""Bytes of a database of which a copy is made in memory, at most; and after which its bounds grow no more."""
_SMALLEST_ROW = 8
"""Fewest bytes of a row: its position in the page, its length and its id."""
_LONGEST_VALUE = 64 << 20


class HistoryError(DpmonError):
    """The history cannot be written or read: no room, damaged, not ours."""


@dataclass
class RingRow:
    """How far one ring has been taken over, as in the table `rings`."""

    name: str
    process: int
    rank: int | None
    pid: int
    position: int = 0
    """Where to go on: a byte of a ring of frames, the number of a span."""
    sequence: int = 0
    """Records of a ring of frames that were read; spans, which goes beyond those of the step under way."""
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
    held_id: int | None = None
    """Of the first call that waits for its step; None: none does."""
    last_call: int | None = None
    lines: int | None = None
    """Bytes of the lines beside a ring of spans."""
    state: str | None = None
    """Of what assembles a ring of spans; empty once its process has ended and all of it is in the history."""


class Bounds:
    """Limits one query by the size of the database, because a damaged tree can have endless rows."""

    def __init__(self, db: sqlite3.Connection, size: int) -> None:
        """Watch `db`, a database of `size` bytes, and do not let its schema run functions."""
        self.set_size(size)
        self._done = 0
        db.set_progress_handler(self._look, _LOOK_STEPS)
        db.execute("PRAGMA trusted_schema=OFF")
        if sys.version_info >= (3, 11):
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)

    def set_size(self, size: int, entries: int = 0) -> None:
        """Set the limits for a database of `size` bytes, and for the next transaction, which writes `entries`."""
        size = min(size, LARGEST)
        self.rows = 10_000 + size // _SMALLEST_ROW
        self._most = (20_000_000 + 8 * size + _ENTRY_STEPS * entries) // _LOOK_STEPS

    def each(self, cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
        """The rows of a query; HistoryError if there are more than the database has room for."""
        for number, row in enumerate(cursor):
            if number > self.rows:
                raise HistoryError("it has more rows than its size allows")
            self._done = 0
            yield row

    def begin(self) -> None:
        """Start counting again: a query begins or has returned a row."""
        self._done = 0

    def _look(self) -> int:
        """SQLite calls this regularly; a result other than 0 interrupts the query."""
        self._done += 1
        return self._done > self._most


def size_of(path: Path) -> int:
    """The bytes of the database at `path`."""
    return sum(part.stat().st_size for part in (path, Path(f"{path}-wal")) if part.exists())


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


def version_of(db: sqlite3.Connection) -> int:
    """The schema of a history. HistoryError for that of a later version: its columns may mean something else."""
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    version: int = row[0] if row is not None and type(row[0]) is int else SCHEMA_VERSION
    if version > SCHEMA_VERSION:
        raise HistoryError(f"a later version of dpmon wrote it (schema {version}; this one knows {SCHEMA_VERSION})")
    return version


def check_whole(db: sqlite3.Connection) -> None:
    """HistoryError for a history that lacks a table."""
    missing = _TABLES - {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
    if missing:
        raise HistoryError(f"it has no table {min(missing)}")


def columns_of(db: sqlite3.Connection, table: str) -> frozenset[str]:
    """The names of the columns that a table has."""
    return frozenset(row[1] for row in db.execute(f"PRAGMA table_info({table})"))


def last_ids(db: sqlite3.Connection) -> list[int]:
    """The highest id in each of the tables that share them."""
    query = " UNION ALL ".join(f"SELECT max(id) FROM {table}" for table in ("calls", "steps", "events", "collectives"))
    return [row[0] or 0 for row in db.execute(query)]


def definitions_in(rows: Iterable[tuple[Any, ...]]) -> dict[int, Any]:
    """The values of definitions by their numbers; damaged ones are left out."""
    found = {}
    for number, value in rows:
        with suppress(ValueError, TypeError):
            found[number] = load_json(value)
    return found


def rings_in(db: sqlite3.Connection) -> dict[str, RingRow]:
    """How far each ring was taken over, by its file's name; damaged rows are left out."""
    there = columns_of(db, "rings")
    members = fields(RingRow)
    # A history of an earlier version lacks some.
    columns = ", ".join(member.name if member.name in there else "NULL" for member in members)
    found = {}
    for row in db.execute(f"SELECT {columns} FROM rings"):
        values = [_member(value, str(member.type)) for value, member in zip(row, members, strict=True)]
        if _DAMAGED not in values:
            found[row[0]] = RingRow(*values)
    return found


_DAMAGED = object()
_MOST_COUNTED = 1 << 62
"""No ring has more bytes or records; adding to a larger number could overflow its column."""


def _member(value: object, declared: str) -> Any:
    """A column as what its member is declared to be, since SQLite takes values of any type."""
    if isinstance(value, str) if declared.startswith("str") else type(value) is int and abs(value) < _MOST_COUNTED:
        return value
    return None if declared.endswith("None") else _DAMAGED

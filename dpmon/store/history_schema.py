"""The schema of history.sqlite, the lasting record of a run. One writer (the supervisor), any number of readers.

    meta         key, value: schema, run, start_ns, limit_bytes, pruned (rows deleted to stay below it), seq (number of
                 the last transaction)
    rings        one row per ring: the reading position (position, lines), the counts of missed and other
                 records, the first and the last id of its steps, the numbers of its last step of each kind and of its
                 last call, its events in the history, whether it has ended, the calls so far while no step has ended,
                 and node (its number in nodes; NULL: this machine)
    nodes        the machines of a mirror, which writes what the supervisors of other machines recorded (dpmon.mirror):
                 number; name (how the user reaches it); host, run (its id there) and version (of dpmon there), NULL
                 until it has answered; state (dpmon.store.query_results.NODE_STATES), why (a sentence, or NULL),
                 since_ns; heard_ns (its last answer); received (the last id of its records that is here); tallied_s
                 (its tallies are complete up to this second); clock_ns (added to its times) and clock_error_ns;
                 shift_s (added to the seconds of its tallies); exit (JSON: the end of its run, or NULL)
    definitions  process, number, value (JSON): layouts and sizes that calls refer to
    steps        id, process, step (0 or less: no step of a loop, but calls alone, see Step), mode, start_ns, wall_ns,
                 kind (flags of dpmon.record.schema), calls (number of calls), each quantity, the ns of each phase
                 (NULL: did not run; phases of its calls are sums), rest_ns (its forward without the phases of its
                 calls), device (NULL, or JSON: `why`, then `times` of Step), spans (JSON: `runs` of Step, flat; NULL:
                 none), missing_spans, sync_number (number of its last synchronized backward pass), exposed_ns and
                 wait_ns (dpmon.store.sync_passes; NULL: the other ranks' steps are not known; exposed_ns also if a
                 rank ran steps of another kind before it), loop and loop_batch (`loop` and `batch` of Step), last_call
                 (number of its last call), called (its calls as JSON, see dpmon.store.query_results.encode_calls;
                 NULL: none)
    events       id, process (NULL: the supervisor), kind, t_ns, json
    collectives  id, process, number (of its span), definition (0: a sample, with the collectives of one step), phase,
                 step (0: none), start_ns, wall_ns, quantity: see CollectiveRow
    losses       id, process, definition (a line that calls backward), step (0: none), t_ns, loss (NULL: NaN)
    collective_sums  start_s (one second; -1: see below), process, definition, count (collectives that began in that
                 second; definition 0: samples), bytes (definition 0: collectives of the samples)
    widths, keys, tallies, series, times
                 dpmon.store.time_buckets, tally_keys, tally_tables and activity_times
    loops        the columns of dpmon.store.loader_loops.LoaderLoop: loops over the loaders of the processes, and which
                 are epochs
    gaps         id, process, after_step, mode, begin_ns, end_ns, ns: the longer times between two steps
    shapes       number of calls by process, mode, kind, layout, virtual, sizes (JSON: the definitions of inputs and
                 outputs of the call, then of each replica, or stage and sizes of each stage) and untimed (why a device
                 time is missing: dpmon.record.record_types.UNTIMED); sizes beyond the limit per process are 0 (unknown)
    device_rollups  start_s (one minute; -1: see below), device (index; -1: the host), name, count, total, high

When the database reaches its size limit, the oldest rows are deleted: steps, collectives and events first, except
events of LASTING_KINDS. In a mirror, a node that fills an eighth of the limit in one table loses rows there first.
Tallies stay longer: each width has its share. The oldest rows of device_rollups and collective_sums are merged into
rows that start at -1. Losses are only thinned, to some thousand for each line that calls backward.

Times are ns since the run's start. Ids come from one counter, so they give the order across the tables. A ring's
position is written in the transaction that writes its records, so a reader that continues from there misses and
repeats nothing.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from dpmon.errors import HistoryError
from dpmon.record.schema import EVALUATION, EXPOSED, FORWARD_ONLY, PHASES, QUANTITIES, SYNC_NUMBER, TRAINING, WAIT
from dpmon.store import activity_times, tally_keys, tally_tables, time_buckets
from dpmon.store.loader_loops import LOOP_COLUMNS

_MIN_ROLLOUTS, _ROLLOUT_SHARE = 3, 0.8
"""Evaluations of a process are rollouts if there are at least so many, and so many for each training step."""
BEFORE_S = -1
"""`start_s` of the device_rollups and collective_sums that cover all time before the other rows."""
HISTORY_FILE = "history.sqlite"
LASTING_KINDS = ("process", "mode", "exit", "warning", "pause", "input", "stall", "loader", "ddp")
"""Events that are kept when older rows are deleted, because they concern the whole run; of some kinds, the newest."""
LASTING = f"kind IN ({', '.join(repr(kind) for kind in LASTING_KINDS)})"
STEP_COLUMNS: Mapping[str, str] = {
    "id": "INTEGER PRIMARY KEY",
    **dict.fromkeys(("process", "step"), "INTEGER"),
    "mode": "TEXT",
    **dict.fromkeys(("start_ns", "wall_ns", "kind", "calls"), "INTEGER"),
    **dict.fromkeys((quantity.name for quantity in QUANTITIES), "INTEGER"),
    **dict.fromkeys((f"{phase.name}_ns" for phase in PHASES), "INTEGER"),
    "rest_ns": "INTEGER",
    **dict.fromkeys(("device", "spans"), "TEXT"),
    "missing_spans": "INTEGER",
    **dict.fromkeys((SYNC_NUMBER, *(f"{name}_ns" for name in (EXPOSED, WAIT)), "loop", "loop_batch"), "INTEGER"),
    "last_call": "INTEGER",
    "called": "TEXT",
}
"""The columns of steps and their types."""
COLLECTIVE_COLUMNS: Mapping[str, str] = {
    "id": "INTEGER PRIMARY KEY",
    **dict.fromkeys(("process", "number", "definition", "phase", "step", "start_ns", "wall_ns", "quantity"), "INTEGER"),
}
"""The columns of collectives and their types."""
NODE_COLUMNS: Mapping[str, str] = {
    "number": "INTEGER PRIMARY KEY",
    **dict.fromkeys(("name", "host", "run", "version", "state", "why"), "TEXT"),
    **dict.fromkeys(("since_ns", "heard_ns", "received", "tallied_s"), "INTEGER"),
    **dict.fromkeys(("clock_ns", "clock_error_ns", "shift_s"), "INTEGER"),
    "exit": "TEXT",
}
"""The columns of nodes and their types."""
LOSS_COLUMNS = ("id", "process", "definition", "step", "t_ns", "loss")
UNFIT = "loss - loss IS NULL"
"""The SQL condition for a loss that is NaN or infinite."""
SHARE_IDS = ("steps", "events", "collectives", "losses")
"""The tables whose ids come from the common counter."""
OWN = "definition > 0 AND phase = 0 AND step > 0"
"""The SQL condition for collectives that the script itself launched in a step, outside the phases."""
COLLECTIVE_SUMS = ("count", "bytes")
"""The sums of collectives."""
_OPTIONAL = {
    *("rank", "first_id", "last_id", "last_step", "last_call", "lines", "loss", "node"),
    *("host", "run", "version", "why", "heard_ns", "clock_ns", "clock_error_ns", "shift_s", "exit"),
    *("rest_ns", "device", "spans", SYNC_NUMBER, f"{EXPOSED}_ns", f"{WAIT}_ns", "called", "t_ns"),
    *("loop", "loop_batch", "length", "ahead", "epoch"),
    *(f"{phase.name}_ns" for phase in PHASES),
    *(quantity.name for quantity in QUANTITIES),
}
"""Columns that may be NULL in some table."""


def _whole_numbers(names: Iterable[str]) -> str:
    return ", ".join(f"{name} INTEGER" for name in names)


_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rings (
    name TEXT PRIMARY KEY, process INTEGER, rank INTEGER, pid INTEGER, position INTEGER, missed INTEGER, calls INTEGER,
    steps INTEGER, last_step INTEGER, evaluations INTEGER, forward_steps INTEGER, evaluation_phases INTEGER,
    first_id INTEGER, last_id INTEGER, last_call INTEGER, lines INTEGER, events INTEGER, ended INTEGER,
    open_calls INTEGER, node INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes ({node_columns});
CREATE TABLE IF NOT EXISTS definitions (
    process INTEGER, number INTEGER, value TEXT, PRIMARY KEY (process, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps ({step_columns});
CREATE TABLE IF NOT EXISTS collectives ({collective_columns});
CREATE TABLE IF NOT EXISTS losses (
    id INTEGER PRIMARY KEY, process INTEGER, definition INTEGER, step INTEGER, t_ns INTEGER, loss REAL);
CREATE TABLE IF NOT EXISTS collective_sums (
    start_s INTEGER, process INTEGER, definition INTEGER, {collective_sums},
    PRIMARY KEY (start_s, process, definition)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, process INTEGER, kind TEXT, t_ns INTEGER, json TEXT);
CREATE TABLE IF NOT EXISTS loops ({loops}, PRIMARY KEY (process, loop)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gaps (
    id INTEGER PRIMARY KEY, process INTEGER, after_step INTEGER, mode TEXT, begin_ns INTEGER, end_ns INTEGER,
    ns INTEGER);
CREATE TABLE IF NOT EXISTS shapes (
    process INTEGER, mode TEXT, kind INTEGER, layout INTEGER, virtual INTEGER, sizes TEXT, untimed INTEGER,
    calls INTEGER, PRIMARY KEY (process, mode, kind, layout, virtual, sizes, untimed)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS device_rollups (
    start_s INTEGER, device INTEGER, name TEXT, count INTEGER, total REAL, high REAL,
    PRIMARY KEY (start_s, device, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lasting ON events (id) WHERE {lasting};
CREATE INDEX IF NOT EXISTS curves ON losses (process, definition, t_ns);
CREATE INDEX IF NOT EXISTS unfit ON losses (process, definition, t_ns) WHERE {unfit};
CREATE INDEX IF NOT EXISTS collected ON collectives (start_ns);
CREATE INDEX IF NOT EXISTS sampled ON collectives (process, start_ns) WHERE definition = 0;
CREATE INDEX IF NOT EXISTS own ON collectives (start_ns) WHERE {own};
CREATE INDEX IF NOT EXISTS samples ON events (t_ns) WHERE kind IN ('device', 'host');
CREATE INDEX IF NOT EXISTS memory ON events (process, t_ns) WHERE kind = 'memory';
""".format(
    lasting=LASTING,
    own=OWN,
    unfit=UNFIT,
    step_columns=", ".join(f"{name} {kind}" for name, kind in STEP_COLUMNS.items()),
    node_columns=", ".join(f"{name} {kind}" for name, kind in NODE_COLUMNS.items()),
    collective_columns=", ".join(f"{name} {kind}" for name, kind in COLLECTIVE_COLUMNS.items()),
    collective_sums=_whole_numbers(COLLECTIVE_SUMS),
    loops=_whole_numbers(LOOP_COLUMNS),
)
SCHEMA = _TABLES + time_buckets.SCHEMA + tally_keys.SCHEMA + tally_tables.SCHEMA + activity_times.SCHEMA
SCHEMA_VERSION = 9_000 + crc32(SCHEMA.encode()) % 1_000
"""Another column makes another version. If the meaning of a column changes, raise the thousands."""


# Without adapters, sqlite3 searches for one for each NULL and BLOB that it writes: a quarter of the time of a step.
sqlite3.register_adapter(type(None), dict[None, None]().get)
sqlite3.register_adapter(bytes, bytes)

_CHECK_INTERVAL = 100_000
"""Instructions of SQLite's virtual machine between two checks."""
_MAX_WRITE_INSTRUCTIONS = 1 << 32
"""More instructions than any batch needs, even a batch with the records of a long time."""
LARGEST = 1 << 30
"""The limits of queries do not grow beyond this size of a database (bytes)."""
_MIN_ROW_BYTES = 8
"""Fewest bytes of a row: its position in the page, its length and its id."""
_MAX_VALUE_BYTES = 64 << 20
_FAILURES = (sqlite3.Error, OverflowError, MemoryError)
DAMAGE = (*_FAILURES, struct.error, LookupError, TypeError, ValueError)
"""What reading a damaged history raises."""
_CHUNK = 200
"""Number of rows that are read together."""


@dataclass
class RingRow:
    """A row of the table `rings`: how much of a ring is in the history."""

    name: str
    process: int
    rank: int | None
    pid: int
    position: int = 0
    """Number of the next unread span."""
    missed: int = 0
    """Records that were overwritten before they were read, or could not be kept."""
    calls: int = 0
    steps: int = 0
    last_step: int | None = None
    """Number of its last training step."""
    evaluations: int = 0
    """Number of its last evaluation step."""
    forward_steps: int = 0
    """Number of its last forward-only step."""
    evaluation_phases: int = 0
    """Number of evaluations, each of one or several steps."""
    first_id: int | None = None
    """First id of its rows in steps; `last_id` is the last. None if it has none."""
    last_id: int | None = None
    last_call: int | None = None
    lines: int | None = None
    """Bytes read of the lines next to the ring."""
    events: int = 0
    """Number of its events in the history."""
    ended: bool = False
    """Whether the process has ended and the history is complete."""
    open_calls: int = 0
    """Calls so far, while no step has ended."""
    node: int | None = None
    """Number of its node; None if it ran on this machine."""

    @property
    def last_steps(self) -> dict[int, int]:
        """Number of its last step of each kind; 0 if there is none."""
        return {TRAINING: self.last_step or 0, EVALUATION: self.evaluations, FORWARD_ONLY: self.forward_steps}


def are_rollouts(evaluations: int, training_steps: int) -> bool:
    """Return whether a process evaluates before nearly every training step, so that this only generates data."""
    return evaluations >= max(_MIN_ROLLOUTS, _ROLLOUT_SHARE * training_steps)


class BoundedConnection:
    """A connection to a history. A damaged tree can have endless rows, so each query has a limit of rows and work."""

    def __init__(self, db: sqlite3.Connection, size: int) -> None:
        """Limit the queries of `db`, a database of `size` bytes, and keep its schema from running functions."""
        self.db = db
        self.set_size(size)
        self._checks = 0
        db.set_progress_handler(self._on_progress, _CHECK_INTERVAL)
        tally_tables.install_aggregates(db)
        db.execute("PRAGMA trusted_schema=OFF")
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)

    def set_size(self, size: int, *, writes: bool = False) -> None:
        """Set the limits for a database of `size` bytes; `writes`: for the next transaction, not for queries."""
        size = min(size, LARGEST)
        self.max_rows = 10_000 + size // _MIN_ROW_BYTES
        self._max_checks = (_MAX_WRITE_INSTRUCTIONS if writes else 20_000_000 + 8 * size) // _CHECK_INTERVAL

    def rows(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Raises HistoryError if the database cannot be read."""
        self.reset_instruction_count()
        remaining_rows = self.max_rows
        try:
            cursor = self.db.execute(query, values)
            while rows := cursor.fetchmany(_CHUNK):
                yield from rows
                remaining_rows -= len(rows)
                if remaining_rows < 0:
                    raise HistoryError("it has more rows than its size allows")
                self.reset_instruction_count()
        except _FAILURES as error:
            raise HistoryError(str(error) or "a value is too long") from None

    def reset_instruction_count(self) -> None:
        """Restart the count of instructions, because a query starts."""
        self._checks = 0

    def refresh(self) -> None:
        """End the transaction, so that the next query sees the current database."""
        with suppress(sqlite3.Error):
            if self.db.in_transaction:
                self.db.execute("COMMIT")
                self.db.execute("BEGIN")

    def _on_progress(self) -> int:
        """Act as SQLite's progress handler: a result other than 0 interrupts the query."""
        self._checks += 1
        return self._checks > self._max_checks


_TYPES = {"INTEGER": int, "TEXT": str, "REAL": float, "BLOB": bytes}


@cache
def columns_of(table: str) -> Mapping[str, tuple[type, ...]]:
    """Return the columns of a table of SCHEMA, and their possible types."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        rows = db.execute(f"PRAGMA table_info({table})").fetchall()
    columns: dict[str, tuple[type, ...]] = {}
    for _, name, declared, not_null, _, in_key in rows:
        # A name may be optional in another table only; a part of a key is never NULL.
        is_optional = name in _OPTIONAL and not not_null and not in_key
        columns[name] = (_TYPES[declared], type(None)) if is_optional else (_TYPES[declared],)
    return columns


def database_file_stamps(path: Path) -> list[os.stat_result]:
    """Return the `lstat` results of a database's files: the database, and its journal if there is one."""
    stamps = []
    for file in (path, Path(f"{path}-wal")):
        with suppress(FileNotFoundError):
            stamps.append(file.lstat())
    return stamps


def database_size(path: Path) -> int:
    """Return the size (bytes) of the database at `path`."""
    return sum(file.st_size for file in database_file_stamps(path))


def check_schema(db: sqlite3.Connection) -> None:
    """Raise HistoryError if a database has a view or a trigger, which would run SQL of another writer."""
    query = "SELECT name FROM sqlite_master WHERE sql NOT LIKE 'CREATE TABLE %' AND sql NOT LIKE 'CREATE INDEX %'"
    for (name,) in db.execute(query):
        raise HistoryError(f"it holds {str(name)[:60]}, which is not dpmon's")


def version_of(db: sqlite3.Connection) -> int:
    """Return the schema version of a history; SCHEMA_VERSION while its tables are still empty."""
    row: tuple[int] | None = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    return SCHEMA_VERSION if row is None else row[0]


def last_ids(db: sqlite3.Connection) -> list[int]:
    """Return the highest id in each of the tables that share ids."""
    query = " UNION ALL ".join(f"SELECT max(id) FROM {table}" for table in SHARE_IDS)
    return [last_id or 0 for (last_id,) in db.execute(query)]


def read_ring_rows(connection: BoundedConnection) -> dict[str, RingRow]:
    """Return the rows of the table `rings` by file name. Raises HistoryError."""
    columns = ", ".join(member.name for member in fields(RingRow))
    rows = (RingRow(*row) for row in connection.rows(f"SELECT {columns} FROM rings"))
    return {row.name: row for row in rows}

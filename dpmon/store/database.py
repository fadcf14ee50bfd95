"""The file of a history: its tables, its version, how its one writer and its readers open it, and its damage.

The supervisor of a run writes history.sqlite, or the mirror of a run on several nodes; any number of processes read it.
Each table has a module, with its SQL, its rows and its queries. Times are ns since the run's start. Seconds are counted
since 1970 (dpmon.store.time_buckets). The ids of NUMBERED tables come from one counter, so they give the order across
the tables.

When the database reaches its size limit, the oldest rows are deleted: steps, collectives and events first, except
lasting events. In a mirror, a node that fills an eighth of the limit in one table loses rows there first.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from dpmon.errors import HistoryError
from dpmon.store import time_buckets
from dpmon.store.activity_times import TIMES
from dpmon.store.collectives import COLLECTIVE_SUMS, COLLECTIVES
from dpmon.store.definition_table import DEFINITIONS
from dpmon.store.device_rollups import DEVICE_ROLLUPS
from dpmon.store.events import EVENTS
from dpmon.store.gaps import GAPS
from dpmon.store.loops import LOOPS
from dpmon.store.loss_table import LOSSES
from dpmon.store.node_table import NODES
from dpmon.store.rings import RINGS
from dpmon.store.shapes import SHAPES
from dpmon.store.steps import STEPS
from dpmon.store.table import NUMBERED, Parameters, StoreTable
from dpmon.store.tally_keys import KEYS
from dpmon.store.tally_tables import SERIES, TALLIES, install_aggregates

HISTORY_FILE = "history.sqlite"
TABLES: tuple[StoreTable[Any], ...] = (
    *(STEPS, EVENTS, COLLECTIVES, LOSSES, DEFINITIONS, KEYS, LOOPS, GAPS, SHAPES),
    *(COLLECTIVE_SUMS, DEVICE_ROLLUPS, TALLIES, SERIES, TIMES, RINGS, NODES),
)
BUCKET_TABLES = (TALLIES, SERIES, TIMES)
"""Tables with wider time buckets."""
_META = """
CREATE TABLE IF NOT EXISTS meta (
    key   TEXT PRIMARY KEY,  -- schema (the version), run (its id), origin_s (dpmon.store.time_buckets), limit_bytes,
                             -- pruned (rows deleted to stay below it), seq (number of the last transaction)
    value NOT NULL
) WITHOUT ROWID;
"""
SCHEMA = "".join([_META, time_buckets.SCHEMA, *(table.schema for table in TABLES)])
_VERSION = 12
"""Raise it whenever a table or the meaning of a column changes."""
SCHEMA_VERSION = 1000 * _VERSION + crc32(STEPS.column_list.encode()) % 1000
"""Another quantity or phase of steps makes another version by itself."""

# Without adapters, sqlite3 searches for one for each NULL and BLOB that it writes: a quarter of the time of a step.
sqlite3.register_adapter(type(None), dict[None, None]().get)
sqlite3.register_adapter(bytes, bytes)

_MAX_VALUE_BYTES = 64 << 20
"""Most bytes of a value that are read: a damaged database can name any length."""
_FAILURES = (sqlite3.Error, OverflowError, MemoryError)
DAMAGE = (*_FAILURES, struct.error, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What reading a damaged history raises."""


def prepare_to_read(db: sqlite3.Connection) -> None:
    """Bound the values that `db` reads, and keep its schema from running functions, before anything is read."""
    db.execute("PRAGMA trusted_schema=OFF")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    install_aggregates(db)


class HistoryConnection:
    """A connection to a history, for queries."""

    def __init__(self, db: sqlite3.Connection, reopen: Callable[[], sqlite3.Connection] | None = None) -> None:
        """`reopen`: opens the same database again after `release`, prepared to read; None: it stays open."""
        prepare_to_read(db)
        self._reopen = reopen
        self._db: sqlite3.Connection | None = db

    @property
    def db(self) -> sqlite3.Connection:
        """The database, which is opened again if it was released."""
        if self._db is None and self._reopen is not None:
            self._db = self._reopen()
        if self._db is None:
            raise HistoryError("it was closed")
        return self._db

    def rows(self, query: str, values: Parameters = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Raises HistoryError if the database cannot be read."""
        try:
            for row in self.db.execute(query, values):  # noqa: UP028 - "yield from" would close the cursor, perhaps late
                yield row
        except _FAILURES as error:
            raise HistoryError(str(error) or "a value is too long") from None

    def release(self) -> None:
        """Close the database until the next query, which sees its current contents.

        An open connection keeps the supervisor from shortening the journal, and from removing it at the end.
        """
        if self._reopen is not None:
            self._disconnect()

    def close(self) -> None:
        """Close the database for good."""
        self._reopen = None
        self._disconnect()

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()


_TYPES = {"INTEGER": int, "TEXT": str, "REAL": float, "BLOB": bytes, "": object}


@cache
def columns_of(table: str) -> Mapping[str, tuple[type, ...]]:
    """Return the columns of a table, and their possible types."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        rows = db.execute(f"PRAGMA table_info({table})").fetchall()
    return {
        name: (_TYPES[declared],) if not_null or in_key else (_TYPES[declared], type(None))
        for _, name, declared, not_null, _, in_key in rows
    }


def database_file_stamps(path: Path) -> list[os.stat_result]:
    """Return the `lstat` results of a database's files: the database, and its journal if there is one."""
    stamps = []
    for file in (path, Path(f"{path}-wal")):
        with suppress(FileNotFoundError):
            stamps.append(file.lstat())
    return stamps


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
    query = " UNION ALL ".join(f"SELECT max(id) FROM {table.name}" for table in TABLES if table.sent == NUMBERED)
    return [last_id or 0 for (last_id,) in db.execute(query)]

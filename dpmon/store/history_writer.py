"""Writes history.sqlite, whose schema is in dpmon.store.history_schema. Only the supervisor of a run writes it."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.schema import SECOND
from dpmon.run.safe_files import check_database
from dpmon.store import sync_passes
from dpmon.store.activity_times import MERGE_STATEMENT, add_times
from dpmon.store.history_schema import (
    BEFORE_S,
    COLLECTIVE_SUMS,
    DAMAGE,
    HISTORY_FILE,
    LASTING,
    SCHEMA,
    SCHEMA_VERSION,
    SHARE_IDS,
    STEP_COLUMNS,
    UNFIT,
    BoundedConnection,
    RingRow,
    check_schema,
    columns_of,
    database_size,
    last_ids,
    read_ring_rows,
    version_of,
)
from dpmon.store.loader_loops import LOOP_COLUMNS, LoaderLoop
from dpmon.store.query_results import NODE_DEVICES, event_from_row
from dpmon.store.sync_passes import join_sync_steps
from dpmon.store.tally_keys import KeyNumbers
from dpmon.store.tally_tables import MERGE_STATEMENTS, add_steps
from dpmon.store.time_buckets import SLACK_S, merge_buckets, prune_buckets
from dpmon.store.write_batch import GAP_NS, WriteBatch

LIMIT_BYTES = 256 << 20
_ERRORS = (HistoryError, OSError, *DAMAGE)
_MAX_LASTING = 10_000
_SUMS_DIVISOR = 3
"""Each table of sums may take the size limit divided by this number."""
_ROW_BYTES = 180
"""Approximate size of a row of sums."""
_TEXT_SIZE = "total(length({0}) + 2048 * (length({0}) > 1000))"
"""SQL for the approximate size of a column: SQLite puts a long value on pages of its own, the last one half empty."""
_TABLE_SHARES = {
    "series": 3 / 4,
    "times": 3 / 4,
    **dict.fromkeys(("collective_sums", "device_rollups"), 1 / _SUMS_DIVISOR),
}
"""Share of the size limit that each of these tables may take before a node loses rows in it."""
_NODE_DIVISOR, _LAST_DIVISOR, _MIN_NODE_BYTES = 8, 64, 1 << 16
"""A node's rows in a table may take the limit divided by the first. That is halved while the history stays too large;
below the limit divided by the second, _TABLE_SHARES no longer count. The third: bytes that a node always keeps."""
_LIMITED_TABLES = ("meta", "nodes", "keys", "widths", "tallies")
"""Tables that have limits of their own. A tally goes with its series."""
_KEY_OWNER = "ifnull((SELECT process FROM keys WHERE number = key), -1 << 40)"
_DELETE_EMPTY_TALLIES = """
DELETE FROM tallies WHERE NOT EXISTS (
    SELECT 1 FROM series WHERE (width, start_s, key) = (tallies.width, tallies.start_s, tallies.key))
"""
_DEVICE_OWNER = f"CASE WHEN device < 0 THEN device ELSE -1 - device / {NODE_DEVICES} END"
KEPT_LOSSES, KEPT_OLDER = 1024, 2048
"""How many of the newest losses of a script line are kept, and how many older ones, at equal distances."""
_THIN_LOSSES = f"""\
DELETE FROM losses WHERE process = :process AND definition = :line AND t_ns < :until AND id NOT IN (
    SELECT min(id) FROM losses WHERE process = :process AND definition = :line GROUP BY t_ns / :slot
    UNION ALL SELECT * FROM (
        SELECT id FROM losses WHERE process = :process AND definition = :line AND {UNFIT} ORDER BY t_ns LIMIT 1))"""
_RING_NAMES = tuple(member.name for member in fields(RingRow))
_INSERT_RING = f"INSERT OR REPLACE INTO rings ({', '.join(_RING_NAMES)}) VALUES ({', '.join('?' * len(_RING_NAMES))})"
_ring_columns = attrgetter(*_RING_NAMES)
_INSERT_LOOP = f"INSERT OR REPLACE INTO loops VALUES ({', '.join('?' * len(LOOP_COLUMNS))})"
_loop_columns = attrgetter(*LOOP_COLUMNS)
_INSERT_GAP = "INSERT INTO gaps (process, after_step, mode, begin_ns, end_ns, ns) VALUES (?,?,?,?,?,?)"
_SHORTEN_GAP = "UPDATE gaps SET ns = max(ns - ?, 0) WHERE process = ? AND begin_ns <= ? AND end_ns >= ?"
_ADD_SHAPE = """\
INSERT INTO shapes VALUES (?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls"""
_Combined = Mapping[str, str]
_COLLECTIVES: tuple[str, str, _Combined] = (
    "collective_sums",
    "process, definition",
    dict.fromkeys(COLLECTIVE_SUMS, "sum"),
)
_DEVICES: tuple[str, str, _Combined] = (
    "device_rollups",
    "device, name",
    {"count": "sum", "total": "sum", "high": "max"},
)
"""Tables of sums by `start_s`, as (name, the other key columns, the SQL function that combines each further column)."""


class HistoryWriter:
    """Writes batches to one history, and deletes its oldest rows at the size limit."""

    def __init__(
        self, db: sqlite3.Connection, meta: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES, path: Path | None = None
    ) -> None:
        """`db`: a history or an empty database. `path`: its file; None if it is in memory, and the caller closes it.

        Raises HistoryError.
        """
        self._limit = limit_bytes
        self._path = path
        self._db = db
        self._until_thin: dict[tuple[int, int], int] = {}
        """By process and definition of a loss: after how many more losses the script line is thinned."""
        try:
            self._page_bytes = self._read_number("PRAGMA page_size")
            self._connection = BoundedConnection(db, self._file_bytes() if path is None else database_size(path))
            self._prepare(meta)
        except _ERRORS as error:
            raise HistoryError(str(error)) from None

    @classmethod
    def open(cls, directory: Path, meta: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES) -> HistoryWriter:
        """Open or create the history of the run in `directory`. Raises HistoryError."""
        path = directory / HISTORY_FILE
        try:
            check_database(path, written=True)
            db = sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)
        except (sqlite3.Error, OSError) as error:
            raise HistoryError(str(error)) from None
        try:
            return cls(db, meta, limit_bytes, path)
        except HistoryError:
            db.close()
            raise

    @property
    def connection(self) -> BoundedConnection:
        """The connection for queries, with limits for the current size of the database."""
        self._connection.set_size(self._file_bytes())
        return self._connection

    def _prepare(self, meta: Mapping[str, Any]) -> None:
        execute = self._db.execute
        has_tables = execute("SELECT 1 FROM sqlite_master").fetchone()
        check_schema(self._db)
        if has_tables and (version := version_of(self._db)) != SCHEMA_VERSION:
            raise HistoryError(f"another version of dpmon wrote it (history {version})")
        execute("PRAGMA journal_mode=WAL")
        # No fsync: a kill of this process loses nothing, because the kernel holds the pages, and a power cut ends the
        # training too. A flush every few seconds would slow a training that writes to the same disk.
        execute("PRAGMA synchronous=OFF")
        execute("PRAGMA journal_size_limit=4194304")
        execute("PRAGMA cache_size=-2000")
        execute("PRAGMA temp_store=MEMORY")
        self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA}; COMMIT")  # readers see all tables or none
        self._db.executescript(sync_passes.SCHEMA)
        rows = {"schema": SCHEMA_VERSION, "limit_bytes": self._limit, "pruned": 0, "seq": 0, **meta}
        self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", rows.items())
        self.key_numbers = KeyNumbers(self._db)
        self.next_id: int = 1 + max(last_ids(self._db))

    def rings(self) -> dict[str, RingRow]:
        """Return the rows of `rings` by file name, as the previous writer left them. Raises HistoryError."""
        return read_ring_rows(self.connection)

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises HistoryError."""
        return list(self.connection.rows(query, values))

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the newest `stall` event; None if there is none. Raises HistoryError."""
        query = "SELECT json FROM events WHERE kind = 'stall' ORDER BY id DESC LIMIT 1"
        return next((event_from_row(row).data for row in self.rows(query)), None)

    def last_step(self, ring: RingRow) -> list[tuple[Any, ...]]:
        """Return a list with (mode, start, wall, kind) of a ring's last step; an empty list if it has none."""
        query = (
            "SELECT mode, start_ns, wall_ns, kind FROM steps"
            " WHERE process = ? AND step > 0 AND id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
        )
        return self.rows(query, (ring.process, ring.first_id, ring.last_id)) if ring.steps else []

    def loops(self, process: int) -> list[LoaderLoop]:
        """Return the loader loops of a process, in order. Raises HistoryError."""
        query = f"SELECT {', '.join(LOOP_COLUMNS)} FROM loops WHERE process = ? ORDER BY loop"
        return [LoaderLoop(*row) for row in self.rows(query, (process,))]

    def write(self, batch: WriteBatch) -> None:
        """Write the whole batch, or nothing if it raises HistoryError. Then the same batch may be written again."""
        self.run_transaction(lambda seq: self._insert_batch(batch, seq))

    def run_transaction(self, write: Callable[[int], None]) -> None:
        """Call `write` with the number of a transaction in it, and delete the oldest rows at the size limit.

        If it raises HistoryError, nothing was written.
        """
        self._connection.reset_instruction_count()
        try:
            self._connection.set_size(self._file_bytes(), writes=True)
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("UPDATE meta SET value = value + 1 WHERE key = 'seq'")
            write(self._read_number("SELECT value FROM meta WHERE key = 'seq'"))
            node_count = self._read_number("SELECT count(*) FROM nodes")
            max_bytes = self._limit // _NODE_DIVISOR
            while self._used_bytes() > self._limit and max_bytes > 0:
                deleted = (self._prune_nodes(max_bytes) if node_count else 0) or self._prune()
                self._db.execute("UPDATE meta SET value = value + ? WHERE key = 'pruned'", (deleted,))
                if not deleted:
                    max_bytes = max_bytes // 2 if node_count and max_bytes > _MIN_NODE_BYTES else 0
            self._db.execute("COMMIT")
        except _ERRORS as error:
            self.key_numbers.reload()
            with suppress(sqlite3.Error):  # some errors roll back themselves
                self._db.execute("ROLLBACK")
            raise error if isinstance(error, HistoryError) else HistoryError(str(error)) from None

    def _insert_batch(self, batch: WriteBatch, seq: int) -> None:
        execute_many = self._db.executemany
        execute_many("INSERT OR REPLACE INTO definitions VALUES (?,?,?)", batch.definitions)
        for table, rows in ((table, getattr(batch, table)) for table in SHARE_IDS):
            execute_many(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns_of(table)))})", rows)
        execute_many(_INSERT_RING, map(_ring_columns, batch.rings))
        execute_many(_upsert_sum_sql(*_DEVICES), [(*key, *values) for key, values in batch.devices.items()])
        execute_many(_upsert_sum_sql(*_COLLECTIVES), [(*key, *values) for key, values in batch.collective_sums.items()])
        number = self.key_numbers.number
        seconds = {(second, number(key)): steps for (second, key), steps in batch.steps_by_tally.items()}
        waits = join_sync_steps(self._db, batch.sync_steps, self.key_numbers)
        add_steps(self._db, seq, seconds, tuple(STEP_COLUMNS), waits)
        add_times(self._db, seq, batch.activity_ns)
        newest_s = max((second for second, _ in seconds), default=0)
        self.merge_buckets(newest_s - SLACK_S)
        execute_many(_INSERT_LOOP, map(_loop_columns, batch.loops.values()))
        execute_many(_INSERT_GAP, batch.gaps)
        for process, start_ns, end_ns in batch.late_input_waits:
            self._db.execute(_SHORTEN_GAP, (end_ns - start_ns, process, start_ns, end_ns))
        if batch.late_input_waits:
            self._db.execute("DELETE FROM gaps WHERE ns < ?", (GAP_NS,))
        execute_many(_ADD_SHAPE, [(*key, count) for key, count in batch.shapes.items()])
        self.thin_losses((process, definition) for _, process, definition, *_ in batch.losses)

    def merge_buckets(self, end_s: int) -> None:
        """Make the wider tallies and times that have passed by second `end_s`, in the current transaction."""
        merge_buckets(self._db, (*MERGE_STATEMENTS, MERGE_STATEMENT), end_s)

    def thin_losses(self, lines: Iterable[tuple[int, int]]) -> None:
        """Thin the losses of a script line after every KEPT_LOSSES of them. The first invalid loss is never deleted.

        `lines`: process and definition of each new loss.
        """
        for line in lines:
            self._until_thin[line] = self._until_thin.get(line, 1) - 1
            if not self._until_thin[line]:
                self._until_thin[line] = KEPT_LOSSES
                self._thin_line(*line)

    def _thin_line(self, process: int, definition: int) -> None:
        query = "SELECT t_ns FROM losses WHERE process = ? AND definition = ? ORDER BY t_ns {} LIMIT 1 OFFSET ?"
        oldest = self._db.execute(query.format(""), (process, definition, 0)).fetchone()
        first_kept = self._db.execute(query.format("DESC"), (process, definition, KEPT_LOSSES)).fetchone()
        if oldest is None or first_kept is None:
            return
        (oldest_ns,), (until_ns,) = oldest, first_kept
        slot_ns = SECOND
        while (until_ns - oldest_ns) // slot_ns > KEPT_OLDER:
            slot_ns *= 2  # so that a slot is always a pair of earlier slots
        values = {"process": process, "line": definition, "until": until_ns, "slot": slot_ns}
        self._db.execute(_THIN_LOSSES, values)

    def _used_bytes(self) -> int:
        return self._file_bytes() - self._read_number("PRAGMA freelist_count") * self._page_bytes

    def _file_bytes(self) -> int:
        return self._read_number("PRAGMA page_count") * self._page_bytes

    def _read_number(self, query: str) -> int:
        (number,) = self._db.execute(query).fetchone()
        return int(number)

    def _prune(self) -> int:
        """Delete the oldest sixteenth of the rows. Return how many were deleted.

        SQLite reuses the pages, so the file does not grow.
        """
        self._prune_sums()
        execute = self._db.execute
        sources = [f"FROM {table} WHERE true" for table in ("steps", "collectives")]
        sources.append(f"FROM events WHERE NOT ({LASTING})")
        id_rows = [row for source in sources for row in execute(f"SELECT min(id) {source}")]
        first_ids = [first_id for (first_id,) in id_rows if first_id is not None]
        if not first_ids:
            return 0
        end_id = min(first_ids) + max(1, (max(last_ids(self._db)) - min(first_ids)) // 16)
        return sum(execute(f"DELETE {source} AND id < ?", (end_id,)).rowcount for source in sources)

    def _prune_nodes(self, max_bytes: int) -> int:
        """Delete the oldest quarter of a node's rows in each table of a mirror where they take more than `max_bytes`.

        Return the number of deleted rows. All tables are treated alike, also those that the schema gets later.
        """
        execute, deleted = self._db.execute, 0
        node_of = dict(execute("SELECT process, node FROM rings"))
        for table, sql in execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = {} if table in _LIMITED_TABLES else columns_of(table)
            key = re.search(r"(?:PRIMARY KEY|UNIQUE) \((.*?)\)", sql)
            order = key[1] if key else next(iter(columns), "")
            if table == "events":
                order = f"{LASTING}, id"
            owner = "ifnull(process, -1 << 40)" if "process" in columns else _DEVICE_OWNER
            if "key" in columns:
                owner = _KEY_OWNER
            text_columns = [name for name, (column_type, *_) in columns.items() if column_type in (str, bytes)]
            size = " + ".join([f"count(*) * {_ROW_BYTES}", *map(_TEXT_SIZE.format, text_columns)])
            rows_by_node = defaultdict[Any, list[tuple[float, ...]]](list)
            query = f"SELECT {owner}, count(*), {size} FROM {table} GROUP BY 1"
            for owner_id, *sums in execute(query).fetchall() if columns else ():
                node = -1 - owner_id if owner_id < 0 else node_of.get(owner_id)
                rows_by_node[node].append((owner_id, *sums))
            share = self._limit * _TABLE_SHARES.get(table, 0) if max_bytes * _LAST_DIVISOR > self._limit else 0
            for owners, counts, sizes in (zip(*rows, strict=True) for rows in rows_by_node.values()):
                if sum(sizes) > max(max_bytes, share, _MIN_NODE_BYTES):
                    source = f"FROM {table} WHERE {owner} IN ({', '.join(map(str, owners))})"
                    oldest = f"SELECT {order} {source} ORDER BY {order} LIMIT {sum(counts) // 4 + 1}"
                    deleted += execute(f"DELETE FROM {table} WHERE ({order}) IN ({oldest})").rowcount
        if deleted:
            execute(_DELETE_EMPTY_TALLIES)
        return deleted

    def _prune_sums(self) -> None:
        """Limit the sums and lasting events, which could fill the database in runs of many days or many processes."""
        execute = self._db.execute
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        end_s = sample_end_s = 1 << 40
        for (sample_ns,) in execute(query):
            sample_end_s = sample_ns // 60_000_000_000 * 60
        # Keep each minute whose samples still have rows: readers use these rows instead of its sums.
        self._roll_up(*_DEVICES, sample_end_s)
        self._roll_up(*_COLLECTIVES, end_s)
        prune_buckets(self._db, self._limit)
        execute("DELETE FROM gaps WHERE id < (SELECT max(id) FROM gaps) - ?", (_MAX_LASTING,))
        newest_loop = "SELECT max(other.loop) FROM loops AS other WHERE other.process = loops.process"
        execute(f"DELETE FROM loops WHERE loop <= ({newest_loop}) - ?", (_MAX_LASTING,))
        for kind in ("warning", "input", "stall", "loader", "ddp"):  # lasting events of unlimited number
            oldest_kept = "SELECT id FROM events WHERE kind = ? ORDER BY id DESC LIMIT 1 OFFSET ?"
            execute(f"DELETE FROM events WHERE kind = ? AND id < ({oldest_kept})", (kind, kind, _MAX_LASTING))

    def _roll_up(self, table: str, key: str, operations: _Combined, latest_s: int) -> None:
        """If a table of sums is too large, merge its oldest eighth into one sum per key, at most up to `latest_s`."""
        query = f"SELECT count(*), min(start_s), max(start_s) FROM {table} WHERE start_s > ?"
        count, first_s, last_s = self._db.execute(query, (BEFORE_S,)).fetchone()
        if count * _ROW_BYTES <= self._limit / _SUMS_DIVISOR:
            return
        end_s = min(first_s + max((last_s - first_s) // 8, 1), latest_s)
        oldest_rows = f"FROM {table} WHERE start_s > ? AND start_s < ?"
        sums = ", ".join(f"{operation}({name})" for name, operation in operations.items())
        upsert = _upsert_sum_sql(table, key, operations, f"SELECT ?, {key}, {sums} {oldest_rows} GROUP BY {key}")
        self._db.execute(upsert, (BEFORE_S, BEFORE_S, end_s))
        self._db.execute(f"DELETE {oldest_rows}", (BEFORE_S, end_s))

    def close(self) -> None:
        """Close the file. It is self-contained afterwards unless another process reads it now."""
        if self._path is None:
            return
        # If another process reads now, the journal stays: readers read both files, and the next supervisor cleans up.
        with suppress(sqlite3.Error, OSError):
            check_database(self._path, written=True)  # again: SQLite opens the journal only now
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()


def _upsert_sum_sql(table: str, key: str, operations: _Combined, rows: str | None = None) -> str:
    """Return the SQL that adds rows to a table of sums. `rows`: a query for these rows; None: SQL parameters."""
    key_columns = f"start_s, {key}"
    rows = rows or f"VALUES ({', '.join('?' * (key_columns.count(',') + 1 + len(operations)))})"
    changes = ", ".join(
        f"{name} = {name} + excluded.{name}" if operation == "sum" else f"{name} = {operation}({name}, excluded.{name})"
        for name, operation in operations.items()
    )
    return f"INSERT INTO {table} {rows} ON CONFLICT ({key_columns}) DO UPDATE SET {changes}"

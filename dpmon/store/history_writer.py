"""Writes the history of a run (dpmon.store.database). Only the supervisor of a run writes it."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.schema import SECOND
from dpmon.run.safe_files import check_database
from dpmon.store import sync_passes
from dpmon.store.activity_times import add_times
from dpmon.store.collectives import COLLECTIVE_SUMS
from dpmon.store.database import (
    BUCKET_TABLES,
    DAMAGE,
    HISTORY_FILE,
    SCHEMA,
    SCHEMA_VERSION,
    HistoryConnection,
    check_schema,
    columns_of,
    last_ids,
    version_of,
)
from dpmon.store.device_rollups import prune_device_rollups
from dpmon.store.events import LASTING, prune_lasting_events
from dpmon.store.gaps import prune_gaps, shorten_gaps
from dpmon.store.loops import LOOPS, LoaderLoop, prune_loops
from dpmon.store.loss_table import LOSSES, LossThinning
from dpmon.store.node_table import NODE_DEVICES
from dpmon.store.shapes import SHAPES, CallShape
from dpmon.store.steps import STEPS, StepRow
from dpmon.store.sync_passes import SyncStep, join_sync_steps
from dpmon.store.table import RowT, StoreTable
from dpmon.store.tally_keys import KeyNumbers, TallyKey
from dpmon.store.tally_tables import SecondOfSteps, add_steps
from dpmon.store.time_accounting import ActivityInterval
from dpmon.store.time_buckets import SLACK_S, WIDTHS, merge_buckets, prune_buckets, roll_up

LIMIT_BYTES = 256 << 20
_ERRORS = (HistoryError, OSError, *DAMAGE)
_ROW_BYTES = 180
"""Approximate size of a row without its texts."""
_TEXT_SIZE = "total(length({0}) + 2048 * (length({0}) > 1000))"
"""SQL for the approximate size of a column: SQLite puts a long value on pages of its own, the last one half empty."""
_TABLE_SHARES = {"series": 2 / 3, "times": 2 / 3, "collective_sums": 1 / 3, "device_rollups": 1 / 3}
"""Share of the size limit that a node's rows in a table may take. The rest has room for steps of the other nodes."""
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


@dataclass
class WriteBatch:
    """What one transaction adds to a history: rows, and the steps and times for its tallies."""

    origin_s: int = 0
    """The second of the run's start (dpmon.store.time_buckets)."""
    rows: dict[StoreTable[Any], list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By table."""
    steps_by_tally: dict[tuple[int, TallyKey], SecondOfSteps] = field(
        default_factory=lambda: defaultdict(SecondOfSteps)
    )
    """By second and key of the tally: the steps that ended in that second."""
    activity_ns: dict[tuple[int, int, str, str], int] = field(default_factory=dict)
    """Time (ns) by second, process, mode and activity. Negative values are subtracted."""
    loops: dict[tuple[int, int], LoaderLoop] = field(default_factory=dict)
    """New and changed loader loops, by process and number."""
    late_input_waits: list[tuple[int, int, int]] = field(default_factory=list)
    """Late input waits, which shorten recorded gaps, as (process, start, end)."""
    sync_steps: list[SyncStep] = field(default_factory=list)
    """Steps that wait for the steps of other ranks."""
    shapes: Counter[CallShape] = field(default_factory=Counter)
    """Calls by shape."""

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return sum(map(len, self.rows.values()))

    def second_of(self, time_ns: int) -> int:
        """Return the second of the time buckets for a time (ns since the run's start)."""
        return time_ns // SECOND + self.origin_s

    def add(self, table: StoreTable[RowT], row: RowT) -> None:
        """Add a row."""
        self.rows[table].append(row)

    def add_step(self, key: TallyKey, row: StepRow, series: Iterable[tuple[str, int]]) -> None:
        """Add a step, also to its tally. `series`: values of further series."""
        self.add(STEPS, row)
        second_of_steps = self.steps_by_tally[self.second_of(row.end_ns), key]
        second_of_steps.rows.append(row)
        second_of_steps.series += series

    def add_activity_time(self, process: int, intervals: Iterable[ActivityInterval]) -> None:
        """Add the time of a process's activities."""
        sums = self.activity_ns
        for interval in intervals:
            activity, mode, start_ns, end_ns, sign = interval
            if sign < 0 and activity == "between":
                self.late_input_waits.append((process, start_ns, end_ns))
            second = start_ns // SECOND
            if end_ns <= (second + 1) * SECOND:  # the usual case
                key = second + self.origin_s, process, mode, activity
                sums[key] = sums.get(key, 0) + sign * (end_ns - start_ns)
                continue
            for second, ns in interval.split_by_second():
                key = second + self.origin_s, process, mode, activity
                sums[key] = sums.get(key, 0) + ns


class HistoryWriter:
    """Writes batches to one history, and deletes its oldest rows at the size limit."""

    def __init__(
        self, db: sqlite3.Connection, meta: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES, path: Path | None = None
    ) -> None:
        """`db`: a history or an empty database. `path`: its file; None if it is in memory, and the caller closes it."""
        self._limit = limit_bytes
        self._path = path
        self._db = db
        self.loss_thinning = LossThinning(db)
        self._page_bytes = self._read_number("PRAGMA page_size")
        self.connection = HistoryConnection(db)
        self._prepare(meta)

    @classmethod
    def open(cls, directory: Path, meta: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES) -> HistoryWriter:
        """Open or create the history of the run in `directory`. Raises HistoryError."""
        path = directory / HISTORY_FILE
        try:
            check_database(path, written=True)
            db = sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)
            try:
                return cls(db, meta, limit_bytes, path)
            except BaseException:
                db.close()
                raise
        except _ERRORS as error:
            raise HistoryError(str(error)) from None

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

    def write(self, batch: WriteBatch) -> None:
        """Write the whole batch, or nothing if it raises HistoryError. Then the same batch may be written again."""
        self.run_transaction(lambda: self._insert_batch(batch))

    def run_transaction(self, write: Callable[[], None]) -> None:
        """Call `write` in a transaction with the next number, and delete the oldest rows at the size limit.

        If it raises HistoryError, nothing was written.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("UPDATE meta SET value = value + 1 WHERE key = 'seq'")
            write()
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

    def _insert_batch(self, batch: WriteBatch) -> None:
        db = self._db
        for table, rows in batch.rows.items():
            table.insert(db, rows)
        LOOPS.insert(db, batch.loops.values())
        SHAPES.insert(db, [shape._replace(calls=calls) for shape, calls in batch.shapes.items()])
        shorten_gaps(db, batch.late_input_waits)
        number = self.key_numbers.number
        seconds = {(second, number(key)): steps for (second, key), steps in batch.steps_by_tally.items()}
        waits = join_sync_steps(db, batch.sync_steps, self.key_numbers)
        add_steps(db, seconds, waits)
        add_times(db, batch.activity_ns)
        newest_s = max((second for second, _ in seconds), default=0)
        merge_buckets(db, BUCKET_TABLES, newest_s - SLACK_S)
        self.loss_thinning.note_losses((row.process, row.definition) for row in batch.rows.get(LOSSES, ()))

    def merge_last_buckets(self) -> None:
        """Make the wider time buckets of the last seconds, because the run has ended. Raises HistoryError."""
        newest_s = max(
            self._read_number(f"SELECT ifnull(max(start_s), 0) FROM {table.name}") for table in BUCKET_TABLES
        )
        end_s = (newest_s // WIDTHS[-1] + 1) * WIDTHS[-1]
        self.run_transaction(lambda: merge_buckets(self._db, BUCKET_TABLES, end_s))

    def _used_bytes(self) -> int:
        return (self._read_number("PRAGMA page_count") - self._read_number("PRAGMA freelist_count")) * self._page_bytes

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
        prune_device_rollups(self.connection, self._limit)
        roll_up(self._db, COLLECTIVE_SUMS, self._limit)
        prune_buckets(self._db, self._limit)
        prune_gaps(self._db)
        prune_loops(self._db)
        prune_lasting_events(self._db)

    def close(self) -> None:
        """Close the file. It is self-contained afterwards unless another process reads it now."""
        if self._path is None:
            return
        # If another process reads now, the journal stays: readers read both files, and the next supervisor cleans up.
        with suppress(sqlite3.Error, OSError):
            check_database(self._path, written=True)  # again: SQLite opens the journal only now
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()

"""Writes history.sqlite (its schema: dpmon.store.history_schema). Only the supervisor of a run writes it."""

from __future__ import annotations

import re
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.run.safe_files import check_database
from dpmon.store.history_schema import (
    BEFORE_S,
    COLLECTIVE_SUMS,
    HISTORY_FILE,
    LASTING,
    SCHEMA,
    SCHEMA_VERSION,
    SHARE_IDS,
    UNFIT,
    CheckedConnection,
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
from dpmon.store.tally_writer import TallyWriter
from dpmon.store.write_batch import GAP_NS, WriteBatch

LIMIT_BYTES = 256 << 20
_FAULTS = sqlite3.Error, OSError, MemoryError, HistoryError
_LASTING_KEPT = 10_000
_SUMS_PART = 3
"""Each table of sums may take a third of the size limit."""
_ROW_BYTES = 180
"""Approximate size of a row of sums."""
_SHARES = {"tallies": 3 / 4, "times": 3 / 4, **dict.fromkeys(("collective_sums", "device_rollups"), 1 / _SUMS_PART)}
"""The part of the size limit that each of these tables may take before a machine loses rows in it."""
_GREEDY_PART, _LAST_PART, _LITTLE = 8, 64, 1 << 16
"""The limit divided by the first is what a machine may have in a table. This is halved while the history stays too
large; below the limit divided by the second, _SHARES no longer count. The third: bytes that it always keeps."""
_BOUNDED = ("meta", "nodes", "series", "late")
"""Tables with limits of their own."""
_OF_DEVICE = f"CASE WHEN device < 0 THEN device ELSE -1 - device / {NODE_DEVICES} END"
KEPT_LOSSES, KEPT_OLDER = 1024, 2048
"""The newest losses of a line that are all kept, and how many of its older ones are kept, in equal distances."""
_THIN_LOSSES = f"""\
DELETE FROM losses WHERE process = :process AND definition = :line AND t_ns < :until AND id NOT IN (
    SELECT min(id) FROM losses WHERE process = :process AND definition = :line GROUP BY t_ns / :slot
    UNION ALL SELECT * FROM (
        SELECT id FROM losses WHERE process = :process AND definition = :line AND {UNFIT} ORDER BY t_ns LIMIT 1))"""
_RING_NAMES = tuple(member.name for member in fields(RingRow))
_INTO_RINGS = f"INSERT OR REPLACE INTO rings ({', '.join(_RING_NAMES)}) VALUES ({', '.join('?' * len(_RING_NAMES))})"
_of_ring = attrgetter(*_RING_NAMES)
_INTO_LOOPS = f"INSERT OR REPLACE INTO loops VALUES ({', '.join('?' * len(LOOP_COLUMNS))})"
_of_loop = attrgetter(*LOOP_COLUMNS)
_INTO_GAPS = "INSERT INTO gaps (process, after_step, mode, begin_ns, end_ns, ns) VALUES (?,?,?,?,?,?)"
_SHORTEN_GAP = "UPDATE gaps SET ns = max(ns - ?, 0) WHERE process = ? AND begin_ns <= ? AND end_ns >= ?"
JOIN_STEP = f"UPDATE steps SET {EXPOSED}_ns = ?, {WAIT}_ns = ? WHERE id = ?"
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
"""Tables of sums by `start_s`: the rest of the key, and how to combine each other column."""


class HistoryWriter:
    """Writes batches to one history, and deletes its oldest rows at the size limit."""

    def __init__(
        self, db: sqlite3.Connection, meta: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES, path: Path | None = None
    ) -> None:
        """Write to `db`: a history or an empty database. `path`: its file; None: in memory, closed by the caller.

        Raises HistoryError.
        """
        self._limit = limit_bytes
        self._path = path
        self._db = db
        self._until_thin: dict[tuple[int, int], int] = {}
        """By process and definition of a loss: how many losses until the line is thinned."""
        try:
            self._page_bytes: int = db.execute("PRAGMA page_size").fetchone()[0]
            self._door = CheckedConnection(db, self._file_bytes() if path is None else database_size(path))
            self._prepare(meta)
        except _FAULTS as error:
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
    def checked_connection(self) -> CheckedConnection:
        """The door for queries, with limits for the current size of the database."""
        self._door.set_size(self._file_bytes())
        return self._door

    def _prepare(self, meta: Mapping[str, Any]) -> None:
        run = self._db.execute
        begun = run("SELECT 1 FROM sqlite_master").fetchone()
        if begun and (version := version_of(self._db)) != SCHEMA_VERSION:
            raise HistoryError(f"another version of dpmon wrote it (history {version})")
        check_schema(self._db, whole=False)
        run("PRAGMA journal_mode=WAL")
        # No fsync: a kill of this process loses nothing, because the kernel holds the pages, and a power cut ends the
        # training too. A flush every few seconds would slow a training that writes to the same disk.
        run("PRAGMA synchronous=OFF")
        run("PRAGMA journal_size_limit=4194304")
        run("PRAGMA cache_size=-2000")
        self._db.executescript(SCHEMA)
        rows = {"schema": SCHEMA_VERSION, "limit_bytes": self._limit, "pruned": 0, **meta}
        self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", rows.items())
        self._tallies = TallyWriter(self._door)
        self.next_id: int = 1 + max(last_ids(self._db))

    @property
    def damage(self) -> HistoryError | None:
        """The first damage found in a tally, which began anew; None if there is none."""
        return self._tallies.damage

    def rings(self) -> dict[str, RingRow]:
        """Return the rows of the rings as the previous writer left them. Raises HistoryError."""
        return read_ring_rows(self.checked_connection)

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises HistoryError."""
        return list(self.checked_connection.rows(query, values))

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the newest record of a stall; None without one, or if it cannot be read."""
        query = "SELECT json FROM events WHERE kind = 'stall' ORDER BY id DESC LIMIT 1"
        with suppress(HistoryError):
            return next((event_from_row(row).data for row in self.rows(query)), None)
        return None

    def last_step(self, ring: RingRow) -> list[tuple[Any, ...]]:
        """Return step, mode, start, wall and kind of the last step of a ring, in a list; an empty list if none."""
        query = (
            "SELECT step, mode, start_ns, wall_ns, kind FROM steps"
            " WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
        )
        return self.rows(query, (ring.process, ring.first_id, ring.last_id)) if ring.steps else []

    def loops(self, process: int) -> list[LoaderLoop]:
        """Return the loops of a process, in order. Raises HistoryError."""
        query = f"SELECT {', '.join(LOOP_COLUMNS)} FROM loops WHERE process = ? ORDER BY loop"
        return [LoaderLoop(*row) for row in self.rows(query, (process,))]

    def write(self, batch: WriteBatch) -> None:
        """Write all of `batch` or nothing. After a HistoryError, the same batch may be written again."""
        try:
            self.run_transaction(lambda: self._insert_batch(batch))
        except HistoryError:
            self._tallies.reload_before_write()
            raise

    def run_transaction(self, put: Callable[[], None]) -> None:
        """Do all that `put` writes, or nothing, and delete the oldest rows at the size limit. Raises HistoryError."""
        self._door.reset_instruction_count()
        try:
            self._door.set_size(self._file_bytes(), writes=True)
            self._db.execute("BEGIN IMMEDIATE")
            put()
            machines = self._db.execute("SELECT count(*) FROM nodes").fetchone()[0]
            most = self._limit // _GREEDY_PART
            while self._used_bytes() > self._limit and most > 0:
                gone = (self._prune_machines(most) if machines else 0) or self._prune()
                self._db.execute("UPDATE meta SET value = value + ? WHERE key = 'pruned'", (gone,))
                if not gone:
                    most = most // 2 if machines and most > _LITTLE else 0
            self._db.execute("COMMIT")
        except (*_FAULTS, OverflowError, struct.error) as error:  # the last two: numbers of damaged rows
            with suppress(sqlite3.Error):  # some errors roll back themselves
                self._db.execute("ROLLBACK")
            raise error if isinstance(error, HistoryError) else HistoryError(str(error)) from None

    def _insert_batch(self, batch: WriteBatch) -> None:
        many = self._db.executemany
        many("INSERT OR REPLACE INTO definitions VALUES (?,?,?)", batch.definitions)
        for table, rows in ((table, getattr(batch, table)) for table in SHARE_IDS):
            many(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns_of(table)))})", rows)
        many(_INTO_RINGS, map(_of_ring, batch.rings))
        many(_upsert_sum_sql(*_DEVICES), [(*key, *values) for key, values in batch.devices.items()])
        many(_upsert_sum_sql(*_COLLECTIVES), [(*key, *values) for key, values in batch.collective_sums.items()])
        many(JOIN_STEP, [(joined.exposed_ns, joined.wait_ns, joined.step.id) for joined in batch.rank_waits])
        self._tallies.add(batch)
        many(_INTO_LOOPS, map(_of_loop, batch.loops.values()))
        many(_INTO_GAPS, batch.gaps)
        for process, begin, end in batch.late_input_waits:
            self._db.execute(_SHORTEN_GAP, (end - begin, process, begin, end))
        if batch.late_input_waits:
            self._db.execute("DELETE FROM gaps WHERE ns < ?", (GAP_NS,))
        many(_ADD_SHAPE, [(*key, count) for key, count in batch.shapes.items()])
        self.thin_losses((process, definition) for _, process, definition, *_ in batch.losses)

    def thin_losses(self, lines: Iterable[tuple[int, int]]) -> None:
        """Thin the losses of a line after every KEPT_LOSSES of them. Never delete the first one that is not finite.

        `lines`: process and definition of each new loss.
        """
        for line in lines:
            self._until_thin[line] = self._until_thin.get(line, 1) - 1
            if not self._until_thin[line]:
                self._until_thin[line] = KEPT_LOSSES
                self._thin_line(*line)

    def _thin_line(self, process: int, definition: int) -> None:
        query = "SELECT t_ns FROM losses WHERE process = ? AND definition = ? ORDER BY t_ns {} LIMIT 1 OFFSET ?"
        first = self._db.execute(query.format(""), (process, definition, 0)).fetchone()
        until = self._db.execute(query.format("DESC"), (process, definition, KEPT_LOSSES)).fetchone()
        if first is None or until is None:
            return
        slot = 1_000_000_000
        while (until[0] - first[0]) // slot > KEPT_OLDER:
            slot *= 2  # so that a slot is always a pair of earlier slots
        values = {"process": process, "line": definition, "until": until[0], "slot": slot}
        self._db.execute(_THIN_LOSSES, values)

    def _used_bytes(self) -> int:
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return self._file_bytes() - free * self._page_bytes

    def _file_bytes(self) -> int:
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        return pages * self._page_bytes

    def _prune(self) -> int:
        """Delete the oldest sixteenth of the rows; return how many. SQLite reuses the pages: the file does not grow."""
        self._prune_sums()
        run, each = self._db.execute, [f"FROM {table} WHERE true" for table in ("calls", "steps", "collectives")]
        each.append(f"FROM events WHERE NOT ({LASTING})")
        firsts = [first for rows in each for (first,) in run(f"SELECT min(id) {rows}") if first is not None]
        if not firsts:
            return 0
        before = min(firsts) + max(1, (max(last_ids(self._db)) - min(firsts)) // 16)
        return sum(run(f"DELETE {rows} AND id < ?", (before,)).rowcount for rows in each)

    def _prune_machines(self, most: int) -> int:
        """Delete the oldest quarter of what a machine of a mirror has in a table, if that is more than `most` bytes.

        Return the number of deleted rows. All tables are treated alike, also those that the schema gets later.
        """
        run, gone = self._db.execute, 0
        node_of = dict(run("SELECT process, node FROM rings"))
        for table, declared in run("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = {} if table in _BOUNDED else columns_of(table)
            key = re.search(r"(?:PRIMARY KEY|UNIQUE) \((.*?)\)", declared)
            order = f"{LASTING}, id" if table == "events" else key[1] if key else next(iter(columns), "")
            owner = "ifnull(process, -1 << 40)" if "process" in columns else _OF_DEVICE
            texts = (f"total(length({name}))" for name, kinds in columns.items() if kinds[0] in (str, bytes))
            query = (
                f"SELECT {owner}, count(*), {' + '.join([f'count(*) * {_ROW_BYTES}', *texts])} FROM {table} GROUP BY 1"
            )
            parts = defaultdict[Any, list[tuple[float, ...]]](list)
            for row in run(query).fetchall() if columns else ():
                parts[-1 - row[0] if row[0] < 0 else node_of.get(row[0])].append(row)
            share = self._limit * _SHARES.get(table, 0) if most * _LAST_PART > self._limit else 0
            for owners, counts, sizes in (zip(*part, strict=True) for part in parts.values()):
                if sum(sizes) > max(most, share, _LITTLE):
                    rows = f"FROM {table} WHERE {owner} IN ({', '.join(map(str, owners))})"
                    oldest = f"SELECT {order} {rows} ORDER BY {order} LIMIT {sum(counts) // 4 + 1}"
                    gone += run(f"DELETE FROM {table} WHERE ({order}) IN ({oldest})").rowcount
        return gone

    def _prune_sums(self) -> None:
        """Limit sums and lasting events, which could fill the database in runs of many days or processes."""
        run = self._db.execute
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        sample, last_s = run(query).fetchone(), 1 << 40
        # Keep each minute whose samples still have rows: readers use these rows instead of its sums.
        self._roll_up(*_DEVICES, last_s if sample is None else sample[0] // 60_000_000_000 * 60)
        self._roll_up(*_COLLECTIVES, last_s)
        self._tallies.prune(self._limit)
        run("DELETE FROM gaps WHERE id < (SELECT max(id) FROM gaps) - ?", (_LASTING_KEPT,))
        newest = "SELECT max(other.loop) FROM loops AS other WHERE other.process = loops.process"
        run(f"DELETE FROM loops WHERE loop <= ({newest}) - ?", (_LASTING_KEPT,))
        for kind in ("warning", "input", "stall", "loader", "ddp"):  # lasting events of unlimited number
            kept = "SELECT id FROM events WHERE kind = ? ORDER BY id DESC LIMIT 1 OFFSET ?"
            run(f"DELETE FROM events WHERE kind = ? AND id < ({kept})", (kind, kind, _LASTING_KEPT))

    def _roll_up(self, table: str, key: str, combined: _Combined, latest_s: int) -> None:
        """If a table of sums is too large, replace its oldest eighth by one sum per key, at most up to `latest_s`."""
        query = f"SELECT count(*), min(start_s), max(start_s) FROM {table} WHERE start_s > ?"
        count, first, last = self._db.execute(query, (BEFORE_S,)).fetchone()
        if count * _ROW_BYTES <= self._limit / _SUMS_PART:
            return
        before = min(first + max((last - first) // 8, 1), latest_s)
        oldest = f"FROM {table} WHERE start_s > ? AND start_s < ?"
        sums = ", ".join(f"{how}({name})" for name, how in combined.items())
        add = _upsert_sum_sql(table, key, combined, f"SELECT ?, {key}, {sums} {oldest} GROUP BY {key}")
        self._db.execute(add, (BEFORE_S, BEFORE_S, before))
        self._db.execute(f"DELETE {oldest}", (BEFORE_S, before))

    def close(self) -> None:
        """Close the file. It is self-contained afterwards unless another process reads it now."""
        if self._path is None:
            return
        # If another process reads now, the journal stays: readers read both files, and the next supervisor cleans up.
        with suppress(sqlite3.Error, OSError):
            check_database(self._path, written=True)  # again: SQLite opens the journal only now
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()


def _upsert_sum_sql(table: str, key: str, combined: _Combined, rows: str | None = None) -> str:
    """Return the SQL that adds rows to a table of sums; `rows`: a query for them; None: parameters."""
    which = f"start_s, {key}"
    rows = rows or f"VALUES ({', '.join('?' * (which.count(',') + 1 + len(combined)))})"
    changes = ", ".join(
        f"{name} = {name} + excluded.{name}" if how == "sum" else f"{name} = {how}({name}, excluded.{name})"
        for name, how in combined.items()
    )
    return f"INSERT INTO {table} {rows} ON CONFLICT ({which}) DO UPDATE SET {changes}"

"""Reads a history that an earlier version of dpmon wrote (schema 1 to 6), without changing its file.

Each row becomes a payload again, and goes through the intake into a new history. So all figures are as if this version
had recorded the run. Rows that the earlier version deleted are missing.
"""

from __future__ import annotations

import heapq
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

from dpmon.record.kinds import RecordError
from dpmon.record.plainjson import load_json
from dpmon.record.schema import SETTLING_STEPS, STEP_PHASES
from dpmon.record.wire import (
    BODY_PHASES,
    EVENT_TAG,
    STEP_EXTRAS,
    TIMED_HEAD,
    TIMED_TAG,
    mode_number,
    pack_definition,
    pack_step,
    with_extras,
)
from dpmon.store.accounts import Accounts
from dpmon.store.batch import Batch
from dpmon.store.intake import Intake
from dpmon.store.tables import HistoryError, QueryLimits, RingRow, rings_in
from dpmon.store.writer import History

_SUPERVISOR = -1
_AT_ONCE = 5000
"""Number of rows in one transaction."""
_EXTRAS = {name: f"{name}_ns" if name in STEP_PHASES else name for name in STEP_EXTRAS}
"""Columns of a step's extras."""
_DAMAGE = (RecordError, LookupError, ValueError, TypeError, AttributeError, struct.error, OverflowError)


def take_in(db: sqlite3.Connection, query_limits: QueryLimits, history: History, start_ns: int) -> str | None:
    """Write the rows of the earlier history `db` to an empty one. Return a text about missing rows; None if complete.

    `start_ns`: the run's start, monotonic. Raises HistoryError if `history` cannot be written, sqlite3.Error if `db`
    has no readable table of rings.
    """
    earlier = _Earlier(db, query_limits, start_ns)
    tables = (earlier.rows(table) for table in ("calls", "steps", "events"))
    for count, (number, table, row) in enumerate(heapq.merge(*tables, key=itemgetter(0)), start=1):
        earlier.add(number, table, row)
        if count % _AT_ONCE == 0:
            history.write(earlier.batch)
            earlier.batch = Batch()
    earlier.batch.rings = earlier.rings()
    history.write(earlier.batch)
    if earlier.damaged is not None:
        return f"the history cannot be read to its end: {earlier.damaged}"
    if earlier.deleted:
        return (
            f"an earlier version of dpmon deleted {earlier.deleted} older records of this run: no figure includes them"
        )
    return None


class _Earlier:
    """An earlier history, and the rows taken from it that are not written yet."""

    def __init__(self, db: sqlite3.Connection, query_limits: QueryLimits, start_ns: int) -> None:
        self._db = db
        self._query_limits = query_limits
        self._start_ns = start_ns
        self._rings = rings_in(db)
        self._accounts = Accounts()
        self.batch = Batch()
        self.damaged: str | None = None
        """Why it cannot be read to its end."""
        found = next(self._each("SELECT value FROM meta WHERE key = 'pruned'"), {}).get("value")
        self.deleted = found if type(found) is int else 0
        self._lack_steps = {ring.process for ring in self._rings.values() if ring.steps} if self.deleted else set()
        """Processes that may lack their first steps; each is removed when its first remaining step is read."""
        self._intakes = {}
        for ring in self._rings.values():  # their rows are counted again
            fresh = replace(ring, calls=0, steps=0, first_id=None, last_id=None, held_id=None)
            self._intakes[ring.process] = Intake(fresh, start_ns, self._accounts)
        self._intakes.setdefault(_SUPERVISOR, Intake(RingRow("", _SUPERVISOR, None, 0), start_ns, self._accounts))
        for row in self._each("SELECT process, number, value FROM definitions ORDER BY process, number"):
            with suppress(*_DAMAGE):
                payload = pack_definition(row["number"], load_json(row["value"]))
                self._intakes[row["process"]].add(self.batch, 0, payload)

    def _each(self, query: str) -> Iterator[dict[str, Any]]:
        """Yield rows by column name; in a damaged history, the rows before the damage."""
        self._query_limits.begin()
        try:
            cursor = self._db.execute(query)
            names = [column[0] for column in cursor.description]
            for row in self._query_limits.each(cursor):
                yield dict(zip(names, row, strict=True))
        except (sqlite3.Error, HistoryError) as error:
            self.damaged = self.damaged or str(error)

    def rows(self, table: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield (id, table, columns) of each row of a table, in order."""
        for row in self._each(f"SELECT * FROM {table} ORDER BY id"):
            yield row["id"], table, row

    def add(self, number: int, table: str, row: Mapping[str, Any]) -> None:
        """Take in a row; damaged rows are counted as missed."""
        process = row["process"]
        intake = self._intakes.get(_SUPERVISOR if process is None and table == "events" else process)
        if intake is None:
            return
        try:
            if table == "calls":
                intake.add(self.batch, number, row["payload"])
            elif table == "steps":
                if process in self._lack_steps:
                    self._lack_steps.remove(process)
                    if row["step"] > 1:
                        intake.resume(row["mode"], SETTLING_STEPS, (), ())
                        self._accounts.account(process).miss()
                intake.add(self.batch, number, _step(row, self._start_ns))
            else:
                intake.add(self.batch, number, bytes((EVENT_TAG,)) + row["json"].encode())
        except _DAMAGE:
            intake.row.missed += 1

    def rings(self) -> list[RingRow]:
        """Return the rows of the rings, with the number of records taken."""
        return [self._intakes[ring.process].row for ring in self._rings.values()]


def _step(row: Mapping[str, Any], start_ns: int) -> bytes:
    """Return the payload of a step. Raises one of _DAMAGE if its row is damaged."""
    body = [-1 if row[name] is None else row[name] for name in ("samples", *(f"{name}_ns" for name in BODY_PHASES))]
    samples, *phases = body
    start = row["start_ns"] + start_ns
    packed = row.get("spans")
    spans = struct.unpack(f"<{len(packed) // 8}Q", packed) if isinstance(packed, bytes) else ()
    record = pack_step(mode_number(row["mode"]), row["step"], start, row["wall_ns"], samples, phases, spans)
    extras = {name: value for name, column in _EXTRAS.items() if (value := row.get(column)) is not None}
    if extras:
        record = with_extras(record, extras)
    device = row.get("device")
    if isinstance(device, bytes):
        _, why, count, _ = TIMED_HEAD.unpack_from(device)
        record = TIMED_HEAD.pack(TIMED_TAG, why, count, len(record)) + record + device[TIMED_HEAD.size :]
    return record

"""Writes the sums of collectives by second; beyond a limit, merges the oldest seconds."""

from __future__ import annotations

import sqlite3

from dpmon.store.batch import Batch
from dpmon.store.tables import BEFORE_S, COLLECTIVE_SUMS

MOST_SUMS = 200_000
"""Most rows of the table."""
_PART = 8
"""Beyond the limit, the oldest eighth of the rows is merged."""
_ADD = "INSERT INTO collective_sums {} ON CONFLICT (start_s, process, definition) DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in COLLECTIVE_SUMS
)
_INTO = _ADD.format(f"VALUES ({', '.join('?' * (3 + len(COLLECTIVE_SUMS)))})")
_OLDEST = "FROM collective_sums WHERE start_s < ?"
_TOTALS = ", ".join(f"CAST(total({name}) AS INTEGER)" for name in COLLECTIVE_SUMS)
_TOGETHER = _ADD.format(
    f"SELECT {BEFORE_S}, process, definition, {_TOTALS} {_OLDEST} AND start_s > {BEFORE_S} GROUP BY process, definition"
)


class CollectiveSums:
    """Writes the table `collective_sums`, within the transactions of its owner."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._rows = MOST_SUMS
        """Upper bound of the number of rows; the rows are counted when it exceeds the limit."""

    def add(self, batch: Batch) -> None:
        """Add the collectives of a batch."""
        if not batch.communicated:
            return
        self._db.executemany(_INTO, [(*key, *values) for key, values in batch.communicated.items()])
        self._rows += len(batch.communicated)
        if self._rows > MOST_SUMS:
            self._add_up()

    def _add_up(self) -> None:
        """Count the rows. If there are too many, replace the oldest by one row per process and definition."""
        run = self._db.execute
        (self._rows,) = run("SELECT count(*) FROM collective_sums WHERE start_s > ?", (BEFORE_S,)).fetchone()
        if self._rows > MOST_SUMS:
            query = "SELECT start_s FROM collective_sums WHERE start_s > ? ORDER BY start_s LIMIT 1 OFFSET ?"
            before = run(query, (BEFORE_S, self._rows // _PART)).fetchone()
            run(_TOGETHER, before)
            self._rows -= run(f"DELETE {_OLDEST} AND start_s > ?", (*before, BEFORE_S)).rowcount

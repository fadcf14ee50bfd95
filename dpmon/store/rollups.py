"""Limits the tables of sums by time: their oldest rows become one row per key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpmon.store.table import StoreTable
from dpmon.store.time_buckets import END_S

if TYPE_CHECKING:
    import sqlite3

BEFORE_S = -1
"""`start_s` of the rows that cover all time before the other rows."""
_LIMIT_DIVISOR = 3
"""A table of sums may take the size limit divided by this number."""
_ROW_BYTES = 180
"""Approximate size of a row."""


def roll_up(db: sqlite3.Connection, table: StoreTable[Any], limit_bytes: int, latest_s: int = END_S) -> None:
    """If a table of sums is too large, merge its oldest eighth into one row per key, at most up to `latest_s`."""
    query = f"SELECT count(*), min(start_s), max(start_s) FROM {table.name} WHERE start_s > ?"
    count, first_s, last_s = db.execute(query, (BEFORE_S,)).fetchone()
    if count * _ROW_BYTES <= limit_bytes / _LIMIT_DIVISOR:
        return
    end_s = min(first_s + max((last_s - first_s) // 8, 1), latest_s)
    oldest = f"FROM {table.name} WHERE start_s > {BEFORE_S} AND start_s < ?"
    db.execute(table.merge_sql(oldest, start_s=str(BEFORE_S)), (end_s,))
    db.execute(f"DELETE {oldest}", (end_s,))

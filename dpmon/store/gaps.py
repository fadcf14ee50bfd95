"""The table `gaps`: the longer times between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpmon.store.table import CHANGING, SEQ, StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.store_queries import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS gaps (
    id INTEGER PRIMARY KEY, process INTEGER NOT NULL,
    after_step INTEGER NOT NULL,  -- number of the step before it
    mode       TEXT NOT NULL,     -- of the step after it
    begin_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,
    ns         INTEGER NOT NULL,  -- without pauses and input waits
    seq        INTEGER NOT NULL   -- the last transaction that changed this row
);
CREATE INDEX IF NOT EXISTS changed_gaps ON gaps (seq);
"""
GAP_NS = 20_000_000
"""A gap between two steps is recorded if it is at least this long."""
MAX_GAPS = 10_000
"""How many gaps are kept in a history that has reached its size limit."""
_SHORTEN = f"UPDATE gaps SET ns = max(ns - ?, 0), seq = {SEQ} WHERE process = ? AND begin_ns <= ? AND end_ns >= ?"


class Gap(NamedTuple):
    """A row of `gaps`, without its id."""

    process: int
    after_step: int
    mode: str
    begin_ns: int
    end_ns: int
    ns: int


GAPS = StoreTable("gaps", Gap, SCHEMA, sent=CHANGING)


def shorten_gaps(db: sqlite3.Connection, input_waits: Sequence[tuple[int, int, int]]) -> None:
    """Subtract late input waits, given as (process, start, end), from recorded gaps."""
    db.executemany(
        _SHORTEN, [(end_ns - start_ns, process, start_ns, end_ns) for process, start_ns, end_ns in input_waits]
    )


def prune_gaps(db: sqlite3.Connection) -> None:
    """Delete the oldest gaps."""
    db.execute("DELETE FROM gaps WHERE id <= (SELECT id FROM gaps ORDER BY id DESC LIMIT 1 OFFSET ?)", (MAX_GAPS,))


def read_gaps(store: Store, limit: int) -> list[Gap]:
    """Return up to `limit` of the longest gaps, the longest first."""
    return list(GAPS.select(store.connection, "WHERE ns >= ? ORDER BY ns DESC LIMIT ?", (GAP_NS, limit)))

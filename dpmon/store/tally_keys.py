"""The table `keys`: what the steps of a tally have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import EXCLUDED
from dpmon.store.table import CHANGING, StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.database import HistoryConnection

SCHEMA = """
-- Tallies refer to a key by its number. Keys are never deleted.
CREATE TABLE IF NOT EXISTS keys (
    number  INTEGER PRIMARY KEY,
    process INTEGER NOT NULL,
    mode    TEXT NOT NULL,     -- dp, single, or empty for steps with calls of both
    kind    INTEGER NOT NULL,  -- flags of dpmon.record.schema
    batch   INTEGER NOT NULL,  -- samples per step, NO_SAMPLES or OTHER_SIZES
    seq     INTEGER NOT NULL,  -- the transaction that added this row
    UNIQUE (process, mode, kind, batch)
);
"""
NO_SAMPLES, OTHER_SIZES = -1, -2
"""Batch sizes in a key for an unknown number of samples, and for all sizes beyond BATCH_SIZES of ring_intake."""


class TallyKey(NamedTuple):
    """What identifies a tally, apart from its time: a row of `keys`, without its number."""

    process: int
    mode: str
    kind: int
    """Flags of dpmon.record.schema."""
    batch: int
    """Samples per step, NO_SAMPLES or OTHER_SIZES."""


KEYS = StoreTable("keys", TallyKey, SCHEMA, sent=CHANGING)


class KeyNumbers:
    """The numbers of the keys, for the one writer of a history."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._numbers: dict[TallyKey, int] = {}

    def reload(self) -> None:
        """Read the table again before the next use, because rows were rolled back, or written without this object."""
        self._numbers.clear()

    def find(self, key: TallyKey) -> int | None:
        """Return the number of a key; None if the table does not have it."""
        if not self._numbers:
            rows = self._db.execute(f"SELECT number, {KEYS.column_list} FROM keys")
            self._numbers.update((TallyKey(*key), number) for number, *key in rows)
        return self._numbers.get(key)

    def number(self, key: TallyKey) -> int:
        """Return the number of a key. A new key is inserted."""
        number = self.find(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers) + 1  # as SQLite counts
            KEYS.insert(self._db, [key])
        return number


def read_keys(
    connection: HistoryConnection, processes: Collection[int] | None = None, *, left_out: bool = False
) -> dict[int, TallyKey]:
    """Return the keys by number, of all processes or of some, without those of steps that statistics exclude.

    `left_out`: only the keys of these steps.
    """
    condition = f"(kind & {EXCLUDED} != 0) = {int(left_out)}"
    if processes is not None:
        condition += f" AND process IN ({', '.join(map(str, processes))})"
    rows = connection.rows(f"SELECT number, {KEYS.column_list} FROM keys WHERE {condition}")
    return {number: TallyKey(*key) for number, *key in rows}

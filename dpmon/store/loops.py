"""The table `loops`: the loops over the loaders of the processes, and which of them are epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpmon.store.table import CHANGING, StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.database import HistoryConnection
    from dpmon.store.store_queries import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS loops (
    process INTEGER NOT NULL, loop INTEGER NOT NULL, dataset INTEGER NOT NULL,
    length        INTEGER,           -- batches of the loader; NULL: unknown
    begin_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,  -- start of its first step, end of its last one
    last_step     INTEGER NOT NULL,  -- number of its last training step
    fetched       INTEGER NOT NULL,
    ahead         INTEGER,           -- fetched batches that no step has used yet; NULL until its second step
    steps         INTEGER NOT NULL,
    trained       INTEGER NOT NULL,  -- its training steps
    epoch         INTEGER,           -- number of the epoch; NULL if it is not an epoch
    evaluation_ns INTEGER NOT NULL,  -- evaluation between its first and its last step
    after_ns      INTEGER NOT NULL,  -- evaluation after its last step, up to the next epoch
    seq           INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (process, loop)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_loops ON loops (seq);
"""
MAX_LOOPS = 10_000
"""How many loops of a process are kept in a history that has reached its size limit."""


@dataclass(slots=True)
class LoaderLoop:
    """A row of `loops`."""

    process: int
    loop: int
    dataset: int
    length: int | None
    begin_ns: int
    end_ns: int = 0
    last_step: int = 0
    fetched: int = 0
    ahead: int | None = None
    steps: int = 0
    trained: int = 0
    epoch: int | None = None
    evaluation_ns: int = 0
    after_ns: int = 0

    @property
    def batches_used(self) -> int | None:
        """The number of batches that its steps have used; None until it is known how many it prefetches."""
        return None if self.ahead is None else self.fetched - self.ahead

    @property
    def is_exhausted(self) -> bool:
        """Whether all batches were fetched."""
        return self.length is not None and self.fetched >= self.length


LOOPS = StoreTable("loops", LoaderLoop, SCHEMA, insertion="INSERT OR REPLACE", sent=CHANGING)


def prune_loops(db: sqlite3.Connection) -> None:
    """Delete the oldest loops of each process."""
    newest_loop = "SELECT max(other.loop) FROM loops AS other WHERE other.process = loops.process"
    db.execute(f"DELETE FROM loops WHERE loop <= ({newest_loop}) - ?", (MAX_LOOPS,))


def read_loops(connection: HistoryConnection, process: int) -> list[LoaderLoop]:
    """Return the loader loops of a process, in order. Raises HistoryError."""
    return list(LOOPS.select(connection, "WHERE process = ? ORDER BY loop", (process,)))


def read_epochs(store: Store, process: int, limit: int) -> list[LoaderLoop]:
    """Return the newest `limit` epochs of a process, in order."""
    condition = "WHERE process = ? AND epoch IS NOT NULL AND begin_ns <= ? ORDER BY loop DESC LIMIT ?"
    return list(LOOPS.select(store.connection, condition, (process, store.until_ns, limit)))[::-1]


def find_epoch(store: Store, process: int, loop: int | None) -> tuple[int | None, int | None]:
    """Return the epoch of a loader loop and the number of batches of its loader; each None if unknown."""
    rows = store.query("SELECT epoch, length FROM loops WHERE process = ? AND loop = ?", (process, loop))
    return next(iter(rows), (None, None))

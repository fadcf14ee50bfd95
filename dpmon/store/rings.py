"""The table `rings`: how much of each ring is in the history.

A ring's position is written in the transaction that writes its records, so a reader that continues from there misses
and repeats nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpmon.record.schema import EVALUATION, FORWARD_ONLY, TRAINING
from dpmon.store.table import CHANGING, StoreTable

if TYPE_CHECKING:
    from dpmon.store.database import HistoryConnection

SCHEMA = """
-- A row with the process -1 counts the records of the supervisor that were missed.
CREATE TABLE IF NOT EXISTS rings (
    name              TEXT PRIMARY KEY,  -- of its file
    process           INTEGER NOT NULL,
    rank              INTEGER,
    pid               INTEGER NOT NULL,
    position          INTEGER NOT NULL,  -- number of the next unread span
    missed            INTEGER NOT NULL,  -- records that were overwritten before they were read, or could not be kept
    calls INTEGER NOT NULL, steps INTEGER NOT NULL,
    last_step         INTEGER,           -- number of its last training step
    evaluations       INTEGER NOT NULL,  -- number of its last evaluation step
    forward_steps     INTEGER NOT NULL,  -- number of its last forward-only step
    evaluation_phases INTEGER NOT NULL,  -- evaluations, each of one or several steps
    first_id INTEGER, last_id INTEGER,   -- ids of its first and last row in steps; NULL if it has none
    last_call         INTEGER,           -- number of its last call
    lines             INTEGER,           -- bytes read of the lines next to the ring
    events            INTEGER NOT NULL,  -- its events in the history
    ended             INTEGER NOT NULL,  -- whether the process has ended and the history is complete
    open_calls        INTEGER NOT NULL,  -- calls so far, while no step has ended
    node              INTEGER,           -- number of its node; NULL if it ran on this machine
    seq               INTEGER NOT NULL   -- the last transaction that changed this row
) WITHOUT ROWID;
"""
_MIN_ROLLOUTS, _ROLLOUT_SHARE = 3, 0.8
"""Evaluations of a process are rollouts if there are at least this many, and at least this many per training step."""


@dataclass
class RingRow:
    """A row of `rings`."""

    name: str
    process: int
    rank: int | None
    pid: int
    position: int = 0
    missed: int = 0
    calls: int = 0
    steps: int = 0
    last_step: int | None = None
    evaluations: int = 0
    forward_steps: int = 0
    evaluation_phases: int = 0
    first_id: int | None = None
    last_id: int | None = None
    last_call: int | None = None
    lines: int | None = None
    events: int = 0
    ended: bool = False
    open_calls: int = 0
    node: int | None = None

    @property
    def last_steps(self) -> dict[int, int]:
        """Number of its last step of each kind; 0 if there is none."""
        return {TRAINING: self.last_step or 0, EVALUATION: self.evaluations, FORWARD_ONLY: self.forward_steps}

    @property
    def has_rollouts(self) -> bool:
        """Whether it evaluates before nearly every training step, so that this only generates data."""
        return self.evaluation_phases >= max(_MIN_ROLLOUTS, _ROLLOUT_SHARE * (self.last_step or 0))


RINGS = StoreTable(
    "rings", RingRow, SCHEMA, insertion="INSERT OR REPLACE", sent=CHANGING, not_sent=("first_id", "last_id", "node")
)


def read_rings(connection: HistoryConnection) -> dict[str, RingRow]:
    """Return the rows of `rings` by file name. Raises HistoryError."""
    return {row.name: row for row in RINGS.select(connection)}

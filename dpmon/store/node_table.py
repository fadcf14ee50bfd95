"""The table `nodes`: the machines of a mirror, which writes what their supervisors recorded (dpmon.mirror)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpmon.store.table import StoreTable

if TYPE_CHECKING:
    from dpmon.store.database import HistoryConnection

SCHEMA = """
-- Times are ns since the start of the mirror's run.
CREATE TABLE IF NOT EXISTS nodes (
    number         INTEGER PRIMARY KEY,
    name           TEXT NOT NULL,     -- how the user reaches it
    run            TEXT,              -- id of its run there; NULL until it has answered
    state          TEXT NOT NULL,     -- one of NODE_STATES
    why            TEXT,              -- the reason for the state, a sentence
    since_ns       INTEGER NOT NULL,  -- start of the state
    heard_ns       INTEGER,           -- its last answer
    received       INTEGER NOT NULL,  -- the last id of its records that is here
    seq            INTEGER NOT NULL,  -- the last of its transactions whose changes are here
    tallied_s      INTEGER NOT NULL,  -- its time buckets are complete up to this second
    clock_ns INTEGER, clock_error_ns INTEGER,  -- added to its times, and its error; NULL until it is measured
    origin_s       INTEGER,           -- the second of its run's start by its clock
    shift_s        INTEGER,           -- added to its seconds, if its clock is off by more than a second
    exit           TEXT               -- the end of its run, as JSON; NULL while it runs
);
"""
NODE_STATES = ("connecting", "connected", "cut", "refused", "ended")
"""States of a node of a mirror. cut: it does not respond, but the mirror keeps trying; refused: the mirror gave up."""
NODE_DEVICES = 1000
"""Device i of node n has the index n * NODE_DEVICES + i."""


@dataclass
class NodeRow:
    """A row of `nodes`."""

    number: int
    name: str
    run: str | None = None
    state: str = "connecting"
    why: str | None = None
    since_ns: int = 0
    heard_ns: int | None = None
    received: int = 0
    seq: int = 0
    tallied_s: int = 0
    clock_ns: int | None = None
    clock_error_ns: int | None = None
    origin_s: int | None = None
    shift_s: int | None = None
    exit: str | None = None


NODES = StoreTable("nodes", NodeRow, SCHEMA, insertion="INSERT OR REPLACE")


def read_node_rows(connection: HistoryConnection) -> list[NodeRow]:
    """Return the nodes of a mirror in order of number; an empty list if this machine recorded the run."""
    return list(NODES.select(connection, "ORDER BY number"))

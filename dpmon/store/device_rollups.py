"""The table `device_rollups`: what the samples of devices and the host add up to in a minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from dpmon.record.schema import SECOND
from dpmon.store.events import HOST, first_sample_ns
from dpmon.store.table import CHANGING, FLOAT_SUM, MAX, SUM, StoreTable
from dpmon.store.time_buckets import BEFORE_S, END_S, read_origin_s, roll_up

if TYPE_CHECKING:
    from dpmon.store.database import HistoryConnection
    from dpmon.store.history_writer import WriteBatch
    from dpmon.store.store_queries import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS device_rollups (
    start_s INTEGER NOT NULL,  -- of the minute, or BEFORE_S (dpmon.store.time_buckets)
    device  INTEGER NOT NULL,  -- index; -1: the host
    name    TEXT NOT NULL,     -- of the value in the samples
    count INTEGER NOT NULL, total REAL NOT NULL, high REAL NOT NULL,
    seq     INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (start_s, device, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_device_rollups ON device_rollups (seq);
"""


@dataclass(frozen=True, slots=True)
class DeviceRollup:
    """A row of `device_rollups`: one value of a device in one minute."""

    start_s: int
    device: int
    name: str
    count: int
    total: float
    high: float


DEVICE_ROLLUPS = StoreTable(
    "device_rollups", DeviceRollup, SCHEMA, combined={"count": SUM, "total": FLOAT_SUM, "high": MAX}, sent=CHANGING
)


def add_sample(batch: WriteBatch, t_ns: int, kind: str, data: Mapping[str, Any]) -> None:
    """Add the values of a sample to their minute. `kind`: device or host."""
    device = data["index"] if kind == "device" else HOST
    for name, value in data.items():
        if type(value) in (int, float) and isfinite(value) and name not in ("t_s", "index"):
            row = DeviceRollup(batch.second_of(t_ns) // 60 * 60, device, name[:64], 1, float(value), float(value))
            batch.add(DEVICE_ROLLUPS, row)


def prune_device_rollups(connection: HistoryConnection, limit_bytes: int) -> None:
    """Merge the oldest rows if there are too many, but not those of minutes whose samples still have rows."""
    first_ns = first_sample_ns(connection)
    latest_s = END_S if first_ns is None else (first_ns // SECOND + read_origin_s(connection)) // 60 * 60
    roll_up(connection.db, DEVICE_ROLLUPS, limit_bytes, latest_s)


def read_device_minutes(store: Store) -> list[DeviceRollup]:
    """Return the sums of deleted device and host samples by minute, in seconds since the run's start.

    The first rows, at BEFORE_S, cover all time before that.
    """
    if not store.pruned:
        return []
    first_ns = first_sample_ns(store.connection)
    last_s = END_S if first_ns is None else first_ns // SECOND + store.origin_s - 60
    rows = DEVICE_ROLLUPS.select(store.connection, "WHERE start_s <= ? ORDER BY start_s, device, name", (last_s,))
    return [replace(row, start_s=row.start_s - store.origin_s) if row.start_s > BEFORE_S else row for row in rows]

"""The table `times`: what each process spent its time on (dpmon.store.time_accounting)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from dpmon.store.time_accounting import ACTIVITIES
from dpmon.store.time_buckets import END_S, existing_widths, starts_query

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.history_schema import BoundedConnection

SCHEMA = """
CREATE TABLE IF NOT EXISTS times (
    width    INTEGER NOT NULL,  -- as in tallies
    start_s  INTEGER NOT NULL,
    process  INTEGER NOT NULL,
    mode     TEXT NOT NULL,
    activity TEXT NOT NULL,     -- one of dpmon.store.time_accounting.ACTIVITIES
    ns       INTEGER NOT NULL,
    seq      INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (width, start_s, process, mode, activity)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_times ON times (seq) WHERE width = 1;
"""
_ADD = "INSERT INTO times VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET ns = ns + excluded.ns, seq = excluded.seq"
MERGE_STATEMENT = """
INSERT INTO times
SELECT :width, start_s / :width * :width AS bucket_s, process, mode, activity, total(ns), max(seq)
FROM times AS finer WHERE width = :finer AND start_s >= :begin AND start_s < :end AND NOT EXISTS (
    SELECT 1 FROM times AS wider WHERE wider.width = :width AND wider.start_s = finer.start_s / :width * :width
    AND wider.process = finer.process AND wider.mode = finer.mode AND wider.activity = finer.activity)
GROUP BY bucket_s, process, mode, activity
"""
"""A statement for dpmon.store.time_buckets.merge_buckets."""


class TimeRow(NamedTuple):
    """The activities of one process in one time bucket and one mode."""

    start_s: int
    width_s: int
    process: int
    mode: str
    spent: Mapping[str, int]
    """ns by activity."""


def add_times(db: sqlite3.Connection, seq: int, activity_ns: Mapping[tuple[int, int, str, str], int]) -> None:
    """Add ns by second, process, mode and activity to all buckets that cover the second.

    Negative values are subtracted. `seq`: number of the transaction.
    """
    for width, made_s in existing_widths(db, min((second for second, *_ in activity_ns), default=END_S)):
        rows = (
            (width, second // width * width, *key, ns, seq)
            for (second, *key), ns in activity_ns.items()
            if second < made_s
        )
        db.executemany(_ADD, rows)


def read_times(
    connection: BoundedConnection,
    buckets: Iterable[tuple[int, int, int]],
    processes: Collection[int] | None = None,
    activities: Sequence[str] = ACTIVITIES,
) -> Iterator[TimeRow]:
    """Yield the activities of all processes, or of some, in order of time, process and mode.

    `buckets`: see `TimeBuckets.cover`.
    """
    condition = f"WHERE activity IN ({', '.join(map(repr, activities))})"
    if processes is not None:
        condition += f" AND process IN ({', '.join(map(str, processes))})"
    for bucket in buckets:
        query = (
            f"{starts_query([bucket])} SELECT start_s, process, mode, activity, ns"
            f" FROM starts CROSS JOIN times USING (width, start_s) {condition}"
        )
        for (start_s, process, mode), rows in groupby(connection.rows(query), key=itemgetter(0, 1, 2)):
            spent = dict.fromkeys(activities, 0) | {activity: ns for *_, activity, ns in rows}
            yield TimeRow(start_s, bucket[0], process, mode, spent)

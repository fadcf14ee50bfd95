"""The table `times`: what each process spent its time on (dpmon.store.time_accounting)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from dpmon.store.table import CHANGING, SUM, StoreTable
from dpmon.store.time_accounting import ACTIVITIES
from dpmon.store.time_buckets import END_S, WIDTHS, existing_widths, starts_query

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.store_queries import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS times (
    width    INTEGER NOT NULL,  -- as in tallies
    start_s  INTEGER NOT NULL,
    process INTEGER NOT NULL, mode TEXT NOT NULL,
    activity TEXT NOT NULL,     -- one of dpmon.store.time_accounting.ACTIVITIES
    ns       INTEGER NOT NULL,
    seq      INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (width, start_s, process, mode, activity)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_times ON times (seq);
"""


class ActivityRow(NamedTuple):
    """A row of `times`."""

    width: int
    start_s: int
    process: int
    mode: str
    activity: str
    ns: int


TIMES = StoreTable("times", ActivityRow, SCHEMA, combined={"ns": SUM}, sent=CHANGING)


class TimeRow(NamedTuple):
    """The activities of one process in one time bucket and one mode."""

    start_s: int
    width_s: int
    process: int
    mode: str
    spent: Mapping[str, int]
    """ns by activity."""


def add_times(db: sqlite3.Connection, activity_ns: Mapping[tuple[int, int, str, str], int]) -> None:
    """Add ns by second, process, mode and activity to all buckets that cover the second.

    Negative values are subtracted.
    """
    for width, made_s in existing_widths(db, min((second for second, *_ in activity_ns), default=END_S)):
        rows = (
            ActivityRow(width, second // width * width, process, mode, activity, ns)
            for (second, process, mode, activity), ns in activity_ns.items()
            if second < made_s
        )
        TIMES.insert(db, rows)


def read_times(
    store: Store,
    begin_s: int = 0,
    end_s: int = END_S,
    *,
    widest: int = WIDTHS[-1],
    process: int | Collection[int] | None = None,
    activities: Sequence[str] = ACTIVITIES,
) -> Iterator[TimeRow]:
    """Yield some activities of each process between two seconds, in order of time, process and mode.

    `process`: one process or several; None: all. `widest`: see `TimeBuckets.cover`.
    """
    condition = f"WHERE activity IN ({', '.join(map(repr, activities))})"
    if process is not None:
        processes = [process] if isinstance(process, int) else process
        condition += f" AND process IN ({', '.join(map(str, processes))})"
    for bucket in store.buckets.cover(begin_s, end_s, widest):
        query = (
            f"{starts_query([bucket])} SELECT start_s, process, mode, activity, ns"
            f" FROM starts CROSS JOIN times USING (width, start_s) {condition}"
        )
        for (start_s, process_index, mode), rows in groupby(store.connection.rows(query), key=itemgetter(0, 1, 2)):
            spent = dict.fromkeys(activities, 0) | {activity: ns for *_, activity, ns in rows}
            yield TimeRow(start_s - store.origin_s, bucket[0], process_index, mode, spent)

"""The table `widths`, and the time buckets of the tables `tallies`, `series` and `times`.

In the tables, seconds are counted since 1970, from the clock at the run's start (`origin_s`, a whole second): so the
buckets of all machines begin alike. A bucket covers `width` seconds, and begins at a multiple of its width. Readers use
seconds since the run's start; Store.origin_s is the difference.

New values are added to the bucket of their second, and to the wider buckets that exist already. When ten seconds have
passed, one INSERT ... SELECT merges their buckets into a bucket of ten seconds; six of these make one of a minute, and
so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dpmon.store.table import StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.database import HistoryConnection

SCHEMA = """
CREATE TABLE IF NOT EXISTS widths (
    width     INTEGER PRIMARY KEY,
    made_s    INTEGER NOT NULL,  -- its buckets before this second exist; those of 1 s are made at once
    deleted_s INTEGER NOT NULL   -- its buckets before this second were deleted
);
"""
WIDTHS = (1, 10, 60, 600, 3600, 14_400, 86_400)
"""Possible lengths of a time bucket (s)."""
END_S = 1 << 40
"""A second after the end of any run."""
SLACK_S = 2
"""Delay after the end of a bucket until it is merged, because processes are read one after the other."""
_SIZE_DIVISORS = dict(zip(WIDTHS, (4, 8, 8, 8, 16, 16), strict=False))
"""The rows of a width may take the size limit divided by this number. Buckets of a day are never deleted."""
_ROW_BYTES = 40
"""Approximate size of a row without its sketch."""
BEFORE_S = -1
"""`start_s` of the rows that cover all time before the other rows."""
_SUMS_DIVISOR = 3
"""A table of sums may take the size limit divided by this number."""
_SUM_BYTES = 180
"""Approximate size of a row of such a table."""
_BUCKET = "start_s / :width * :width"
_SET_MADE = "INSERT INTO widths VALUES (?, ?, 0) ON CONFLICT DO UPDATE SET made_s = excluded.made_s"
_SET_DELETED = (
    "INSERT INTO widths VALUES (?, 0, ?) ON CONFLICT DO UPDATE SET deleted_s = max(deleted_s, excluded.deleted_s)"
)


def bucket_start(second: int, width: int, origin_s: int) -> int:
    """Return the start of the bucket of `width` seconds with a second. Both count from a run's start, at `origin_s`."""
    return (second + origin_s) // width * width - origin_s


# ------------------------------------------------------------------------------------------------ writing


def existing_widths(db: sqlite3.Connection, first_s: int) -> list[tuple[int, int]]:
    """Return each width with buckets at or after second `first_s`, and the second up to which its buckets exist."""
    query = "SELECT width, made_s FROM widths WHERE made_s > ? AND width > 1"
    return [(1, END_S), *db.execute(query, (first_s,))]


def merge_buckets(db: sqlite3.Connection, tables: Iterable[StoreTable[Any]], end_s: int) -> None:
    """Make the wider buckets that have passed by second `end_s`, unless their rows exist."""
    finer_rows = "FROM {} WHERE width = :finer AND start_s >= :begin AND start_s < :end"
    statements = [
        table.merge_sql(finer_rows.format(table.name), [_BUCKET], "INSERT OR IGNORE", width=":width", start_s=_BUCKET)
        for table in tables
    ]
    made = dict(db.execute("SELECT width, made_s FROM widths"))
    for finer, width in pairwise(WIDTHS):
        begin_s, width_end_s = made.get(width, 0), end_s // width * width
        if width_end_s > begin_s:
            for statement in statements:
                db.execute(statement, {"finer": finer, "width": width, "begin": begin_s, "end": width_end_s})
            db.execute(_SET_MADE, (width, width_end_s))


def note_deleted(db: sqlite3.Connection, width: int, before_s: int) -> None:
    """Note that readers must use wider buckets before a second."""
    db.execute(_SET_DELETED, (width, before_s))


def prune_buckets(db: sqlite3.Connection, limit_bytes: int) -> None:
    """Delete the oldest eighth of the buckets of each width that exceeds its share of `limit_bytes`.

    Only where wider buckets exist.
    """
    size_query = (
        f"SELECT {_ROW_BYTES} * count(*) + total(sketch_bytes), min(start_s), max(start_s) FROM ("
        " SELECT start_s, length(sketch) AS sketch_bytes FROM series WHERE width = :width"
        " UNION ALL SELECT start_s, 0 FROM tallies WHERE width = :width"
        " UNION ALL SELECT start_s, 0 FROM times WHERE width = :width)"
    )
    for width, wider in pairwise(WIDTHS):
        size, first_s, last_s = db.execute(size_query, {"width": width}).fetchone()
        if size <= limit_bytes / _SIZE_DIVISORS[width]:
            continue
        ((made_s,),) = db.execute("SELECT total(made_s) FROM widths WHERE width = ?", (wider,))
        before_s = min(first_s + max((last_s - first_s) // 8, 1), int(made_s))
        for table in ("tallies", "series", "times"):
            db.execute(f"DELETE FROM {table} WHERE width = ? AND start_s < ?", (width, before_s))
        note_deleted(db, width, before_s)


def roll_up(db: sqlite3.Connection, table: StoreTable[Any], limit_bytes: int, latest_s: int = END_S) -> None:
    """If a table of sums is too large, merge its oldest eighth into one row per key, at most up to `latest_s`."""
    query = f"SELECT count(*), min(start_s), max(start_s) FROM {table.name} WHERE start_s > ?"
    count, first_s, last_s = db.execute(query, (BEFORE_S,)).fetchone()
    if count * _SUM_BYTES <= limit_bytes / _SUMS_DIVISOR:
        return
    end_s = min(first_s + max((last_s - first_s) // 8, 1), latest_s)
    oldest = f"FROM {table.name} WHERE start_s > {BEFORE_S} AND start_s < ?"
    db.execute(table.merge_sql(oldest, start_s=str(BEFORE_S)), (end_s,))
    db.execute(f"DELETE {oldest}", (end_s,))


# ------------------------------------------------------------------------------------------------ reading


def read_origin_s(connection: HistoryConnection) -> int:
    """Return the second of the run's start in the tables; 0 if the history is empty."""
    return next((origin_s for (origin_s,) in connection.rows("SELECT value FROM meta WHERE key = 'origin_s'")), 0)


def starts_query(buckets: Iterable[tuple[int, int, int]]) -> str:
    """Return the beginning of a query: a table `starts` with `width` and `start_s` of each bucket.

    `buckets`: as from `TimeBuckets.cover`, at least one.
    """
    values = ", ".join(map(str, buckets))
    return (
        f"WITH RECURSIVE starts(width, start_s, end_s) AS (VALUES {values} UNION ALL"
        " SELECT width, start_s + width, end_s FROM starts WHERE start_s + width < end_s)"
    )


class TimeBuckets:
    """The time buckets of a history, for its readers."""

    def __init__(self, connection: HistoryConnection, origin_s: int) -> None:
        self._origin_s = origin_s
        self.made_until = dict.fromkeys(WIDTHS, 0)
        """The second up to which the buckets of a width exist, by width."""
        self.deleted_until = dict.fromkeys(WIDTHS, 0)
        """The second before which the buckets of a width were deleted, by width."""
        for width, made_s, deleted_s in connection.rows("SELECT width, made_s, deleted_s FROM widths"):
            self.made_until[width], self.deleted_until[width] = made_s, deleted_s
        queries = (f"SELECT max(start_s) FROM {table} WHERE width = 1" for table in ("tallies", "times"))
        newest_seconds = [second for query in queries for (second,) in connection.rows(query) if second is not None]
        self.narrowest = 1 if newest_seconds else WIDTHS[1]
        """The shortest width: only a mirror of many nodes has no buckets of one second."""
        self.end_s = max(newest_seconds, default=self.made_until[WIDTHS[1]] - 1) + 1
        """The second after the newest one with a bucket."""

    def cover(self, begin_s: int, end_s: int, widest: int = WIDTHS[-1]) -> list[tuple[int, int, int]]:
        """Return the widest time buckets that cover the time between two seconds since the run's start.

        Each (width, start, end) in seconds of the tables stands for all buckets of one width between two times. Where
        the buckets up to the width `widest` were deleted, wider buckets take their place. These may extend beyond
        `begin_s` and `end_s`.
        """
        end_s, begin_s = end_s + self._origin_s, max(begin_s, 0) + self._origin_s
        if begin_s == self._origin_s:  # no bucket is older
            begin_s = begin_s // WIDTHS[-1] * WIDTHS[-1]
        end_s = min(end_s, max(self.end_s, begin_s + 1))
        # A bucket that is wider than the time helps only where narrower ones were deleted.
        widest_useful = WIDTHS[-1] if begin_s < max(self.deleted_until.values()) else max(end_s - begin_s, 1)
        return self._cover_with_widths(begin_s, end_s, [width for width in WIDTHS if width <= widest_useful], widest)

    def _cover_with_widths(
        self, start: int, end: int, widths: Sequence[int], widest: int
    ) -> list[tuple[int, int, int]]:
        """Return the same as `cover`, of buckets with these widths only."""
        if start >= end:
            return []
        *finer, width = widths
        if not finer:
            return [(width, start, end)]
        low, high = start // width * width, end // width * width
        if low < start and not self._is_deleted(start, finer):
            low += width
        if high < end and self._is_deleted(high, finer):
            high += width
        if width > widest:
            deleted_s = min(self.deleted_until[finer_width] for finer_width in finer)
            high = min(high, -(-deleted_s // width) * width)
        low = max(low, -(-self.deleted_until[width] // width) * width)
        high = min(high, self.made_until[width] // width * width)
        if low >= high:
            return self._cover_with_widths(start, end, finer, widest)
        before = self._cover_with_widths(start, low, finer, widest)
        after = self._cover_with_widths(high, end, finer, widest)
        return [*before, (width, low, high), *after]

    def _is_deleted(self, second: int, widths: Sequence[int]) -> bool:
        """Return whether the buckets of all these widths that covered a second were deleted."""
        return all(second // width * width < self.deleted_until[width] for width in widths)

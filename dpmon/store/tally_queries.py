"""Reads sums between any two seconds of a run: tallies of steps, and times of activities."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.schema import EXCLUDED, STEP
from dpmon.store.history_schema import ACTIVITY_COLUMNS, CheckedConnection
from dpmon.store.query_results import RingSummary, SecondRow, TimeRow
from dpmon.store.tally import TALLY, TALLY_AT, WIDTHS, IncrementalTallies, Tally, TallyKey
from dpmon.store.tally_encoding import series_total
from dpmon.store.time_accounting import ACTIVITIES, LATEST_NS

END = 1 << 40
"""A second later than the end of any run."""
_LATEST_S = LATEST_NS // 1_000_000_000
"""Latest possible second; a later one comes from damaged data."""
Parameters = Sequence[Any] | Mapping[str, Any]
"""Values of a query's parameters."""
_TIME = ("start_s", "process", "mode", *ACTIVITY_COLUMNS)
_BETWEEN = "width = :width AND start_s >= :begin AND start_s < :end"
_SECOND = (
    *("process", "mode", "kind", "steps", "samples_sum", "samples_n"),
    *("first_ns", "last_ns", "sketches"),
)
"""The columns of a SecondRow."""
_STARTS = (
    "WITH RECURSIVE starts(at) AS (VALUES (:begin) UNION ALL SELECT at + :width FROM starts WHERE at + :width < :end)"
)


def exclude_flags_condition(flags: int) -> str:
    """Return the condition for rows whose kind has none of these flags (dpmon.record.schema)."""
    return f"(kind & {flags} = 0)"


class TallyStore:
    """The sums in one history, as of one instant. If the database is damaged, they cover its readable part."""

    def __init__(self, door: CheckedConnection, damaged: str | None = None) -> None:
        """`door`: of a database in a transaction, so that all queries see the same state.

        `damaged`: why the history could not be read. Raises HistoryError if its smallest tables are damaged.
        """
        self._door = door
        self.damaged = damaged
        """Why the history could not be read to its end; None if all queries so far succeeded."""
        rings = door.rows(f"SELECT {', '.join(RingSummary._fields)} FROM rings")
        self.rings = {row[0]: RingSummary._make(row) for row in rings}
        """By process."""
        self._names: dict[int, str] = dict(door.rows("SELECT number, name FROM series"))
        meta: dict[str, int] = dict(door.rows("SELECT key, value AS number FROM meta WHERE key != 'run'"))
        self._whole = {width: min(meta.get(f"whole_{width}", 0), _LATEST_S) for width in WIDTHS[1:]}
        self._pruned = {width: min(meta.get(f"pruned_{width}", 0), _LATEST_S) for width in WIDTHS[:-1]}
        self.pruned = meta.get("pruned", 0)
        """Number of rows deleted to keep the history below its size limit."""
        self._kinds: set[tuple[str, int]] = {*door.rows("SELECT DISTINCT mode, kind FROM keys")}
        self._newest = self._newest_second()

    @cached_property
    def processes(self) -> list[int]:
        """Processes with steps."""
        return [number for (number,) in self.query("SELECT DISTINCT process FROM keys ORDER BY process")]

    def query(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query; in a damaged database, the rows before the damage."""
        return list(self._each(query, values))

    def _each(self, query: str, values: Parameters = ()) -> Iterator[tuple[Any, ...]]:
        with self.until_damage():
            yield from self._door.rows(query, values)

    @contextmanager
    def until_damage(self) -> Iterator[None]:
        """End the block at the first damage, and note it: what was read before remains."""
        try:
            yield
        except HistoryError as error:
            self.damaged = self.damaged or f"the history cannot be read to its end: {error}"

    # ------------------------------------------------------------------------------------------ tallies

    def covering_buckets(self, begin_s: int, end_s: int, widest: int = WIDTHS[-1]) -> list[tuple[int, int, int]]:
        """Return the widest tallies that cover the time from `begin_s` to `end_s`, as stretches (width, begin, end).

        Where the tallies up to the width `widest` were deleted, wider ones replace them. They may extend beyond the
        two times.
        """
        end_s = min(end_s, max(self._newest, begin_s) + 1)
        # A tally wider than the time is of use only if narrower ones were deleted.
        widest_useful = WIDTHS[-1] if begin_s < max(self._pruned.values()) else max(end_s - begin_s, 1)
        return self._cover_with_widths(begin_s, end_s, [width for width in WIDTHS if width <= widest_useful], widest)

    def _cover_with_widths(
        self, begin: int, end: int, widths: Sequence[int], widest: int
    ) -> list[tuple[int, int, int]]:
        """Return the stretches of `covering_buckets`; use only tallies of these widths."""
        *finer, width = widths
        if begin >= end or not finer:
            return [(width, begin, end)] if begin < end else []
        low, high = begin // width * width, end // width * width
        if low < begin and not self._is_deleted(begin, finer):
            low += width
        if high < end and self._is_deleted(high, finer):
            high += width
        if width > widest:
            high = min(high, -(-min(self._pruned[each] for each in finer) // width) * width)
        low = max(low, -(-self._pruned.get(width, 0) // width) * width)
        high = min(high, self._whole[width] // width * width)
        if low >= high:
            return self._cover_with_widths(begin, end, finer, widest)
        before, after = (
            self._cover_with_widths(begin, low, finer, widest),
            self._cover_with_widths(high, end, finer, widest),
        )
        return [*before, (width, low, high), *after]

    def _is_deleted(self, second: int, widths: Sequence[int]) -> bool:
        """Whether no tally of these widths covers a second any more."""
        return all(second // width * width < self._pruned[width] for width in widths)

    def next_bucket_edge(self, second: int) -> int:
        """Return the first second from `second` on that no kept tally spans: here, a stretch can be divided exactly."""
        deleted = {width: -(-self._pruned[width] // wider) * wider for width, wider in pairwise(WIDTHS)}
        width = next((width for width, until in deleted.items() if second >= until), WIDTHS[-1])
        return -(-second // width) * width

    def kept_from(self, width: int) -> int:
        """Return the second before which the tallies of a width were deleted."""
        return self._pruned.get(width, 0)

    def _newest_second(self) -> int:
        query = "SELECT max(start_s) FROM {} WHERE width = 1"
        rows = [row for table in ("tallies", "times") for row in self.query(query.format(table))]
        return min(max((newest for (newest,) in rows if newest is not None), default=-1), _LATEST_S)

    def tally_rows(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        widest: int = WIDTHS[-1],
        series: Collection[str] | None = None,
    ) -> Iterator[tuple[int, int, TallyKey, Tally]]:
        """Yield (start, width, key, tally) of each row between two seconds, in order of time.

        `process`: one process or several; None: all. `series`: read only these series.
        """
        names = self._named(series)
        with self.until_damage():
            for width, row in self._rows_between("tallies", TALLY, begin_s, end_s, process, widest):
                yield (
                    row[0],
                    width,
                    TallyKey(*row[1:TALLY_AT]),
                    Tally.from_row(row[TALLY_AT:], names, sketches=sketches),
                )

    def _rows_between(
        self,
        table: str,
        columns: Sequence[str],
        begin_s: int,
        end_s: int,
        process: int | Collection[int] | None,
        widest: int = WIDTHS[-1],
        *,
        left_out: bool = False,
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield (width, columns) of the rows of tallies or times between two seconds, in order of time.

        `left_out`: the tallies of the steps that no figure includes, and only these.
        """
        if left_out and not any(kind & EXCLUDED for _, kind in self._kinds):
            return
        names = ", ".join(columns)
        kinds = f"NOT {exclude_flags_condition(EXCLUDED)}" if left_out else exclude_flags_condition(EXCLUDED)
        counted = f" AND {kinds}" if table == "tallies" else ""
        several = [process] if isinstance(process, int) else process
        which = "" if several is None else f" AND process IN ({', '.join(map(str, several))})"
        for width, begin, end in self.covering_buckets(begin_s, end_s, widest):
            values = {"width": width, "begin": begin, "end": end}
            if several is None or 2 * len(several) > len(self.rings):
                query = f"SELECT {names} FROM {table} WHERE {_BETWEEN}{counted}{which} ORDER BY start_s"
            else:  # one look-up per row, because the rows of all processes are interleaved
                query = (
                    f"{_STARTS} SELECT {names} FROM starts CROSS JOIN {table}"
                    f" ON width = :width AND start_s = starts.at{counted}{which}"
                )
            for row in self._each(query, values):
                yield width, row

    def tallies(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        series: Collection[str] | None = None,
        left_out: bool = False,
    ) -> dict[TallyKey, Tally]:
        """Return one tally per key for the time between two seconds. Parameters as in `tally_rows`.

        `left_out`: only of the steps that no figure includes; no other method has them.
        """
        found: dict[TallyKey, Tally] = {}
        names = self._named(series)
        with self.until_damage():
            for _, row in self._rows_between("tallies", TALLY, begin_s, end_s, process, left_out=left_out):
                found.setdefault(TallyKey(*row[1:TALLY_AT]), Tally()).add_row(row[TALLY_AT:], names, sketches=sketches)
        return found

    def seconds(self, begin_s: int, end_s: int, processes: Collection[int]) -> Iterator[SecondRow]:
        """Yield the steps of some processes in each second between two, in order of time.

        Light, because a picture reads some seconds of every rank. Deleted seconds are replaced by longer stretches.
        """
        step = next((number for number, name in self._names.items() if name == STEP), -1)
        rows = self._rows_between("tallies", _SECOND, begin_s, end_s, processes, 1)
        with self.until_damage():
            for _, (process, mode, kind, steps, samples, known, first, last, sketches) in rows:
                if steps and first is not None and last is not None:
                    counted = samples if known == steps else None
                    yield SecondRow(process, mode, kind, steps, counted, first, last, series_total(sketches, step))

    def step_count(self, begin_s: int, end_s: int, processes: Collection[int]) -> int:
        """Return the number of steps of some processes between two seconds."""
        return sum(
            steps or 0 for _, (steps,) in self._rows_between("tallies", ("sum(steps)",), begin_s, end_s, processes)
        )

    def tallies_incremental(
        self, kept: IncrementalTallies, begin_s: int, end_s: int, process: int
    ) -> dict[TallyKey, Tally]:
        """Return `tallies` of one process. `kept`: from the last question, which concerned nearly the same rows."""
        with self.until_damage():
            return kept.read(self._rows_between("tallies", TALLY, begin_s, end_s, process), self._names)
        return {}

    def _named(self, series: Collection[str] | None) -> Mapping[int, str]:
        """Return the names of `series` by number; None: the names of all series."""
        if series is None:
            return self._names
        return {number: name for number, name in self._names.items() if name in series}

    def kinds(self) -> set[tuple[str, int]]:
        """Return (mode, kind) of all steps so far."""
        return self._kinds

    # ------------------------------------------------------------------------------------------ time

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        widest: int = WIDTHS[-1],
        process: int | Collection[int] | None = None,
    ) -> list[TimeRow]:
        """Return the activities of each process, or of `process`, between two seconds, in order of time."""
        rows = self._rows_between("times", _TIME, begin_s, end_s, process, widest)
        return [
            TimeRow(start, width, who, mode, dict(zip(ACTIVITIES, spent, strict=True)))
            for width, (start, who, mode, *spent) in rows
        ]

    def activity_time(
        self,
        begin_s: int,
        end_s: int,
        processes: Collection[int],
        activities: Collection[str],
        *,
        widest: int = WIDTHS[-1],
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (process, start and width of a stretch, ns in some activities together), in order of time."""
        columns = ("process", "start_s", " + ".join(f"{name}_ns" for name in activities))
        for width, (process, start, ns) in self._rows_between("times", columns, begin_s, end_s, processes, widest):
            yield process, start, width, ns

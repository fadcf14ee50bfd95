"""Reads sums between any two seconds of a run: tallies of steps, and times of activities."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dpmon.record.schema import MODES, STEP
from dpmon.store.accounting import ACTIVITIES, LATEST_NS
from dpmon.store.answers import PaceRow, TimeRow, TimeTogether
from dpmon.store.tables import (
    ACTIVITY_COLUMNS,
    HistoryError,
    QueryLimits,
    RingRow,
    rings_in,
)
from dpmon.store.tally import ALL, COLUMNS, WIDTHS, Key, Tally, are_optional, known_keys, total_in

END = 1 << 40
"""A second later than the end of any run."""
_LATEST_S = LATEST_NS // 1_000_000_000
"""Latest possible second; a later one comes from damaged data."""
Parameters = Sequence[Any] | Mapping[str, Any]
"""Values of a query's parameters."""
TALLY = ("start_s", "process", "mode", "kind", "batch", *COLUMNS)
TALLY_AT = len(TALLY) - len(COLUMNS)
"""Index of the first of the COLUMNS in a row of TALLY."""
_PACE = ("start_s", "process", "mode", "kind", "steps", "first_ns", "last_ns", "samples_sum", "samples_n", "sketches")
_TIME = ("start_s", "process", "mode", *ACTIVITY_COLUMNS)
_BETWEEN = "width = :width AND start_s >= :begin AND start_s < :end"
_STARTS = (
    "WITH RECURSIVE starts(at) AS (VALUES (:begin) UNION ALL SELECT at + :width FROM starts WHERE at + :width < :end)"
)
_REACH = {"last_step": "max", "low_ns": "min", "high_ns": "max", "first_ns": "min", "last_ns": "max"}


def _total(column: str) -> str:
    """Return the SQL for the sum of a column; `sum` would fail if a damaged row makes it too large."""
    return f"CAST(total({column}) AS INTEGER)"


_SUMS = tuple(f"{_REACH[name]}({name})" if name in _REACH else _total(name) for name in COLUMNS[:-1])
"""SQL to combine the columns of several tallies."""
_TIME_SUMS = ", ".join(map(_total, ACTIVITY_COLUMNS))


class Sums:
    """The sums in one history, as of one instant. If the database is damaged, they cover its readable part."""

    def __init__(
        self, db: sqlite3.Connection, query_limits: QueryLimits, origin_ns: int = 0, damaged: str | None = None
    ) -> None:
        """`db`: in a transaction, so that all queries see the same state. `query_limits`: its limits.

        `origin_ns`: start of the run (monotonic). `damaged`: why the history could not be read.
        """
        self._db = db
        self._query_limits = query_limits
        self.origin_ns = origin_ns
        self.damaged = damaged
        """Why the history could not be read to its end; None if all queries so far succeeded."""
        self._known_stretches: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
        """Results of `stretches` by its arguments."""
        self.rings: dict[str, RingRow] = rings_in(db)
        self._names = dict(self._rows("SELECT number, name FROM series"))
        meta = dict(self._rows("SELECT key, value FROM meta"))
        self._whole: dict[int, int] = {width: _second(meta.get(f"whole_{width}")) for width in WIDTHS[1:]}
        self._pruned: dict[int, int] = {width: _second(meta.get(f"pruned_{width}")) for width in WIDTHS[:-1]}
        self.pruned = _count(meta.get("pruned", 0))
        """Number of rows deleted to keep the history below its size limit."""
        self._keys = known_keys(self._rows("SELECT process, mode, kind, batch FROM keys"))
        self.processes = sorted({key.process for key in self._keys})
        """Processes with steps."""
        self._newest = self._newest_second()

    def query(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query; for other files of this package."""
        return self._rows(query, values)

    def _rows(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        return list(self._each(query, values))

    def _each(self, query: str, values: Parameters = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; in a damaged database, the rows before the damage."""
        self._query_limits.begin()
        try:
            yield from self._query_limits.each(self._db.execute(query, values))
        except (sqlite3.Error, OverflowError, HistoryError) as error:
            self.damaged = self.damaged or f"the history cannot be read to its end: {error}"

    # ------------------------------------------------------------------------------------------ tallies

    def stretches(
        self, begin_s: int, end_s: int, finest: int = 1, widest: int = WIDTHS[-1]
    ) -> list[tuple[int, int, int]]:
        """Return the widest tallies that cover the time from `begin_s` to `end_s`, as stretches (width, begin, end).

        `finest`, `widest`: limits of the widths. Where narrow tallies were deleted, wider ones replace them, even above
        `widest`; they may extend beyond the two times.
        """
        asked = begin_s, end_s, finest, widest
        if asked in self._known_stretches:
            return self._known_stretches[asked]
        end_s = min(end_s, max(self._newest, begin_s) + 1)
        found = self._known_stretches[asked] = []
        at = begin_s
        while at < end_s:
            width = self._width_at(at, end_s, finest, widest)
            at -= at % width
            until = self._same_until(at, width, end_s, widest)
            if found and found[-1][0] == width and found[-1][2] == at:
                found[-1] = width, found[-1][1], until
            else:
                found.append((width, at, until))
            at = until
        return found

    def _width_at(self, at: int, end: int, finest: int, widest: int) -> int:
        """Return the width of the widest tally that begins at `at` and ends by `end`.

        If there is none, return the narrowest width that was not deleted there.
        """
        for width in WIDTHS[:0:-1]:
            there = at + width <= min(end, self._whole[width]) and at >= self._pruned.get(width, 0)
            if width <= widest and there and at % width == 0:
                return width
        for width in WIDTHS:
            start = at - at % width
            there = width == 1 or start + width <= self._whole[width]
            if width >= finest and there and start >= self._pruned.get(width, 0):
                return width
        return WIDTHS[0]

    def _same_until(self, at: int, width: int, end: int, widest: int) -> int:
        """Return the second until which the tallies from `at` on have this width.

        The width changes only a few times, so the loop of `stretches` stays short, even in a damaged history.
        """
        limits = [end, *(second for each, second in self._pruned.items() if each < width and second > at)]
        for wider in WIDTHS:
            if width < wider <= widest:
                begin = -(-max(at + 1, self._pruned.get(wider, 0)) // wider) * wider
                if begin < self._whole[wider]:
                    limits.append(begin)
        if width > 1:
            limits.append(self._whole[width])
        return max(at + (min(limits) - at) // width * width, at + width)

    def _newest_second(self) -> int:
        query = "SELECT max(start_s) FROM {} WHERE width = 1 AND start_s <= ?"
        rows = [row for table in ("tallies", "times") for row in self._rows(query.format(table), (_LATEST_S,))]
        return max(whole(found, -1) for (found,) in (*rows, (-1,)))

    def tally_rows(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        finest: int = 1,
        widest: int = WIDTHS[-1],
        series: Collection[str] | None = None,
    ) -> Iterator[tuple[int, int, Key, Tally]]:
        """Yield (start, width, key, tally) of each row between two seconds, in order of time, without damaged rows.

        `process`: one process or several; ALL: the tallies of all processes together, which exist only if there are
        several. `series`: read only these series.
        """
        names = self._named(series)
        for width, row in self._rows_between("tallies", TALLY, begin_s, end_s, process, finest, widest):
            key = key_in(row)
            if key is None:
                continue
            try:
                tally = Tally.of_row(row[TALLY_AT:], names, sketches=sketches)
            except ValueError:
                continue
            yield row[0], width, key, tally

    def _rows_between(
        self,
        table: str,
        columns: Sequence[str],
        begin_s: int,
        end_s: int,
        process: int | Collection[int] | None,
        finest: int = 1,
        widest: int = WIDTHS[-1],
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield (width, columns) of the rows of tallies or times between two seconds, in order of time."""
        names = ", ".join(columns)
        if isinstance(process, Collection) and len(process) == 1:
            (process,) = process
        for width, begin, end in self.stretches(begin_s, end_s, finest, widest):
            values = {"width": width, "begin": begin, "end": end}
            if not isinstance(process, int):
                which = ">= 0" if process is None else f"IN ({', '.join(map(str, process))})"
                query = f"SELECT {names} FROM {table} WHERE {_BETWEEN} AND process {which} ORDER BY start_s"
            elif len(self.processes) < 2:
                values["process"] = process
                query = f"SELECT {names} FROM {table} WHERE {_BETWEEN} AND process = :process ORDER BY start_s"
            else:  # one look-up per row, because the rows of all processes are interleaved
                values["process"] = process
                query = (
                    f"{_STARTS} SELECT {names} FROM starts CROSS JOIN {table}"
                    " ON width = :width AND start_s = starts.at AND process = :process"
                )
            for row in self._each(query, values):
                yield width, row

    def pace_rows(self, begin_s: int, end_s: int, processes: Collection[int]) -> Iterator[PaceRow]:
        """Yield the columns of the one-second tallies that a rate needs, in order of time."""
        number = next((number for number, name in self._names.items() if name == STEP), None)
        for _, row in self._rows_between("tallies", _PACE, begin_s, end_s, processes, widest=1):
            start, who, mode, kind, steps, first, last, samples, known, data = row
            whole_numbers = type(start) is type(who) is type(kind) is type(steps) is int
            if whole_numbers and mode in MODES and are_optional((first, last, samples, known)):
                try:
                    took = total_in(data, number)
                except ValueError:
                    continue
                yield PaceRow(start, who, mode, kind, steps, first, last, samples, known, took)

    def pace_times(
        self, begin_s: int, end_s: int, processes: Collection[int], *, evaluation: bool, widest: int = WIDTHS[-1]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (process, start, width, ns): time of training and between steps; `evaluation`: also of evaluation."""
        spent = "training_ns + between_ns" + " + evaluation_ns" * evaluation
        for width, row in self._rows_between(
            "times", ("process", "start_s", spent), begin_s, end_s, processes, 1, widest
        ):
            who, start, ns = row
            if type(who) is type(start) is type(ns) is int:
                yield who, start, width, ns

    def tallies(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        series: Collection[str] | None = None,
    ) -> dict[Key, Tally]:
        """Return one tally per key for the time between two seconds. Parameters as in `tally_rows`."""
        found: dict[Key, Tally] = {}
        names = self._named(series)
        for _, row in self._rows_between("tallies", TALLY, begin_s, end_s, process):
            key = key_in(row)
            with suppress(ValueError):
                if key is not None:
                    tally = found.get(key) or Tally()
                    tally.add_row(row[TALLY_AT:], names, sketches=sketches)
                    found[key] = tally
        return found

    def _named(self, series: Collection[str] | None) -> Mapping[int, str]:
        """Return the names of `series` by number; None: the names of all series."""
        if series is None:
            return self._names
        return {number: name for number, name in self._names.items() if name in series}

    def of_all(self, begin_s: int = 0, end_s: int = END) -> dict[Key, Tally]:
        """Return `tallies` of all processes together, under the process ALL."""
        if len(self.processes) > 1:
            return self.tallies(begin_s, end_s, process=ALL)
        return {key._replace(process=ALL): tally for key, tally in self.tallies(begin_s, end_s).items()}

    def sums(self, begin_s: int = 0, end_s: int = END) -> dict[Key, Tally]:
        """Return `tallies` of each process without series. The database adds them up, which is cheap."""
        query = (
            f"SELECT process, mode, kind, batch, {', '.join(_SUMS)}"
            f" FROM (SELECT width, {', '.join(TALLY)} FROM tallies)"
            " WHERE width = ? AND start_s >= ? AND start_s < ? AND process >= 0 GROUP BY process, mode, kind, batch"
        )
        found: dict[Key, Tally] = {}
        for stretch in self.stretches(begin_s, end_s):
            for row in self._each(query, stretch):
                key = Key(*row[:4])
                with suppress(ValueError):
                    if key in self._keys:
                        tally = found.get(key) or Tally()
                        tally.add_row((*row[4:], b""), {})
                        found[key] = tally
        return found

    def kinds(self) -> set[tuple[str, int]]:
        """Return (mode, kind) of all steps so far."""
        return {(key.mode, key.kind) for key in self._keys}

    # ------------------------------------------------------------------------------------------ time

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        finest: int = 1,
        widest: int = WIDTHS[-1],
        process: int | Collection[int] | None = None,
    ) -> list[TimeRow]:
        """Return the activities of each process, or of `process`, between two seconds, in order of time."""
        found = []
        for width, row in self._rows_between("times", _TIME, begin_s, end_s, process, finest, widest):
            start, who, mode, *spent = row
            if mode in MODES and {type(start), type(who), *map(type, spent)} == {int}:
                found.append(TimeRow(start, width, who, mode, dict(zip(ACTIVITIES, spent, strict=True))))
        return found

    def time_sums(self, begin_s: int = 0, end_s: int = END) -> list[TimeRow]:
        """Return the activities of each process by mode; adjacent rows of the same width are added up."""
        query = (
            f"SELECT process, mode, {_TIME_SUMS} FROM times WHERE width = ? AND start_s >= ? AND start_s < ?"
            " GROUP BY process, mode"
        )
        return [
            TimeRow(begin, end - begin, process, mode, dict(zip(ACTIVITIES, spent, strict=True)))
            for width, begin, end in self.stretches(begin_s, end_s)
            for process, mode, *spent in self._each(query, (width, begin, end))
            if type(process) is int and mode in MODES and all(type(ns) is int for ns in spent)
        ]

    def times_together(self, begin_s: int = 0, end_s: int = END) -> list[TimeTogether]:
        """Return the activities of all processes together, in order of time."""
        own = " + ".join(map(_total, ACTIVITY_COLUMNS))
        named = ", ".join(f"{_total(name)} AS {name}" for name in ACTIVITY_COLUMNS)
        query = (
            f"SELECT start_s, max(own), {_TIME_SUMS} FROM (SELECT start_s, {named}, {own} AS own FROM times"
            " WHERE width = ? AND start_s >= ? AND start_s < ? GROUP BY start_s, process) GROUP BY start_s"
        )
        return [
            TimeTogether(start, width, longest, dict(zip(ACTIVITIES, spent, strict=True)))
            for width, begin, end in self.stretches(begin_s, end_s)
            for start, longest, *spent in self._each(query, (width, begin, end))
            if {type(start), type(longest), *map(type, spent)} == {int}
        ]


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise HistoryError("its count of deleted rows is not a number")
    return value


def _second(value: object) -> int:
    """Return a second of the run; a damaged value becomes the nearest possible second."""
    return min(max(whole(value), 0), _LATEST_S)


def key_in(row: Sequence[Any]) -> Key | None:
    """Return the key in a row of TALLY; None if it or the start is damaged."""
    start, process, mode, kind, batch = row[:TALLY_AT]
    if type(start) is type(process) is type(kind) is type(batch) is int and mode in MODES:
        return Key(process, mode, kind, batch)
    return None


def whole(value: object, otherwise: int = 0) -> int:
    """Return the value if it is an integer, else `otherwise`: a damaged row may hold anything."""
    return value if isinstance(value, int) else otherwise

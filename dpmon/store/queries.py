"""What a run's record says of any time between two seconds: tallies, times, gaps, shapes and the longest steps.

A `Store` reads the database as of one instant. Every figure of the screen, the report, the summary, the lines of JSON
and the metrics is made from what it returns (dpmon.store.figures, dpmon.store.window).
"""

from __future__ import annotations

import heapq
import sqlite3
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from dpmon.record.codec import Decoder, kept_step_times
from dpmon.record.kinds import Call, Event, Record, RecordError, Step
from dpmon.record.plainjson import load_event, load_json
from dpmon.record.schema import EVALUATION, MODES, QUANTITIES, SETTLING, STEP, STEP_PHASES
from dpmon.store.accounting import ACTIVITIES
from dpmon.store.answers import GapRow, LongRow, MinuteRow, Shape, TimeRow, TimeTogether
from dpmon.store.tables import (
    ACTIVITY_COLUMNS,
    LASTING,
    LASTING_KINDS,
    STEP_COLUMNS,
    TALLY_COLUMNS,
    Bounds,
    HistoryError,
    RingRow,
    rings_in,
)
from dpmon.store.tally import ALL, WIDTHS, Key, Tally, known_keys

__all__ = ["END", "LONG_COLUMNS", "Store", "long_row"]

END = 1 << 40
"""A second after every run."""
Parameters = Sequence[Any] | Mapping[str, Any]
"""Values of a query's parameters."""
_LAST_NS = (1 << 63) - 1
_SECOND = 1_000_000_000
_TALLY = ("start_s", "process", "mode", "kind", "batch", *TALLY_COLUMNS, "sketches")
_STEP = ", ".join(STEP_COLUMNS)
_TIME = ("start_s", "process", "mode", *ACTIVITY_COLUMNS)
_BETWEEN = "width = :width AND start_s >= :begin AND start_s < :end"
_STARTS = (
    "WITH RECURSIVE starts(at) AS (VALUES (:begin) UNION ALL SELECT at + :width FROM starts WHERE at + :width < :end)"
)
_LONG_PHASES = tuple(f"{name}_ns" for name in STEP_PHASES)
LONG_COLUMNS = ", ".join(("process", "step", "mode", "kind", "start_ns", "wall_ns", *_LONG_PHASES))
"""What `long_row` takes of a step."""
_SHAPE_CHARACTERS = 1 << 20
_REACH = {"last_step": "max", "low_ns": "min", "high_ns": "max", "first_ns": "min", "last_ns": "max"}


def _total(column: str) -> str:
    """The sum of a column; `sum` would raise an error where a damaged row makes it too large."""
    return f"CAST(total({column}) AS INTEGER)"


_SUMS = tuple(f"{_REACH[name]}({name})" if name in _REACH else _total(name) for name in TALLY_COLUMNS)
"""Of the columns of several tallies."""
_TIME_SUMS = ", ".join(map(_total, ACTIVITY_COLUMNS))


class Store:
    """The tables of one history, as of one instant."""

    def __init__(self, db: sqlite3.Connection, bounds: Bounds, origin_ns: int = 0, damaged: str | None = None) -> None:
        """`db`: in a transaction, so that every query sees the same; `bounds`: its limits.

        `origin_ns`: the run's start, monotonic; `damaged`: why the history could not be read.
        """
        self._db = db
        self._bounds = bounds
        self.origin_ns = origin_ns
        self.damaged = damaged
        """Why the history could not be read, or not to its end; None: what was asked so far was read."""
        self._unreadable = 0
        """Damaged rows that `records` met."""
        self._decoders: dict[int, Decoder] = {}
        self._covers: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
        """What `cover` found, by what it was asked for."""
        self.rings: dict[str, RingRow] = rings_in(db)
        self._names = dict(self._rows("SELECT number, name FROM series"))
        meta = dict(self._rows("SELECT key, value FROM meta"))
        self._whole: dict[int, int] = {width: _whole(meta.get(f"whole_{width}")) for width in WIDTHS[1:]}
        self._pruned: dict[int, int] = {width: _whole(meta.get(f"pruned_{width}")) for width in WIDTHS[:-1]}
        self.pruned = _count(meta.get("pruned", 0))
        """Rows that were deleted to bound the history."""
        self._keys = known_keys(self._rows("SELECT process, mode, kind, batch FROM keys"))
        self.processes = sorted({key.process for key in self._keys})
        """Those with steps."""
        self._newest = self._newest_second()

    def query(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        """All rows of a query; for other files of this package."""
        return self._rows(query, values)

    @property
    def dropped(self) -> int:
        """Records that nobody could keep: lost by their writer, overwritten before they were read, or unreadable."""
        return self._unreadable + sum(ring.missed + ring.lost for ring in self.rings.values())

    def _rows(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        return list(self._each(query, values))

    def _each(self, query: str, values: Parameters = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query; where the database is damaged, those before the damage."""
        self._bounds.begin()
        try:
            for number, row in enumerate(self._db.execute(query, values)):
                if number > self._bounds.rows:
                    raise HistoryError("it has more rows than its size allows")
                self._bounds.begin()
                yield row
        except (sqlite3.Error, OverflowError, HistoryError) as error:
            self.damaged = self.damaged or f"the history cannot be read to its end: {error}"

    # ------------------------------------------------------------------------------------------ tallies

    def cover(self, begin_s: int, end_s: int, finest: int = 1, widest: int = WIDTHS[-1]) -> list[tuple[int, int, int]]:
        """Width, begin and end of the fewest stretches of tallies that make up the time from `begin_s` to `end_s`.

        `finest`, `widest`: use no narrower and no wider tallies. Where narrow ones were deleted, wider ones are used
        all the same, and reach beyond these times.
        """
        asked = begin_s, end_s, finest, widest
        if asked in self._covers:
            return self._covers[asked]
        end_s = min(end_s, max(self._newest, begin_s) + 1)
        found = self._covers[asked] = []
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
        """The widest stretch that begins at a second and ends by `end`, or the narrowest that was not deleted."""
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
        """Up to where the stretches from `at` on are this wide."""
        wider = next((each for each in WIDTHS if width < each <= widest), None)
        limits = [end, *(second for each, second in self._pruned.items() if each < width and second > at)]
        if wider is not None and at < self._whole[wider]:
            limits.append(at - at % wider + wider)
        if width > 1:
            limits.append(self._whole[width])
        return max(at + (min(limits) - at) // width * width, at + width)

    def _newest_second(self) -> int:
        rows = self._rows("SELECT max(start_s) FROM tallies WHERE width = 1")
        rows += self._rows("SELECT max(start_s) FROM times WHERE width = 1")
        return max(_whole(found, -1) for (found,) in (*rows, (-1,)))

    def tally_rows(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        process: int | None = None,
        sketches: bool = True,
        finest: int = 1,
        widest: int = WIDTHS[-1],
        series: Collection[str] | None = None,
    ) -> Iterator[tuple[int, int, Key, Tally]]:
        """Start, width, key and tally of each row between two seconds, in order of time; damaged rows are left out.

        `process`: of this one only; ALL for those of all processes together, which a run of one process lacks.
        `series`: read these only.
        """
        for width, row in self._stretches("tallies", _TALLY, begin_s, end_s, process, finest, widest):
            named = dict(zip(_TALLY, row, strict=True))
            key = _key(named)
            if key is not None:
                with suppress(ValueError):
                    tally = Tally.of_row(named, self._names, sketches=sketches, series=series)
                    yield named["start_s"], width, key, tally

    def _stretches(
        self,
        table: str,
        columns: Sequence[str],
        begin_s: int,
        end_s: int,
        process: int | Collection[int] | None,
        finest: int = 1,
        widest: int = WIDTHS[-1],
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Width and columns of the rows of tallies or times between two seconds, in order of time."""
        names = ", ".join(columns)
        for width, begin, end in self.cover(begin_s, end_s, finest, widest):
            values = {"width": width, "begin": begin, "end": end}
            if not isinstance(process, int):
                which = ">= 0" if process is None else f"IN ({', '.join(map(str, process))})"
                query = f"SELECT {names} FROM {table} WHERE {_BETWEEN} AND process {which} ORDER BY start_s"
            elif len(self.processes) < 2:
                values["process"] = process
                query = f"SELECT {names} FROM {table} WHERE {_BETWEEN} AND process = :process ORDER BY start_s"
            else:  # one look-up a row: the rows of all processes lie together
                values["process"] = process
                query = (
                    f"{_STARTS} SELECT {names} FROM starts CROSS JOIN {table}"
                    " ON width = :width AND start_s = starts.at AND process = :process"
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
    ) -> dict[Key, Tally]:
        """By key, all of the time between two seconds. Parameters as in `tally_rows`; `process` may be several."""
        found: dict[Key, Tally] = {}
        for _, row in self._stretches("tallies", _TALLY, begin_s, end_s, process):
            named = dict(zip(_TALLY, row, strict=True))
            key = _key(named)
            if key is not None:
                with suppress(ValueError):
                    fresh = Tally() if key not in found else found[key]
                    fresh.add_row(named, self._names, sketches=sketches, series=series)
                    found[key] = fresh
        return found

    def of_all(self, begin_s: int = 0, end_s: int = END) -> dict[Key, Tally]:
        """As `tallies`, of all processes together, under the process ALL."""
        if len(self.processes) > 1:
            return self.tallies(begin_s, end_s, process=ALL)
        return {key._replace(process=ALL): tally for key, tally in self.tallies(begin_s, end_s).items()}

    def sums(self, begin_s: int = 0, end_s: int = END) -> dict[Key, Tally]:
        """As `tallies` of each process, without series: the database adds up, so that many processes cost little."""
        query = (
            f"SELECT process, mode, kind, batch, {', '.join(_SUMS)}"
            f" FROM (SELECT width, {', '.join(_TALLY)} FROM tallies)"
            " WHERE width = ? AND start_s >= ? AND start_s < ? AND process >= 0 GROUP BY process, mode, kind, batch"
        )
        found: dict[Key, Tally] = {}
        for stretch in self.cover(begin_s, end_s):
            for row in self._each(query, stretch):
                key = Key(*row[:4])
                with suppress(ValueError):
                    if key in self._keys:
                        tally = Tally.of_row({**dict(zip(TALLY_COLUMNS, row[4:], strict=True)), "sketches": b""}, {})
                        found.setdefault(key, Tally()).merge(tally)
        return found

    def kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all steps so far."""
        return {(key.mode, key.kind) for key in self._keys}

    # ------------------------------------------------------------------------------------------ time

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = END,
        *,
        finest: int = 1,
        widest: int = WIDTHS[-1],
        process: int | None = None,
    ) -> list[TimeRow]:
        """What each process did between two seconds, or one of them, in order of time."""
        found = []
        for width, row in self._stretches("times", _TIME, begin_s, end_s, process, finest, widest):
            start, who, mode, *spent = row
            if mode in MODES and {type(start), type(who), *map(type, spent)} == {int}:
                found.append(TimeRow(start, width, who, mode, dict(zip(ACTIVITIES, spent, strict=True))))
        return found

    def time_sums(self, begin_s: int = 0, end_s: int = END) -> list[TimeRow]:
        """What each process did in each mode: rows are added up as far as they are of one width."""
        query = (
            f"SELECT process, mode, {_TIME_SUMS} FROM times WHERE width = ? AND start_s >= ? AND start_s < ?"
            " GROUP BY process, mode"
        )
        return [
            TimeRow(begin, end - begin, process, mode, dict(zip(ACTIVITIES, spent, strict=True)))
            for width, begin, end in self.cover(begin_s, end_s)
            for process, mode, *spent in self._each(query, (width, begin, end))
            if type(process) is int and mode in MODES and all(type(ns) is int for ns in spent)
        ]

    def times_together(self, begin_s: int = 0, end_s: int = END) -> list[TimeTogether]:
        """What all processes did together, in order of time."""
        own = " + ".join(map(_total, ACTIVITY_COLUMNS))
        named = ", ".join(f"{_total(name)} AS {name}" for name in ACTIVITY_COLUMNS)
        query = (
            f"SELECT max(own), {_TIME_SUMS} FROM (SELECT start_s, {named}, {own} AS own FROM times"
            " WHERE width = ? AND start_s >= ? AND start_s < ? GROUP BY start_s, process) GROUP BY start_s"
        )
        return [
            TimeTogether(covered, dict(zip(ACTIVITIES, spent, strict=True)))
            for width, begin, end in self.cover(begin_s, end_s)
            for covered, *spent in self._each(query, (width, begin, end))
            if type(covered) is int and all(type(ns) is int for ns in spent)
        ]

    def gaps(self, most: int, begin_ns: int = 0, end_ns: int = _LAST_NS) -> list[GapRow]:
        """The longest times between two steps, the longest first."""
        query = (
            "SELECT process, after_step, before_step, mode, begin_ns, end_ns, ns FROM gaps"
            " WHERE end_ns > ? AND begin_ns < ? ORDER BY ns DESC LIMIT ?"
        )
        return [
            GapRow(*row)
            for row in self._rows(query, (begin_ns, end_ns, most))
            if row[3] in MODES and all(type(value) is int for value in (*row[:3], *row[4:]))
        ]

    # ------------------------------------------------------------------------------------------ rows

    def longest(
        self,
        most: int,
        begin_ns: int = 0,
        end_ns: int = _LAST_NS,
        *,
        mode: str | None = None,
        evaluation: bool | None = None,
    ) -> list[LongRow]:
        """The longest steps that began between two times, the longest first, without settling ones.

        `mode`, `evaluation`: of this mode, and of its evaluation steps or the others.
        """
        only, values = _only(mode, evaluation)
        query = (
            f"SELECT {LONG_COLUMNS} FROM steps WHERE start_ns >= ? AND start_ns < ? AND {only}"
            " ORDER BY wall_ns DESC LIMIT ?"
        )
        rows = self._rows(query, (begin_ns, end_ns, *values, most))
        return [row for each in rows if (row := long_row(each)) is not None]

    def longest_deleted(self, most: int, *, mode: str | None = None, evaluation: bool | None = None) -> list[LongRow]:
        """As `longest`, of the steps that have no row any more: the longest of each tally.

        Its phase is known if the others of the tally were too short to have spent what the tally has of that phase.
        """
        oldest = self.oldest_step_ns()
        if not self.pruned or oldest is None:
            return []
        only, values = _only(mode, evaluation)
        query = (
            f"SELECT {', '.join(_TALLY)} FROM tallies WHERE width = ? AND start_s >= ? AND start_s < ?"
            f" AND process >= 0 AND {only} ORDER BY high_ns DESC LIMIT ?"
        )
        found = []
        for width, begin, end in self.cover(0, oldest // _SECOND, widest=1):
            for row in self._rows(query, (width, begin, end, *values, most)):
                named = dict(zip(_TALLY, row, strict=True))
                with suppress(ValueError, TypeError):
                    found.append(_longest_of(named, width, Tally.of_row(named, self._names, sketches=False)))
        return sorted(found, key=lambda step: -step.wall_ns)[:most]

    def steps(self, most: int, *, begin_ns: int = 0, end_ns: int = _LAST_NS, process: int | None = None) -> list[Step]:
        """The newest steps that ended between two times, the newest first; damaged ones are left out."""
        who, values = ("", ()) if process is None else (" AND process = ?", (process,))
        ended = "start_ns + wall_ns"
        query = f"SELECT {_STEP} FROM steps WHERE {ended} > ? AND {ended} <= ?{who}"
        return self._steps(f"{query} ORDER BY id DESC LIMIT ?", (begin_ns, end_ns, *values, most))

    def steps_until(self, last_id: int, process: int, most: int) -> list[Step]:
        """The newest steps of a process up to an id, the newest first; damaged ones are left out."""
        query = f"SELECT {_STEP} FROM steps WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT ?"
        return self._steps(query, (process, last_id, most))

    def _steps(self, query: str, values: Parameters) -> list[Step]:
        found = []
        for row in self._each(query, values):
            with suppress(RecordError):
                found.append(self._step(dict(zip(STEP_COLUMNS, row, strict=True))))
        return found

    def _step(self, row: Mapping[str, Any]) -> Step:
        """The record in a row of steps; RecordError if it is damaged."""
        phases = {name: row[f"{name}_ns"] for name in STEP_PHASES}
        quantities = {quantity.name: row[quantity.name] for quantity in QUANTITIES}
        whole = [row[name] for name in ("process", "step", "start_ns", "wall_ns")]
        optional = [*quantities.values(), *phases.values()]
        known = all(type(value) is int for value in whole)
        if not known or row["mode"] not in MODES or not all(value is None or type(value) is int for value in optional):
            raise RecordError("damaged row in steps")
        process, number, start, wall = whole
        found = Step(
            process=process,
            rank=self.rank(process),
            step=number,
            mode=row["mode"],
            start_ns=start,
            wall_ns=wall,
            samples=quantities.pop("samples"),
            phases={name: took for name, took in phases.items() if took is not None},
            quantities={name: count for name, count in quantities.items() if count is not None},
        )
        try:
            return kept_step_times(found, row["device"]) if isinstance(row["device"], bytes) else found
        except (struct.error, ValueError, IndexError):
            raise RecordError("damaged row in steps") from None

    def records(self) -> Iterator[Record]:
        """Every call, step and event, in the order in which they came; damaged ones count as `dropped`."""
        columns = {"calls": "process, payload", "steps": _STEP, "events": "json"}
        tables = (self._each(f"SELECT id, '{table}', {columns[table]} FROM {table} ORDER BY id") for table in columns)
        for _, table, *row in heapq.merge(*tables, key=itemgetter(0)):
            try:
                record = self._record(table, row)
            except (RecordError, LookupError, ValueError, TypeError, AttributeError, RecursionError, struct.error):
                record = None
            if record is None:
                self._unreadable += 1
            else:
                yield record

    def _record(self, table: str, row: Sequence[Any]) -> Record | None:
        """The record in a row; None if it is damaged, or an error."""
        if table == "calls":
            process, payload = row
            return self.decoder(process).decode(payload)
        if table == "steps":
            return self._step(dict(zip(STEP_COLUMNS, row, strict=True)))
        return Event(*load_event(row[0]))

    def rank(self, process: int) -> int | None:
        """The rank of a process; None if it has none."""
        return next((ring.rank for ring in self.rings.values() if ring.process == process), None)

    def newest_ns(self) -> int:
        """When the last thing that is recorded was over; 0 if there is none."""
        found = 0
        for table, end in (("steps", "start_ns + wall_ns"), ("calls", "start_ns + wall_ns"), ("events", "t_ns")):
            query = f"SELECT max(at) FROM (SELECT {end} AS at FROM {table} ORDER BY id DESC LIMIT 1000)"
            found = max([found, *(_whole(newest) for (newest,) in self._rows(query))])
        return found

    def oldest_step_ns(self) -> int | None:
        """When the oldest step began that has a row; None if there is none."""
        rows = self._rows("SELECT start_ns FROM steps ORDER BY id LIMIT 1000")
        return min((at for (at,) in rows if type(at) is int), default=None)

    def next_step_ns(self, process: int, after_ns: int) -> int | None:
        """When the first step of a process began that began no earlier than a time; None if there is none.

        Where rows were deleted it may be a later step.
        """
        rows = self._rows(
            "SELECT min(start_ns) FROM steps WHERE process = ? AND start_ns >= ?"
            " UNION ALL SELECT min(first_ns) FROM tallies WHERE process = ? AND first_ns >= ?",
            (process, after_ns, process, after_ns),
        )
        return min((at for (at,) in rows if type(at) is int), default=None)

    # ------------------------------------------------------------------------------------------ calls

    def calls(self, most: int, *, process: int, step: int | None = None, end_ns: int = _LAST_NS) -> list[Call]:
        """The newest calls of a process that ended by a time, or of one of its steps; the newest first.

        Damaged ones are left out.
        """
        of_step, values = ("", ()) if step is None else (" AND step = ?", (step,))
        query = (
            f"SELECT payload FROM calls WHERE process = ? AND start_ns + wall_ns <= ?{of_step} ORDER BY id DESC LIMIT ?"
        )
        found = []
        for (payload,) in self._rows(query, (process, end_ns, *values, most)):
            with suppress(RecordError, LookupError, TypeError):
                record = self.decoder(process).decode(payload)
                if isinstance(record, Call):
                    found.append(record)
        return found

    def decoder(self, process: int) -> Decoder:
        """A decoder that knows the definitions of a process."""
        found = self._decoders.get(process)
        if found is None:
            found = self._decoders[process] = Decoder(process, self.rank(process), self.origin_ns)
            for number, value in self.definitions(process).items():
                with suppress(LookupError, ValueError, TypeError, AttributeError):
                    found.define(number, value)
        return found

    def events(
        self, *kinds: str, begin_ns: int | None = None, end_ns: int = _LAST_NS, newest: int | None = None
    ) -> list[Event]:
        """Events of some kinds up to a time, in their order; the newest of them if `newest` says how many.

        An event without a time counts as old. Damaged ones are left out.
        """
        since, values = ("", ()) if begin_ns is None else (" AND t_ns >= ?", (begin_ns,))
        # The words of the index's own condition let SQLite use it.
        lasting = f"{LASTING} AND " if set(kinds) <= set(LASTING_KINDS) else ""
        named = f"{lasting}kind IN ({', '.join('?' * len(kinds))})"
        query = f"SELECT json FROM events WHERE {named} AND ifnull(t_ns, 0) <= ?{since} ORDER BY id DESC LIMIT ?"
        found = []
        for (text,) in reversed(self._rows(query, (*kinds, end_ns, *values, -1 if newest is None else newest))):
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                found.append(Event(*load_event(text)))
        return found

    def event_count(self, kind: str) -> int:
        """How many events of a kind there are, of those kinds that are kept (dpmon.store.tables.LASTING)."""
        (found,) = self._rows(f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ?", (kind,))[0]
        return _whole(found)

    def device_minutes(self) -> list[MinuteRow]:
        """Sums of the samples of devices and host that were deleted, those of the time before all minutes first."""
        if not self.pruned:
            return []
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        first = next((at for (at,) in self._rows(query) if type(at) is int), _LAST_NS)
        query = (
            "SELECT start_s, device, name, count, total, high FROM device_rollups WHERE (start_s + 60) * ? <= ?"
            " ORDER BY start_s, device, name"
        )
        return [
            MinuteRow(start, device, name, samples, float(total), float(high))
            for start, device, name, samples, total, high in self._rows(query, (_SECOND, first))
            if (type(start), type(device), type(name), type(samples)) == (int, int, str, int)
            and {type(total), type(high)} <= {int, float}
        ]

    def shapes(self) -> list[Shape]:
        """What calls got and gave, over the whole run so far."""
        query = "SELECT process, mode, kind, layout, virtual, sizes, untimed, calls FROM shapes"
        found = []
        for process, mode, kind, layout, virtual, sizes, untimed, calls in self._rows(query):
            with suppress(ValueError, TypeError, RecursionError):
                if not isinstance(sizes, str) or len(sizes) > _SHAPE_CHARACTERS or mode not in MODES:
                    continue
                inputs, outputs, *parts = load_json(sizes)
                whole = [tuple(int(number) for number in part) for part in parts]
                pairs = tuple((part[0], part[1]) for part in whole if len(part) == 2)
                stages = tuple((part[0], part[1], part[2]) for part in whole if len(part) == 3)
                numbers = (process, kind, layout, untimed, calls, inputs, outputs)
                if all(type(number) is int for number in numbers):
                    shape = Shape(
                        process, mode, kind, layout, bool(virtual), inputs, outputs, pairs, stages, untimed, calls
                    )
                    found.append(shape)
        return found

    def definitions(self, process: int) -> dict[int, Any]:
        """The definitions of a process by number; damaged ones are left out."""
        found: dict[int, Any] = {}
        for number, value in self._rows("SELECT number, value FROM definitions WHERE process = ?", (process,)):
            with suppress(ValueError, TypeError):
                found[number] = load_json(value)
        return found


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise HistoryError("the number of its deleted rows is none")
    return value


def _only(mode: str | None, evaluation: bool | None) -> tuple[str, tuple[Any, ...]]:
    """A condition for rows of steps and tallies, and its values."""
    parts, values = [f"kind & {SETTLING} = 0"], []
    if mode is not None:
        parts.append("mode = ?")
        values.append(mode)
    if evaluation is not None:
        parts.append(f"kind & {EVALUATION} {'>' if evaluation else '='} 0")
    return " AND ".join(parts), tuple(values)


def _longest_of(row: Mapping[str, Any], width: int, tally: Tally) -> LongRow:
    """The longest step of a tally; ValueError if it has none."""
    process, mode, kind, start, wall = row["process"], row["mode"], row["kind"], row["start_s"], tally.high_ns
    if mode not in MODES or wall is None or not {type(process), type(kind), type(start)} <= {int}:
        raise ValueError("a damaged tally")
    others = max(tally.stat(STEP).total - wall, 0)
    spent = {name: tally.stat(name).total for name in STEP_PHASES}
    # As if the others had been in that phase all the time.
    least = {name: took - others for name, took in spent.items() if 2 * (took - others) > wall}
    return LongRow(process, None, mode, kind, max((start + width) * _SECOND - wall, 0), wall, least)


def _key(row: Mapping[str, Any]) -> Key | None:
    """The key of a row of tallies; None if it is damaged."""
    whole = row["start_s"], row["process"], row["kind"], row["batch"]
    if any(type(value) is not int for value in whole) or row["mode"] not in MODES:
        return None
    return Key(row["process"], row["mode"], row["kind"], row["batch"])


def long_row(row: tuple[Any, ...]) -> LongRow | None:
    """A step of LONG_COLUMNS; None if it is damaged."""
    process, step, mode, kind, start, wall, *phases = row
    known = {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if type(took) is int}
    if mode in MODES and all(type(value) is int for value in (process, step, kind, start, wall)):
        return LongRow(process, step, mode, kind, start, wall, known)
    return None


def _whole(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) else otherwise

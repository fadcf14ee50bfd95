"""Reads the records of a run's history: steps, calls, collectives, events, gaps, shapes and the longest steps.

A `Store` reads the database as of one instant. All figures of the screen, the report, the summary, the JSON lines and
the metrics come from its results (dpmon.store.figures, dpmon.store.window).
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from dpmon.record.history_rows import CollectiveRow, Resolver
from dpmon.record.kinds import BUCKET, Call, Collective, Event, Record, RecordError, Sampled, Step
from dpmon.record.plainjson import load_event, load_json
from dpmon.record.schema import EVALUATION, EXPOSED, MODES, QUANTITIES, SETTLING, STEP, STEP_PHASES, SYNC_NUMBER, WAIT
from dpmon.store.answers import GapRow, LongRow, MinuteRow, Shape
from dpmon.store.parts import call_in, check_numbers, check_times
from dpmon.store.sums import TALLY, TALLY_AT, Parameters, Sums, key_in, whole
from dpmon.store.tables import (
    CALL_ROW,
    COLLECTIVE_COLUMNS,
    LASTING,
    LASTING_KINDS,
    STEP_COLUMNS,
    QueryLimits,
    definitions_in,
)
from dpmon.store.tally import Key, Tally, are_optional

_LAST_NS = (1 << 63) - 1
_SECOND = 1_000_000_000
COLLECTED = ", ".join(tuple(COLLECTIVE_COLUMNS)[1:])
"""Columns of a row for `collective`."""
_AT_ONCE = 5000
"""Number of ids read in one transaction."""
_LONG_PHASES = tuple(f"{name}_ns" for name in STEP_PHASES)
_AT = {name: index for index, name in enumerate(STEP_COLUMNS)}
_plain_of = itemgetter(*map(_AT.__getitem__, ("process", "step", "mode", "start_ns", "wall_ns", "samples")))
_phases_of = itemgetter(*(_AT[f"{name}_ns"] for name in STEP_PHASES))
_rest_of = itemgetter(*map(_AT.__getitem__, ("spans", "missing_spans", "device", f"{EXPOSED}_ns", f"{WAIT}_ns")))
_STEP_COLUMNS = ", ".join(STEP_COLUMNS)
_TABLES = {
    "calls": f"process, {CALL_ROW}",
    "steps": _STEP_COLUMNS,
    "events": "json",
    "collectives": COLLECTED,
}
"""Columns of each table with records."""
_COUNTED = (*(quantity.name for quantity in QUANTITIES if quantity.name != "samples"), SYNC_NUMBER)
_counts_of = itemgetter(*map(_AT.__getitem__, _COUNTED))
LONG_COLUMNS = ", ".join(("process", "step", "mode", "kind", "start_ns", "wall_ns", *_LONG_PHASES))
"""Columns of a step for `long_row`."""
_SHAPE_CHARACTERS = 1 << 20


class Store(Sums):
    """The tables of one history, as of one instant."""

    def __init__(
        self, db: sqlite3.Connection, query_limits: QueryLimits, origin_ns: int = 0, damaged: str | None = None
    ) -> None:
        """Take the parameters of Sums."""
        super().__init__(db, query_limits, origin_ns, damaged)
        self._unreadable = 0
        """Number of damaged rows found by `records`."""
        self._resolvers: dict[int, Resolver] = {}
        self._ranks = {ring.process: ring.rank for ring in reversed(self.rings.values())}

    @property
    def dropped(self) -> int:
        """Number of lost records: lost by their writer, overwritten before they were read, or unreadable."""
        return self._unreadable + sum(ring.missed for ring in self.rings.values())

    def rank(self, process: int) -> int | None:
        """The rank of a process; None if it has none."""
        return self._ranks.get(process)

    def definitions(self, process: int, numbers: Collection[int] | None = None) -> dict[int, Any]:
        """Return the definitions of a process by number, all or those in `numbers`, without damaged ones."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        if numbers is not None:
            query += f" AND number IN ({', '.join('?' * len(numbers))})"
        return definitions_in(self._rows(query, (process, *(numbers or ()))))

    def resolver(self, process: int) -> Resolver:
        """Return a resolver that knows the definitions of a process."""
        found = self._resolvers.get(process)
        if found is None:
            found = self._resolvers[process] = Resolver(process, self.rank(process))
            for number, value in self.definitions(process).items():
                with suppress(RecordError):
                    found.define(number, value)
        return found

    def gaps(self, most: int, begin_ns: int = 0, end_ns: int = _LAST_NS) -> list[GapRow]:
        """Return the longest gaps between two steps, the longest first."""
        query = (
            "SELECT process, after_step, before_step, mode, begin_ns, end_ns, ns FROM gaps"
            " WHERE end_ns > ? AND begin_ns < ? ORDER BY ns DESC LIMIT ?"
        )
        return [
            GapRow(*row)
            for row in self._rows(query, (begin_ns, end_ns, most))
            if row[3] in MODES and all(type(value) is int for value in (*row[:3], *row[4:]))
        ]

    def longest(
        self,
        most: int,
        begin_ns: int = 0,
        end_ns: int = _LAST_NS,
        *,
        mode: str | None = None,
        evaluation: bool | None = None,
    ) -> list[LongRow]:
        """Return the longest steps that began between two times, the longest first, without settling steps.

        `mode`: only this mode. `evaluation`: True for evaluation steps only, False for the others only.
        """
        only, values = _only(mode, evaluation)
        query = (
            f"SELECT {LONG_COLUMNS} FROM steps WHERE start_ns >= ? AND start_ns < ? AND {only}"
            " ORDER BY wall_ns DESC LIMIT ?"
        )
        rows = self._rows(query, (begin_ns, end_ns, *values, most))
        return [row for each in rows if (row := long_row(each)) is not None]

    def longest_deleted(self, most: int, *, mode: str | None = None, evaluation: bool | None = None) -> list[LongRow]:
        """Return the longest of the steps with deleted rows, like `longest`, but only one step per tally.

        A phase of that step is known if the tally's other steps are too short to account for the phase's total.
        """
        oldest = self.oldest_step_ns()
        if not self.pruned or oldest is None:
            return []
        only, values = _only(mode, evaluation)
        query = (
            f"SELECT {', '.join(TALLY)} FROM tallies WHERE width = ? AND start_s >= ? AND start_s < ?"
            f" AND process >= 0 AND {only} ORDER BY high_ns DESC LIMIT ?"
        )
        found = []
        for width, begin, end in self.stretches(0, oldest // _SECOND, widest=1):
            for row in self._rows(query, (width, begin, end, *values, most)):
                key = key_in(row)
                with suppress(ValueError):
                    if key is not None:
                        tally = Tally.of_row(row[TALLY_AT:], self._names, sketches=False)
                        found.append(_longest_of(key, (row[0] + width) * _SECOND, tally))
        return sorted(found, key=lambda step: -step.wall_ns)[:most]

    def steps(self, most: int, *, begin_ns: int = 0, end_ns: int = _LAST_NS, process: int | None = None) -> list[Step]:
        """Return the newest steps that ended between two times, the newest first, without damaged ones."""
        who, values = ("", ()) if process is None else (" AND process = ?", (process,))
        ended = "start_ns + wall_ns"
        query = f"SELECT {_STEP_COLUMNS} FROM steps WHERE {ended} > ? AND {ended} <= ?{who}"
        return self._steps(f"{query} ORDER BY id DESC LIMIT ?", (begin_ns, end_ns, *values, most))

    def steps_until(self, last_id: int, process: int, most: int) -> list[Step]:
        """Return the newest steps of a process up to an id, the newest first, without damaged ones."""
        query = f"SELECT {_STEP_COLUMNS} FROM steps WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT ?"
        return self._steps(query, (process, last_id, most))

    def _steps(self, query: str, values: Parameters) -> list[Step]:
        found = []
        for row in self._each(query, values):
            with suppress(RecordError):
                found.append(self._step(row))
        return found

    def _step(self, row: Sequence[Any]) -> Step:
        """Return the record in a row of STEP_COLUMNS. Raises RecordError if it is damaged."""
        process, number, mode, start, wall, samples = _plain_of(row)
        phases, counts = _phases_of(row), _counts_of(row)
        spans, missing, device, exposed, wait = _rest_of(row)
        known = type(process) is type(number) is type(start) is type(wall) is int and mode in MODES
        if not known or not are_optional((*phases, samples, *counts, exposed, wait, missing)):
            raise RecordError("damaged row in steps")
        try:
            flat = [] if spans is None else load_json(spans)
            why, *times = [0] if device is None else load_json(device)
            check_numbers((why, *flat))
            check_times(times)
            runs = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
            if any(not 0 <= phase <= BUCKET for phase, _, _ in runs):
                raise ValueError("an unknown phase")
        except (ValueError, TypeError):
            raise RecordError("damaged row in steps") from None
        return Step(
            *(process, self.rank(process), number, mode, start, wall, samples),
            {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None},
            {name: count for name, count in zip(_COUNTED, counts, strict=True) if count is not None},
            *(runs, missing, None if device is None else times, why, exposed, wait),
        )

    def records(self) -> Iterator[Record]:
        """Yield every record so far in the order of arrival; damaged records count as `dropped`.

        Reads in parts, and ends the transaction between two parts: a slow reader would otherwise let the journal grow.
        Rows deleted in between are left out.
        """
        self._unreadable = 0
        first, newest = self._ids(0)
        while first <= newest and first < _LAST_NS:
            found = list(self._part(first, first + _AT_ONCE))
            first = max(self._ids(first + _AT_ONCE)[0], first + _AT_ONCE)  # a damaged tree may return lower ids
            self._refresh()
            yield from found

    def _ids(self, least: int) -> tuple[int, int]:
        """Return the lowest and the highest id from `least` on; (the largest possible id, 0) if there are none."""
        queries = (f"SELECT min(id), max(id) FROM {table} WHERE id >= ?" for table in _TABLES)
        found = [row for query in queries for row in self._rows(query, (least,))]
        known = [row for row in found if type(row[0]) is type(row[1]) is int]
        return min((low for low, _ in known), default=_LAST_NS), max((high for _, high in known), default=0)

    def _part(self, first: int, end: int) -> Iterator[Record]:
        """Yield the records with ids from `first` up to, not including, `end`."""
        tables = (
            self._rows(f"SELECT id, '{table}', {names} FROM {table} WHERE id >= ? AND id < ? ORDER BY id", (first, end))
            for table, names in _TABLES.items()
        )
        for _, table, *row in heapq.merge(*tables, key=itemgetter(0)):
            try:
                record = self._record(table, row)
            except (RecordError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
                record = None
            if record is None:
                self._unreadable += 1
            else:
                yield record

    def _refresh(self) -> None:
        """End the transaction, so that the next query sees the current database."""
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("COMMIT")
                self._db.execute("BEGIN")

    def _record(self, table: str, row: Sequence[Any]) -> Record | None:
        """Return the record in a row; None, or an exception, if it is damaged."""
        if table == "calls":
            process, *columns = row
            return self.resolver(process).record(call_in(columns))
        if table == "steps":
            return self._step(row)
        if table == "collectives":
            return self.collective(row)
        return event_in(row[0])

    def collective(self, row: Sequence[Any]) -> Collective | Sampled:
        """Return the record in a row of COLLECTED. Raises RecordError or LookupError if it is damaged."""
        process, *numbers = row
        if any(type(number) is not int for number in row):
            raise RecordError("damaged row in collectives")
        return self.resolver(process).collective(CollectiveRow(*numbers))

    def newest_ns(self) -> int:
        """Return the end of the last record (ns); 0 if there is none."""
        found = 0
        for table, end in (("steps", "start_ns + wall_ns"), ("calls", "start_ns + wall_ns"), ("events", "t_ns")):
            query = f"SELECT max(at) FROM (SELECT {end} AS at FROM {table} ORDER BY id DESC LIMIT 1000)"
            found = max([found, *(whole(newest) for (newest,) in self._rows(query))])
        return found

    def oldest_step_ns(self) -> int | None:
        """Return the start of the oldest step that has a row; None if there is none."""
        rows = self._rows("SELECT start_ns FROM steps ORDER BY id LIMIT 1000")
        return min((at for (at,) in rows if type(at) is int), default=None)

    def next_step_ns(self, process: int, after_ns: int) -> int | None:
        """Return the start of the first step of a process that began at or after a time; None if there is none.

        If rows were deleted, the result may be a later step.
        """
        rows = self._rows(
            "SELECT min(start_ns) FROM steps WHERE process = ? AND start_ns >= ?"
            " UNION ALL SELECT min(first_ns) FROM tallies WHERE process = ? AND first_ns >= ?",
            (process, after_ns, process, after_ns),
        )
        return min((at for (at,) in rows if type(at) is int), default=None)

    def calls(self, most: int, *, process: int, step: int | None = None, end_ns: int = _LAST_NS) -> list[Call]:
        """Return the newest calls of a process that ended by a time, the newest first; `step`: only calls of this step.

        Damaged calls are left out.
        """
        of_step, values = ("", ()) if step is None else (" AND step = ?", (step,))
        query = (
            f"SELECT {CALL_ROW} FROM calls WHERE process = ? AND start_ns + wall_ns <= ?{of_step}"
            " ORDER BY id DESC LIMIT ?"
        )
        found = []
        for columns in self._rows(query, (process, end_ns, *values, most)):
            with suppress(RecordError):
                found.append(self.resolver(process).call(call_in(columns)))
        return found

    def events(
        self, *kinds: str, begin_ns: int | None = None, end_ns: int = _LAST_NS, newest: int | None = None
    ) -> list[Event]:
        """Return events of some kinds between two times, in order. `newest`: only this many, the newest.

        `begin_ns` leaves out events without a time. Damaged events are always left out.
        """
        since, values = ("", ()) if begin_ns is None else (" AND t_ns >= ?", (begin_ns,))
        query = f"{_events_of(kinds)} AND ifnull(t_ns, 0) <= ?{since} ORDER BY id DESC LIMIT ?"
        rows = self._rows(query, (*kinds, end_ns, *values, -1 if newest is None else newest))
        return [event for (text,) in reversed(rows) if (event := event_in(text)) is not None]

    def each_event(self, *kinds: str) -> Iterator[Event]:
        """Yield all events of some kinds, one at a time: the samples of devices may not fit into memory."""
        rows = self._each(f"{_events_of(kinds)} ORDER BY id", kinds)
        return (event for (text,) in rows if (event := event_in(text)) is not None)

    def event_count(self, kind: str) -> int:
        """Return the number of events of a lasting kind (dpmon.store.tables.LASTING)."""
        (found,) = self._rows(f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ?", (kind,))[0]
        return whole(found)

    def device_minutes(self) -> list[MinuteRow]:
        """Return the sums of deleted device and host samples by minute; the first ones cover all earlier time."""
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
        """Return the sizes of inputs and outputs of all calls so far, with their number of calls."""
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


def _events_of(kinds: Sequence[str]) -> str:
    """Return the beginning of a query for events of some kinds."""
    # SQLite uses the partial index only if the query repeats its condition.
    lasting = f"{LASTING} AND " if set(kinds) <= set(LASTING_KINDS) else ""
    return f"SELECT json FROM events WHERE {lasting}kind IN ({', '.join('?' * len(kinds))})"


def event_in(text: Any) -> Event | None:
    """Return the event in the JSON of a row; None if it is damaged."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        return Event(*load_event(text))
    return None


def _only(mode: str | None, evaluation: bool | None) -> tuple[str, tuple[Any, ...]]:
    """Return a condition for rows of steps and tallies, and its values."""
    parts, values = [f"kind & {SETTLING} = 0"], []
    if mode is not None:
        parts.append("mode = ?")
        values.append(mode)
    if evaluation is not None:
        parts.append(f"kind & {EVALUATION} {'>' if evaluation else '='} 0")
    return " AND ".join(parts), tuple(values)


def _longest_of(key: Key, end_ns: int, tally: Tally) -> LongRow:
    """Return the longest step of a tally; `end_ns`: end of its time. Raises ValueError if it has no step."""
    wall = tally.high_ns
    if wall is None:
        raise ValueError("a damaged tally")
    others = max(tally.stat(STEP).total - wall, 0)
    spent = {name: tally.stat(name).total for name in STEP_PHASES}
    # Lower bounds: assume that the other steps spent all their time in that phase.
    least = {name: took - others for name, took in spent.items() if 2 * (took - others) > wall}
    return LongRow(key.process, None, key.mode, key.kind, max(end_ns - wall, 0), wall, least)


def long_row(row: tuple[Any, ...]) -> LongRow | None:
    """Return the step in a row of LONG_COLUMNS; None if it is damaged."""
    process, step, mode, kind, start, wall, *phases = row
    known = {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if type(took) is int}
    if mode in MODES and all(type(value) is int for value in (process, step, kind, start, wall)):
        return LongRow(process, step, mode, kind, start, wall, known)
    return None

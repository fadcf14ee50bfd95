"""Reads the records of a run's history: steps, calls, collectives, events, gaps, shapes and the longest steps.

A `Store` reads the database as of one instant. All figures of the screen, the report, the summary, the JSON lines and
the metrics come from its results (dpmon.store.figures).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CollectiveRow, Resolver
from dpmon.record.kinds import BUCKET, Call, Collective, Event, Record, RecordError, Sampled, Step
from dpmon.record.schema import EVALUATION, EXPOSED, QUANTITIES, SETTLING, STEP_PHASES, SYNC_NUMBER, WAIT
from dpmon.store.accounting import Gap
from dpmon.store.answers import LongRow, MinuteRow, Shape, call_in, event_in, numbers_in
from dpmon.store.sums import Parameters, Sums
from dpmon.store.tables import (
    CALL_ROW,
    COLLECTIVE_COLUMNS,
    LASTING,
    LASTING_KINDS,
    STEP_COLUMNS,
    Door,
    definition_in,
)

_Decoded = TypeVar("_Decoded")

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


class Store(Sums):
    """The tables of one history, as of one instant."""

    def __init__(self, door: Door, damaged: str | None = None) -> None:
        """Take the parameters of Sums."""
        super().__init__(door, damaged)
        self._unreadable = 0
        """Number of rows without a record, found by `records`: they refer to a lost definition."""
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
        """Return the definitions of a process by number, all or those in `numbers`."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        if numbers is not None:
            query += f" AND number IN ({', '.join('?' * len(numbers))})"
        return dict(self.read(definition_in, query, (process, *(numbers or ()))))

    def resolver(self, process: int) -> Resolver:
        """Return a resolver that knows the definitions of a process."""
        found = self._resolvers.get(process)
        if found is None:
            found = self._resolvers[process] = Resolver(process, self.rank(process))
            for number, value in self.definitions(process).items():
                with suppress(RecordError):  # a process may write any value
                    found.define(number, value)
        return found

    def gaps(self, most: int) -> list[Gap]:
        """Return the longest gaps between two steps, the longest first."""
        query = "SELECT process, after_step, mode, begin_ns, end_ns, ns FROM gaps ORDER BY ns DESC LIMIT ?"
        return [Gap(*row) for row in self.query(query, (most,))]

    def longest(self, most: int, *, mode: str | None = None, evaluation: bool | None = None) -> list[LongRow]:
        """Return the longest steps, the longest first, without settling steps.

        `mode`: only this mode. `evaluation`: True for evaluation steps only, False for the others only.
        """
        only, values = _only(mode, evaluation)
        query = f"SELECT {LONG_COLUMNS} FROM steps WHERE {only} ORDER BY wall_ns DESC LIMIT ?"
        return [long_row(row) for row in self.query(query, (*values, most))]

    def steps(self, most: int, *, process: int | None = None, last_id: int = _LAST_NS) -> list[Step]:
        """Return the newest steps, or those of one process, up to an id, the newest first."""
        who, values = ("", ()) if process is None else (" AND process = ?", (process,))
        query = f"SELECT {_STEP_COLUMNS} FROM steps WHERE id <= ?{who} ORDER BY id DESC LIMIT ?"
        return list(self.read(self._step, query, (last_id, *values, most)))

    def read(
        self, decode: Callable[[tuple[Any, ...]], _Decoded], query: str, values: Parameters = ()
    ) -> Iterator[_Decoded]:
        """Yield what `decode` makes of each row, up to the first damaged one.

        Rows that refer to a lost definition (RecordError) are left out.
        """
        with self.until_damage():
            for row in self._door.rows(query, values):
                with suppress(RecordError):
                    yield decode(row)

    def _step(self, row: Sequence[Any]) -> Step:
        """Return the record in a row of STEP_COLUMNS. Raises HistoryError if it is damaged."""
        process, number, mode, start, wall, samples = _plain_of(row)
        phases, counts = _phases_of(row), _counts_of(row)
        spans, missing, device, exposed, wait = _rest_of(row)
        try:
            flat = [] if spans is None else numbers_in(spans)
            why, *times = [0] if device is None else numbers_in(device)
            runs = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
            if list in map(type, (*flat, *times)) or any(not 0 <= phase <= BUCKET for phase, _, _ in runs):
                raise ValueError("an unknown phase")
        except (ValueError, TypeError) as error:
            raise HistoryError(f"a damaged step: {error}") from None
        return Step(
            *(process, self.rank(process), number, mode, start, wall, samples),
            {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None},
            {name: count for name, count in zip(_COUNTED, counts, strict=True) if count is not None},
            *(runs, missing, None if device is None else times, why, exposed, wait),
        )

    def records(self) -> Iterator[Record]:
        """Yield every record so far in the order of arrival; those with a lost definition count as `dropped`.

        Reads in parts, and ends the transaction between two parts: a slow reader would otherwise let the journal grow.
        Rows deleted in between are left out.
        """
        self._unreadable = 0
        first, newest = self._ids(0)
        while first <= newest and first < _LAST_NS:
            found: list[Record] = []
            until = _LAST_NS
            with self.until_damage():
                for record in self._part(first, first + _AT_ONCE):
                    found.append(record)
                until = first + _AT_ONCE
            first = max(self._ids(until)[0], until)  # a damaged tree may return lower ids
            self._door.refresh()
            yield from found

    def _ids(self, least: int) -> tuple[int, int]:
        """Return the lowest and the highest id from `least` on; (the largest possible id, 0) if there are none."""
        queries = (f"SELECT min(id), max(id) FROM {table} WHERE id >= ?" for table in _TABLES)
        found = [row for query in queries for row in self.query(query, (least,))]
        known = [row for row in found if row[0] is not None]
        return min((low for low, _ in known), default=_LAST_NS), max((high for _, high in known), default=0)

    def _part(self, first: int, end: int) -> Iterator[Record]:
        """Yield the records with ids from `first` up to, not including, `end`."""
        tables = (
            self._arrived(table, f"SELECT id, {names} FROM {table} WHERE id >= ? AND id < ? ORDER BY id", (first, end))
            for table, names in _TABLES.items()
        )
        return (record for _, record in heapq.merge(*tables, key=itemgetter(0)))

    def _arrived(self, table: str, query: str, values: tuple[int, ...]) -> Iterator[tuple[int, Record]]:
        """Yield the id and the record of each row of a table."""
        decoders: Mapping[str, Callable[[Sequence[Any]], Record]] = {
            "calls": self._call, "steps": self._step, "collectives": self.collective, "events": event_in
        }  # fmt: skip
        decode = decoders[table]
        for number, *row in self._door.rows(query, values):
            try:
                yield number, decode(row)
            except RecordError:
                self._unreadable += 1

    def _call(self, row: Sequence[Any]) -> Call:
        """Return the record in a row: the process, and CALL_ROW. Raises RecordError for a lost definition."""
        process, *columns = row
        return self.resolver(process).call(call_in(columns))

    def collective(self, row: Sequence[Any]) -> Collective | Sampled:
        """Return the record in a row of COLLECTED. Raises RecordError for a lost definition."""
        process, *numbers = row
        return self.resolver(process).collective(CollectiveRow(*numbers))

    def newest_ns(self) -> int:
        """Return the end of the last record (ns); 0 if there is none."""
        found = 0
        for table, end in (("steps", "start_ns + wall_ns"), ("calls", "start_ns + wall_ns"), ("events", "t_ns")):
            query = f"SELECT max(at) FROM (SELECT {end} AS at FROM {table} ORDER BY id DESC LIMIT 1000)"
            found = max([found, *(newest or 0 for (newest,) in self.query(query))])
        return found

    def next_step_ns(self, process: int, after_ns: int) -> int | None:
        """Return the start of the first step of a process that began at or after a time; None if there is none.

        If rows were deleted, the result may be a later step.
        """
        rows = self.query(
            "SELECT min(start_ns) FROM steps WHERE process = ? AND start_ns >= ?"
            " UNION ALL SELECT min(first_ns) FROM tallies WHERE process = ? AND first_ns >= ?",
            (process, after_ns, process, after_ns),
        )
        return min((at for (at,) in rows if at is not None), default=None)

    def calls(self, most: int, process: int) -> list[Call]:
        """Return the newest calls of a process, the newest first."""
        query = f"SELECT process, {CALL_ROW} FROM calls WHERE process = ? ORDER BY id DESC LIMIT ?"
        return list(self.read(self._call, query, (process, most)))

    def events(self, *kinds: str, end_ns: int = _LAST_NS, newest: int | None = None) -> list[Event]:
        """Return events of some kinds up to a time, in order. `newest`: only this many, the newest."""
        query = f"{_events_of(kinds)} AND ifnull(t_ns, 0) <= ? ORDER BY id DESC LIMIT ?"
        found = list(self.read(_again, query, (*kinds, end_ns, -1 if newest is None else newest)))
        return found[::-1]

    def each_event(self, *kinds: str) -> Iterator[Event]:
        """Yield all events of some kinds, one at a time: the samples of devices may not fit into memory."""
        return self.read(event_in, f"{_events_of(kinds)} ORDER BY id", kinds)

    def event_count(self, kind: str, end_ns: int = _LAST_NS) -> int:
        """Return the number of events of a lasting kind (dpmon.store.tables.LASTING) up to a time."""
        query = f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ? AND ifnull(t_ns, 0) <= ?"
        return sum(count for (count,) in self.query(query, (kind, end_ns)))

    def device_minutes(self) -> list[MinuteRow]:
        """Return the sums of deleted device and host samples by minute; the first ones cover all earlier time."""
        if not self.pruned:
            return []
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        first = next((at for (at,) in self.query(query)), _LAST_NS)
        query = (
            "SELECT start_s, device AS number, name, count, total, high FROM device_rollups"
            " WHERE (start_s + 60) * ? <= ? ORDER BY start_s, device, name"
        )
        return [MinuteRow(*row) for row in self.query(query, (_SECOND, first))]

    def shapes(self) -> list[Shape]:
        """Return the sizes of inputs and outputs of all calls so far, with their number of calls."""
        query = "SELECT process, mode, kind, layout, virtual, sizes, untimed, calls FROM shapes"
        return list(self.read(_shape_in, query))


def _shape_in(row: Sequence[Any]) -> Shape:
    process, mode, kind, layout, virtual, sizes, untimed, calls = row
    try:
        inputs, outputs, *parts = numbers_in(sizes)
        pairs = tuple((part[0], part[1]) for part in parts if len(part) == 2)
        stages = tuple((part[0], part[1], part[2]) for part in parts if len(part) == 3)
    except (ValueError, TypeError) as error:
        raise HistoryError(f"a damaged shape: {error}") from None
    return Shape(process, mode, kind, layout, bool(virtual), inputs, outputs, pairs, stages, untimed, calls)


def _events_of(kinds: Sequence[str]) -> str:
    """Return the beginning of a query for events of some kinds."""
    # SQLite uses the partial index only if the query repeats its condition.
    lasting = f"{LASTING} AND " if set(kinds) <= set(LASTING_KINDS) else ""
    return f"SELECT json FROM events WHERE {lasting}kind IN ({', '.join('?' * len(kinds))})"


_again = lru_cache(maxsize=1024)(event_in)
"""Cached, because every picture asks for the same lasting events."""


def _only(mode: str | None, evaluation: bool | None) -> tuple[str, tuple[Any, ...]]:
    """Return a condition for rows of steps, and its values."""
    parts, values = [f"kind & {SETTLING} = 0"], []
    if mode is not None:
        parts.append("mode = ?")
        values.append(mode)
    if evaluation is not None:
        parts.append(f"kind & {EVALUATION} {'>' if evaluation else '='} 0")
    return " AND ".join(parts), tuple(values)


def long_row(row: tuple[Any, ...]) -> LongRow:
    """Return the step in a row of LONG_COLUMNS."""
    known = {name: took for name, took in zip(STEP_PHASES, row[6:], strict=True) if took is not None}
    return LongRow._make((*row[:6], known))

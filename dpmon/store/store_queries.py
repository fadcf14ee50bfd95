"""Reads the records of a run's history: steps, calls, collectives, events, gaps, shapes and the longest steps.

A `Store` reads the database as of one instant; `Store.at` leaves out later records, so that the state known at a time
in the past is shown. All figures of the screen, the report, the summary, the JSON lines and the metrics come from its
results (dpmon.store.step_stats).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import exp, isfinite
from operator import itemgetter
from typing import Any

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CollectiveRow, LossRow, LossSite, Resolver
from dpmon.record.record_types import Collective, Event, Operation, Record, RecordError, Sampled
from dpmon.record.safe_json import int_member, text_member
from dpmon.record.schema import SECOND
from dpmon.store.history_schema import (
    BEFORE_S,
    CALL_ROW,
    COLLECTIVE_COLUMNS,
    COLLECTIVE_SUMS,
    LASTING,
    LASTING_KINDS,
    LOSS_COLUMNS,
    NODE_COLUMNS,
    OWN,
    UNFIT,
    CheckedConnection,
)
from dpmon.store.query_results import (
    SMOOTHED,
    ChartSample,
    CollectiveSums,
    InvalidLoss,
    LastSample,
    LossBin,
    MinuteRow,
    NodeRow,
    Shape,
    event_from_row,
    loss_from_columns,
    parse_numbers,
)
from dpmon.store.step_queries import LAST_NS, WHOLE_STEP, StepStore

COLLECTED = ", ".join(tuple(COLLECTIVE_COLUMNS)[1:])
"""Columns of a row for `collective`."""
LOSSES = ", ".join(LOSS_COLUMNS[1:])
_AT_ONCE = 5000
"""Number of ids read in one transaction."""
_PROCESSES_READ = 64
"""Most records of processes to read for the job of a run: all its ranks are of the same one."""
_TABLES = {
    "calls": f"process, {CALL_ROW}",
    "steps": WHOLE_STEP,
    "events": "json",
    "collectives": COLLECTED,
    "losses": LOSSES,
}
"""Columns of each table with records."""
_SAMPLED = ", ".join(
    f"json_extract(json, '$.{name}')"
    for name in ("index", "util_pct", "cpu_pct", "mem_used_bytes", "mem_total_bytes", "power_w", "run_mem_bytes")
)
_HOST = -1
"""Device number of the host."""
MOST_DRAWN = 128
"""Most collectives of a sample that are read for drawing."""
MOST_OWN = 100
"""Most of the script's own collectives to read, the newest."""
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in COLLECTIVE_SUMS)
_NEWEST_LOSSES = (
    "SELECT definition, step, t_ns, loss FROM losses WHERE process = ? AND definition = ? AND t_ns <= ?"
    " ORDER BY t_ns DESC LIMIT ?"
)
_FOR_SMOOTHED = 200
"""Of more values, the oldest weigh less than 1 in 20,000."""


class Store(StepStore):
    """The tables of one history, as of one instant."""

    def __init__(self, door: CheckedConnection, damaged: str | None = None) -> None:
        """Take the parameters of TallyStore."""
        super().__init__(door, damaged)
        self._unreadable = 0
        """Number of rows without a record, found by `records`: they refer to a lost definition."""

    @property
    def dropped(self) -> int:
        """Number of lost records: lost by their writer, overwritten before they were read, or unreadable."""
        return self._unreadable + sum(ring.missed for ring in self.rings.values())

    def records(self) -> Iterator[Record]:
        """Yield every record so far in the order of arrival; those with a lost definition count as `dropped`.

        Reads in parts, and ends the transaction between two parts: a slow reader would otherwise let the journal grow.
        Rows deleted in between are left out.
        """
        self._unreadable = 0
        first, newest = self._ids(0)
        while first <= newest and first < LAST_NS:
            found: list[Record] = []
            until = LAST_NS
            with self.until_damage():
                for record in self._records_between(first, first + _AT_ONCE):
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
        return min((low for low, _ in known), default=LAST_NS), max((high for _, high in known), default=0)

    def _records_between(self, first: int, end: int) -> Iterator[Record]:
        """Yield the records with ids from `first` up to, not including, `end`."""
        tables = (
            self._iter_rows(
                table, f"SELECT id, {names} FROM {table} WHERE id >= ? AND id < ? ORDER BY id", (first, end)
            )
            for table, names in _TABLES.items()
        )
        return (record for _, record in heapq.merge(*tables, key=itemgetter(0)))

    def _iter_rows(self, table: str, query: str, values: tuple[int, ...]) -> Iterator[tuple[int, Record]]:
        """Yield the id and the record of each row of a table."""
        decoders: Mapping[str, Callable[[Sequence[Any]], Record]] = {
            "calls": self._call, "steps": self._step, "collectives": self.collective, "events": event_from_row,
            "losses": self._loss,
        }  # fmt: skip
        decode = decoders[table]
        for number, *row in self._door.rows(query, values):
            try:
                yield number, decode(row)
            except RecordError:
                self._unreadable += 1

    def collective(self, row: Sequence[Any]) -> Collective | Sampled:
        """Return the record in a row of COLLECTED. Raises RecordError for a lost definition."""
        process, *numbers = row
        return self.resolver(process).collective(CollectiveRow(*numbers))

    def _loss(self, row: Sequence[Any]) -> Event:
        """Return the record in a row of LOSSES. Raises RecordError for a lost definition."""
        process, *columns = row
        return self.resolver(process).loss(loss_from_columns(columns))

    def newest_ns(self) -> int:
        """Return the end of the last record (ns); 0 if there is none."""
        found = 0
        for table, end in (("steps", "start_ns + wall_ns"), ("calls", "start_ns + wall_ns"), ("events", "t_ns")):
            query = f"SELECT max(at) FROM (SELECT {end} AS at FROM {table} ORDER BY id DESC LIMIT 1000)"
            found = max([found, *(newest or 0 for (newest,) in self.query(query))])
        return found

    def events(self, *kinds: str, newest: int | None = None) -> list[Event]:
        """Return events of some kinds, in order. `newest`: only this many, the newest."""
        query = f"{_events_of(kinds)} AND ifnull(t_ns, 0) <= ? ORDER BY id DESC LIMIT ?"
        found = list(self.read(_again, query, (*kinds, self.until_ns, -1 if newest is None else newest)))
        return found[::-1]

    def iter_events(self, *kinds: str) -> Iterator[Event]:
        """Yield all events of some kinds, one at a time: the samples of devices may not fit into memory."""
        return self.read(event_from_row, f"{_events_of(kinds)} ORDER BY id", kinds)

    def event_count(self, kind: str) -> int:
        """Return the number of events of a lasting kind (dpmon.store.history_schema.LASTING)."""
        query = f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ? AND ifnull(t_ns, 0) <= ?"
        return sum(count for (count,) in self.query(query, (kind, self.until_ns)))

    def job(self) -> tuple[dict[str, str] | None, int | None]:
        """Return the job of the run's ranks (`by` and `id`, equal on all its machines), and the number of this machine.

        Both as the newest training process knows them, None if it does not.
        """
        for event in reversed(self.events("process", newest=_PROCESSES_READ)):
            job, node = event.data.get("job"), int_member(event.data, "node")
            by, name = (text_member(job, "by"), text_member(job, "id")) if isinstance(job, Mapping) else (None, None)
            if by is not None and name is not None:
                return {"by": by, "id": name}, node
        return None, None

    def newest_event(self) -> int:
        """Return the id of the newest event of a lasting kind; 0 if there is none."""
        return sum(number or 0 for (number,) in self.query(f"SELECT max(id) FROM events WHERE {LASTING}"))

    def device_minutes(self) -> list[MinuteRow]:
        """Return the sums of deleted device and host samples by minute; the first ones cover all earlier time."""
        if not self.pruned:
            return []
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        first = next((at for (at,) in self.query(query)), LAST_NS)
        query = (
            "SELECT start_s, device AS number, name, count, total, high FROM device_rollups"
            " WHERE (start_s + 60) * ? <= ? ORDER BY start_s, device, name"
        )
        return [MinuteRow(*row) for row in self.query(query, (SECOND, first))]

    def nodes(self) -> list[NodeRow]:
        """Return the machines of a mirror, by number; an empty list for a run of this machine."""
        return [NodeRow(*row) for row in self.query(f"SELECT {', '.join(NODE_COLUMNS)} FROM nodes ORDER BY number")]

    def shapes(self) -> list[Shape]:
        """Return the sizes of inputs and outputs of all calls so far, with their number of calls."""
        query = "SELECT process, mode, kind, layout, virtual, sizes, untimed, calls FROM shapes"
        return list(self.read(shape_from_row, query))

    # ------------------------------------------------------------------------------------------ events

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """Return the last memory event of a process up to a time; None if there is none."""
        query = (
            "SELECT json FROM events WHERE kind = 'memory' AND process = ? AND t_ns <= ?"
            " ORDER BY t_ns DESC, id DESC LIMIT 1"
        )
        until = self.until_ns if until_ns is None else min(until_ns, self.until_ns)
        return next(self.read(event_from_row, query, (process, until)), None)

    def newest_memory(self, processes: Sequence[int]) -> dict[int, Event]:
        """Return the newest memory event of each process that has one."""
        newest = (
            "SELECT id FROM events WHERE kind = 'memory' AND process = who AND t_ns <= ?"
            " ORDER BY t_ns DESC, id DESC LIMIT 1"
        )
        query = (
            f"WITH ends(who) AS (VALUES {', '.join(f'({one})' for one in processes)})"
            f" SELECT json FROM ends CROSS JOIN events AS row ON row.id = ({newest})"
        )
        found = self.read(event_from_row, query, (self.until_ns,)) if processes else ()
        return {process: event for event in found if (process := int_member(event.data, "process")) is not None}

    # ------------------------------------------------------------------------------------------ collectives

    def last_sample(self, process: int, begin_ns: int) -> LastSample | None:
        """Return the newest sample of a process that began at or after `begin_ns`, with its first collectives.

        None if there is no sample, or if it has no collectives.
        """
        query = (
            f"SELECT {COLLECTED} FROM collectives WHERE start_ns >= ? AND start_ns < ? AND process = ?"
            " AND definition {} 0 ORDER BY start_ns {} LIMIT ?"
        )
        read = self.read(self.collective, query.format("=", "DESC"), (begin_ns, self.until_ns, process, 1))
        sample = next(read, None)
        if not isinstance(sample, Sampled):
            return None
        until = min(sample.start_ns + sample.wall_ns, self.until_ns)
        values = sample.start_ns, until, process, MOST_DRAWN
        found = self.read(self.collective, query.format(">", ""), values)
        collectives = tuple(record for record in found if isinstance(record, Collective))
        return LastSample(sample.step, sample.start_ns, sample.wall_ns, collectives) if collectives else None

    def collective_sums(
        self, begin_ns: int = 0, end_ns: int = LAST_NS, processes: Collection[int] | None = None
    ) -> CollectiveSums:
        """Return the sampled collectives between two times by operation, of all processes or only of `processes`.

        Both times are rounded outwards to whole seconds.
        """
        end_ns = min(end_ns, self.until_ns)
        who = tuple(processes or ())
        only = "" if processes is None else f" AND process IN ({', '.join('?' * len(who))})"
        values = (begin_ns // SECOND if begin_ns > 0 else BEFORE_S, -(-end_ns // SECOND), *who)
        query = (
            f"SELECT process, definition, {_SUMS} FROM collective_sums WHERE start_s >= ? AND start_s < ?{only}"
            " GROUP BY process, definition"
        )
        samples = 0
        sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(COLLECTIVE_SUMS))
        why = None
        for process, definition, *numbers in self.query(query, values):
            if not definition:
                samples += numbers[0]
                continue
            with suppress(LookupError):
                facts = self.resolver(process).definitions.collectives[definition]
                if facts.operation is None:
                    why = facts.why
                    continue
                whole = sums[facts.operation, facts.size]
                for at, number in enumerate(numbers):
                    whole[at] += number
        operations = [Operation(*key, *whole) for key, whole in sums.items()]
        operations.sort(key=lambda operation: -operation.bytes)
        query = (
            f"SELECT {COLLECTED} FROM collectives WHERE {OWN} AND start_ns >= ? AND start_ns < ?{only}"
            " ORDER BY start_ns DESC LIMIT ?"
        )
        newest = self.read(self.collective, query, (begin_ns, end_ns, *who, MOST_OWN))
        own = {one.operation for one in newest if isinstance(one, Collective)}
        return CollectiveSums(tuple(operations), samples, why, tuple(sorted(own)))

    # ------------------------------------------------------------------------------------------ losses

    def loss_places(self, process: int) -> dict[int, LossSite]:
        """Return the lines of a process with losses, by definition, in order of their first loss."""
        query = "SELECT DISTINCT definition FROM losses WHERE process = ? AND t_ns <= ? ORDER BY definition"
        return self._places(process, [number for (number,) in self.query(query, (process, self.until_ns))])

    def _places(self, process: int, numbers: Sequence[int]) -> dict[int, LossSite]:
        resolver = Resolver(process)
        for number, value in self.definitions(process, numbers).items() if numbers else ():
            with suppress(RecordError):  # a process may write any value
                resolver.define(number, value)
        return resolver.definitions.losses

    def loss_bins(self, process: int, definition: int, begin_s: int, end_s: int, width_s: int) -> list[LossBin]:
        """Return the losses of a line from `begin_s` up to `end_s`, in stretches of `width_s` that begin at multiples.

        Stretches without a loss are left out.
        """
        query = (
            "SELECT t_ns / :width AS at, count(fit), min(fit) AS loss, avg(fit) AS loss, max(fit) AS loss,"
            f" count(*) - count(fit) FROM (SELECT t_ns, CASE WHEN {UNFIT} THEN NULL ELSE loss END AS fit FROM losses"
            " WHERE process = :process AND definition = :line AND t_ns >= :begin AND t_ns < :end)"
            " GROUP BY at ORDER BY at"
        )
        begin, end = begin_s * SECOND, min(end_s * SECOND, self.until_ns + 1)
        values = {"process": process, "line": definition, "begin": begin, "end": end, "width": width_s * SECOND}
        return [LossBin(at * width_s, *rest) for at, *rest in self.query(query, values)]

    def newest_losses(self, process: int, definition: int) -> tuple[LossRow | None, float | None]:
        """Return the newest loss of a line, and the smoothed one: a weighted mean of its last finite values.

        The weight of a value falls by e for every SMOOTHED values after it. Values are at least a second apart.
        """
        values = process, definition, self.until_ns, _FOR_SMOOTHED
        rows = [loss_from_columns(row) for row in self.query(_NEWEST_LOSSES, values)]
        weights = [(exp(-at / SMOOTHED), row.loss) for at, row in enumerate(rows) if isfinite(row.loss)]
        whole = sum(weight for weight, _ in weights)
        smoothed = sum(weight * value for weight, value in weights) / whole if weights else None
        return next(iter(rows), None), smoothed

    def first_invalid_losses(self) -> list[InvalidLoss]:
        """Return the first loss of each process and line that is NaN or infinite, in order of time."""
        query = (
            f"SELECT process, definition, step, min(t_ns), loss FROM losses WHERE {UNFIT} AND t_ns <= ?"
            " GROUP BY process, definition"
        )
        found = []
        for process, *columns in self.query(query, (self.until_ns,)):
            row = loss_from_columns(columns)
            place = self._places(process, [row.definition]).get(row.definition)
            if place is not None and place.why is None:
                found.append(InvalidLoss(process, place.place, row.step or None, row.start, row.loss))
        return sorted(found, key=lambda one: one.t_ns)

    # ------------------------------------------------------------------------------------------ samples

    def samples(self, span_ns: int, after_id: int = 0, node: int | None = None) -> list[ChartSample]:
        """Return the samples of devices and host in the `span_ns` before the newest one, in order.

        `after_id`: return all samples after this id instead. `node`: only those of a node.
        """
        if after_id:
            which, begin = "id > ? AND +t_ns <= ?", after_id
        else:
            query = "SELECT max(t_ns) FROM events WHERE kind IN ('device', 'host')"
            newest = next((at or 0 for (at,) in self.query(query)), 0)
            which, begin = "t_ns >= ? AND t_ns <= ?", min(newest, self.until_ns) - span_ns
        # SQLite parses the JSON ten times as fast as Python.
        query = (
            f"SELECT id, t_ns, kind = 'host', {_SAMPLED} FROM events"
            f" WHERE {which} AND kind IN ('device', 'host') AND (?3 IS NULL OR process = -1 - ?3) AND json_valid(json)"
            " ORDER BY id"
        )
        rows = self.query(query, (begin, self.until_ns, node))
        return [sample for row in rows if (sample := _sample(*row)) is not None]

    def sample(self, number: int) -> Event | None:
        """Return the complete sample with this id; None if it was deleted."""
        return next(self.read(event_from_row, "SELECT json FROM events WHERE id = ?", (number,)), None)

    def host_memory(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return (start in ns, peak bytes of the run's processes) of each minute that begins between two times."""
        query = (
            "WITH RECURSIVE starts(at) AS (VALUES (:begin) UNION ALL SELECT at + 60 FROM starts WHERE at + 60 < :end)"
            " SELECT start_s, high FROM starts CROSS JOIN device_rollups"
            " ON start_s = starts.at AND device = :host AND name = 'run_mem_bytes'"
        )
        begin, end = -(-begin_ns // (60 * SECOND)) * 60, min(end_ns, self.until_ns) // SECOND
        if begin >= end:
            return []
        rows = self.query(query, {"begin": begin, "end": end, "host": _HOST})
        return [(start * SECOND, int(high)) for start, high in rows]


def shape_from_row(row: Sequence[Any]) -> Shape:
    """Return the shape in a row. Raises HistoryError if it is damaged."""
    process, mode, kind, layout, virtual, sizes, untimed, calls = row
    try:
        inputs, outputs, *parts = parse_numbers(sizes)
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


_again = lru_cache(maxsize=1024)(event_from_row)
"""Cached, because every picture asks for the same lasting events."""


def _sample(number: int, t_ns: int, of_host: int, index: object, *values: object) -> ChartSample | None:
    device = _HOST if of_host else index
    if type(device) is not int or device < _HOST:
        return None
    util, cpu, used, total, power, run = (
        float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None for value in values
    )
    return ChartSample(number, t_ns, device, cpu if device == _HOST else util, used, total, power, run)

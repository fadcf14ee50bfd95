"""Reads the records of a run's history: steps, calls, collectives, events, gaps, shapes and the longest steps.

A `Store` reads the database as of one instant; `Store.at` leaves out later records, so that the state known at a time
in the past is shown. All figures of the screen, the report, the summary, the JSON lines and the metrics come from its
results (dpmon.store.figures). The rows of one process are in order of time, so a binary search finds the newest row
before a time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache
from math import exp, isfinite
from operator import itemgetter
from typing import Any, TypeVar

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CallRow, CollectiveRow, LossPlace, LossRow, Resolver
from dpmon.record.kinds import BUCKET, Call, Collective, Event, Operation, Record, RecordError, Sampled, Step
from dpmon.record.schema import (
    EVALUATION,
    EXPOSED,
    LEFT_OUT,
    PHASES,
    QUANTITIES,
    SETTLING,
    STEP_PHASES,
    SYNC_NUMBER,
    WAIT,
)
from dpmon.store.accounting import Gap
from dpmon.store.answers import (
    ChartSample,
    Communicated,
    LastSample,
    LongRow,
    LoopStep,
    LossBin,
    MinuteRow,
    Shape,
    UnfitLoss,
    call_in,
    event_in,
    loss_in,
    numbers_in,
)
from dpmon.store.loops import LOOP_COLUMNS, Loop
from dpmon.store.sums import Parameters, Sums
from dpmon.store.tables import (
    BEFORE_S,
    CALL_ROW,
    COLLECTIVE_COLUMNS,
    COLLECTIVE_SUMS,
    LASTING,
    LASTING_KINDS,
    LOSS_COLUMNS,
    OWN,
    STEP_COLUMNS,
    UNFIT,
    Door,
    definition_in,
)

_Decoded = TypeVar("_Decoded")

_LAST_NS = (1 << 63) - 1
_SECOND = 1_000_000_000
COLLECTED = ", ".join(tuple(COLLECTIVE_COLUMNS)[1:])
"""Columns of a row for `collective`."""
LOSSES = ", ".join(LOSS_COLUMNS[1:])
_AT_ONCE = 5000
"""Number of ids read in one transaction."""
_LONG_PHASES = tuple(f"{name}_ns" for name in STEP_PHASES)
_AT = {name: index for index, name in enumerate(STEP_COLUMNS)}
_plain_of = itemgetter(*map(_AT.__getitem__, ("process", "step", "mode", "start_ns", "wall_ns", "samples")))
_phases_of = itemgetter(*(_AT[f"{name}_ns"] for name in STEP_PHASES))
_rest_of = itemgetter(
    *map(_AT.__getitem__, ("spans", "missing_spans", "device", f"{EXPOSED}_ns", f"{WAIT}_ns", "loop", "loop_batch"))
)
_STEP_COLUMNS = ", ".join(STEP_COLUMNS)
_TABLES = {
    "calls": f"process, {CALL_ROW}",
    "steps": _STEP_COLUMNS,
    "events": "json",
    "collectives": COLLECTED,
    "losses": LOSSES,
}
"""Columns of each table with records."""
_COUNTED = (*(quantity.name for quantity in QUANTITIES if quantity.name != "samples"), SYNC_NUMBER)
_counts_of = itemgetter(*map(_AT.__getitem__, _COUNTED))
_SLOW_COLUMNS = ", ".join(
    ("process", "step", "mode", "kind", "start_ns", "wall_ns", *(f"{phase.name}_ns" for phase in PHASES))
)
"""Columns of a step with all phases."""
_LONG_COLUMNS = ", ".join(("process", "step", "mode", "kind", "start_ns", "wall_ns", *_LONG_PHASES))
"""Columns of a step for `_long_row`."""
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
SMOOTHED, _FOR_SMOOTHED = 20.0, 200
"""In a smoothed loss, a value weighs e times as much as the value this many before it. Of more than 200 values, the
oldest weigh less than 1 in 20,000."""
_LOOKED_AT = 20_000
"""A search for single steps reads only this many of the newest ids."""


class Store(Sums):
    """The tables of one history, as of one instant."""

    def __init__(self, door: Door, damaged: str | None = None) -> None:
        """Take the parameters of Sums."""
        super().__init__(door, damaged)
        self._unreadable = 0
        """Number of rows without a record, found by `records`: they refer to a lost definition."""
        self._resolvers: dict[int, Resolver] = {}
        self._rings = {ring.process: ring for ring in self.rings.values() if ring.process >= 0}
        self.ranks = {process: ring.rank for process, ring in self._rings.items()}
        """Rank by process, for all processes with records."""
        self.open_calls = sum(ring.open_calls for ring in self._rings.values())
        """Calls so far of processes without a step."""
        self.until_ns = _LAST_NS
        """Methods that return the newest rows leave out those after this time (ns since the run's start)."""
        self._last_ids: dict[tuple[str, int], int] = {}

    def at(self, t_ns: int | None) -> Store:
        """Return this store as of an earlier time (ns since the run's start); None: as of now."""
        found = copy(self)
        found.until_ns, found._last_ids = _LAST_NS if t_ns is None else t_ns, {}
        return found

    @property
    def until_s(self) -> int | None:
        """The first unfinished second as of this time; None as of now."""
        return None if self.until_ns == _LAST_NS else self.until_ns // _SECOND

    @property
    def dropped(self) -> int:
        """Number of lost records: lost by their writer, overwritten before they were read, or unreadable."""
        return self._unreadable + sum(ring.missed for ring in self.rings.values())

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
            found = self._resolvers[process] = Resolver(process, self.ranks.get(process))
            for number, value in self.definitions(process).items():
                with suppress(RecordError):  # a process may write any value
                    found.define(number, value)
        return found

    def gaps(self, most: int) -> list[Gap]:
        """Return the longest gaps between two steps, the longest first."""
        query = "SELECT process, after_step, mode, begin_ns, end_ns, ns FROM gaps ORDER BY ns DESC LIMIT ?"
        return [Gap(*row) for row in self.query(query, (most,))]

    def longest(
        self, most: int, mode: str, *, trains: bool = False, process: int | None = None, lately: bool = False
    ) -> list[LongRow]:
        """Return the longest steps of a mode, the longest first, without settling steps and those left out of figures.

        `trains`: without evaluation steps. `process`: only its steps up to this time; `lately`: only its newest ones.
        """
        last = min(_LAST_NS if process is None else self._last_id("steps", process), self._newest_id())
        query = (
            f"SELECT {_LONG_COLUMNS} FROM steps WHERE id BETWEEN ? AND ? AND process = ifnull(?, process) AND mode = ?"
            f" AND kind & {SETTLING | LEFT_OUT | EVALUATION * trains} = 0 ORDER BY wall_ns DESC LIMIT ?"
        )
        rows = self.query(query, (last - _LOOKED_AT if lately else 0, last, process, mode, most))
        return [_long_row(row) for row in rows]

    def slowest(self, most: int, processes: Collection[int], begin_ns: int) -> list[LongRow]:
        """Return the longest training steps that end after `begin_ns`, up to this time, the longest first.

        Without settling steps. `processes` train together: of the steps of one synchronised pass, only the one of the
        process that the others waited for. With all phases, also those of calls.
        """
        which = ", ".join(map(str, sorted(processes)))
        last = max((self._last_id("steps", process) for process in processes), default=0)
        before = self.at(begin_ns)
        first = min((before._last_id("steps", process) for process in processes), default=0)
        together = (
            (", min(ifnull(wait_ns, 0))", f"GROUP BY ifnull({SYNC_NUMBER}, -id)") if len(processes) > 1 else ("",) * 2
        )
        query = (
            f"SELECT {_SLOW_COLUMNS}{together[0]} FROM steps WHERE id > ? AND id <= ? AND process IN ({which})"
            f" AND kind & {SETTLING | EVALUATION} = 0 {together[1]} ORDER BY wall_ns DESC LIMIT ?"
        )
        names = [phase.name for phase in PHASES]
        return [
            LongRow._make(
                (*row[:6], {name: took for name, took in zip(names, row[6:], strict=False) if took is not None})
            )
            for row in self.query(query, (first, last, most))
            if row[4] + row[5] <= self.until_ns
        ]

    def oldest_step_ns(self, processes: Collection[int]) -> int | None:
        """Return the start of the oldest step of some processes that was not deleted; None without steps."""
        query = f"SELECT start_ns FROM steps WHERE process IN ({', '.join(map(str, processes))}) ORDER BY id LIMIT 1"
        return next((at for (at,) in self.query(query)), None)

    def mean_longest(self, phase: str, mode: str, *, trains: bool) -> float | None:
        """Return the mean over the newest steps of the longest time (ns) of a phase on any rank.

        `trains`: without evaluation steps.
        """
        which = f"id > ? AND id <= ? AND mode = ? AND kind & {SETTLING | LEFT_OUT | EVALUATION * trains} = 0"
        longest = f"SELECT max(ifnull({phase}_ns, 0)) AS longest FROM steps WHERE {which} GROUP BY step"
        query = f"SELECT sum(longest), count(*) FROM ({longest})"
        last = self._newest_id()
        return next((sum_ns / n for sum_ns, n in self.query(query, (last - _LOOKED_AT, last, mode)) if n), None)

    def steps(self, most: int, *, process: int | None = None, left_out: bool = True) -> list[Step]:
        """Return the newest steps of a process, the newest first; None: of all processes, as of now.

        `left_out`: with the steps that no figure includes.
        """
        last = _LAST_NS if process is None else self._last_id("steps", process)
        which = "id <= ? AND process = ifnull(?, process)" + ("" if left_out else f" AND kind & {LEFT_OUT} = 0")
        query = f"SELECT {_STEP_COLUMNS} FROM steps WHERE {which} ORDER BY id DESC LIMIT ?"
        return list(self.read(self._step, query, (last, process, most)))

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
        spans, missing, device, *others = _rest_of(row)
        try:
            flat = [] if spans is None else numbers_in(spans)
            why, *times = [0] if device is None else numbers_in(device)
            runs = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
            if list in map(type, (*flat, *times)) or any(not 0 <= phase <= BUCKET for phase, _, _ in runs):
                raise ValueError("an unknown phase")
        except (ValueError, TypeError) as error:
            raise HistoryError(f"a damaged step: {error}") from None
        return Step(
            *(process, self.ranks.get(process), number, mode, start, wall, samples),
            {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None},
            {name: count for name, count in zip(_COUNTED, counts, strict=True) if count is not None},
            *(runs, missing, None if device is None else times, why, *others),
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
            "calls": self._call, "steps": self._step, "collectives": self.collective, "events": event_in,
            "losses": self._loss,
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

    def _loss(self, row: Sequence[Any]) -> Event:
        """Return the record in a row of LOSSES. Raises RecordError for a lost definition."""
        process, *columns = row
        return self.resolver(process).loss(loss_in(columns))

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

    def events(self, *kinds: str, newest: int | None = None) -> list[Event]:
        """Return events of some kinds, in order. `newest`: only this many, the newest."""
        query = f"{_events_of(kinds)} AND ifnull(t_ns, 0) <= ? ORDER BY id DESC LIMIT ?"
        found = list(self.read(_again, query, (*kinds, self.until_ns, -1 if newest is None else newest)))
        return found[::-1]

    def each_event(self, *kinds: str) -> Iterator[Event]:
        """Yield all events of some kinds, one at a time: the samples of devices may not fit into memory."""
        return self.read(event_in, f"{_events_of(kinds)} ORDER BY id", kinds)

    def event_count(self, kind: str) -> int:
        """Return the number of events of a lasting kind (dpmon.store.tables.LASTING)."""
        query = f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ? AND ifnull(t_ns, 0) <= ?"
        return sum(count for (count,) in self.query(query, (kind, self.until_ns)))

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

    # ------------------------------------------------------------------------------------------ steps and calls

    def first_ns(self, process: int) -> int | None:
        """Return the start of the first call or step of a process that still has a row; None if there is none yet."""
        ring = self._rings.get(process)
        tables = [] if ring is None else [table for table in ("calls", "steps") if getattr(ring, table)]
        first = (
            "SELECT * FROM (SELECT id, start_ns, start_ns + wall_ns AS end_ns FROM {}"
            " WHERE process = :process AND id BETWEEN :low AND :high ORDER BY id LIMIT 1)"
        )
        low, high = self._bounds(process)
        values = {"process": process, "low": low, "high": high}
        found = self.query(" UNION ALL ".join(map(first.format, tables)), values) if tables else []
        return next((start for _, start, end in sorted(found) if end <= self.until_ns), None)

    def last_training_ns(self, process: int) -> int | None:
        """Return the end of the last training step among a process's newest steps; None if there is none."""
        last = min(self._last_id("steps", process), self._newest_id())
        query = (
            "SELECT start_ns + wall_ns AS end_ns FROM steps WHERE process = ? AND id BETWEEN ? AND ?"
            f" AND kind & {EVALUATION} = 0 ORDER BY id DESC LIMIT 1"
        )
        rows = self.query(query, (process, last - _LOOKED_AT, last))
        return next((end for (end,) in rows), None)

    def _newest_id(self) -> int:
        return next((number or 0 for (number,) in self.query("SELECT max(id) FROM steps")), 0)

    def call_rows(self, process: int, most: int) -> list[CallRow]:
        """Return the newest calls of a process, the newest first."""
        return self._call_rows(process, 0, self._last_id("calls", process), most)

    def last_calls(self, process: int, most: int) -> list[CallRow]:
        """Return the newest calls in the newest step of a process, the newest first."""
        query = "SELECT id, step FROM steps WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT 2"
        rows = self.query(query, (process, self._last_id("steps", process)))
        if not rows:
            return []
        low = rows[1][0] if len(rows) > 1 else 0
        return [call for call in self._call_rows(process, low, rows[0][0], most) if call.step == rows[0][1]]

    def _call_rows(self, process: int, low: int, high: int, most: int) -> list[CallRow]:
        query = f"SELECT {CALL_ROW} FROM calls WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id DESC LIMIT ?"
        values = process, max(low, self._bounds(process)[0]), high, most
        return list(self.read(call_in, query, values))

    def call(self, process: int, row: CallRow) -> Call | None:
        """Return the full call; None if a definition is lost."""
        with suppress(RecordError):
            resolver = Resolver(process, self.ranks.get(process))
            for number, value in self.definitions(process, row.definitions).items():
                resolver.define(number, value)
            return resolver.call(row)
        return None

    def _last_id(self, table: str, process: int) -> int:
        """Return the id of a process's newest row in a table."""
        key = table, process
        found = self._last_ids.get(key)
        if found is None:
            low, high = self._bounds(process)
            found = self._last_ids[key] = high if self.until_ns == _LAST_NS else self._search(table, process, low, high)
        return found

    def _bounds(self, process: int) -> tuple[int, int]:
        """Return the lowest and highest possible id of a process's calls and steps."""
        ring = self._rings.get(process)
        if ring is None:
            return 0, 0
        return ring.first_id or 0, _LAST_NS if ring.last_id is None else ring.last_id

    def _search(self, table: str, process: int, low: int, high: int) -> int:
        """Return the highest id (`low` to `high`) of a process's rows that ended by `until_ns`; `low` - 1 if none."""
        query = (
            f"SELECT id, start_ns + wall_ns AS end_ns FROM {table} WHERE process = ? AND id BETWEEN ? AND ?"
            " ORDER BY id DESC LIMIT 1"
        )
        found = low - 1
        while low <= high:
            middle = (low + high) // 2
            rows = self.query(query, (process, low, middle))
            if not rows:
                low = middle + 1
            elif rows[0][1] <= self.until_ns:
                found, low = rows[0][0], middle + 1
            else:
                high = rows[0][0] - 1
        return found

    def step_end(self, process: int, *, forward: bool) -> int | None:
        """Return the end of the last step before this time, or (`forward`) of the first one after it, or None."""
        last = self._last_id("steps", process)
        query = "SELECT start_ns + wall_ns AS end_ns FROM steps WHERE process = ? AND id {} ORDER BY id {} LIMIT 1"
        query = query.format("> ?", "") if forward else query.format("<= ?", "DESC")
        return next((end for (end,) in self.query(query, (process, last))), None)

    def epochs(self, process: int, most: int) -> list[Loop]:
        """Return the newest loops over loaders of a process that are epochs, in order."""
        query = (
            f"SELECT {', '.join(LOOP_COLUMNS)} FROM loops WHERE process = ? AND epoch IS NOT NULL AND begin_ns <= ?"
            " ORDER BY loop DESC LIMIT ?"
        )
        return [Loop(*row) for row in self.query(query, (process, self.until_ns, most))][::-1]

    def loop_steps(self, process: int, loops: Sequence[int], most: int, one_in: int = 1) -> list[LoopStep]:
        """Return the newest steps of some loops, the newest first: one in `one_in`, of the newest rows."""
        last = min(self._last_id("steps", process), self._newest_id())
        query = (
            "SELECT step, loop, loop_batch, start_ns, wall_ns FROM steps WHERE process = ? AND id BETWEEN ? AND ?"
            f" AND loop IN ({', '.join('?' * len(loops))}) AND loop_batch IS NOT NULL AND step % ? = 0"
            " ORDER BY id DESC LIMIT ?"
        )
        rows = self.query(query, (process, last - _LOOKED_AT, last, *loops, one_in, most))
        return [LoopStep(*row) for row in rows]

    # ------------------------------------------------------------------------------------------ events

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """Return the last memory event of a process up to a time; None if there is none."""
        query = (
            "SELECT json FROM events WHERE kind = 'memory' AND process = ? AND t_ns <= ?"
            " ORDER BY t_ns DESC, id DESC LIMIT 1"
        )
        until = self.until_ns if until_ns is None else min(until_ns, self.until_ns)
        return next(self.read(event_in, query, (process, until)), None)

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

    def communicated(
        self, begin_ns: int = 0, end_ns: int = _LAST_NS, processes: Collection[int] | None = None
    ) -> Communicated:
        """Return the sampled collectives between two times by operation, of all processes or only of `processes`.

        Both times are rounded outwards to whole seconds.
        """
        end_ns = min(end_ns, self.until_ns)
        who = tuple(processes or ())
        only = "" if processes is None else f" AND process IN ({', '.join('?' * len(who))})"
        values = (begin_ns // _SECOND if begin_ns > 0 else BEFORE_S, -(-end_ns // _SECOND), *who)
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
        return Communicated(tuple(operations), samples, why, tuple(sorted(own)))

    # ------------------------------------------------------------------------------------------ losses

    def loss_places(self, process: int) -> dict[int, LossPlace]:
        """Return the lines of a process with losses, by definition, in order of their first loss."""
        query = "SELECT DISTINCT definition FROM losses WHERE process = ? AND t_ns <= ? ORDER BY definition"
        numbers = [number for (number,) in self.query(query, (process, self.until_ns))]
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
        begin, end = begin_s * _SECOND, min(end_s * _SECOND, self.until_ns + 1)
        values = {"process": process, "line": definition, "begin": begin, "end": end, "width": width_s * _SECOND}
        return [LossBin(at * width_s, *rest) for at, *rest in self.query(query, values)]

    def newest_losses(self, process: int, definition: int) -> tuple[LossRow | None, float | None]:
        """Return the newest loss of a line, and the smoothed one: a weighted mean of its last finite values.

        The weight of a value falls by e for every SMOOTHED values after it. Values are at least a second apart.
        """
        values = process, definition, self.until_ns, _FOR_SMOOTHED
        rows = [loss_in(row) for row in self.query(_NEWEST_LOSSES, values)]
        weights = [(exp(-at / SMOOTHED), row.loss) for at, row in enumerate(rows) if isfinite(row.loss)]
        whole = sum(weight for weight, _ in weights)
        smoothed = sum(weight * value for weight, value in weights) / whole if weights else None
        return next(iter(rows), None), smoothed

    def unfit_losses(self) -> list[UnfitLoss]:
        """Return the first loss of each process and line that is NaN or infinite, in order of time."""
        query = (
            f"SELECT process, definition, step, min(t_ns), loss FROM losses WHERE {UNFIT} AND t_ns <= ?"
            " GROUP BY process, definition"
        )
        found = []
        for process, *columns in self.query(query, (self.until_ns,)):
            row = loss_in(columns)
            place = self.loss_places(process).get(row.definition)
            if place is not None and place.why is None:
                found.append(UnfitLoss(process, place.place, row.step or None, row.start, row.loss))
        return sorted(found, key=lambda one: one.t_ns)

    # ------------------------------------------------------------------------------------------ samples

    def samples(self, span_ns: int, after_id: int = 0) -> list[ChartSample]:
        """Return the samples of devices and host in the `span_ns` before the newest one, in order.

        `after_id`: return all samples after this id instead.
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
            f" WHERE {which} AND kind IN ('device', 'host') AND json_valid(json) ORDER BY id"
        )
        return [sample for row in self.query(query, (begin, self.until_ns)) if (sample := _sample(*row)) is not None]

    def sample(self, number: int) -> Event | None:
        """Return the complete sample with this id; None if it was deleted."""
        return next(self.read(event_in, "SELECT json FROM events WHERE id = ?", (number,)), None)

    def host_memory(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return (start in ns, peak bytes of the run's processes) of each minute that begins between two times."""
        query = (
            "WITH RECURSIVE starts(at) AS (VALUES (:begin) UNION ALL SELECT at + 60 FROM starts WHERE at + 60 < :end)"
            " SELECT start_s, high FROM starts CROSS JOIN device_rollups"
            " ON start_s = starts.at AND device = :host AND name = 'run_mem_bytes'"
        )
        begin, end = -(-begin_ns // (60 * _SECOND)) * 60, min(end_ns, self.until_ns) // _SECOND
        if begin >= end:
            return []
        rows = self.query(query, {"begin": begin, "end": end, "host": _HOST})
        return [(start * _SECOND, int(high)) for start, high in rows]


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


def _long_row(row: tuple[Any, ...]) -> LongRow:
    """Return the step in a row of _LONG_COLUMNS."""
    known = {name: took for name, took in zip(STEP_PHASES, row[6:], strict=True) if took is not None}
    return LongRow._make((*row[:6], known))


def _sample(number: int, t_ns: int, of_host: int, index: object, *values: object) -> ChartSample | None:
    device = _HOST if of_host else index
    if type(device) is not int or device < _HOST:
        return None
    util, cpu, used, total, power, run = (
        float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None for value in values
    )
    return ChartSample(number, t_ns, device, cpu if device == _HOST else util, used, total, power, run)

"""Reads the state of a run as of a time: the newest steps, calls and events of each process, and device samples.

Later records are ignored, so a time in the past gives the state known then. The rows of one process are in order of
time, so a binary search finds the newest row before a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

from dpmon.record.history_rows import CallRow, Resolver
from dpmon.record.kinds import Call, Collective, Event, Operation, RecordError, Sampled, Step
from dpmon.record.schema import EVALUATION, SETTLING
from dpmon.store.answers import ChartSample, Communicated, LastSample, LongRow, call_in, event_in
from dpmon.store.queries import COLLECTED, LONG_COLUMNS, Store, long_row
from dpmon.store.tables import BEFORE_S, CALL_ROW, COLLECTIVE_SUMS, OWN

_LAST = (1 << 63) - 1
_SECOND = 1_000_000_000
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
_LOOKED_AT = 20_000
"""A search for single steps reads only this many of the newest ids."""


class StoreAt:
    """The contents of a store up to a time (ns since the run's start); None: up to now."""

    def __init__(self, store: Store, t_ns: int | None = None) -> None:
        self.store = store
        self.until_ns = _LAST if t_ns is None else t_ns
        self._ids: dict[tuple[str, int], int] = {}
        rings = [ring for ring in store.rings.values() if ring.process >= 0]
        self._rings = {ring.process: ring for ring in rings}
        self.missed = sum(ring.missed for ring in store.rings.values())
        """Number of lost records."""
        self.open_calls = sum(ring.open_calls for ring in rings)
        """Calls so far of processes without a step."""
        self.ranks = {ring.process: ring.rank for ring in rings}
        """Rank by process, for all processes with records."""

    @property
    def until_s(self) -> int | None:
        """The first unfinished second as of this time; None as of now."""
        return None if self.until_ns == _LAST else self.until_ns // _SECOND

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
        found = self.store.query(" UNION ALL ".join(map(first.format, tables)), values) if tables else []
        return next((start for _, start, end in sorted(found) if end <= self.until_ns), None)

    def steps(self, process: int, most: int) -> list[Step]:
        """Return the newest steps of a process, the newest first."""
        return self.store.steps(most, process=process, last_id=self._last_id("steps", process))

    def longest(self, process: int, mode: str, most: int, *, of_all: bool = False) -> list[LongRow]:
        """Return the longest of a process's newest steps in a mode, the longest first, without settling steps.

        `of_all`: search all its steps.
        """
        last = self._last_id("steps", process)
        query = (
            f"SELECT {LONG_COLUMNS} FROM steps WHERE process = ? AND id BETWEEN ? AND ? AND mode = ?"
            f" AND kind & {SETTLING} = 0 ORDER BY wall_ns DESC LIMIT ?"
        )
        last = min(last, self._newest_id())
        rows = self.store.query(query, (process, 0 if of_all else last - _LOOKED_AT, last, mode, most))
        return [long_row(row) for row in rows]

    def last_training_ns(self, process: int) -> int | None:
        """Return the end of the last training step among a process's newest steps; None if there is none."""
        last = min(self._last_id("steps", process), self._newest_id())
        query = (
            "SELECT start_ns + wall_ns AS end_ns FROM steps WHERE process = ? AND id BETWEEN ? AND ?"
            f" AND kind & {EVALUATION} = 0 ORDER BY id DESC LIMIT 1"
        )
        rows = self.store.query(query, (process, last - _LOOKED_AT, last))
        return next((end for (end,) in rows), None)

    def _newest_id(self) -> int:
        return next((number or 0 for (number,) in self.store.query("SELECT max(id) FROM steps")), 0)

    def calls(self, process: int, most: int) -> list[CallRow]:
        """Return the newest calls of a process, the newest first."""
        return self._calls(process, 0, self._last_id("calls", process), most)

    def last_calls(self, process: int, most: int) -> list[CallRow]:
        """Return the newest calls in the newest step of a process, the newest first."""
        query = "SELECT id, step FROM steps WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT 2"
        rows = self.store.query(query, (process, self._last_id("steps", process)))
        if not rows:
            return []
        low = rows[1][0] if len(rows) > 1 else 0
        return [call for call in self._calls(process, low, rows[0][0], most) if call.step == rows[0][1]]

    def _calls(self, process: int, low: int, high: int, most: int) -> list[CallRow]:
        query = f"SELECT {CALL_ROW} FROM calls WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id DESC LIMIT ?"
        values = process, max(low, self._bounds(process)[0]), high, most
        return list(self.store.read(call_in, query, values))

    def call(self, process: int, row: CallRow) -> Call | None:
        """Return the full call; None if a definition is lost."""
        with suppress(RecordError):
            resolver = Resolver(process, self.ranks.get(process))
            for number, value in self.store.definitions(process, row.definitions).items():
                resolver.define(number, value)
            return resolver.call(row)
        return None

    def _last_id(self, table: str, process: int) -> int:
        """Return the id of a process's newest row in a table."""
        key = table, process
        found = self._ids.get(key)
        if found is None:
            low, high = self._bounds(process)
            found = self._ids[key] = high if self.until_ns == _LAST else self._search(table, process, low, high)
        return found

    def _bounds(self, process: int) -> tuple[int, int]:
        """Return the lowest and highest possible id of a process's calls and steps."""
        ring = self._rings.get(process)
        if ring is None:
            return 0, 0
        return ring.first_id or 0, _LAST if ring.last_id is None else ring.last_id

    def _search(self, table: str, process: int, low: int, high: int) -> int:
        """Return the highest id (`low` to `high`) of a process's rows that ended by `until_ns`; `low` - 1 if none."""
        query = (
            f"SELECT id, start_ns + wall_ns AS end_ns FROM {table} WHERE process = ? AND id BETWEEN ? AND ?"
            " ORDER BY id DESC LIMIT 1"
        )
        found = low - 1
        while low <= high:
            middle = (low + high) // 2
            rows = self.store.query(query, (process, low, middle))
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
        return next((end for (end,) in self.store.query(query, (process, last))), None)

    # ------------------------------------------------------------------------------------------ events

    def lasting(self, kind: str, newest: int | None = None) -> list[Event]:
        """Return events of a lasting kind (dpmon.store.tables.LASTING), in order. `newest`: at most this many."""
        return self.store.events(kind, end_ns=self.until_ns, newest=newest)

    def count(self, kind: str) -> int:
        """Return the number of events of a lasting kind."""
        return self.store.event_count(kind, self.until_ns)

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """Return the last memory event of a process up to a time; None if there is none."""
        query = (
            "SELECT json FROM events WHERE kind = 'memory' AND process = ? AND t_ns <= ?"
            " ORDER BY t_ns DESC, id DESC LIMIT 1"
        )
        until = self.until_ns if until_ns is None else min(until_ns, self.until_ns)
        return next(self.store.read(event_in, query, (process, until)), None)

    # ------------------------------------------------------------------------------------------ collectives

    def last_sample(self, process: int, begin_ns: int) -> LastSample | None:
        """Return the newest sample of a process that began at or after `begin_ns`, with its first collectives.

        None if there is no sample, or if it has no collectives.
        """
        query = (
            f"SELECT {COLLECTED} FROM collectives WHERE start_ns >= ? AND start_ns < ? AND process = ?"
            " AND definition {} 0 ORDER BY start_ns {} LIMIT ?"
        )
        read = self.store.read(self.store.collective, query.format("=", "DESC"), (begin_ns, self.until_ns, process, 1))
        sample = next(read, None)
        if not isinstance(sample, Sampled):
            return None
        until = min(sample.start_ns + sample.wall_ns, self.until_ns)
        values = sample.start_ns, until, process, MOST_DRAWN
        found = self.store.read(self.store.collective, query.format(">", ""), values)
        collectives = tuple(record for record in found if isinstance(record, Collective))
        return LastSample(sample.step, sample.start_ns, sample.wall_ns, collectives) if collectives else None

    def communicated(
        self, begin_ns: int = 0, end_ns: int = _LAST, processes: Collection[int] | None = None
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
        for process, definition, *numbers in self.store.query(query, values):
            if not definition:
                samples += numbers[0]
                continue
            with suppress(LookupError):
                facts = self.store.resolver(process).definitions.collectives[definition]
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
        newest = self.store.read(self.store.collective, query, (begin_ns, end_ns, *who, MOST_OWN))
        own = {one.operation for one in newest if isinstance(one, Collective)}
        return Communicated(tuple(operations), samples, why, tuple(sorted(own)))

    # ------------------------------------------------------------------------------------------ samples

    def samples(self, span_ns: int, after_id: int = 0) -> list[ChartSample]:
        """Return the samples of devices and host in the `span_ns` before the newest one, in order.

        `after_id`: return all samples after this id instead.
        """
        if after_id:
            which, begin = "id > ? AND +t_ns <= ?", after_id
        else:
            query = "SELECT max(t_ns) FROM events WHERE kind IN ('device', 'host')"
            newest = next((at or 0 for (at,) in self.store.query(query)), 0)
            which, begin = "t_ns >= ? AND t_ns <= ?", min(newest, self.until_ns) - span_ns
        # SQLite parses the JSON ten times as fast as Python.
        query = (
            f"SELECT id, t_ns, kind = 'host', {_SAMPLED} FROM events"
            f" WHERE {which} AND kind IN ('device', 'host') AND json_valid(json) ORDER BY id"
        )
        return [
            sample for row in self.store.query(query, (begin, self.until_ns)) if (sample := _sample(*row)) is not None
        ]

    def sample(self, number: int) -> Event | None:
        """Return the complete sample with this id; None if it was deleted."""
        return next(self.store.read(event_in, "SELECT json FROM events WHERE id = ?", (number,)), None)

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
        rows = self.store.query(query, {"begin": begin, "end": end, "host": _HOST})
        return [(start * _SECOND, int(high)) for start, high in rows]


def _sample(number: int, t_ns: int, of_host: int, index: object, *values: object) -> ChartSample | None:
    device = _HOST if of_host else index
    if type(device) is not int or device < _HOST:
        return None
    util, cpu, used, total, power, run = (
        float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None for value in values
    )
    return ChartSample(number, t_ns, device, cpu if device == _HOST else util, used, total, power, run)

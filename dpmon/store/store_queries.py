"""Queries the history of a run, as of one instant.

All numbers of the screen, the report, the summary, the JSON lines and the metrics come from the results of a `Store`
(dpmon.store.step_stats computes them).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property, lru_cache
from itertools import pairwise
from math import exp, isfinite
from operator import itemgetter
from typing import Any, TypeVar

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CallRow, CollectiveRow, LossRow, LossSite, Resolver
from dpmon.record.record_types import Call, Collective, Event, Operation, Record, RecordError, Sampled, Step
from dpmon.record.safe_json import int_member, text_member
from dpmon.record.schema import (
    EVALUATION,
    EXPOSED,
    LEFT_OUT,
    PHASES,
    QUANTITIES,
    SECOND,
    SETTLING,
    STEP,
    STEP_PHASES,
    SYNC_NUMBER,
    WAIT,
)
from dpmon.store.history_schema import (
    ACTIVITY_COLUMNS,
    BEFORE_S,
    CALL_ROW,
    COLLECTIVE_COLUMNS,
    COLLECTIVE_SUMS,
    LASTING,
    LASTING_KINDS,
    LOSS_COLUMNS,
    NODE_COLUMNS,
    OWN,
    STEP_COLUMNS,
    UNFIT,
    CheckedConnection,
    definition_from_row,
)
from dpmon.store.loader_loops import LOOP_COLUMNS, LoaderLoop
from dpmon.store.query_results import (
    SMOOTHED,
    ChartSample,
    CollectiveSums,
    InvalidLoss,
    LastSample,
    LongStepRow,
    LoopStep,
    LossBin,
    MinuteRow,
    NodeRow,
    RingSummary,
    SecondRow,
    Shape,
    SlowStepRow,
    TimeRow,
    call_from_columns,
    event_from_row,
    loss_from_columns,
    shape_from_row,
    step_lists,
)
from dpmon.store.tally import TALLY, TALLY_AT, WIDTHS, IncrementalTallies, Tally, TallyKey
from dpmon.store.tally_encoding import series_total
from dpmon.store.time_accounting import ACTIVITIES, LATEST_NS, Gap

_Decoded = TypeVar("_Decoded")

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
LAST_NS = (1 << 63) - 1
"""After every possible time and id."""
_LONG_PHASES = tuple(f"{name}_ns" for name in STEP_PHASES)
_AT = {name: index for index, name in enumerate(STEP_COLUMNS)}
_OF_PLAIN = ("process", "step", "mode", "start_ns", "wall_ns", "samples")
_PLAIN = ", ".join(_OF_PLAIN)
_plain_of = itemgetter(*map(_AT.__getitem__, _OF_PLAIN))
_phases_of = itemgetter(*(_AT[f"{name}_ns"] for name in STEP_PHASES))
_rest_of = itemgetter(
    *map(_AT.__getitem__, ("spans", "missing_spans", "device", f"{EXPOSED}_ns", f"{WAIT}_ns", "loop", "loop_batch"))
)
WHOLE_STEP = ", ".join(STEP_COLUMNS)
"""The columns of a step for a record."""
_COUNTED = (*(quantity.name for quantity in QUANTITIES if quantity.name != "samples"), SYNC_NUMBER)
_counts_of = itemgetter(*map(_AT.__getitem__, _COUNTED))
_SLOW_COLUMNS = ", ".join(
    (
        "process",
        "step",
        "start_ns",
        "wall_ns",
        SYNC_NUMBER,
        f"{WAIT}_ns",
        "loop",
        "loop_batch",
        *(f"{phase.name}_ns" for phase in PHASES),
    )
)
"""Columns of a step for a SlowStepRow."""
_LONG_COLUMNS = ", ".join(("process", "step", "mode", "kind", "start_ns", "wall_ns", *_LONG_PHASES))
"""Columns of a step for `_long_row`."""
_LOOKED_AT = 20_000
"""A search for single steps reads only this many of the newest ids."""
_NEAR_ROWS = 2
"""A search for a time reads this many rows on each side. For more, SQLite passes over the rows of too many ranks."""
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


class Store:
    """The tables of one history, as of one instant. If the database is damaged, results cover its readable part.

    `as_of` returns the store as it was at an earlier time, without later records.
    """

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
        self._resolvers: dict[int, Resolver] = {}
        self.ranks = {process: ring.rank for process, ring in self.rings.items() if process >= 0}
        """Rank by process, for all processes with records."""
        self.open_calls = sum(ring.open_calls for ring in self.rings.values())
        """Calls so far of processes without a step."""
        self.until_ns = LAST_NS
        """Methods that return the newest rows leave out those after this time (ns since the run's start)."""
        self._last_ids: dict[tuple[str, int], int] = {}
        self._near: dict[str, int] = {}
        """By table: the id that `_search` found last."""
        self._unreadable = 0
        """Number of rows without a record, found by `records`: they refer to a lost definition."""

    def as_of(self, t_ns: int | None) -> Store:
        """Return this store as of an earlier time (ns since the run's start); None: as of now."""
        found = copy(self)
        found.until_ns, found._last_ids = LAST_NS if t_ns is None else t_ns, {}
        return found

    @property
    def is_mirror(self) -> bool:
        """Whether a mirror writes this history (dpmon.mirror)."""
        return any(ring.node is not None for ring in self.rings.values())

    @property
    def until_s(self) -> int | None:
        """The first unfinished second as of this time; None as of now."""
        return None if self.until_ns == LAST_NS else self.until_ns // SECOND

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

    def definitions(self, process: int, numbers: Collection[int] | None = None) -> dict[int, Any]:
        """Return the definitions of a process by number, all or those in `numbers`."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        if numbers is not None:
            query += f" AND number IN ({', '.join('?' * len(numbers))})"
        return dict(self.read(definition_from_row, query, (process, *(numbers or ()))))

    def resolver(self, process: int) -> Resolver:
        """Return a resolver that knows the definitions of a process."""
        found = self._resolvers.get(process)
        if found is None:
            found = self._resolvers[process] = Resolver(process, self.ranks.get(process))
            for number, value in self.definitions(process).items():
                with suppress(RecordError):  # a process may write any value
                    found.define(number, value)
        return found

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
        if left_out and not any(kind & LEFT_OUT for _, kind in self._kinds):
            return
        names = ", ".join(columns)
        kinds = f"NOT {exclude_flags_condition(LEFT_OUT)}" if left_out else exclude_flags_condition(LEFT_OUT)
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

    # ------------------------------------------------------------------------------------------ steps and calls

    def gaps(self, most: int) -> list[Gap]:
        """Return the longest gaps between two steps, the longest first."""
        query = "SELECT process, after_step, mode, begin_ns, end_ns, ns FROM gaps ORDER BY ns DESC LIMIT ?"
        return [Gap(*row) for row in self.query(query, (most,))]

    def longest_steps(
        self, most: int, mode: str, *, trains: bool = False, process: int | None = None, lately: bool = False
    ) -> list[LongStepRow]:
        """Return the longest steps of a mode, the longest first, without settling steps and those left out of figures.

        `trains`: without evaluation steps. `process`: only its steps up to this time; `lately`: only its newest ones.
        """
        last = min(LAST_NS if process is None else self._last_id("steps", process), self._newest_id())
        query = (
            f"SELECT {_LONG_COLUMNS} FROM steps WHERE id BETWEEN ? AND ? AND process = ifnull(?, process) AND mode = ?"
            f" AND {_in_stats_condition(trains)} ORDER BY wall_ns DESC LIMIT ?"
        )
        rows = self.query(query, (last - _LOOKED_AT if lately else 0, last, process, mode, most))
        return [_long_row(row) for row in rows]

    def longest_training_steps(
        self, most: int, processes: Collection[int], mode: str, first_id: int, last_id: int, begin_ns: int
    ) -> list[SlowStepRow]:
        """Return the longest training steps of a mode that end after `begin_ns`, the longest first.

        Of ids above `first_id`, up to `last_id`, without settling steps. `processes` train together: of the steps of
        one synchronized pass, only the one of the process that the others waited for.
        """
        together = ("", "")
        which = "" if len(processes) == len(self.ranks) else f" AND process IN ({', '.join(map(str, processes))})"
        if len(processes) > 1:
            together = (", min(ifnull(wait_ns, 0))", f"GROUP BY ifnull({SYNC_NUMBER}, -id)")
        longest = (  # only the columns that decide, because it may read the steps of a thousand ranks
            f"SELECT id, wall_ns AS ns{together[0]} FROM steps WHERE id > ? AND id <= ?{which}"
            " AND mode = ? AND start_ns + wall_ns > ?"
            f" AND {exclude_flags_condition(SETTLING | EVALUATION)} {together[1]} ORDER BY wall_ns DESC LIMIT ?"
        )
        query = f"SELECT {_SLOW_COLUMNS} FROM ({longest}) CROSS JOIN steps USING (id) ORDER BY ns DESC"
        names = [phase.name for phase in PHASES]
        return [
            SlowStepRow._make(
                (*row[:8], {name: took for name, took in zip(names, row[8:], strict=True) if took is not None})
            )
            for row in self.query(query, (first_id, last_id, mode, begin_ns, most))
        ]

    def last_step_id(self, processes: Collection[int]) -> int:
        """Return the id of the newest step of some processes."""
        return max((self._last_id("steps", process) for process in processes), default=0)

    def first_step_ns(self, processes: Collection[int], after_id: int) -> int | None:
        """Return the start of the first step of some processes after an id; None if there is none."""
        which = f"id > ? AND process IN ({', '.join(map(str, processes))})"
        rows = self.query(f"SELECT start_ns FROM steps WHERE {which} ORDER BY id LIMIT 1", (after_id,))
        return next((at for (at,) in rows), None)

    def worst_rank_share(self, phase: str, mode: str, *, trains: bool) -> float | None:
        """Return the share of the newest steps (0 to 1) that a phase takes on the rank where it takes longest in each.

        `trains`: without evaluation steps.
        """
        which = f"id > ? AND id <= ? AND mode = ? AND {_in_stats_condition(trains)}"
        on_all = f"max(ifnull({phase}_ns, 0)) * count(*) AS longest, sum(wall_ns) AS wall"
        query = f"SELECT sum(longest), sum(wall) FROM (SELECT {on_all} FROM steps WHERE {which} GROUP BY step)"
        last = self._newest_id()
        found = self.query(query, (last - _LOOKED_AT, last, mode))
        return next((min(longest_ns / wall_ns, 1.0) for longest_ns, wall_ns in found if wall_ns), None)

    def steps(self, most: int, *, process: int | None = None, left_out: bool = True) -> list[Step]:
        """Return the newest steps of a process, the newest first; None: of all processes, as of now.

        `left_out`: with the steps that no figure includes.
        """
        last = LAST_NS if process is None else self._last_id("steps", process)
        which = "id <= ? AND process = ifnull(?, process)" + (
            "" if left_out else f" AND {exclude_flags_condition(LEFT_OUT)}"
        )
        query = f"SELECT {WHOLE_STEP} FROM steps WHERE {which} ORDER BY id DESC LIMIT ?"
        return list(self.read(self._step, query, (last, process, most)))

    def _step(self, row: Sequence[Any]) -> Step:
        """Return the record in a row of STEP_COLUMNS. Raises HistoryError if it is damaged."""
        process, number, mode, start, wall, samples = _plain_of(row)
        phases, counts = _phases_of(row), _counts_of(row)
        spans, missing, device, *others = _rest_of(row)
        runs, why, times = step_lists(spans, device)
        return Step(
            *(process, self.ranks.get(process), number, mode, start, wall, samples),
            {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None},
            {name: count for name, count in zip(_COUNTED, counts, strict=True) if count is not None},
            *(runs, missing, times, why, *others),
        )

    def _call(self, row: Sequence[Any]) -> Call:
        """Return the record in a row: the process, and CALL_ROW. Raises RecordError for a lost definition."""
        process, *columns = row
        return self.resolver(process).call(call_from_columns(columns))

    def waits(self, after_id: int, after_number: int) -> Iterator[tuple[int, ...]]:
        """Yield id, process, synchronized pass, exposed communication (ns), wait (ns) and end (s) of training steps.

        Only steps up to this time with known waits, and with ids and passes above these.
        """
        columns = f"id, process, {SYNC_NUMBER}, {EXPOSED}_ns, {WAIT}_ns, (start_ns + wall_ns) / {SECOND} AS end_s"
        query = (
            f"SELECT {columns} FROM steps WHERE id > ? AND {SYNC_NUMBER} > ? AND {WAIT}_ns IS NOT NULL"
            f" AND {_in_stats_condition(True)} AND start_ns + wall_ns <= ? ORDER BY id"
        )
        return self._each(query, (after_id, after_number, self.until_ns))

    def unknown_wait(self, after_id: int, after_number: int) -> int | None:
        """Return the id of the first step of `waits` with an unknown wait; None if there is none."""
        which = f"id > ? AND {SYNC_NUMBER} > ? AND {WAIT}_ns IS NULL AND {_in_stats_condition(True)}"
        found = self.query(f"SELECT id FROM steps WHERE {which} ORDER BY id LIMIT 1", (after_id, after_number))
        return next((number for (number,) in found), None)

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

    def newest_steps(self, processes: Sequence[int], *, plain: bool = False) -> dict[int, Step]:
        """Return the newest step of each process that has one; `plain`: without its phases, counts and waits."""
        decode, columns = (self._plain_step, _PLAIN) if plain else (self._step, WHOLE_STEP)
        return {step.process: step for step in self._newest_of(decode, "steps", columns, processes)}

    def _plain_step(self, row: tuple[Any, ...]) -> Step:
        process, step, mode, start_ns, wall_ns, samples = row
        return Step(process, self.ranks.get(process), step, mode, start_ns, wall_ns, samples, {})

    def newest_calls(self, processes: Sequence[int]) -> dict[int, tuple[str, int]]:
        """Return the mode and the end (ns) of the newest call of each process that has one."""
        columns = "process, mode, start_ns + wall_ns AS end_ns"
        return {process: (mode, end) for process, mode, end in self._newest_of(tuple, "calls", columns, processes)}

    def _newest_of(
        self, decode: Callable[[tuple[Any, ...]], _Decoded], table: str, columns: str, processes: Sequence[int]
    ) -> Iterator[_Decoded]:
        """Yield the newest row of each process in a table, of one query: a run can have a thousand ranks."""
        bounds = [f"({one}, {self._bounds(one)[0]}, {self._last_id(table, one)})" for one in processes]
        newest = f"SELECT id FROM {table} WHERE process = who AND id BETWEEN low AND high ORDER BY id DESC LIMIT 1"
        query = (
            f"WITH ends(who, low, high) AS (VALUES {', '.join(bounds)})"
            f" SELECT {columns} FROM ends CROSS JOIN {table} AS row ON row.id = ({newest})"
        )
        return self.read(decode, query) if bounds else iter(())

    def first_activity_ns(self, processes: Sequence[int]) -> dict[int, int]:
        """Return the start of the first call or step of each process that still has one."""
        ids = ", ".join(str(ring.first_id) for one in processes if (ring := self.rings.get(one)) and ring.first_id)
        first = "SELECT process, start_ns, start_ns + wall_ns AS end_ns FROM {} WHERE id IN ({})"
        rows = self.query(" UNION ALL ".join(first.format(table, ids) for table in ("calls", "steps")))
        found = {process: start for process, start, end in rows if end <= self.until_ns}
        for process in processes:  # its first row was deleted, or ended later
            if process not in found and (start := self._first_ns(process)) is not None:
                found[process] = start
        return found

    def _first_ns(self, process: int) -> int | None:
        """Return the start of the first call or step of a process that still has a row; None if there is none yet."""
        ring = self.rings.get(process)
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
            f" AND {exclude_flags_condition(EVALUATION)} ORDER BY id DESC LIMIT 1"
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
        return list(self.read(call_from_columns, query, values))

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
            found = self._last_ids[key] = high if self.until_ns == LAST_NS else self._search(table, process, low, high)
        return found

    def _bounds(self, process: int) -> tuple[int, int]:
        """Return the lowest and highest possible id of a process's calls and steps."""
        ring = self.rings.get(process)
        if ring is None:
            return 0, 0
        return ring.first_id or 0, LAST_NS if ring.last_id is None else ring.last_id

    def _search(self, table: str, process: int, low: int, high: int) -> int:
        """Return the highest id (`low` to `high`) of a process's rows that ended by `until_ns`; `low` - 1 if none."""
        query = (
            f"SELECT id, start_ns + wall_ns <= ? FROM {table} WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id {{}}"
            f" LIMIT {_NEAR_ROWS}"
        )
        middle = self._near.get(table, (low + high) // 2)  # found for another process: rows of one time have near ids
        while low <= high:
            middle = min(max(middle, low), high, LAST_NS - 1)
            below = self.query(query.format("DESC"), (self.until_ns, process, low, middle))
            above = self.query(query.format(""), (self.until_ns, process, middle + 1, high))
            ended, later = ([number for number, over in (*below, *above) if over == which] for which in (True, False))
            low, high = max(ended, default=low - 1) + 1, min(later, default=high + 1) - 1
            if (ended and later) or (not later and len(above) < _NEAR_ROWS) or (not ended and len(below) < _NEAR_ROWS):
                break  # no other row is between them
            middle = (low + high) // 2
        self._near[table] = low - 1
        return low - 1

    def step_end(self, process: int, *, forward: bool) -> int | None:
        """Return the end of the last step before this time, or (`forward`) of the first one after it, or None."""
        last = self._last_id("steps", process)
        query = "SELECT start_ns + wall_ns AS end_ns FROM steps WHERE process = ? AND id {} ORDER BY id {} LIMIT 1"
        query = query.format("> ?", "") if forward else query.format("<= ?", "DESC")
        return next((end for (end,) in self.query(query, (process, last))), None)

    def epochs(self, process: int, most: int) -> list[LoaderLoop]:
        """Return the newest loops over loaders of a process that are epochs, in order."""
        query = (
            f"SELECT {', '.join(LOOP_COLUMNS)} FROM loops WHERE process = ? AND epoch IS NOT NULL AND begin_ns <= ?"
            " ORDER BY loop DESC LIMIT ?"
        )
        return [LoaderLoop(*row) for row in self.query(query, (process, self.until_ns, most))][::-1]

    def epoch_of(self, process: int, loop: int | None) -> tuple[int | None, int | None]:
        """Return the epoch of a loop, and the number of batches of its loader; None if unknown."""
        found = self.query("SELECT epoch, length FROM loops WHERE process = ? AND loop = ?", (process, loop))
        return next(iter(found), (None, None))

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

    # ------------------------------------------------------------------------------------------ records

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

    def nodes(self) -> list[NodeRow]:
        """Return the machines of a mirror, by number; an empty list for a run of this machine."""
        return [NodeRow(*row) for row in self.query(f"SELECT {', '.join(NODE_COLUMNS)} FROM nodes ORDER BY number")]

    def shapes(self) -> list[Shape]:
        """Return the sizes of inputs and outputs of all calls so far, with their number of calls."""
        query = "SELECT process, mode, kind, layout, virtual, sizes, untimed, calls FROM shapes"
        return list(self.read(shape_from_row, query))

    # ------------------------------------------------------------------------------------------ events

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

    def newest_event(self) -> int:
        """Return the id of the newest event of a lasting kind; 0 if there is none."""
        return sum(number or 0 for (number,) in self.query(f"SELECT max(id) FROM events WHERE {LASTING}"))

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


def exclude_flags_condition(flags: int) -> str:
    """Return the condition for rows whose kind has none of these flags (dpmon.record.schema)."""
    return f"(kind & {flags} = 0)"


def _in_stats_condition(trains: bool) -> str:
    """Return the condition for the steps in figures, without settling ones; `trains`: without evaluation steps."""
    return exclude_flags_condition(SETTLING | LEFT_OUT | EVALUATION * trains)


def _long_row(row: tuple[Any, ...]) -> LongStepRow:
    """Return the step in a row of _LONG_COLUMNS."""
    known = {name: took for name, took in zip(STEP_PHASES, row[6:], strict=True) if took is not None}
    return LongStepRow._make((*row[:6], known))


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

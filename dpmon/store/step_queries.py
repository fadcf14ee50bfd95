"""Queries the steps and calls of a run's history, as of one instant.

The rows of one process are in order of time, so a binary search finds the newest row before a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from copy import copy
from operator import itemgetter
from typing import Any, TypeVar

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CallRow, Resolver
from dpmon.record.record_types import BUCKET, Call, RecordError, Step
from dpmon.record.schema import (
    EVALUATION,
    EXCLUDED,
    EXPOSED,
    PHASES,
    QUANTITIES,
    SECOND,
    STEP_PHASES,
    SYNC_NUMBER,
    WAIT,
    WARM_UP,
)
from dpmon.store.history_schema import CALL_ROW, STEP_COLUMNS, CheckedConnection, definition_from_row
from dpmon.store.loader_loops import LOOP_COLUMNS, LoaderLoop
from dpmon.store.query_results import LongStepRow, LoopStep, SlowStepRow, call_from_columns, parse_numbers
from dpmon.store.tally_queries import Parameters, TallyStore, exclude_flags_condition
from dpmon.store.time_accounting import Gap

_Decoded = TypeVar("_Decoded")
_Same = TypeVar("_Same", bound="StepStore")

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


class StepStore(TallyStore):
    """The steps and calls of one history, as of one instant."""

    def __init__(self, door: CheckedConnection, damaged: str | None = None) -> None:
        """Take the parameters of TallyStore."""
        super().__init__(door, damaged)
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

    def as_of(self: _Same, t_ns: int | None) -> _Same:
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
            f" AND {exclude_flags_condition(WARM_UP | EVALUATION)} {together[1]} ORDER BY wall_ns DESC LIMIT ?"
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
            "" if left_out else f" AND {exclude_flags_condition(EXCLUDED)}"
        )
        query = f"SELECT {WHOLE_STEP} FROM steps WHERE {which} ORDER BY id DESC LIMIT ?"
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


def step_lists(spans: str | None, device: str | None) -> tuple[list[Any], int, list[float | None] | None]:
    """Return the runs of a step's phases, and its device times (None: none) after the number of why one is missing.

    Raises HistoryError if a column is damaged.
    """
    try:
        flat = [] if spans is None else parse_numbers(spans)
        why, *times = [0] if device is None else parse_numbers(device)
        runs = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        if list in map(type, (*flat, *times)) or any(not 0 <= phase <= BUCKET for phase, _, _ in runs):
            raise ValueError("an unknown phase")
    except (ValueError, TypeError) as error:
        raise HistoryError(f"a damaged step: {error}") from None
    return runs, why, None if device is None else times


def _in_stats_condition(trains: bool) -> str:
    """Return the condition for the steps in figures, without settling ones; `trains`: without evaluation steps."""
    return exclude_flags_condition(WARM_UP | EXCLUDED | EVALUATION * trains)


def _long_row(row: tuple[Any, ...]) -> LongStepRow:
    """Return the step in a row of _LONG_COLUMNS."""
    known = {name: took for name, took in zip(STEP_PHASES, row[6:], strict=True) if took is not None}
    return LongStepRow._make((*row[:6], known))

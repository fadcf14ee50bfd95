"""Queries the history of a run, as of one instant.

All numbers of the screen, the report, the summary, the JSON lines and the metrics come from the results of a `Store`
(dpmon.store.step_stats computes them).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property, lru_cache
from operator import add, itemgetter
from typing import Any, TypeVar

from dpmon.record.history_rows import CollectiveRow, Defined, Layout, LossRow, LossSite, Resolver
from dpmon.record.record_types import Call, CallRow, Collective, Event, Operation, Record, Sampled, Step
from dpmon.record.safe_json import int_member, text_member
from dpmon.record.schema import (
    EVALUATION,
    EXCLUDED,
    EXPOSED,
    FORWARD_ONLY,
    PHASES,
    QUANTITIES,
    SECOND,
    STEP_KINDS,
    STEP_PHASES,
    SYNC_NUMBER,
    TRAINING,
    WAIT,
    WARM_UP,
    step_kind,
)
from dpmon.store.activity_times import TimeRow, read_times
from dpmon.store.history_schema import (
    BEFORE_S,
    COLLECTIVE_COLUMNS,
    COLLECTIVE_SUMS,
    LASTING,
    LASTING_KINDS,
    LOSS_COLUMNS,
    NODE_COLUMNS,
    OWN,
    STEP_COLUMNS,
    UNFIT,
    BoundedConnection,
    are_rollouts,
)
from dpmon.store.loader_loops import LOOP_COLUMNS, LoaderLoop
from dpmon.store.query_results import (
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
    Shape,
    SlowStepRow,
    decode_calls,
    definition_from_row,
    event_from_row,
    loss_from_columns,
    shape_from_row,
    step_lists,
)
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import TallyKey, read_keys
from dpmon.store.tally_tables import TallyQuery
from dpmon.store.time_accounting import ACTIVITIES, Gap
from dpmon.store.time_buckets import END_S, WIDTHS, TimeBuckets

_Decoded = TypeVar("_Decoded")

Parameters = Sequence[Any] | Mapping[str, Any]
"""Values of a query's parameters."""
LAST_NS = (1 << 63) - 1
"""A number that is at least as large as any time (ns) and any id."""
_STEP_INDEX = {name: index for index, name in enumerate(STEP_COLUMNS)}
_BRIEF_COLUMNS = ("process", "step", "mode", "start_ns", "wall_ns", "samples", "kind")
_BRIEF_STEP = ", ".join(_BRIEF_COLUMNS)
_get_brief = itemgetter(*map(_STEP_INDEX.__getitem__, _BRIEF_COLUMNS))
_get_phases = itemgetter(*(_STEP_INDEX[f"{name}_ns"] for name in STEP_PHASES))
_get_remaining = itemgetter(
    *map(
        _STEP_INDEX.__getitem__,
        ("spans", "missing_spans", "device", f"{EXPOSED}_ns", f"{WAIT}_ns", "loop", "loop_batch"),
    )
)
_get_calls = itemgetter(_STEP_INDEX["last_call"], _STEP_INDEX["called"])
WHOLE_STEP = ", ".join(STEP_COLUMNS)
"""The columns of a step for its record."""
_QUANTITY_COLUMNS = (*(quantity.name for quantity in QUANTITIES if quantity.name != "samples"), SYNC_NUMBER)
_get_quantities = itemgetter(*map(_STEP_INDEX.__getitem__, _QUANTITY_COLUMNS))
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
_LONG_COLUMNS = ", ".join(
    ("process", "step", "mode", "kind", "start_ns", "wall_ns", f"{WAIT}_ns", *(f"{name}_ns" for name in STEP_PHASES))
)
"""Columns of a step for a LongStepRow."""
_NEWEST_IDS_SEARCHED = 20_000
"""How many of the newest ids are searched for single steps."""
_ROWS_PER_SIDE = 2
"""How many rows a search for a time reads on each side. To find more, SQLite would skip the rows of too many ranks."""
_COLLECTIVE_ROW = ", ".join(tuple(COLLECTIVE_COLUMNS)[1:])
"""The columns that `Store._collective_from_row` takes."""
_LOSS_ROW = ", ".join(LOSS_COLUMNS[1:])
"""The columns that `Store._loss_from_row` takes."""
_RECORDS_PER_TRANSACTION = 5000
"""After how many records `Store.records` ends a transaction."""
_MAX_PROCESS_EVENTS = 64
"""How many `process` events are searched for the job of a run. All its ranks belong to the same job."""
_TABLES = {
    "steps": WHOLE_STEP,
    "events": "json",
    "collectives": _COLLECTIVE_ROW,
    "losses": _LOSS_ROW,
}
"""The tables with records, and the columns to read of each."""
_SAMPLED = ", ".join(
    f"json_extract(json, '$.{name}')"
    for name in ("index", "util_pct", "cpu_pct", "mem_used_bytes", "mem_total_bytes", "power_w", "run_mem_bytes")
)
"""The columns of an event for `_chart_sample_from_row`, after its id, its time and whether it is of the host."""
_HOST = -1
"""Device index of the host."""
MAX_DRAWN_COLLECTIVES = 128
"""How many collectives of a sampled step are read for drawing."""
MAX_OWN_COLLECTIVES = 100
"""How many of the newest collectives that the script itself launched are read."""
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in COLLECTIVE_SUMS)
_LOSSES = "SELECT definition, step, t_ns, loss FROM losses WHERE process = ? AND definition = ? AND t_ns <= ?"


class Store:
    """The tables of one history, as of one instant. Every query raises HistoryError if the database is damaged.

    After `as_of`, methods that return the newest rows leave out later ones.
    """

    def __init__(self, connection: BoundedConnection, unread_count: int = 0) -> None:
        """`connection`: in a transaction, so that all queries see the same state of the database.

        `unread_count`: how many records are not in the history yet, and no supervisor is writing them.
        """
        self._connection = connection
        self._unread_count = unread_count
        rings = map(RingSummary._make, connection.rows(f"SELECT {', '.join(RingSummary._fields)} FROM rings"))
        self.rings = {ring.process: ring for ring in rings}
        """By process."""
        self.buckets = TimeBuckets(connection)
        """The time buckets of tallies and times."""
        meta: dict[str, int] = dict(connection.rows("SELECT key, value FROM meta WHERE key IN ('pruned', 'seq')"))
        self.seq = meta.get("seq", 0)
        """Number of the last transaction."""
        self.pruned = meta.get("pruned", 0)
        """Number of rows deleted to keep the history below its size limit."""
        self.mode_kinds: set[tuple[str, int]] = {*connection.rows("SELECT DISTINCT mode, kind FROM keys")}
        """Mode and flags of all steps so far."""
        self._resolvers: dict[int, Resolver] = {}
        """By process."""
        self.ranks = {process: ring.rank for process, ring in self.rings.items() if process >= 0}
        """Rank by process, for all processes with records."""
        self.open_calls = sum(ring.open_calls for ring in self.rings.values())
        """Number of calls so far of processes that have not finished a step."""
        self.main_kind = TRAINING
        """The kind of steps that describes the run: training, or the most frequent kind if it never trains."""
        evaluations = sum(ring.evaluations for ring in self.rings.values())
        forward_steps = sum(ring.forward_steps for ring in self.rings.values())
        trained = [ring for ring in self.rings.values() if ring.last_step]
        if evaluations + forward_steps and not trained:
            self.main_kind = EVALUATION if evaluations >= forward_steps else FORWARD_ONLY
        self.kind_words = {kind: name.replace("_", " ") for kind, name in STEP_KINDS.items()}
        """The word for each kind of steps and calls. Evaluations before nearly every update, or only within training
        steps, have another word: they generate data."""
        self.between_activities = ["between"]
        """The activities (dpmon.store.time_accounting) between steps of the main kind. Their time counts in rates."""
        has_rollouts = any(are_rollouts(ring.evaluation_phases, ring.last_step or 0) for ring in trained)
        if has_rollouts or (trained and not any(ring.evaluation_phases for ring in self.rings.values())):
            self.kind_words[EVALUATION] = "without gradients"
            self.between_activities.append("evaluation")
        self.until_ns = LAST_NS
        """Methods that return the newest rows leave out rows after this time (ns since the run's start)."""
        self._last_ids: dict[int, int] = {}
        """By process: see `_last_id`."""
        self._last_found_id = 0
        """The previous result of `_find_last_id`; 0 if there is none."""
        self._undefined = 0
        """Number of rows that `records` skipped because they refer to a lost definition."""

    def as_of(self, t_ns: int | None) -> Store:
        """Return this store as of an earlier time (ns since the run's start), or as of now if `t_ns` is None."""
        store = copy(self)
        store.until_ns, store._last_ids = LAST_NS if t_ns is None else t_ns, {}
        return store

    @property
    def unread_warning(self) -> str | None:
        """A warning about the records that are not in the history yet; None if there are none."""
        if not self._unread_count:
            return None
        records = "1 record is" if self._unread_count == 1 else f"{self._unread_count:,} records are"
        return f"{records} not in the history yet: no supervisor is writing it"

    @property
    def is_mirror(self) -> bool:
        """Whether a mirror writes this history (dpmon.mirror)."""
        return any(ring.node is not None for ring in self.rings.values())

    @property
    def until_s(self) -> int | None:
        """The first second that has not ended at the time of this store; None if the store is as of now."""
        return None if self.until_ns == LAST_NS else self.until_ns // SECOND

    @cached_property
    def processes(self) -> list[int]:
        """The processes with steps."""
        return [process for (process,) in self.query("SELECT DISTINCT process FROM keys ORDER BY process")]

    @cached_property
    def trained_processes(self) -> set[int]:
        """The processes with training steps."""
        return {process for process, ring in self.rings.items() if ring.last_step}

    def query(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query. Raises HistoryError."""
        return list(self._connection.rows(query, values))

    def read(
        self, decode: Callable[[tuple[Any, ...]], _Decoded | None], query: str, values: Parameters = ()
    ) -> Iterator[_Decoded]:
        """Yield the result of `decode` for each row. None is left out."""
        for row in self._connection.rows(query, values):
            if (decoded := decode(row)) is not None:
                yield decoded

    def definitions(self, process: int, numbers: Collection[int] | None = None) -> dict[int, Defined]:
        """Return the definitions of a process by number: all of them, or those in `numbers`."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        if numbers is not None:
            query += f" AND number IN ({', '.join('?' * len(numbers))})"
        return dict(self.read(definition_from_row, query, (process, *(numbers or ()))))

    def resolver(self, process: int) -> Resolver:
        """Return a resolver that knows the definitions of a process."""
        resolver = self._resolvers.get(process)
        if resolver is None:
            resolver = self._resolvers[process] = Resolver(process, self.ranks.get(process))
            for number, definition in self.definitions(process).items():
                resolver.definitions.remember(number, definition)
        return resolver

    # ------------------------------------------------------------------------------------------ tallies

    def tally_rows(
        self,
        begin_s: int = 0,
        end_s: int = END_S,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        widest: int = WIDTHS[-1],
        series: Collection[str] | None = None,
    ) -> Iterator[tuple[int, int, TallyKey, Tally]]:
        """Yield (start in s, width in s, key, tally) of each row between two seconds, in order of time.

        `process`: one process or several; None: all. `series`: read only these series; None: all. `widest`: see
        `TimeBuckets.cover`. Without `sketches`, only counts and sums are read.
        """
        query = self._tally_query(process, series=series, sketches=sketches)
        return query.rows(self.buckets.cover(begin_s, end_s, widest))

    def tallies(
        self,
        begin_s: int = 0,
        end_s: int = END_S,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        series: Collection[str] | None = None,
        left_out: bool = False,
    ) -> dict[TallyKey, Tally]:
        """Return one tally per key for the time between two seconds. Parameters as in `tally_rows`.

        `left_out`: tally only the steps that statistics exclude. No other method returns them.
        """
        query = self._tally_query(process, series=series, sketches=sketches, left_out=left_out)
        return query.merged(self.buckets.cover(begin_s, end_s))

    def step_count(self, begin_s: int, end_s: int, processes: Collection[int]) -> int:
        """Return the number of steps of the main kind of some processes between two seconds."""
        tallies = self.tallies(begin_s, end_s, process=processes, series=())
        return sum(tally.steps for key, tally in tallies.items() if step_kind(key.kind) == self.main_kind)

    def keys(self, process: int | Collection[int] | None = None, *, left_out: bool = False) -> dict[int, TallyKey]:
        """Return the keys of tallies by number. Parameters as in `tallies`."""
        if left_out and not any(kind & EXCLUDED for _, kind in self.mode_kinds):
            return {}
        return read_keys(self._connection, [process] if isinstance(process, int) else process, left_out=left_out)

    def _tally_query(
        self,
        process: int | Collection[int] | None,
        *,
        series: Collection[str] | None = None,
        sketches: bool = True,
        left_out: bool = False,
    ) -> TallyQuery:
        processes = [process] if isinstance(process, int) else process
        is_selective = left_out or (processes is not None and 2 * len(processes) <= len(self.rings))
        keys = self.keys(processes, left_out=left_out)
        return TallyQuery(self._connection, keys, is_selective, series, sketches)

    def other_kind(self, kind: int) -> str:
        """Return the word for a kind of steps; empty for the main kind."""
        return "" if kind == self.main_kind else self.kind_words[kind]

    # ------------------------------------------------------------------------------------------ time

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = END_S,
        *,
        widest: int = WIDTHS[-1],
        process: int | Collection[int] | None = None,
        activities: Sequence[str] = ACTIVITIES,
    ) -> Iterator[TimeRow]:
        """Yield some activities of each process, or of `process`, between two seconds, in order of time."""
        processes = [process] if isinstance(process, int) else process
        return read_times(self._connection, self.buckets.cover(begin_s, end_s, widest), processes, activities)

    # ------------------------------------------------------------------------------------------ steps and calls

    def gaps(self, limit: int) -> list[Gap]:
        """Return up to `limit` of the longest gaps between two steps, the longest first."""
        query = "SELECT process, after_step, mode, begin_ns, end_ns, ns FROM gaps ORDER BY ns DESC LIMIT ?"
        return [Gap(*row) for row in self.query(query, (limit,))]

    def longest_steps(
        self, limit: int, mode: str, *, process: int | None = None, newest_only: bool = False
    ) -> list[LongStepRow]:
        """Return the longest steps of a mode and of the main kind, the longest first, without excluded steps.

        `process`: only its steps, up to the time of this store; None: those of all processes, except those in which
        ranks may have waited for steps of another kind. `newest_only`: only among the newest rows.
        """
        compared = f"({WAIT}_ns IS NULL OR {EXPOSED}_ns IS NOT NULL)" if process is None else "TRUE"
        last_id = min(LAST_NS if process is None else self._last_id(process), self._newest_step_id())
        query = (
            f"SELECT {_LONG_COLUMNS} FROM steps WHERE id BETWEEN ? AND ? AND process = ifnull(?, process) AND step > 0"
            f" AND mode = ? AND {_in_stats_condition(self.main_kind)} AND {compared} ORDER BY wall_ns DESC LIMIT ?"
        )
        rows = self.query(query, (last_id - _NEWEST_IDS_SEARCHED if newest_only else 0, last_id, process, mode, limit))
        return [_long_step_from_row(row) for row in rows]

    def longest_training_steps(
        self, limit: int, processes: Collection[int], mode: str, first_id: int, last_id: int, begin_ns: int
    ) -> list[SlowStepRow]:
        """Return the longest training steps of a mode that ended after `begin_ns`, the longest first.

        Only steps with ids above `first_id`, up to `last_id`, without warm-up steps. If there are several `processes`,
        they train together: of the steps that share a sync pass, only that of the greatest `blame_weight_ns` is
        returned.
        """
        weight = grouping = process_condition = ""
        if len(processes) > 1:
            weight = ", max(wall_ns - ifnull(wait_ns, 0) / 2)"
            grouping = f"GROUP BY ifnull({SYNC_NUMBER}, -id)"
        if len(processes) != len(self.ranks):
            process_condition = f" AND process IN ({', '.join(map(str, processes))})"
        longest_query = (  # only the columns that decide, because it may read the steps of a thousand ranks
            f"SELECT id, wall_ns AS ns{weight} FROM steps WHERE id > ? AND id <= ?{process_condition}"
            " AND step > 0 AND mode = ? AND start_ns + wall_ns > ?"
            f" AND {_kind_condition(TRAINING, WARM_UP)} {grouping}"
            " ORDER BY wall_ns DESC LIMIT ?"
        )
        query = f"SELECT {_SLOW_COLUMNS} FROM ({longest_query}) CROSS JOIN steps USING (id) ORDER BY ns DESC"
        return [_slow_step_from_row(row) for row in self.query(query, (first_id, last_id, mode, begin_ns, limit))]

    def last_step_id(self, processes: Collection[int]) -> int:
        """Return the id of the newest step of some processes."""
        return max((self._last_id(process) for process in processes), default=0)

    def first_step_ns(self, processes: Collection[int], after_id: int) -> int | None:
        """Return the start (ns) of the first step of some processes after an id; None if there is none."""
        condition = f"id > ? AND step > 0 AND process IN ({', '.join(map(str, processes))})"
        rows = self.query(f"SELECT start_ns FROM steps WHERE {condition} ORDER BY id LIMIT 1", (after_id,))
        return next((start_ns for (start_ns,) in rows), None)

    def steps(self, limit: int, *, process: int | None = None, main_only: bool = False) -> list[Step]:
        """Return the newest steps, the newest first: of a process, or of all processes as of now.

        `main_only`: only those of the main kind that statistics include, among the newest steps.
        """
        last_id = LAST_NS if process is None else self._last_id(process)
        condition = "id <= ? AND step > 0 AND process = ifnull(?, process)"
        if main_only:
            newest_id = min(last_id, self._newest_step_id())
            condition += f" AND id > {newest_id - _NEWEST_IDS_SEARCHED} AND {_kind_condition(self.main_kind, EXCLUDED)}"
        query = f"SELECT {WHOLE_STEP} FROM steps WHERE {condition} ORDER BY id DESC LIMIT ?"
        return list(self.read(self._step_from_row, query, (last_id, process, limit)))

    def _step_from_row(self, row: Sequence[Any]) -> Step:
        """Return the record in a row of STEP_COLUMNS."""
        process, step, mode, start_ns, wall_ns, samples, flags = _get_brief(row)
        phases, quantities, (last_call, called) = _get_phases(row), _get_quantities(row), _get_calls(row)
        spans_text, missing_spans, device_text, exposed_ns, wait_ns, loop, batch = _get_remaining(row)
        runs, untimed, times = step_lists(spans_text, device_text)
        return Step(
            *(process, self.ranks.get(process), step, mode, start_ns, wall_ns, samples),
            {name: ns for name, ns in zip(STEP_PHASES, phases, strict=True) if ns is not None},
            {name: value for name, value in zip(_QUANTITY_COLUMNS, quantities, strict=True) if value is not None},
            runs,
            missing_spans,
            times,
            untimed,
            exposed_ns,
            wait_ns,
            loop,
            batch,
            kind=step_kind(flags),
            calls=decode_calls(called, start_ns, last_call),
        )

    def waits(self, after_id: int, after_number: int) -> Iterator[tuple[int, ...]]:
        """Yield (id, process, sync pass, exposed communication in ns, rank wait in ns, end in s) of training steps.

        Only steps with known waits, with an id above `after_id` and a sync pass above `after_number`.
        """
        columns = f"id, process, {SYNC_NUMBER}, {EXPOSED}_ns, {WAIT}_ns, (start_ns + wall_ns) / {SECOND} AS end_s"
        query = (
            f"SELECT {columns} FROM steps WHERE id > ? AND {SYNC_NUMBER} > ? AND {EXPOSED}_ns + {WAIT}_ns IS NOT NULL"
            f" AND {_in_stats_condition(TRAINING)} AND start_ns + wall_ns <= ? ORDER BY id"
        )
        return self._connection.rows(query, (after_id, after_number, self.until_ns))

    def unknown_wait(self, after_id: int, after_number: int) -> int | None:
        """Return the id of the first such step (see `waits`) whose wait is not known; None if there is none."""
        condition = f"id > ? AND {SYNC_NUMBER} > ? AND {WAIT}_ns IS NULL AND {_in_stats_condition(TRAINING)}"
        rows = self.query(f"SELECT id FROM steps WHERE {condition} ORDER BY id LIMIT 1", (after_id, after_number))
        return next((step_id for (step_id,) in rows), None)

    def next_step_ns(self, process: int, after_ns: int) -> int | None:
        """Return the start (ns) of a process's first step that began at or after a time; None if there is none.

        If rows were deleted, the result may be the start of a later step.
        """
        keys = ", ".join(map(str, self.keys(process)))
        query = (
            f"SELECT first_ns FROM tallies WHERE width = ? AND start_s >= ? AND key IN ({keys}) AND first_ns >= ?"
            " ORDER BY start_s, first_ns LIMIT 1"
        )
        query_steps = "SELECT min(start_ns) FROM steps WHERE process = ? AND step > 0 AND start_ns >= ?"
        rows = self.query(query_steps, (process, after_ns))
        for width in WIDTHS:
            rows += self.query(query, (width, after_ns // SECOND // width * width, after_ns))
        return min((start_ns for (start_ns,) in rows if start_ns is not None), default=None)

    def newest_steps(self, processes: Sequence[int], *, brief: bool = False) -> dict[int, Step]:
        """Return the newest step of each process that has one. `brief`: without phases, quantities, waits and calls."""
        decode, columns = (self._brief_step_from_row, _BRIEF_STEP) if brief else (self._step_from_row, WHOLE_STEP)
        return {step.process: step for step in map(decode, self._outermost_rows(processes, columns, "step > 0"))}

    def newest_activity(self, processes: Sequence[int]) -> dict[int, tuple[str, int]]:
        """Return the mode and the end (ns) of the newest step, or calls alone, of each process that has some."""
        rows = self._outermost_rows(processes, "process, mode, start_ns + wall_ns")
        return {process: (mode, end_ns) for process, mode, end_ns in rows}

    def first_activity_ns(self, processes: Sequence[int]) -> dict[int, int]:
        """Return the start (ns) of the first call, or step without a call, of each process that still has one."""
        start_ns = "start_ns + ifnull(json_extract(called, '$[0][2]'), 0)"
        return dict(self._outermost_rows(processes, f"process, {start_ns}", order="ASC"))

    def _brief_step_from_row(self, row: Sequence[Any]) -> Step:
        process, step, mode, start_ns, wall_ns, samples, flags = row
        kind = step_kind(flags)
        return Step(process, self.ranks.get(process), step, mode, start_ns, wall_ns, samples, {}, kind=kind)

    def _outermost_rows(
        self, processes: Sequence[int], columns: str, condition: str = "TRUE", *, order: str = "DESC"
    ) -> list[tuple[Any, ...]]:
        """Return the newest row of each process in `steps`, from a single query: a run can have a thousand ranks.

        `order` ASC: return the first row.
        """
        bounds = []
        for process in processes:
            low_id, _ = self._id_bounds(process)
            bounds.append(f"({process}, {low_id}, {self._last_id(process)})")
        outermost = (
            f"SELECT id FROM steps WHERE process = who AND id BETWEEN low AND high AND {condition}"
            f" ORDER BY id {order} LIMIT 1"
        )
        query = (
            f"WITH ends(who, low, high) AS (VALUES {', '.join(bounds)})"
            f" SELECT {columns} FROM ends CROSS JOIN steps AS row ON row.id = ({outermost})"
        )
        return self.query(query) if bounds else []

    def last_main_step(self, process: int) -> tuple[int, int] | None:
        """Return number and end (ns) of the last step of the main kind among a process's newest steps; else None."""
        last_id = min(self._last_id(process), self._newest_step_id())
        query = (
            "SELECT step, start_ns + wall_ns AS end_ns FROM steps WHERE process = ? AND step > 0 AND id BETWEEN ? AND ?"
            f" AND {_kind_condition(self.main_kind)} ORDER BY id DESC LIMIT 1"
        )
        rows = self.query(query, (process, last_id - _NEWEST_IDS_SEARCHED, last_id))
        return next(((step, end_ns) for step, end_ns in rows), None)

    def step_number(self, newest: Step) -> int:
        """Return the number of the newest step of the main kind of a process, given its newest step; 0 if unknown."""
        if newest.kind == self.main_kind:
            return newest.step
        last = self.last_main_step(newest.process)
        return 0 if last is None else last[0]

    def _newest_step_id(self) -> int:
        return next((step_id or 0 for (step_id,) in self.query("SELECT max(id) FROM steps")), 0)

    def called_steps(self, process: int, calls: int) -> list[Step]:
        """Return the newest steps of a process with calls, and calls alone, until they have `calls` calls.

        The newest are first. They are brief: see `newest_steps`.
        """
        query = (
            f"SELECT {_BRIEF_STEP}, last_call, called FROM steps"
            " WHERE process = ? AND id BETWEEN ? AND ? AND called IS NOT NULL ORDER BY id DESC LIMIT ?"
        )
        first_id, _ = self._id_bounds(process)
        rows = self._connection.rows(query, (process, first_id, self._last_id(process), calls))
        steps = []
        for *brief, last_call, called in rows:
            step = self._brief_step_from_row(brief)
            steps.append(step._replace(calls=decode_calls(called, step.start_ns, last_call)))
            calls -= len(steps[-1].calls)
            if calls <= 0:
                break
        return steps

    def call(self, step: Step, row: CallRow) -> Call | None:
        """Return the record of a call of `step`; None if a definition is lost."""
        resolver = Resolver(step.process, step.rank)
        for number, definition in self.definitions(step.process, row.definitions).items():
            resolver.definitions.remember(number, definition)
        return resolver.call(step, row)

    def _last_id(self, process: int) -> int:
        """Return an upper bound for the ids of a process's steps up to this store's time; later steps are above it."""
        last_id = self._last_ids.get(process)
        if last_id is None:
            low_id, last_id = self._id_bounds(process)
            if self.until_ns != LAST_NS:
                last_id = self._find_last_id(process, low_id, last_id)
            self._last_ids[process] = last_id
        return last_id

    def _id_bounds(self, process: int) -> tuple[int, int]:
        """Return the lowest and the highest possible id of a process's rows in steps."""
        ring = self.rings.get(process)
        if ring is None:
            return 0, 0
        return ring.first_id or 0, LAST_NS if ring.last_id is None else ring.last_id

    def _find_last_id(self, process: int, low_id: int, high_id: int) -> int:
        """Return the highest id of a process's steps that ended by `until_ns`; `low_id` - 1 if there is none.

        A binary search from `low_id` to `high_id`: the rows of one process are in order of time.
        """
        query = (
            "SELECT id, start_ns + wall_ns <= ? FROM steps WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id {}"
            f" LIMIT {_ROWS_PER_SIDE}"
        )
        # Start where another process's row was found: the rows of one time have similar ids.
        middle_id = self._last_found_id or (low_id + high_id) // 2
        while low_id <= high_id:
            middle_id = min(max(middle_id, low_id), high_id, LAST_NS - 1)
            rows_below = self.query(query.format("DESC"), (self.until_ns, process, low_id, middle_id))
            rows_above = self.query(query.format(""), (self.until_ns, process, middle_id + 1, high_id))
            rows = (*rows_below, *rows_above)
            ended_ids = [row_id for row_id, has_ended in rows if has_ended]
            later_ids = [row_id for row_id, has_ended in rows if not has_ended]
            low_id, high_id = max(ended_ids, default=low_id - 1) + 1, min(later_ids, default=high_id + 1) - 1
            if ended_ids and later_ids:
                break  # no other row is between them
            if not later_ids and len(rows_above) < _ROWS_PER_SIDE:
                break  # no row is above them
            if not ended_ids and len(rows_below) < _ROWS_PER_SIDE:
                break  # no row is below them
            middle_id = (low_id + high_id) // 2
        self._last_found_id = low_id - 1
        return low_id - 1

    def step_end(self, process: int, *, forward: bool) -> int | None:
        """Return the end (ns) of the last step at the time of this store, or of the next one after it (`forward`).

        None if there is no such step.
        """
        last_id = self._last_id(process)
        condition = "id > ? ORDER BY id" if forward else "id <= ? ORDER BY id DESC"
        query = f"SELECT start_ns + wall_ns AS end_ns FROM steps WHERE process = ? AND step > 0 AND {condition} LIMIT 1"
        return next((end_ns for (end_ns,) in self.query(query, (process, last_id))), None)

    def epochs(self, process: int, limit: int) -> list[LoaderLoop]:
        """Return the newest `limit` epochs of a process, in order."""
        query = (
            f"SELECT {', '.join(LOOP_COLUMNS)} FROM loops WHERE process = ? AND epoch IS NOT NULL AND begin_ns <= ?"
            " ORDER BY loop DESC LIMIT ?"
        )
        return [LoaderLoop(*row) for row in self.query(query, (process, self.until_ns, limit))][::-1]

    def epoch_of(self, process: int, loop: int | None) -> tuple[int | None, int | None]:
        """Return the epoch of a loader loop and the number of batches of its loader; each None if unknown."""
        rows = self.query("SELECT epoch, length FROM loops WHERE process = ? AND loop = ?", (process, loop))
        return next(iter(rows), (None, None))

    def loop_steps(self, process: int, loops: Sequence[int], limit: int, interval: int = 1) -> list[LoopStep]:
        """Return every `interval`-th step of some loader loops, among the newest rows, the newest first."""
        last_id = min(self._last_id(process), self._newest_step_id())
        query = (
            "SELECT step, loop, loop_batch, start_ns, wall_ns FROM steps WHERE process = ? AND id BETWEEN ? AND ?"
            f" AND loop IN ({', '.join('?' * len(loops))}) AND loop_batch IS NOT NULL AND step % ? = 0"
            " ORDER BY id DESC LIMIT ?"
        )
        rows = self.query(query, (process, last_id - _NEWEST_IDS_SEARCHED, last_id, *loops, interval, limit))
        return [LoopStep(*row) for row in rows]

    # ------------------------------------------------------------------------------------------ records

    @property
    def dropped(self) -> int:
        """The number of lost records: by their writer, by being overwritten, or with their definition."""
        return self._undefined + sum(ring.missed for ring in self.rings.values())

    def records(self) -> Iterator[Record]:
        """Yield every record so far, in order of arrival. Records with a lost definition count as `dropped`.

        The transaction ends after some thousand records, because a slow reader would otherwise let the journal grow.
        Rows that are deleted meanwhile are left out.
        """
        self._undefined = 0
        ids = " UNION ALL ".join(f"SELECT max(id) FROM {table}" for table in _TABLES)
        first_id, newest_id = 0, max(last_id or 0 for (last_id,) in self.query(ids))
        while first_id <= newest_id:
            records: list[Record] = []
            for row_id, record in self._records_between(first_id, newest_id):
                first_id = row_id + 1
                if isinstance(record, Step):
                    records += self.calls_of(record)
                if not isinstance(record, Step) or record.step > 0:
                    records.append(record)
                if len(records) >= _RECORDS_PER_TRANSACTION:
                    break
            else:
                first_id = newest_id + 1
            self._connection.refresh()
            yield from records

    def calls_of(self, step: Step) -> list[Call]:
        """Return the records of a step's calls. Those with a lost definition count as `dropped`."""
        resolver = self.resolver(step.process)
        calls = [call for row in step.calls if (call := resolver.call(step, row)) is not None]
        self._undefined += len(step.calls) - len(calls)
        return calls

    def _records_between(self, first_id: int, last_id: int) -> Iterator[tuple[int, Record]]:
        """Yield the id and the record of the rows with ids from `first_id` to `last_id`, in order."""
        tables = (
            self._iter_rows(
                table, f"SELECT id, {columns} FROM {table} WHERE id BETWEEN ? AND ? ORDER BY id", (first_id, last_id)
            )
            for table, columns in _TABLES.items()
        )
        return heapq.merge(*tables, key=itemgetter(0))

    def _iter_rows(self, table: str, query: str, values: tuple[int, ...]) -> Iterator[tuple[int, Record]]:
        """Yield the id and the record of each row of a table."""
        decoders: Mapping[str, Callable[[Sequence[Any]], Record | None]] = {
            "steps": self._step_from_row,
            "collectives": self._collective_from_row,
            "events": event_from_row,
            "losses": self._loss_from_row,
        }
        decode = decoders[table]
        for row_id, *row in self._connection.rows(query, values):
            record = decode(row)
            if record is None:
                self._undefined += 1
            else:
                yield row_id, record

    def _collective_from_row(self, row: Sequence[Any]) -> Collective | Sampled | None:
        """Return the record in a row of _COLLECTIVE_ROW; None if a definition is lost."""
        process, *numbers = row
        return self.resolver(process).collective(CollectiveRow(*numbers))

    def _loss_from_row(self, row: Sequence[Any]) -> Event | None:
        """Return the record in a row of _LOSS_ROW; None if its definition is lost."""
        process, *columns = row
        return self.resolver(process).loss(loss_from_columns(columns))

    def newest_ns(self) -> int:
        """Return the latest end (ns) of a record; 0 if there is none."""
        newest_ns = 0
        for table, end_sql in (("steps", "start_ns + wall_ns"), ("events", "t_ns")):
            query = f"SELECT max(at) FROM (SELECT {end_sql} AS at FROM {table} ORDER BY id DESC LIMIT 1000)"
            for (end_ns,) in self.query(query):
                newest_ns = max(newest_ns, end_ns or 0)
        return newest_ns

    def nodes(self) -> list[NodeRow]:
        """Return the nodes of a mirror in order of number; an empty list if this machine recorded the run."""
        return [NodeRow(*row) for row in self.query(f"SELECT {', '.join(NODE_COLUMNS)} FROM nodes ORDER BY number")]

    def shapes(self) -> list[Shape]:
        """Return the sizes of inputs and outputs of all calls so far, with the number of calls of each."""
        query = "SELECT process, mode, kind, layout, virtual, sizes, untimed, calls FROM shapes"
        return list(self.read(shape_from_row, query))

    def wrapper_types(self, process: int) -> set[str]:
        """Return the wrappers through which the process has called its models so far (`via` of their calls)."""
        layouts = [
            layout for (layout,) in self.query("SELECT DISTINCT layout FROM shapes WHERE process = ?", (process,))
        ]
        values = self.definitions(process, layouts).values()
        return {value.via for value in values if isinstance(value, Layout) and value.via is not None}

    # ------------------------------------------------------------------------------------------ events

    def events(self, *kinds: str, limit: int | None = None) -> list[Event]:
        """Return the newest `limit` events of some kinds, in order; all of them if `limit` is None or -1."""
        query = f"{_events_query(kinds)} AND ifnull(t_ns, 0) <= ? ORDER BY id DESC LIMIT ?"
        values = (*kinds, self.until_ns, -1 if limit is None else limit)
        return list(self.read(_cached_event_from_row, query, values))[::-1]

    def iter_events(self, *kinds: str) -> Iterator[Event]:
        """Yield all events of some kinds, one at a time: all device samples together may not fit into memory."""
        return self.read(event_from_row, f"{_events_query(kinds)} ORDER BY id", kinds)

    def event_count(self, kind: str) -> int:
        """Return the number of events of a lasting kind (dpmon.store.history_schema.LASTING)."""
        query = f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ? AND ifnull(t_ns, 0) <= ?"
        return sum(count for (count,) in self.query(query, (kind, self.until_ns)))

    def newest_event_id(self) -> int:
        """Return the id of the newest event of a lasting kind; 0 if there is none."""
        return sum(event_id or 0 for (event_id,) in self.query(f"SELECT max(id) FROM events WHERE {LASTING}"))

    def job(self) -> tuple[dict[str, str] | None, int | None]:
        """Return the job of the run's ranks (`by` and `id`, the same on all nodes) and the number of this node.

        Both come from the newest process event with a job, among the newest _MAX_PROCESS_EVENTS. The job is None if
        there is none; the number is None if it is unknown.
        """
        for event in reversed(self.events("process", limit=_MAX_PROCESS_EVENTS)):
            job = event.data.get("job")
            if not isinstance(job, Mapping):
                continue
            launcher, job_id = text_member(job, "by"), text_member(job, "id")
            if launcher is not None and job_id is not None:
                return {"by": launcher, "id": job_id}, int_member(event.data, "node")
        return None, None

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """Return the last memory event of a process up to a time (ns); None if there is none."""
        query = (
            "SELECT json FROM events WHERE kind = 'memory' AND process = ? AND t_ns <= ?"
            " ORDER BY t_ns DESC, id DESC LIMIT 1"
        )
        limit_ns = self.until_ns if until_ns is None else min(until_ns, self.until_ns)
        return next(self.read(event_from_row, query, (process, limit_ns)), None)

    def newest_memory(self, processes: Sequence[int]) -> dict[int, Event]:
        """Return the newest memory event of each process that has one."""
        newest = (
            "SELECT id FROM events WHERE kind = 'memory' AND process = who AND t_ns <= ?"
            " ORDER BY t_ns DESC, id DESC LIMIT 1"
        )
        query = (
            f"WITH ends(who) AS (VALUES {', '.join(map('({})'.format, processes))})"
            f" SELECT json FROM ends CROSS JOIN events AS row ON row.id = ({newest})"
        )
        events = self.read(event_from_row, query, (self.until_ns,)) if processes else ()
        return {process: event for event in events if (process := int_member(event.data, "process")) is not None}

    # ------------------------------------------------------------------------------------------ collectives

    def last_sample(self, process: int, start_ns: int) -> LastSample | None:
        """Return the newest sampled step of a process that began at or after `start_ns`, with its first collectives.

        None if no step was sampled, or if the newest sample has no collectives.
        """
        query = (
            f"SELECT {_COLLECTIVE_ROW} FROM collectives WHERE start_ns >= ? AND start_ns < ? AND process = ?"
            " AND definition {} 0 ORDER BY start_ns {} LIMIT ?"
        )
        samples = self.read(self._collective_from_row, query.format("=", "DESC"), (start_ns, self.until_ns, process, 1))
        sample = next(samples, None)
        if not isinstance(sample, Sampled):
            return None
        end_ns = min(sample.start_ns + sample.wall_ns, self.until_ns)
        values = sample.start_ns, end_ns, process, MAX_DRAWN_COLLECTIVES
        records = self.read(self._collective_from_row, query.format(">", ""), values)
        collectives = tuple(record for record in records if isinstance(record, Collective))
        return LastSample(sample.step, sample.start_ns, sample.wall_ns, collectives) if collectives else None

    def collective_sums(
        self, start_ns: int = 0, end_ns: int = LAST_NS, processes: Collection[int] | None = None
    ) -> CollectiveSums:
        """Return the sums of the sampled collectives between two times, of all processes or only of `processes`.

        Both times are rounded outwards to whole seconds.
        """
        end_ns = min(end_ns, self.until_ns)
        process_values = tuple(processes or ())
        process_condition = "" if processes is None else f" AND process IN ({', '.join('?' * len(process_values))})"
        values = (start_ns // SECOND if start_ns > 0 else BEFORE_S, -(-end_ns // SECOND), *process_values)
        query = (
            f"SELECT process, definition, {_SUMS} FROM collective_sums"
            f" WHERE start_s >= ? AND start_s < ?{process_condition} GROUP BY process, definition"
        )
        samples = 0
        sums_by_operation: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(COLLECTIVE_SUMS))
        reason = None
        for process, number, count, *sums in self.query(query, values):
            if not number:
                samples += count
                continue
            with suppress(LookupError):
                definition = self.resolver(process).definitions.collectives[number]
                if definition.operation is None:
                    reason = definition.why
                    continue
                totals = sums_by_operation[definition.operation, definition.size]
                totals[:] = map(add, totals, (count, *sums))
        operations = [Operation(*key, *totals) for key, totals in sums_by_operation.items()]
        operations.sort(key=lambda operation: -operation.bytes)
        query = (
            f"SELECT {_COLLECTIVE_ROW} FROM collectives"
            f" WHERE {OWN} AND start_ns >= ? AND start_ns < ?{process_condition} ORDER BY start_ns DESC LIMIT ?"
        )
        own_records = self.read(
            self._collective_from_row, query, (start_ns, end_ns, *process_values, MAX_OWN_COLLECTIVES)
        )
        own_operations = {record.operation for record in own_records if isinstance(record, Collective)}
        return CollectiveSums(tuple(operations), samples, reason, tuple(sorted(own_operations)))

    # ------------------------------------------------------------------------------------------ losses

    def loss_sites(self, process: int) -> dict[int, LossSite]:
        """Return the script lines with losses of a process, by definition, in the order of their first loss."""
        query = "SELECT DISTINCT definition FROM losses WHERE process = ? AND t_ns <= ? ORDER BY definition"
        rows = self.query(query, (process, self.until_ns))
        return self._read_loss_sites(process, [definition for (definition,) in rows])

    def _read_loss_sites(self, process: int, definitions: Sequence[int]) -> dict[int, LossSite]:
        if not definitions:
            return {}
        resolver = Resolver(process)
        for number, definition in self.definitions(process, definitions).items():
            resolver.definitions.remember(number, definition)
        return resolver.definitions.losses

    def loss_bins(self, process: int, definition: int, start_s: int, end_s: int, width_s: int) -> list[LossBin]:
        """Return the losses of a script line from `start_s` up to `end_s`, in bins of `width_s`.

        Bins start at multiples of `width_s`. Those without a loss are left out.
        """
        query = (
            "SELECT t_ns / :width AS at, count(fit), min(fit), avg(fit), max(fit),"
            f" count(*) - count(fit) FROM (SELECT t_ns, CASE WHEN {UNFIT} THEN NULL ELSE loss END AS fit FROM losses"
            " WHERE process = :process AND definition = :line AND t_ns >= :begin AND t_ns < :end)"
            " GROUP BY at ORDER BY at"
        )
        start_ns, end_ns = start_s * SECOND, min(end_s * SECOND, self.until_ns + 1)
        values = {"process": process, "line": definition, "begin": start_ns, "end": end_ns, "width": width_s * SECOND}
        return [LossBin(bin_index * width_s, *statistics) for bin_index, *statistics in self.query(query, values)]

    def first_loss(self, process: int, definition: int) -> float | None:
        """Return the first loss of a script line, which may be NaN; None if there is none."""
        rows = self.query(f"{_LOSSES} ORDER BY t_ns LIMIT 1", (process, definition, self.until_ns))
        return next((loss_from_columns(row).loss for row in rows), None)

    def newest_losses(self, process: int, definition: int, limit: int) -> list[LossRow]:
        """Return at most `limit` losses of a script line, the newest first."""
        values = process, definition, self.until_ns, limit
        return [loss_from_columns(row) for row in self.query(f"{_LOSSES} ORDER BY t_ns DESC LIMIT ?", values)]

    def first_invalid_losses(self) -> list[InvalidLoss]:
        """Return the first NaN or infinite loss of each process and script line, in order of time."""
        query = (
            f"SELECT process, definition, step, min(t_ns), loss FROM losses WHERE {UNFIT} AND t_ns <= ?"
            " GROUP BY process, definition"
        )
        invalid_losses = []
        for process, *columns in self.query(query, (self.until_ns,)):
            row = loss_from_columns(columns)
            site = self._read_loss_sites(process, [row.definition]).get(row.definition)
            if site is not None and site.why is None:
                invalid_losses.append(InvalidLoss(process, site.place, row.step or None, row.start, row.loss))
        return sorted(invalid_losses, key=lambda invalid: invalid.t_ns)

    # ------------------------------------------------------------------------------------------ samples

    def samples(self, duration_ns: int, after_id: int = 0, node: int | None = None) -> list[ChartSample]:
        """Return the device and host samples of the last `duration_ns` before the newest one, in order.

        `after_id`: return all samples after this id instead. `node`: return only the samples of this node.
        """
        if after_id:
            condition, lower_bound = "id > ? AND +t_ns <= ?", after_id
        else:
            query = "SELECT max(t_ns) FROM events WHERE kind IN ('device', 'host')"
            newest_ns = next((t_ns or 0 for (t_ns,) in self.query(query)), 0)
            condition, lower_bound = "t_ns >= ? AND t_ns <= ?", min(newest_ns, self.until_ns) - duration_ns
        # SQLite parses the JSON ten times as fast as Python.
        query = (
            f"SELECT id, t_ns, kind = 'host', {_SAMPLED} FROM events WHERE {condition}"
            " AND kind IN ('device', 'host') AND (?3 IS NULL OR process = -1 - ?3) AND json_valid(json) ORDER BY id"
        )
        rows = self.query(query, (lower_bound, self.until_ns, node))
        return [sample for row in rows if (sample := _chart_sample_from_row(*row)) is not None]

    def sample(self, event_id: int) -> Event | None:
        """Return the sample with this id and all its values; None if it was deleted."""
        return next(self.read(event_from_row, "SELECT json FROM events WHERE id = ?", (event_id,)), None)

    def device_minutes(self) -> list[MinuteRow]:
        """Return the sums of deleted device and host samples by minute. The first rows cover all time before that."""
        if not self.pruned:
            return []
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        first_ns = next((t_ns for (t_ns,) in self.query(query)), LAST_NS)
        query = (
            "SELECT start_s, device, name, count, total, high FROM device_rollups"
            " WHERE (start_s + 60) * ? <= ? ORDER BY start_s, device, name"
        )
        return [MinuteRow(*row) for row in self.query(query, (SECOND, first_ns))]

    def host_memory(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return (start in ns, peak host memory of the run's processes in bytes) of each minute between two times."""
        query = (
            "WITH RECURSIVE starts(at) AS (VALUES (:begin) UNION ALL SELECT at + 60 FROM starts WHERE at + 60 < :end)"
            " SELECT start_s, high FROM starts CROSS JOIN device_rollups"
            " ON start_s = starts.at AND device = :host AND name = 'run_mem_bytes'"
        )
        start_s, end_s = -(-start_ns // (60 * SECOND)) * 60, min(end_ns, self.until_ns) // SECOND
        if start_s >= end_s:
            return []
        rows = self.query(query, {"begin": start_s, "end": end_s, "host": _HOST})
        return [(minute_s * SECOND, int(peak_bytes)) for minute_s, peak_bytes in rows]


def _in_stats_condition(kind: int) -> str:
    """Return the SQL condition for steps of a kind that statistics include, without warm-up steps."""
    return _kind_condition(kind, WARM_UP | EXCLUDED)


def _kind_condition(kind: int, excluded: int = 0) -> str:
    """Return the SQL condition for steps of a kind that have none of the flags `excluded`."""
    return f"(kind & {EVALUATION | FORWARD_ONLY | excluded} = {kind})"


def _long_step_from_row(row: tuple[Any, ...]) -> LongStepRow:
    """Return the step in a row of _LONG_COLUMNS."""
    process, step, mode, kind, start_ns, wall_ns, wait_ns, *phases = row
    ns_by_phase = {name: ns for name, ns in zip(STEP_PHASES, phases, strict=True) if ns is not None}
    return LongStepRow(process, step, mode, kind, start_ns, wall_ns, wait_ns, ns_by_phase)


def _slow_step_from_row(row: tuple[Any, ...]) -> SlowStepRow:
    """Return the step in a row of _SLOW_COLUMNS."""
    process, step, start_ns, wall_ns, sync_number, wait_ns, loop, batch, *phases = row
    ns_by_phase = {phase.name: ns for phase, ns in zip(PHASES, phases, strict=True) if ns is not None}
    return SlowStepRow(process, step, start_ns, wall_ns, sync_number, wait_ns, loop, batch, ns_by_phase)


def _events_query(kinds: Sequence[str]) -> str:
    """Return the beginning of a query for events of some kinds."""
    # SQLite uses the partial index only if the query repeats its condition.
    lasting = f"{LASTING} AND " if set(kinds) <= set(LASTING_KINDS) else ""
    return f"SELECT json FROM events WHERE {lasting}kind IN ({', '.join('?' * len(kinds))})"


_cached_event_from_row = lru_cache(maxsize=1024)(event_from_row)
"""Cached, because every frame of the screen needs the same lasting events."""


def _chart_sample_from_row(
    event_id: int, t_ns: int, is_host: int, device_index: object, *values: object
) -> ChartSample | None:
    device = _HOST if is_host else device_index
    if type(device) is not int or device < _HOST:
        return None
    util_pct, cpu_pct, used_bytes, total_bytes, power_w, run_bytes = (
        float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None for value in values
    )
    return ChartSample(
        event_id, t_ns, device, cpu_pct if device == _HOST else util_pct, used_bytes, total_bytes, power_w, run_bytes
    )

"""The table `steps`: a row per step of the training, with its calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.record.history_rows import Resolver
from dpmon.record.record_types import Call, CallParts, CallRow, Step
from dpmon.record.schema import (
    EVALUATION,
    EXCLUDED,
    FORWARD_ONLY,
    PHASES,
    QUANTITIES,
    STEP_PHASES,
    SYNC_NUMBER,
    TRAINING,
    WARM_UP,
    step_kind,
)
from dpmon.store.table import NUMBERED, StoreTable

if TYPE_CHECKING:
    from dpmon.store.database import HistoryConnection
    from dpmon.store.rings import RingRow
    from dpmon.store.store_queries import Store

MEASURED = {
    **{quantity.name: quantity.name for quantity in QUANTITIES},
    **{phase.name: f"{phase.name}_ns" for phase in PHASES},
}
"""The columns of the quantities and phases (dpmon.record.schema) by name."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY, process INTEGER NOT NULL,
    step          INTEGER NOT NULL,  -- its number, from 1; 0 or less: no step of a loop, but calls alone (see Step)
    mode          TEXT NOT NULL,     -- dp or single
    start_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL,
    kind          INTEGER NOT NULL,  -- flags of dpmon.record.schema
    calls         INTEGER NOT NULL,  -- the number of its calls
    -- quantities: NULL if unknown or none. phases: NULL if they did not run; those of calls are sums, within forward
    {" INTEGER, ".join(MEASURED.values())} INTEGER,
    rest_ns       INTEGER,           -- its forward without the phases of its calls
    device        TEXT,              -- JSON: why device times are missing, then `times` of Step; NULL: none was timed
    spans         TEXT,              -- JSON: `runs` of Step, flat; NULL: none
    missing_spans INTEGER NOT NULL,
    sync_number   INTEGER,           -- number of its last synchronized backward pass, the same on all ranks
    exposed_ns INTEGER, wait_ns INTEGER,  -- of these passes: dpmon.store.sync_passes; NULL: unknown
    loop          INTEGER,           -- the loop over a loader that its batches came from
    loop_batch    INTEGER,           -- batches of that loop that were used by its end; NULL: unknown
    last_call     INTEGER,           -- number of its last call
    called        TEXT               -- its calls as JSON, see encode_calls; NULL: none
);
"""
_NEWEST_IDS_SEARCHED = 20_000
"""How many of the newest ids are searched for single steps."""
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class StepRow(NamedTuple):
    """A row of `steps`."""

    id: int
    process: int
    step: int
    mode: str
    start_ns: int
    wall_ns: int
    kind: int
    calls: int
    measured: tuple[int | None, ...]
    """Its quantities and the ns of its phases, in the order of MEASURED. None: unknown, or the phase did not run."""
    rest_ns: int | None = None
    device: str | None = None
    spans: str | None = None
    missing_spans: int = 0
    sync_number: int | None = None
    exposed_ns: int | None = None
    wait_ns: int | None = None
    loop: int | None = None
    loop_batch: int | None = None
    last_call: int | None = None
    called: str | None = None

    @property
    def end_ns(self) -> int:
        """Its end (ns since the run's start)."""
        return self.start_ns + self.wall_ns

    def measurement(self, name: str) -> int | None:
        """Return a quantity, or the ns of a phase; None if it is unknown, or if the phase did not run."""
        return self.measured[_MEASURED_NAMES.index(name)]

    @property
    def known(self) -> dict[str, int]:
        """Its known quantities, and the ns of the phases that ran, by name."""
        return {name: value for name, value in zip(MEASURED, self.measured, strict=True) if value is not None}

    @property
    def phases(self) -> dict[str, int]:
        """Durations (ns) of its own phases that ran, by name, without the phases of its calls."""
        known = self.known
        return {name: known[name] for name in STEP_PHASES if name in known}

    @property
    def blame_weight_ns(self) -> int:
        """The length by which the ranks' steps of one sync pass compete: half of a wait counts.

        The straggler's step wins, unless it is short: then the straggler was late for another reason, as an evaluation.
        """
        return self.wall_ns - (self.wait_ns or 0) // 2

    def to_record(self, rank: int | None) -> Step:
        """Return its record."""
        known = self.known
        counts = {quantity.name: known[quantity.name] for quantity in QUANTITIES if quantity.name in known}
        samples = counts.pop("samples", None)
        if self.sync_number is not None:
            counts[SYNC_NUMBER] = self.sync_number
        spans = [] if self.spans is None else json.loads(self.spans)
        untimed_reason, *times = (0,) if self.device is None else json.loads(self.device)
        return Step(
            process=self.process,
            rank=rank,
            step=self.step,
            mode=self.mode,
            start_ns=self.start_ns,
            wall_ns=self.wall_ns,
            samples=samples,
            phases=self.phases,
            counts=counts,
            runs=list(zip(spans[::3], spans[1::3], spans[2::3], strict=True)),
            missing_spans=self.missing_spans,
            times=None if self.device is None else times,
            why=untimed_reason,
            exposed_ns=self.exposed_ns,
            wait_ns=self.wait_ns,
            loop=self.loop,
            batch=self.loop_batch,
            kind=step_kind(self.kind),
            calls=decode_calls(self.called, self.start_ns, self.last_call or 0),
        )


_MEASURED_NAMES = tuple(MEASURED)
_MEASURED_AT = StepRow._fields.index("measured")


class _StepTable(StoreTable[StepRow]):
    """The table, with a column for each quantity and phase in place of `measured`."""

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return (*StepRow._fields[:_MEASURED_AT], *MEASURED.values(), *StepRow._fields[_MEASURED_AT + 1 :])

    def to_values(self, row: StepRow) -> tuple[Any, ...]:
        return row[:_MEASURED_AT] + row.measured + row[_MEASURED_AT + 1 :]

    def from_values(self, values: Sequence[Any]) -> StepRow:
        end = _MEASURED_AT + len(MEASURED)
        return StepRow._make((*values[:_MEASURED_AT], tuple(values[_MEASURED_AT:end]), *values[end:]))


STEPS = _StepTable("steps", StepRow, SCHEMA, sent=NUMBERED)


# ------------------------------------------------------------------------------------------------ columns of JSON


def encode_calls(step: Step) -> str | None:
    """Return the calls of a step as JSON, and None if there are none: a list of lists, without their numbers.

    A call has its flags, layout, offset from the start of the step, duration, inputs and outputs, and the members of
    its CallParts if it has parts; without device times, only the first three of them.
    """
    if not step.calls:
        return None
    texts = []
    for _, flags, layout, start_ns, wall_ns, inputs, outputs, parts in step.calls:
        text = f"{flags},{layout},{start_ns - step.start_ns},{wall_ns},{inputs},{outputs}"
        if parts is not None:
            text += f",{_to_json(parts if parts.device_ms is not None else parts[:3])[1:-1]}"
        texts.append(f"[{text}]")
    return f"[{','.join(texts)}]"


def decode_calls(text: str | None, step_start_ns: int, last_number: int) -> list[CallRow]:
    """Return the calls of a step from their JSON. `last_number`: the number of the last one."""
    if text is None:
        return []
    calls = json.loads(text)
    rows = []
    for number, call in enumerate(calls, last_number + 1 - len(calls)):
        flags, layout, offset_ns, wall_ns, inputs, outputs, *parts = call
        call_parts = CallParts(*parts) if parts else None
        rows.append(CallRow(number, flags, layout, step_start_ns + offset_ns, wall_ns, inputs, outputs, call_parts))
    return rows


def encode_spans(step: Step) -> str | None:
    """Return the column `spans` of a step."""
    return f"[{','.join(map(str, chain.from_iterable(step.runs)))}]" if step.runs else None


def encode_device_times(step: Step) -> str | None:
    """Return the column `device` of a step."""
    return None if step.times is None else _to_json([step.why, *step.times])


# ------------------------------------------------------------------------------------------------ a process's rows


def read_last_step(connection: HistoryConnection, ring: RingRow) -> StepRow | None:
    """Return the last step of a ring; None if it has none. Raises HistoryError."""
    condition = "WHERE process = ? AND step > 0 AND id BETWEEN ? AND ? ORDER BY id DESC LIMIT 1"
    values = ring.process, ring.first_id, ring.last_id
    return next(STEPS.select(connection, condition, values), None) if ring.steps else None


def _outermost_rows(
    store: Store, processes: Sequence[int], columns: str, condition: str = "TRUE", *, order: str = "DESC"
) -> list[tuple[Any, ...]]:
    """Return the newest row of each process, from a single query: a run can have a thousand ranks.

    `order` ASC: return the first row.
    """
    store.find_last_ids(processes)
    bounds = ", ".join(f"({process}, {store.first_id(process)}, {store.last_id(process)})" for process in processes)
    outermost = f"SELECT id FROM steps WHERE process = who AND id BETWEEN low AND high AND {condition}"
    outermost += f" ORDER BY id {order} LIMIT 1"
    query = (
        f"WITH ends(who, low, high) AS (VALUES {bounds})"
        f" SELECT {columns} FROM ends CROSS JOIN steps AS row ON row.id = ({outermost})"
    )
    return store.query(query) if processes else []


def read_newest_steps(store: Store, processes: Sequence[int]) -> dict[int, Step]:
    """Return the newest step of each process that has one."""
    rows = map(STEPS.from_values, _outermost_rows(store, processes, STEPS.column_list, "step > 0"))
    return {row.process: row.to_record(store.ranks.get(row.process)) for row in rows}


def read_newest_activity(store: Store, processes: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Return the mode and the end (ns) of the newest step, or calls alone, of each process that has some."""
    rows = _outermost_rows(store, processes, "process, mode, start_ns + wall_ns")
    return {process: (mode, end_ns) for process, mode, end_ns in rows}


def read_first_activity_ns(store: Store, processes: Sequence[int]) -> dict[int, int]:
    """Return the start (ns) of the first call, or step without a call, of each process that still has one."""
    start_ns = "start_ns + ifnull(json_extract(called, '$[0][2]'), 0)"
    return dict(_outermost_rows(store, processes, f"process, {start_ns}", order="ASC"))


def read_steps(store: Store, limit: int, *, process: int | None = None, main_only: bool = False) -> list[Step]:
    """Return the newest steps, the newest first: of a process, or of all processes as of now.

    `main_only`: only those of the main kind that statistics include, among the newest steps.
    """
    last_id = store.newest_step_id if process is None else store.last_id(process)
    condition = "WHERE id <= ? AND step > 0 AND process = ifnull(?, process)"
    if main_only:
        condition += f" AND id > {last_id - _NEWEST_IDS_SEARCHED} AND {_kind_condition(store.main_kind, EXCLUDED)}"
    rows = STEPS.select(store.connection, f"{condition} ORDER BY id DESC LIMIT ?", (last_id, process, limit))
    return [row.to_record(store.ranks.get(row.process)) for row in rows]


def read_called_steps(store: Store, process: int, calls: int) -> list[Step]:
    """Return the newest steps of a process with calls, and calls alone, until they have `calls` calls, newest first.

    The steps have no phases, counts, spans and device times.
    """
    query = (
        "SELECT step, mode, start_ns, wall_ns, kind, last_call, called FROM steps"
        " WHERE process = ? AND id BETWEEN ? AND ? AND called IS NOT NULL ORDER BY id DESC LIMIT ?"
    )
    values = process, store.first_id(process), store.last_id(process), calls
    steps, rank = [], store.ranks.get(process)
    for number, mode, start_ns, wall_ns, kind, last_call, called in store.connection.rows(query, values):
        rows = decode_calls(called, start_ns, last_call)
        step = Step(process, rank, number, mode, start_ns, wall_ns, None, {}, kind=step_kind(kind), calls=rows)
        steps.append(step)
        calls -= len(rows)
        if calls <= 0:
            break
    return steps


def resolve_call(store: Store, step: Step, row: CallRow) -> Call | None:
    """Return the record of a call of `step`; None if a definition is lost."""
    resolver = Resolver(step.process, step.rank)
    for number, definition in store.definitions(step.process, row.definitions).items():
        resolver.definitions.remember(number, definition)
    return resolver.call(step, row)


def find_last_main_step(store: Store, process: int) -> StepRow | None:
    """Return the last step of the main kind among a process's newest steps; None if there is none."""
    last_id = store.last_id(process)
    condition = f"process = ? AND step > 0 AND id BETWEEN ? AND ? AND {_kind_condition(store.main_kind)}"
    values = process, last_id - _NEWEST_IDS_SEARCHED, last_id
    return next(STEPS.select(store.connection, f"WHERE {condition} ORDER BY id DESC LIMIT 1", values), None)


def find_step_number(store: Store, newest: Step) -> int:
    """Return the number of the newest step of the main kind of a process, given its newest step; 0 if unknown."""
    if newest.kind == store.main_kind:
        return newest.step
    last = find_last_main_step(store, newest.process)
    return 0 if last is None else last.step


def find_step_end(store: Store, process: int, *, forward: bool) -> int | None:
    """Return the end (ns) of the last step at the time of the store, or of the next one after it (`forward`).

    None if there is no such step.
    """
    condition = "id > ? ORDER BY id" if forward else "id <= ? ORDER BY id DESC"
    query = f"SELECT start_ns + wall_ns FROM steps WHERE process = ? AND step > 0 AND {condition} LIMIT 1"
    return next((end_ns for (end_ns,) in store.query(query, (process, store.last_id(process)))), None)


def find_next_step_ns(store: Store, process: int, after_ns: int) -> int | None:
    """Return the start (ns) of a process's first step that began at or after a time; None if there is none.

    If rows were deleted, the result may be the start of a later step.
    """
    query = "SELECT min(start_ns) FROM steps WHERE process = ? AND step > 0 AND start_ns >= ?"
    start_ns: int | None
    ((start_ns,),) = store.query(query, (process, after_ns))
    return start_ns


def read_loop_steps(store: Store, process: int, loops: Sequence[int], limit: int, interval: int = 1) -> list[StepRow]:
    """Return every `interval`-th step of some loader loops, among the newest rows, the newest first."""
    last_id = store.last_id(process)
    condition = (
        f"WHERE process = ? AND id BETWEEN ? AND ? AND loop IN ({', '.join(map(str, loops))})"
        " AND loop_batch IS NOT NULL AND step % ? = 0 ORDER BY id DESC LIMIT ?"
    )
    values = process, last_id - _NEWEST_IDS_SEARCHED, last_id, interval, limit
    return list(STEPS.select(store.connection, condition, values))


# ------------------------------------------------------------------------------------------------ long steps, waits


def read_longest_steps(store: Store, limit: int, mode: str) -> list[StepRow]:
    """Return the longest steps of a mode and of the main kind, the longest first, without excluded steps.

    Steps in which ranks may have waited for steps of another kind are left out.
    """
    compared = "(wait_ns IS NULL OR exposed_ns IS NOT NULL)"
    query = (
        f"SELECT id, wall_ns FROM steps WHERE id <= ? AND step > 0 AND mode = ? AND {compared}"
        f" AND {_kind_condition(store.main_kind, WARM_UP | EXCLUDED)} ORDER BY wall_ns DESC LIMIT ?"
    )
    return _read_longest(store, query, (store.newest_step_id, mode, limit))


def read_longest_training_steps(
    store: Store, limit: int, processes: Collection[int], mode: str, first_id: int, last_id: int, begin_ns: int
) -> list[StepRow]:
    """Return the longest training steps of a mode that ended after `begin_ns`, the longest first.

    Only steps with ids above `first_id`, up to `last_id`, without warm-up steps. If there are several `processes`,
    they train together: of the steps that share a sync pass, only that of the greatest `blame_weight_ns` is returned.
    """
    weight = grouping = process_condition = ""
    if len(processes) > 1:
        weight = ", max(wall_ns - ifnull(wait_ns, 0) / 2)"
        grouping = "GROUP BY ifnull(sync_number, -id)"
    if len(processes) != len(store.ranks):
        process_condition = f" AND process IN ({', '.join(map(str, processes))})"
    query = (
        f"SELECT id, wall_ns{weight} FROM steps WHERE id > ? AND id <= ?{process_condition}"
        f" AND step > 0 AND mode = ? AND start_ns + wall_ns > ? AND {_kind_condition(TRAINING, WARM_UP)} {grouping}"
        " ORDER BY wall_ns DESC LIMIT ?"
    )
    return _read_longest(store, query, (first_id, last_id, mode, begin_ns, limit))


def _read_longest(store: Store, query: str, values: Sequence[Any]) -> list[StepRow]:
    """Return the rows with the ids of a query, the longest first.

    The query reads only the columns that decide, because it may read the steps of a thousand ranks.
    """
    condition = f"WHERE id IN (SELECT id FROM ({query})) ORDER BY wall_ns DESC"
    return list(STEPS.select(store.connection, condition, values))


def find_first_step_ns(store: Store, processes: Collection[int], after_id: int) -> int | None:
    """Return the start (ns) of the first step of some processes after an id; None if there is none."""
    condition = f"id > ? AND step > 0 AND process IN ({', '.join(map(str, processes))})"
    rows = store.query(f"SELECT start_ns FROM steps WHERE {condition} ORDER BY id LIMIT 1", (after_id,))
    return next((start_ns for (start_ns,) in rows), None)


def _kind_condition(kind: int, excluded: int = 0) -> str:
    """Return the SQL condition for steps of a kind that have none of the flags `excluded`."""
    return f"(kind & {EVALUATION | FORWARD_ONLY | excluded} = {kind})"

"""The tables `tallies` and `series`: what the steps of a time bucket add up to.

A step counts in the bucket of the second in which it ended. Its values are added to what is there: a sketch after a
sketch is a sketch of both. A step or a wait that arrives late is added to all buckets that cover its second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import REST, STEP, step_kind
from dpmon.store import quantile_sketch
from dpmon.store.steps import MEASURED, StepRow
from dpmon.store.table import CHANGING, FLOAT_SUM, MAX, MIN, SEQ, SKETCH, SUM, WITH_TALLY, StoreTable
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import TallyKey, read_keys
from dpmon.store.time_buckets import END_S, WIDTHS, existing_widths, starts_query

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.store_queries import Store
    from dpmon.store.sync_passes import RankStepWait

SCHEMA = """
CREATE TABLE IF NOT EXISTS tallies (
    width     INTEGER NOT NULL,  -- length of the time bucket (s): dpmon.store.time_buckets.WIDTHS
    start_s   INTEGER NOT NULL,  -- its first second: dpmon.store.time_buckets
    key       INTEGER NOT NULL,  -- number of the key
    steps     INTEGER NOT NULL,
    calls     INTEGER NOT NULL,  -- calls in these steps
    last_step INTEGER NOT NULL,  -- the highest number of a step
    low_ns INTEGER NOT NULL, high_ns INTEGER NOT NULL,   -- duration of the shortest and of the longest step
    first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL, -- start of the first step, end of the last one
    seq       INTEGER NOT NULL,  -- the last transaction that changed this row or one of its series
    PRIMARY KEY (width, start_s, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_tallies ON tallies (seq);
"""
SERIES_SCHEMA = """
-- The values of the steps in a tally. Names: step (its duration), the phases, rest and the quantities of
-- dpmon.record.schema; EXPOSED, WAIT, STRAGGLER_DELAY and UNCOMPARED; replica_series and stage_series;
-- device_series of these.
CREATE TABLE IF NOT EXISTS series (
    width INTEGER NOT NULL, start_s INTEGER NOT NULL, key INTEGER NOT NULL,
    name    TEXT NOT NULL,
    count   INTEGER NOT NULL,    -- steps with a value
    total   INTEGER NOT NULL,    -- the sum of the values; REAL from 2^63 on, as FLOPs of hours are
    sketch  BLOB NOT NULL,       -- dpmon.store.quantile_sketch
    PRIMARY KEY (width, start_s, key, name)
) WITHOUT ROWID;
"""


class TallyRow(NamedTuple):
    """A row of `tallies`."""

    width: int
    start_s: int
    key: int
    steps: int
    calls: int
    last_step: int
    low_ns: int
    high_ns: int
    first_ns: int
    last_ns: int


@dataclass(slots=True)
class SeriesRow:
    """A row of `series`."""

    width: int
    start_s: int
    key: int
    name: str
    count: int
    total: float
    sketch: bytes


TALLIES = StoreTable(
    "tallies",
    TallyRow,
    SCHEMA,
    combined={
        "steps": SUM,
        "calls": SUM,
        "last_step": MAX,
        "low_ns": MIN,
        "high_ns": MAX,
        "first_ns": MIN,
        "last_ns": MAX,
    },
    sent=CHANGING,
)
SERIES = StoreTable(
    "series", SeriesRow, SERIES_SCHEMA, combined={"count": SUM, "total": FLOAT_SUM, "sketch": SKETCH}, sent=WITH_TALLY
)
_NOTE_CHANGE = f"UPDATE tallies SET seq = {SEQ} WHERE width = ? AND start_s = ? AND key = ?"
"""Notes that a series of a tally has changed."""
_PLAIN = "steps, calls, last_step, low_ns, high_ns, first_ns, last_ns"
"""The columns of a tally that are members of Tally."""


@lru_cache(4096)
def replica_series(layout: int, index: int) -> str:
    """Return the series name of the replica at `index` in calls of this layout."""
    return f"replica {layout} {index}"


def stage_series(layout: int, index: int, stage: int, inputs: int, outputs: int) -> str:
    """Return the series name of the stage at `index` in calls with these sizes of inputs and outputs."""
    return f"stage {layout} {index} {stage} {inputs} {outputs}"


# ------------------------------------------------------------------------------------------------ sketches in SQL


class _JoinedSketch:
    """The SQL aggregate `joined_sketch(sketch)`: the sketches one after the other."""

    def __init__(self) -> None:
        self._sketches: list[bytes] = []

    def step(self, sketch: bytes) -> None:
        self._sketches.append(sketch)

    def finalize(self) -> bytes:
        return b"".join(self._sketches)


class _MergedSketch(_JoinedSketch):
    """The SQL aggregate `merged_sketch(sketch)`: one sketch of all, which takes less room."""

    def finalize(self) -> bytes:
        counts: quantile_sketch.Counts = {}
        quantile_sketch.unpack(counts, super().finalize())
        return quantile_sketch.pack(counts)


def install_aggregates(db: sqlite3.Connection) -> None:
    """Let the queries of a connection use `joined_sketch` and `merged_sketch`."""
    # typeshed knows only aggregates of whole numbers.
    db.create_aggregate("joined_sketch", 1, _JoinedSketch)  # type: ignore[arg-type]
    db.create_aggregate("merged_sketch", 1, _MergedSketch)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ writing


@dataclass(slots=True)
class SecondOfSteps:
    """The steps that a batch adds to the tally of one second."""

    rows: list[StepRow] = field(default_factory=list)
    series: list[tuple[str, int]] = field(default_factory=list)
    """Values of further series of these steps, and of earlier steps whose values were not known before."""


def add_steps(
    db: sqlite3.Connection, seconds: Mapping[tuple[int, int], SecondOfSteps], waits: Iterable[RankStepWait] = ()
) -> None:
    """Add steps by second and number of the key, and waits of earlier steps, to all buckets that cover the second."""
    waited: dict[tuple[int, int], SecondOfSteps] = defaultdict(SecondOfSteps)
    for wait in waits:
        waited[wait.second, wait.key].series += wait.series.items()
    added = [*seconds.items(), *waited.items()]
    tallies: list[TallyRow] = []
    series: list[SeriesRow] = []
    changes: list[tuple[int, ...]] = []
    for width, made_s in existing_widths(db, min((second for (second, _), _ in added), default=END_S)):
        buckets: dict[tuple[int, int], list[SecondOfSteps]] = defaultdict(list)
        for (second, key), steps in added:
            if second < made_s:
                buckets[second // width * width, key].append(steps)
        for (start_s, key), parts in buckets.items():
            rows = [row for part in parts for row in part.rows]
            if rows:
                tallies.append(_tally_row(width, start_s, key, rows))
            else:
                changes.append((width, start_s, key))
            named = _values_by_series(rows)
            for name, value in chain.from_iterable(part.series for part in parts):
                named[name].append(value)
            for name, values in named.items():
                sketch = quantile_sketch.pack_values(values)
                series.append(SeriesRow(width, start_s, key, name, len(values), sum(values), sketch))
    TALLIES.insert(db, tallies)
    db.executemany(_NOTE_CHANGE, changes)
    SERIES.insert(db, series)


def _tally_row(width: int, start_s: int, key: int, steps: Sequence[StepRow]) -> TallyRow:
    walls, starts = [step.wall_ns for step in steps], [step.start_ns for step in steps]
    return TallyRow(
        width=width,
        start_s=start_s,
        key=key,
        steps=len(steps),
        calls=sum([step.calls for step in steps]),
        last_step=max([step.step for step in steps]),
        low_ns=min(walls),
        high_ns=max(walls),
        first_ns=min(starts),
        last_ns=max(map(int.__add__, starts, walls)),
    )


def _values_by_series(steps: Sequence[StepRow]) -> defaultdict[str, list[int]]:
    """Return the values in the columns of steps by series. Series without values are left out."""
    columns = {
        STEP: [step.wall_ns for step in steps],
        **dict(zip(MEASURED, zip(*[step.measured for step in steps], strict=True), strict=False)),
        REST: [step.rest_ns for step in steps],
    }
    known = ((name, [value for value in column if value is not None]) for name, column in columns.items())
    return defaultdict(list, {name: values for name, values in known if values})


# ------------------------------------------------------------------------------------------------ reading


def read_tallies(
    store: Store,
    begin_s: int = 0,
    end_s: int = END_S,
    *,
    process: int | Collection[int] | None = None,
    series: Collection[str] | None = None,
    sketches: bool = True,
    left_out: bool = False,
) -> dict[TallyKey, Tally]:
    """Return one tally per key for the time between two seconds, in order of time and key.

    `process`: one process or several; None: all. `series`: read only these series; None: all. Without `sketches`, only
    counts and sums are read. `left_out`: tally only the steps that statistics exclude. No other function returns them.
    """
    keys, condition = _select_keys(store, process, left_out=left_out)
    buckets = store.buckets.cover(begin_s, end_s)
    if not buckets or not keys:
        return {}
    starts = starts_query(buckets)
    query = (
        f"{starts} SELECT min(start_s), key, CAST(total(steps) AS INTEGER), CAST(total(calls) AS INTEGER),"
        " max(last_step), min(low_ns), max(high_ns), min(first_ns), max(last_ns)"
        f" FROM starts CROSS JOIN tallies USING (width, start_s) WHERE {condition} GROUP BY key"
    )
    found = [
        (start_s, keys[number], number, Tally(*values))
        for start_s, number, *values in store.query(query)
        if number in keys
    ]
    found.sort(key=itemgetter(0, 1))
    tallies = {number: tally for _, _, number, tally in found}
    if series is None or series:
        query = (
            f"{starts} SELECT key, name, CAST(total(count) AS INTEGER), CAST(total(total) AS INTEGER),"
            f" {'joined_sketch(sketch)' if sketches else 'NULL'} FROM starts CROSS JOIN series"
            f" USING (width, start_s) WHERE {condition} {_of_series(series)} GROUP BY key, name"
        )
        for number, name, *values in store.connection.rows(query, tuple(series or ())):
            if number in tallies:  # else its tally is not here yet, in a mirror
                tallies[number].stats[name] = SeriesStats(*values)
    return {key: tally for _, key, _, tally in found}


def read_tally_rows(
    store: Store,
    begin_s: int = 0,
    end_s: int = END_S,
    *,
    process: int | Collection[int] | None = None,
    series: Collection[str] | None = None,
    sketches: bool = True,
    widest: int = WIDTHS[-1],
) -> Iterator[tuple[int, int, TallyKey, Tally]]:
    """Yield (start in s, width in s, key, tally) of each row between two seconds, in order of time and key.

    `widest`: see `TimeBuckets.cover`. Other parameters as in `read_tallies`.
    """
    keys, condition = _select_keys(store, process)
    for bucket in store.buckets.cover(begin_s, end_s, widest) if keys else ():
        query = (
            f"{starts_query([bucket])} SELECT tallies.start_s, tallies.key, {_PLAIN}, name, count, total,"
            f" {'sketch' if sketches else 'NULL'} FROM starts CROSS JOIN tallies USING (width, start_s)"
            " LEFT JOIN series"
            " ON (series.width, series.start_s, series.key) = (tallies.width, tallies.start_s, tallies.key)"
            f" {_of_series(series)} WHERE tallies.{condition}"
        )
        rows = store.connection.rows(query, tuple(series or ()))
        for start_s, rows_of_bucket in groupby(rows, key=itemgetter(0)):
            tallies: dict[TallyKey, Tally] = {}
            for _, number, *plain, name, count, total, sketch in rows_of_bucket:
                if number not in keys:
                    continue
                tally = tallies.get(keys[number])
                if tally is None:
                    tally = tallies[keys[number]] = Tally(*plain)
                if name is not None:
                    tally.stats[name] = SeriesStats(count, total, sketch)
            for key, tally in sorted(tallies.items(), key=itemgetter(0)):
                yield start_s - store.origin_s, bucket[0], key, tally


def count_steps(store: Store, begin_s: int, end_s: int, processes: Collection[int]) -> int:
    """Return the number of steps of the main kind of some processes between two seconds."""
    tallies = read_tallies(store, begin_s, end_s, process=processes, series=())
    return sum(tally.steps for key, tally in tallies.items() if step_kind(key.kind) == store.main_kind)


def _select_keys(
    store: Store, process: int | Collection[int] | None, *, left_out: bool = False
) -> tuple[dict[int, TallyKey], str]:
    """Return the keys to read, by number, and the SQL condition for them, if most rows have others."""
    processes = [process] if isinstance(process, int) else process
    keys = read_keys(store.connection, processes, left_out=left_out)
    if left_out or (processes is not None and 2 * len(processes) <= len(store.rings)):
        return keys, f"key IN ({', '.join(map(str, keys))})"
    return keys, "key IS NOT NULL"


def _of_series(series: Collection[str] | None) -> str:
    return "" if series is None else f"AND name IN ({', '.join('?' * len(series))})"

"""The tables `tallies` and `series`: what the steps of a time bucket add up to.

A step counts in the bucket of the second in which it ended. Its values are added to what is there: a sketch after a
sketch is a sketch of both. A step or a wait that arrives late is added to all buckets that cover its second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.record.schema import PHASES, QUANTITIES, REST, STEP
from dpmon.store import quantile_sketch
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.time_buckets import END_S, existing_widths, starts_query

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.history_schema import BoundedConnection
    from dpmon.store.sync_passes import RankStepWait

SCHEMA = """
CREATE TABLE IF NOT EXISTS tallies (
    width     INTEGER NOT NULL,  -- length of the time bucket (s): dpmon.store.time_buckets.WIDTHS
    start_s   INTEGER NOT NULL,  -- its first second since the run's start
    key       INTEGER NOT NULL,  -- number of the key
    steps     INTEGER NOT NULL,
    calls     INTEGER NOT NULL,  -- calls in these steps
    last_step INTEGER NOT NULL,  -- the highest number of a step
    low_ns    INTEGER NOT NULL,  -- duration of the shortest step
    high_ns   INTEGER NOT NULL,  -- duration of the longest step
    first_ns  INTEGER NOT NULL,  -- start of the first step
    last_ns   INTEGER NOT NULL,  -- end of the last step
    seq       INTEGER NOT NULL,  -- the last transaction that changed this row or one of its series
    PRIMARY KEY (width, start_s, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_tallies ON tallies (seq) WHERE width = 1;
-- The values of the steps in a tally. Names: step (its duration), the phases, rest and the quantities of
-- dpmon.record.schema; EXPOSED, WAIT, STRAGGLER_DELAY and UNCOMPARED; replicas and stages (dpmon.store.query_results);
-- device_series of these.
CREATE TABLE IF NOT EXISTS series (
    width   INTEGER NOT NULL,
    start_s INTEGER NOT NULL,
    key     INTEGER NOT NULL,
    name    TEXT NOT NULL,
    count   INTEGER NOT NULL,    -- steps with a value
    total   INTEGER NOT NULL,    -- the sum of the values
    sketch  BLOB NOT NULL,       -- dpmon.store.quantile_sketch
    PRIMARY KEY (width, start_s, key, name)
) WITHOUT ROWID;
"""
_COLUMN_OF_SERIES = {
    STEP: "wall_ns",
    **{phase.name: f"{phase.name}_ns" for phase in PHASES},
    REST: "rest_ns",
    **{quantity.name: quantity.name for quantity in QUANTITIES},
}
"""The series that are columns of the table `steps`."""
_ADD_TALLY = """
INSERT INTO tallies VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET
    steps = steps + excluded.steps, calls = calls + excluded.calls, last_step = max(last_step, excluded.last_step),
    low_ns = min(low_ns, excluded.low_ns), high_ns = max(high_ns, excluded.high_ns),
    first_ns = min(first_ns, excluded.first_ns), last_ns = max(last_ns, excluded.last_ns), seq = excluded.seq
"""
_ADD_SERIES = """
INSERT INTO series VALUES (?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET
    count = count + excluded.count, total = total + excluded.total,
    sketch = CAST(sketch || excluded.sketch AS BLOB)
"""
_NOTE_CHANGE = "UPDATE tallies SET seq = ? WHERE width = ? AND start_s = ? AND key = ?"
MERGE_STATEMENTS = (
    """
INSERT INTO tallies
SELECT :width, start_s / :width * :width AS bucket_s, key, total(steps), total(calls), max(last_step), min(low_ns),
    max(high_ns), min(first_ns), max(last_ns), max(seq)
FROM tallies AS finer WHERE width = :finer AND start_s >= :begin AND start_s < :end AND NOT EXISTS (
    SELECT 1 FROM tallies AS wider WHERE wider.width = :width AND wider.start_s = finer.start_s / :width * :width
    AND wider.key = finer.key)
GROUP BY bucket_s, key
""",
    """
INSERT INTO series
SELECT :width, start_s / :width * :width AS bucket_s, key, name, total(count), total(total), merged_sketch(sketch)
FROM series AS finer WHERE width = :finer AND start_s >= :begin AND start_s < :end AND NOT EXISTS (
    SELECT 1 FROM series AS wider WHERE wider.width = :width AND wider.start_s = finer.start_s / :width * :width
    AND wider.key = finer.key AND wider.name = finer.name)
GROUP BY bucket_s, key, name
""",
)
"""Statements for dpmon.store.time_buckets.merge_buckets. Unlike sum(), total() cannot overflow; it is exact below 2^53.
So one node of a mirror cannot stop it with numbers beyond reason."""
_PLAIN = "steps, calls, last_step, low_ns, high_ns, first_ns, last_ns"
"""The columns of a tally that are members of Tally."""


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

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    """Rows of the table `steps`."""
    series: list[tuple[str, int]] = field(default_factory=list)
    """Values of further series of these steps, and of earlier steps whose values were not known before."""


def add_steps(
    db: sqlite3.Connection,
    seq: int,
    seconds: Mapping[tuple[int, int], SecondOfSteps],
    columns: Sequence[str],
    waits: Iterable[RankStepWait] = (),
) -> None:
    """Add steps by second and number of the key, and waits of earlier steps, to all buckets that cover the second.

    `columns`: those of the rows. `seq`: number of the transaction.
    """
    waited: dict[tuple[int, int], SecondOfSteps] = defaultdict(SecondOfSteps)
    for wait in waits:
        waited[wait.second, wait.key].series += wait.series.items()
    added = [*seconds.items(), *waited.items()]
    tallies: list[tuple[int, ...]] = []
    series: list[tuple[Any, ...]] = []
    changes: list[tuple[int, ...]] = []
    for width, made_s in existing_widths(db, min((second for (second, _), _ in added), default=END_S)):
        buckets: dict[tuple[int, int], list[SecondOfSteps]] = defaultdict(list)
        for (second, key), steps in added:
            if second < made_s:
                buckets[second // width * width, key].append(steps)
        for (start_s, key), parts in buckets.items():
            rows = [row for part in parts for row in part.rows]
            if rows:
                by_column = dict(zip(columns, zip(*rows, strict=True), strict=True))
                tallies.append((width, start_s, key, *_plain_columns(by_column), seq))
                series += ((width, start_s, key, *values) for values in _series_of_columns(by_column))
            else:
                changes.append((seq, width, start_s, key))
            named: dict[str, list[int]] = defaultdict(list)
            for part in parts:
                for name, value in part.series:
                    named[name].append(value)
            series += ((width, start_s, key, *series_values(name, values)) for name, values in named.items())
    db.executemany(_ADD_TALLY, tallies)
    db.executemany(_NOTE_CHANGE, changes)
    db.executemany(_ADD_SERIES, series)


def _plain_columns(by_column: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    """Return the values of _PLAIN of some steps."""
    walls, starts = by_column["wall_ns"], by_column["start_ns"]
    last_ns = max(map(int.__add__, starts, walls))
    calls, last_step = sum(by_column["calls"]), max(by_column["step"])
    return len(walls), calls, last_step, min(walls), max(walls), min(starts), last_ns


def _series_of_columns(by_column: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, int, int, bytes]]:
    for name, column in _COLUMN_OF_SERIES.items():
        known = [value for value in by_column[column] if value is not None]
        if known:
            yield series_values(name, known)


def series_values(name: str, values: Sequence[int]) -> tuple[str, int, int, bytes]:
    """Return the columns `name` to `sketch` of a series with these values."""
    return name, len(values), sum(values), quantile_sketch.pack_values(values)


# ------------------------------------------------------------------------------------------------ reading


class TallyQuery(NamedTuple):
    """Reads the tallies of some keys."""

    connection: BoundedConnection
    keys: Mapping[int, TallyKey]
    """The keys to read, by number."""
    is_selective: bool
    """Whether most rows have other keys."""
    series: Collection[str] | None = None
    """Read only these series; None: all."""
    sketches: bool = True
    """Without sketches, only counts and sums are read."""

    def merged(self, buckets: Sequence[tuple[int, int, int]]) -> dict[TallyKey, Tally]:
        """Return one tally per key, in order of time and key, over all buckets (see `TimeBuckets.cover`)."""
        if not buckets or not self.keys:
            return {}
        starts = starts_query(buckets)
        query = (
            f"{starts} SELECT min(start_s), key, CAST(total(steps) AS INTEGER), CAST(total(calls) AS INTEGER),"
            " max(last_step), min(low_ns), max(high_ns), min(first_ns), max(last_ns)"
            " FROM starts CROSS JOIN tallies USING (width, start_s)"
            f" WHERE {self._key_condition('tallies')} GROUP BY key"
        )
        found = [
            (start_s, self.keys[number], number, Tally(*values))
            for start_s, number, *values in self.connection.rows(query)
            if number in self.keys
        ]
        found.sort(key=itemgetter(0, 1))
        tallies = {number: tally for _, _, number, tally in found}
        if self.series is None or self.series:
            query = (
                f"{starts} SELECT key, name, CAST(total(count) AS INTEGER), CAST(total(total) AS INTEGER),"
                f" {self._sketch('joined_sketch(sketch)')} FROM starts CROSS JOIN series USING (width, start_s)"
                f" WHERE {self._key_condition('series')} {self._name_condition} GROUP BY key, name"
            )
            for number, name, *values in self.connection.rows(query, tuple(self.series or ())):
                if number in tallies:  # else its tally is not here yet, in a mirror
                    tallies[number].stats[name] = SeriesStats(*values)
        return {key: tally for _, key, _, tally in found}

    def rows(self, buckets: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, TallyKey, Tally]]:
        """Yield (start in s, width in s, key, tally) of each row, in order of time and key."""
        for bucket in buckets if self.keys else ():
            query = (
                f"{starts_query([bucket])} SELECT tallies.start_s, tallies.key, {_PLAIN}, name, count, total,"
                f" {self._sketch('sketch')}"
                " FROM starts CROSS JOIN tallies USING (width, start_s) LEFT JOIN series"
                " ON (series.width, series.start_s, series.key) = (tallies.width, tallies.start_s, tallies.key)"
                f" {self._name_condition} WHERE {self._key_condition('tallies')}"
            )
            rows = self.connection.rows(query, tuple(self.series or ()))
            for start_s, rows_of_bucket in groupby(rows, key=itemgetter(0)):
                tallies: dict[TallyKey, Tally] = {}
                for _, number, *plain, name, count, total, sketch in rows_of_bucket:
                    key = self.keys.get(number)
                    if key is None:
                        continue
                    tally = tallies.get(key)
                    if tally is None:
                        tally = tallies[key] = Tally(*plain)
                    if name is not None:
                        tally.stats[name] = SeriesStats(count, total, sketch)
                for key, tally in sorted(tallies.items(), key=itemgetter(0)):
                    yield start_s, bucket[0], key, tally

    def _key_condition(self, table: str) -> str:
        return f"{table}.key IN ({', '.join(map(str, self.keys))})" if self.is_selective else "TRUE"

    @property
    def _name_condition(self) -> str:
        return "" if self.series is None else f"AND name IN ({', '.join('?' * len(self.series))})"

    def _sketch(self, expression: str) -> str:
        return expression if self.sketches else "x''"

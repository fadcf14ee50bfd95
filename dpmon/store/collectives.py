"""The tables `collectives` and `collective_sums`: what the ranks exchanged in the sampled steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.history_rows import CollectiveRow
from dpmon.record.record_types import Collective, Operation
from dpmon.record.schema import SECOND
from dpmon.store.table import CHANGING, NUMBERED, SUM, StoreTable
from dpmon.store.time_buckets import BEFORE_S

if TYPE_CHECKING:
    from dpmon.store.history_writer import WriteBatch
    from dpmon.store.store_queries import Store

_OWN = "definition > 0 AND phase = 0 AND step > 0"
"""The SQL condition for collectives that the script itself launched in a step, outside the phases."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS collectives (
    id INTEGER PRIMARY KEY, process INTEGER NOT NULL,
    number     INTEGER NOT NULL,  -- of its span
    definition INTEGER NOT NULL,  -- 0: a sample, which is a period in which all collectives are recorded
    phase      INTEGER NOT NULL,  -- kind of the span in which it was launched; 0: none
    step       INTEGER NOT NULL,  -- the step that ran when it was launched, or in the middle of a sample; 0: none
    start_ns   INTEGER NOT NULL,
    wall_ns    INTEGER NOT NULL,  -- duration of the call that launched it, or of the sample
    quantity   INTEGER NOT NULL   -- bytes of a collective, or number of collectives in a sample
);
CREATE INDEX IF NOT EXISTS collected ON collectives (start_ns);
CREATE INDEX IF NOT EXISTS own ON collectives (start_ns) WHERE {_OWN};
"""
SUMS_SCHEMA = """
CREATE TABLE IF NOT EXISTS collective_sums (
    start_s    INTEGER NOT NULL,  -- the second in which they began, or BEFORE_S (dpmon.store.time_buckets)
    process    INTEGER NOT NULL,
    definition INTEGER NOT NULL,  -- 0: samples
    count      INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,  -- of samples: the number of their collectives
    seq        INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (start_s, process, definition)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_collective_sums ON collective_sums (seq);
"""
MAX_OWN_COLLECTIVES = 100
"""How many of the newest collectives that the script itself launched are read."""


@dataclass(frozen=True, slots=True)
class CollectiveSumRow:
    """A row of `collective_sums`."""

    start_s: int
    process: int
    definition: int
    count: int
    bytes: int


COLLECTIVES = StoreTable("collectives", CollectiveRow, SCHEMA, sent=NUMBERED)
COLLECTIVE_SUMS = StoreTable(
    "collective_sums",
    CollectiveSumRow,
    SUMS_SCHEMA,
    combined={"count": SUM, "bytes": SUM},
    sent=CHANGING,
)


class CollectiveSums(NamedTuple):
    """The sampled collectives of a time range."""

    operations: tuple[Operation, ...] = ()
    """In order of bytes, the most first."""
    samples: int = 0
    """Number of sampled steps of all processes."""
    why: str | None = None
    """Why no collectives can be recorded; None if they can be."""
    own: tuple[str, ...] = ()
    """Names of the operations that the script itself launched outside the phases, sorted; from the newest samples."""


def add_collective(batch: WriteBatch, row: CollectiveRow) -> None:
    """Add a collective or a sample, also to the sums of its second."""
    batch.add(COLLECTIVES, row)
    second = batch.second_of(max(row.start_ns, 0))
    batch.add(COLLECTIVE_SUMS, CollectiveSumRow(second, row.process, row.definition, 1, row.quantity))


def read_collective_sums(
    store: Store, start_ns: int = 0, end_ns: int | None = None, processes: Collection[int] | None = None
) -> CollectiveSums:
    """Return the sums of the sampled collectives between two times, of all processes or only of `processes`.

    Both times are rounded outwards to whole seconds.
    """
    end_ns = store.until_ns if end_ns is None else min(end_ns, store.until_ns)
    of_processes = "" if processes is None else f" AND process IN ({', '.join(map(str, processes))})"
    begin_s = start_ns // SECOND + store.origin_s if start_ns > 0 else BEFORE_S
    query = (
        "SELECT process, definition, CAST(total(count) AS INTEGER), CAST(total(bytes) AS INTEGER) FROM collective_sums"
        f" WHERE start_s >= ? AND start_s < ?{of_processes} GROUP BY process, definition"
    )
    samples, reason = 0, None
    sums_by_operation: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for process, number, count, byte_count in store.query(query, (begin_s, -(-end_ns // SECOND) + store.origin_s)):
        if not number:
            samples += count
            continue
        with suppress(LookupError):
            definition = store.resolver(process).definitions.collectives[number]
            if definition.operation is None:
                reason = definition.why
                continue
            key = definition.operation, definition.size
            earlier_count, earlier_bytes = sums_by_operation[key]
            sums_by_operation[key] = earlier_count + count, earlier_bytes + byte_count
    operations = [Operation(*key, *sums) for key, sums in sums_by_operation.items()]
    operations.sort(key=lambda operation: -operation.bytes)
    own_rows = COLLECTIVES.select(
        store.connection,
        f"WHERE {_OWN} AND start_ns >= ? AND start_ns < ?{of_processes} ORDER BY start_ns DESC LIMIT ?",
        (start_ns, end_ns, MAX_OWN_COLLECTIVES),
    )
    own_records = (store.resolver(row.process).collective(row) for row in own_rows)
    own = {record.operation for record in own_records if isinstance(record, Collective)}
    return CollectiveSums(tuple(operations), samples, reason, tuple(sorted(own)))

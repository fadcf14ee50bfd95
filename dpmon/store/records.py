"""All records of a history, in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import itemgetter

from dpmon.record.record_types import Call, Record, Step
from dpmon.store.collectives import COLLECTIVES
from dpmon.store.database import last_ids
from dpmon.store.events import EVENTS
from dpmon.store.loss_table import LOSSES
from dpmon.store.steps import STEPS
from dpmon.store.store_queries import Store

_RECORDS_PER_TRANSACTION = 5000
"""After how many records a transaction ends."""


def read_records(store: Store) -> Iterator[Record]:
    """Yield every record so far, in order of arrival. Records with a lost definition count as `dropped` of the store.

    The transaction ends after some thousand records, because a slow reader would otherwise let the journal grow. Rows
    that are deleted meanwhile are left out.
    """
    store.undefined = 0
    first_id, newest_id = 0, max(last_ids(store.connection.db))
    while first_id <= newest_id:
        records: list[Record] = []
        for row_id, record in _records_between(store, first_id, newest_id):
            first_id = row_id + 1
            if record is None:
                store.undefined += 1
                continue
            if isinstance(record, Step):
                records += resolve_calls(store, record)
            if not isinstance(record, Step) or record.step > 0:
                records.append(record)
            if len(records) >= _RECORDS_PER_TRANSACTION:
                break
        else:
            first_id = newest_id + 1
        store.connection.release()
        yield from records


def resolve_calls(store: Store, step: Step) -> list[Call]:
    """Return the records of a step's calls. Those with a lost definition count as `dropped` of the store."""
    resolver = store.resolver(step.process)
    calls = [call for row in step.calls if (call := resolver.call(step, row)) is not None]
    store.undefined += len(step.calls) - len(calls)
    return calls


def _records_between(store: Store, first_id: int, last_id: int) -> Iterator[tuple[int, Record | None]]:
    """Yield the id and the record of each row with an id from `first_id` to `last_id`, in order.

    The record is None if a definition is lost.
    """
    connection, ranks = store.connection, store.ranks
    values = "WHERE id BETWEEN ? AND ? ORDER BY id", (first_id, last_id)
    steps = ((row.id, row.to_record(ranks.get(row.process))) for row in STEPS.select(connection, *values))
    events = ((row.id, row.event) for row in EVENTS.select(connection, *values))
    resolver = store.resolver
    collectives = ((row.id, resolver(row.process).collective(row)) for row in COLLECTIVES.select(connection, *values))
    losses = ((row.id, resolver(row.process).loss(row)) for row in LOSSES.select(connection, *values))
    return heapq.merge(steps, events, collectives, losses, key=itemgetter(0))


def newest_record_ns(store: Store) -> int:
    """Return the latest end (ns) of a record; 0 if there is none."""
    newest_ns = 0
    for table, end_sql in (("steps", "start_ns + wall_ns"), ("events", "t_ns")):
        query = f"SELECT max(at) FROM (SELECT {end_sql} AS at FROM {table} ORDER BY id DESC LIMIT 1000)"
        for (end_ns,) in store.query(query):
            newest_ns = max(newest_ns, end_ns or 0)
    return newest_ns

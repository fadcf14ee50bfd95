"""What is asked of the collectives of sampled steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

from dpmon.record.kinds import Collective, RecordError, Sampled
from dpmon.store.answers import Communicated, Operation
from dpmon.store.queries import COLLECTED, Store

_LAST_NS = (1 << 63) - 1


def collectives(
    store: Store, most: int, *, begin_ns: int = 0, end_ns: int = _LAST_NS, process: int | None = None
) -> list[Collective | Sampled]:
    """The newest collectives and samples that began between two times, the newest first; damaged ones are left out."""
    who, values = ("", ()) if process is None else (" AND process = ?", (process,))
    query = f"SELECT {COLLECTED} FROM collectives WHERE start_ns >= ? AND start_ns < ?{who} ORDER BY id DESC LIMIT ?"
    found = []
    for row in store.query(query, (begin_ns, end_ns, *values, most)):
        with suppress(RecordError, LookupError):
            found.append(store.collective(row))
    return found


def communicated(
    store: Store, begin_ns: int = 0, end_ns: int = _LAST_NS, processes: Collection[int] | None = None
) -> Communicated:
    """The collectives of the samples between two times by operation, of all processes or of these."""
    only, values = "", [begin_ns, end_ns]
    if processes is not None:
        only = f" AND process IN ({', '.join('?' * len(processes))})"
        values += processes
    known = "wall_ns >= 0 AND definition > 0"
    query = (
        "SELECT process, definition, count(*), total(quantity), total(wall_ns >= 0),"
        f" total(CASE WHEN {known} THEN quantity END),"
        f" total(CASE WHEN {known} THEN max(wall_ns - max(queued_ns, 0), 0) END)"
        f" FROM collectives WHERE start_ns >= ? AND start_ns < ?{only} GROUP BY process, definition"
    )
    samples = launched = 0
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * 5)
    why = None
    for process, definition, count, *totals in store.query(query, values):
        if any(type(number) is not int for number in (process, definition, count)):
            continue
        if not definition:
            samples, launched = samples + count, launched + int(totals[0])
            continue
        with suppress(LookupError):
            facts = store.decoder(process).facts(definition)
            if facts["operation"] is None:
                why = facts["why"]
                continue
            whole = sums[facts["operation"], facts["size"]]
            for at, number in enumerate((count, *map(int, totals))):
                whole[at] += number
    operations = [Operation(*key, *whole) for key, whole in sums.items()]
    return Communicated(tuple(sorted(operations, key=lambda one: -one.bytes)), samples, launched, why)

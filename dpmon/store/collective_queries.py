"""Queries about the collectives of sampled steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

from dpmon.record.kinds import Collective, Operation, Sampled
from dpmon.store.answers import Communicated, LastSample
from dpmon.store.queries import COLLECTED, Store
from dpmon.store.tables import BEFORE_S, COLLECTIVE_SUMS, OWN

MOST_DRAWN = 128
"""Most collectives of a sample that are read for drawing."""
MOST_OWN = 100
"""Most of the script's own collectives to read, the newest."""
_SECOND = 1_000_000_000
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in COLLECTIVE_SUMS)
_LAST_NS = (1 << 63) - 1


def collectives(
    store: Store, most: int, *, begin_ns: int = 0, end_ns: int = _LAST_NS, process: int | None = None
) -> list[Collective | Sampled]:
    """Return the newest collectives and samples that began between two times, newest first."""
    who, values = ("", ()) if process is None else (" AND process = ?", (process,))
    query = f"SELECT {COLLECTED} FROM collectives WHERE start_ns >= ? AND start_ns < ?{who} ORDER BY id DESC LIMIT ?"
    return list(store.read(store.collective, query, (begin_ns, end_ns, *values, most)))


def last_sample(store: Store, process: int, begin_ns: int, end_ns: int) -> LastSample | None:
    """Return the newest sample of a process between two times, with its first collectives.

    None if there is no sample, or if it has no collectives.
    """
    query = (
        f"SELECT {COLLECTED} FROM collectives WHERE start_ns >= ? AND start_ns < ? AND process = ? AND definition = 0"
        " ORDER BY start_ns DESC LIMIT 1"
    )
    sample = next(store.read(store.collective, query, (begin_ns, end_ns, process)), None)
    if not isinstance(sample, Sampled):
        return None
    query = (
        f"SELECT {COLLECTED} FROM collectives WHERE start_ns >= ? AND start_ns < ? AND process = ? AND definition > 0"
        " ORDER BY start_ns LIMIT ?"
    )
    until = min(sample.start_ns + sample.wall_ns, end_ns)
    found = store.read(store.collective, query, (sample.start_ns, until, process, MOST_DRAWN))
    collectives = tuple(record for record in found if isinstance(record, Collective))
    return LastSample(sample.step, sample.start_ns, sample.wall_ns, collectives) if collectives else None


def communicated(
    store: Store, begin_ns: int = 0, end_ns: int = _LAST_NS, processes: Collection[int] | None = None
) -> Communicated:
    """Return the sampled collectives between two times by operation, of all processes or only of `processes`.

    Both times are rounded outwards to whole seconds.
    """
    only, who = _only(processes)
    values = (begin_ns // _SECOND if begin_ns > 0 else BEFORE_S, -(-end_ns // _SECOND), *who)
    query = (
        f"SELECT process, definition, {_SUMS} FROM collective_sums WHERE start_s >= ? AND start_s < ?{only}"
        " GROUP BY process, definition"
    )
    samples = launched = 0
    sums: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(COLLECTIVE_SUMS))
    why = None
    for process, definition, *numbers in store.query(query, values):
        count, quantity, *_ = numbers
        if not definition:
            samples, launched = samples + count, launched + quantity
            continue
        with suppress(LookupError):
            facts = store.resolver(process).definitions.collectives[definition]
            if facts.operation is None:
                why = facts.why
                continue
            whole = sums[facts.operation, facts.size]
            for at, number in enumerate(numbers):
                whole[at] += number
    operations = [Operation(*key, *whole) for key, whole in sums.items()]
    operations.sort(key=lambda operation: -operation.bytes)
    return Communicated(tuple(operations), samples, launched, why, _own(store, begin_ns, end_ns, processes))


def _only(processes: Collection[int] | None) -> tuple[str, tuple[int, ...]]:
    """Return the condition that a row is of one of `processes`, and its values; None: of any process."""
    if processes is None:
        return "", ()
    return f" AND process IN ({', '.join('?' * len(processes))})", tuple(processes)


def _own(store: Store, begin_ns: int, end_ns: int, processes: Collection[int] | None) -> tuple[str, ...]:
    only, who = _only(processes)
    query = (
        f"SELECT {COLLECTED} FROM collectives WHERE {OWN} AND start_ns >= ? AND start_ns < ?{only}"
        " ORDER BY start_ns DESC LIMIT ?"
    )
    found = store.read(store.collective, query, (begin_ns, end_ns, *who, MOST_OWN))
    return tuple(sorted({one.operation for one in found if isinstance(one, Collective)}))

"""The table `events`: samples of devices and the host, warnings, pauses, stalls and the like, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.record_types import Event
from dpmon.record.safe_json import int_member, load_event, replace_nonfinite, text_member
from dpmon.record.shared_names import to_bounded_json
from dpmon.store.table import LAST_NS, NUMBERED, StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.database import HistoryConnection
    from dpmon.store.store_queries import Store

LASTING_KINDS = ("process", "mode", "exit", "warning", "pause", "input", "stall", "loader", "ddp", "growth", "oom")
"""Events that are kept when older rows are deleted, because they concern the whole run; of some kinds, the newest."""
LASTING = f"kind IN ({', '.join(map(repr, LASTING_KINDS))})"
IS_SAMPLE = "kind IN ('device', 'host')"
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS events (
    id      INTEGER PRIMARY KEY,
    process INTEGER,        -- NULL: the supervisor. In a mirror, -1 - n: the supervisor of node n
    kind    TEXT NOT NULL,
    t_ns    INTEGER,        -- NULL: unknown
    json    TEXT NOT NULL   -- the whole event
);
CREATE INDEX IF NOT EXISTS lasting ON events (id) WHERE {LASTING};
CREATE INDEX IF NOT EXISTS samples ON events (t_ns) WHERE {IS_SAMPLE};
CREATE INDEX IF NOT EXISTS memory ON events (process, t_ns) WHERE kind = 'memory';
"""
MAX_LASTING = 10_000
"""How many lasting events of each unlimited kind are kept in a history that has reached its size limit."""
_UNLIMITED_KINDS = ("warning", "input", "stall", "loader", "ddp", "growth", "oom")
HOST = -1
"""Device index of the host."""
_MAX_PROCESS_EVENTS = 64
"""How many `process` events are searched for the job of a run. All its ranks belong to the same job."""
_SAMPLED = ("util_pct", "cpu_pct", "mem_used_bytes", "mem_total_bytes", "power_w")
"""The values of a sample for the charts; a sample has one of the first two."""


class EventRow(NamedTuple):
    """A row of `events`."""

    id: int
    process: int | None
    kind: str
    t_ns: int | None
    json: str

    @property
    def event(self) -> Event:
        """The event in its JSON."""
        return parse_event(self.json)


EVENTS = StoreTable("events", EventRow, SCHEMA, sent=NUMBERED)


class ChartSample(NamedTuple):
    """The values of one device sample (-1: of the host) for the charts. Unknown values are None."""

    id: int
    t_ns: int
    device: int
    util: float | None
    """Utilization of the device, or of the host's CPU cores (%)."""
    mem_used: float | None
    """Memory in use (bytes); `mem_total` is in bytes, too."""
    mem_total: float | None
    power: float | None
    """Watts."""


@lru_cache(maxsize=1024)  # every frame of the screen needs the same lasting events
def parse_event(text: str) -> Event:
    """Return the event in its JSON. Raises ValueError."""
    return Event(*load_event(text))


def event_to_json(event: Event) -> str:
    """Return the JSON of an event. NaN and infinity, which are not JSON, become null."""
    text = to_bounded_json({"kind": event.kind, **event.data})
    if b"NaN" in text or b"Infinity" in text:
        text = to_bounded_json(replace_nonfinite({"kind": event.kind, **event.data}))
    return text.decode()


def prune_lasting_events(db: sqlite3.Connection) -> None:
    """Delete the oldest lasting events of each kind of unlimited number."""
    oldest_kept = "SELECT id FROM events WHERE kind = ? ORDER BY id DESC LIMIT 1 OFFSET ?"
    for kind in _UNLIMITED_KINDS:
        db.execute(f"DELETE FROM events WHERE kind = ? AND id < ({oldest_kept})", (kind, kind, MAX_LASTING))


# ------------------------------------------------------------------------------------------------ queries


def last_sample_ns(connection: HistoryConnection) -> int | None:
    """Return the time of the newest sample of a device or the host; None if there is none."""
    rows = connection.rows(f"SELECT max(t_ns) FROM events WHERE {IS_SAMPLE}")
    return next((t_ns for (t_ns,) in rows), None)


def first_sample_ns(connection: HistoryConnection) -> int | None:
    """Return the time of the oldest sample of a device or the host that still has a row; None if there is none."""
    rows = connection.rows(f"SELECT t_ns FROM events WHERE {IS_SAMPLE} AND t_ns IS NOT NULL ORDER BY id LIMIT 1")
    return next((t_ns for (t_ns,) in rows), None)


def read_events(store: Store, *kinds: str, limit: int = -1) -> list[Event]:
    """Return the newest `limit` events of some kinds, in order; -1: all of them."""
    condition = f"{_of_kinds(kinds)} AND ifnull(t_ns, 0) <= ? ORDER BY id DESC LIMIT ?"
    rows = EVENTS.select(store.connection, condition, (*kinds, store.until_ns, limit))
    return [row.event for row in rows][::-1]


def iter_events(store: Store, *kinds: str) -> Iterator[Event]:
    """Yield all events of some kinds, one at a time: all device samples together may not fit into memory."""
    return (row.event for row in EVENTS.select(store.connection, f"{_of_kinds(kinds)} ORDER BY id", kinds))


def _of_kinds(kinds: Sequence[str]) -> str:
    # SQLite uses the partial index only if the query repeats its condition.
    lasting = f"{LASTING} AND " if set(kinds) <= set(LASTING_KINDS) else ""
    return f"WHERE {lasting}kind IN ({', '.join('?' * len(kinds))})"


def count_events(store: Store, kind: str) -> int:
    """Return the number of events of a lasting kind."""
    query = f"SELECT count(*) FROM events WHERE {LASTING} AND kind = ? AND ifnull(t_ns, 0) <= ?"
    return sum(count for (count,) in store.query(query, (kind, store.until_ns)))


def newest_event_id(store: Store) -> int:
    """Return the id of the newest event of a lasting kind; 0 if there is none."""
    return sum(event_id or 0 for (event_id,) in store.query(f"SELECT max(id) FROM events WHERE {LASTING}"))


def read_job(store: Store) -> tuple[dict[str, str] | None, int | None]:
    """Return the job of the run's ranks (`by` and `id`, the same on all nodes) and the number of this node.

    Both come from the newest process event with a job, among the newest _MAX_PROCESS_EVENTS. The job is None if
    there is none; the number is None if it is unknown.
    """
    for event in reversed(read_events(store, "process", limit=_MAX_PROCESS_EVENTS)):
        job = event.data.get("job")
        if not isinstance(job, Mapping):
            continue
        launcher, job_id = text_member(job, "by"), text_member(job, "id")
        if launcher is not None and job_id is not None:
            return {"by": launcher, "id": job_id}, int_member(event.data, "node")
    return None, None


def read_newest_memory(store: Store, processes: Sequence[int], until_ns: int = LAST_NS) -> dict[int, Event]:
    """Return the newest memory event up to a time (ns) of each process that has one."""
    if not processes:
        return {}
    newest = "SELECT id FROM events WHERE kind = 'memory' AND process = who AND t_ns <= ?"
    newest += " ORDER BY t_ns DESC, id DESC LIMIT 1"
    query = (
        f"WITH ends(who) AS (VALUES {', '.join(map('({})'.format, processes))})"
        f" SELECT who, json FROM ends CROSS JOIN events AS row ON row.id = ({newest})"
    )
    return {process: parse_event(text) for process, text in store.query(query, (min(until_ns, store.until_ns),))}


def read_chart_samples(store: Store, duration_ns: int, after_id: int = 0, node: int | None = None) -> list[ChartSample]:
    """Return the device and host samples of the last `duration_ns` before the newest one, in order.

    `after_id`: return all samples after this id instead. `node`: return only the samples of this node.
    """
    if after_id:
        condition, lower_bound = "id > ? AND +t_ns <= ?", after_id
    else:
        newest_ns = last_sample_ns(store.connection) or 0
        condition, lower_bound = "t_ns >= ? AND t_ns <= ?", min(newest_ns, store.until_ns) - duration_ns
    # SQLite parses the JSON ten times as fast as Python.
    index, *values = (f"json_extract(json, '$.{name}')" for name in ("index", *_SAMPLED))
    util, cpu, *others = (f"CAST({value} AS REAL)" for value in values)
    query = (
        f"SELECT id, t_ns, CASE kind WHEN 'host' THEN {HOST} ELSE {index} END AS device,"
        f" CASE kind WHEN 'host' THEN {cpu} ELSE {util} END, {', '.join(others)} FROM events WHERE {condition}"
        f" AND {IS_SAMPLE} AND (?3 IS NULL OR process = -1 - ?3) AND typeof(device) = 'integer' ORDER BY id"
    )
    return [ChartSample(*row) for row in store.query(query, (lower_bound, store.until_ns, node))]


def read_sample(store: Store, event_id: int) -> Event | None:
    """Return the sample with this id and all its values; None if it was deleted."""
    return next((row.event for row in EVENTS.select(store.connection, "WHERE id = ?", (event_id,))), None)

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

_UNLIMITED_KINDS = (
    *("warning", "input", "stall", "loader", "ddp", "growth", "oom", "check"),
    *("profile", "checkpoint", "compiles", "host_syncs", "loader_lines"),
)
LASTING_KINDS = ("process", "mode", "exit", "pause", "flops", *_UNLIMITED_KINDS)
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
CREATE INDEX IF NOT EXISTS lasting ON events (kind, id) WHERE {LASTING};
CREATE INDEX IF NOT EXISTS samples ON events (t_ns) WHERE {IS_SAMPLE};
CREATE INDEX IF NOT EXISTS memory ON events (process, t_ns) WHERE kind = 'memory';
"""
MAX_LASTING = 10_000
"""How many lasting events of each unlimited kind are kept in a history that has reached its size limit."""
HOST = -1
"""Device index of the host."""
_MAX_PROCESS_EVENTS = 64
"""How many `process` events are searched for the job of a run. All its ranks belong to the same job."""


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


class DeviceSample(NamedTuple):
    """One sample of a GPU, or of the host of a node (device below 0): members of its event; unknown values are None."""

    id: int
    t_ns: int
    device: int
    """Index of the GPU; HOST for the host, HOST - n for that of node n."""
    util_pct: float | None
    cpu_pct: float | None
    mem_used_bytes: float | None
    mem_total_bytes: float | None
    power_w: float | None
    mem_run_bytes: int | None = None
    run_mem_bytes: int | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    cpus: int | None = None
    run_cpu_pct: float | None = None
    load_1m: float | None = None
    of_run: int | None = None
    throttle: str | None = None
    """A list as JSON, as `ordinals`."""
    name: str | None = None
    uuid: str | None = None
    ordinals: str | None = None
    gpu_absent: str | None = None
    mig: int | None = None
    sm_active_pct: float | None = None
    node: int | None = None
    """The node of several; None on one machine."""

    @property
    def use_pct(self) -> float | None:
        """Utilization of the GPU, or of the host's CPU cores (%)."""
        return self.cpu_pct if self.device < 0 else self.util_pct


_HOST = f"{HOST} - ifnull(json_extract(json, '$.node'), 0)"
_DEVICE = f"CASE kind WHEN 'host' THEN {_HOST} ELSE json_extract(json, '$.index') END"
_SAMPLE_MEMBERS = DeviceSample._fields[3:]
_CHART_MEMBERS = _SAMPLE_MEMBERS[: _SAMPLE_MEMBERS.index("power_w") + 1]


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
    oldest_kept = f"SELECT id FROM events WHERE {LASTING} AND kind = ? ORDER BY id DESC LIMIT 1 OFFSET ?"
    for kind in _UNLIMITED_KINDS:
        condition = f"{LASTING} AND kind = ? AND id < ({oldest_kept})"
        db.execute(f"DELETE FROM events WHERE {condition}", (kind, kind, MAX_LASTING))


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
    newest = f"SELECT ifnull(max(id), 0) FROM events WHERE {LASTING} AND kind = "  # one search per kind, no scan
    query = f"SELECT max({', '.join(f'({newest}{kind!r})' for kind in LASTING_KINDS)})"
    return sum(event_id for (event_id,) in store.query(query))


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


def iter_samples(
    store: Store, since_ns: int = 0, *, after_id: int = 0, node: int | None = None, for_charts: bool = False
) -> Iterator[DeviceSample]:
    """Yield the samples of GPUs and hosts from a time (ns) up to the time of the store, in order.

    `after_id`: only samples after this id. `node`: only those of this node. `for_charts`: without the members that
    have a default.
    """
    # SQLite parses the JSON ten times as fast as Python.
    members = (f"json_extract(json, '$.{member}')" for member in (_CHART_MEMBERS if for_charts else _SAMPLE_MEMBERS))
    query = (
        f"SELECT id, t_ns, {_DEVICE} AS device, {', '.join(members)} FROM events"
        f" WHERE {'id > ?1 AND +t_ns >= ?2 AND +t_ns <= ?3' if after_id else 't_ns >= ?2 AND t_ns <= ?3 AND id > ?1'}"
        f" AND {IS_SAMPLE} AND (?4 IS NULL OR process = -1 - ?4) AND typeof(device) = 'integer' ORDER BY id"
    )
    rows = store.connection.rows(query, (after_id, since_ns, store.until_ns, node))
    return (DeviceSample(*row) for row in rows)


def read_highest_samples(store: Store, member: str, least: int) -> list[Event]:
    """Return the sample with the highest value of an integer member of each GPU that reaches `least`."""
    value = f"json_extract(json, '$.{member}')"
    query = (
        f"SELECT json, max({value}) FROM events WHERE t_ns <= ? AND {IS_SAMPLE} AND {value} >= ?"
        f" AND typeof({value}) = 'integer' GROUP BY json_extract(json, '$.index')"
    )
    return [parse_event(text) for text, _ in store.query(query, (store.until_ns, least))]


def read_energy_use(store: Store, start_ns: int, end_ns: int) -> list[tuple[int, bool, float, int]]:
    """Return by `DeviceSample.device` whether the run used it, its energy (J), and the time of its samples (ns)."""
    query = f"""
        SELECT device, max(of_run) = 1, sum(max(growth, 0)) AS used, max(t_ns) - min(t_ns) FROM (
            SELECT *, joules - lag(joules) OVER (PARTITION BY device ORDER BY t_ns) AS growth FROM (
                SELECT t_ns, json_extract(json, '$.energy_j') AS joules, json_extract(json, '$.of_run') AS of_run,
                    {_DEVICE} AS device
                FROM events WHERE t_ns BETWEEN ? AND ? AND {IS_SAMPLE} AND typeof(joules) IN ('integer', 'real')))
        GROUP BY device HAVING used > 0"""  # a counter goes back if it wraps around, or the driver is loaded again
    return list(store.query(query, (start_ns, min(end_ns, store.until_ns))))


def read_sample(store: Store, event_id: int) -> Event | None:
    """Return the sample with this id and all its values; None if it was deleted."""
    return next((row.event for row in EVENTS.select(store.connection, "WHERE id = ?", (event_id,))), None)

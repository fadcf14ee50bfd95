"""Builds rows of DistributedDataParallel ranks, on one node or many. They wait for each other in backward passes."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from dpmon.model.communication import Communication, Wrapper, build_communication
from dpmon.model.run_analysis import RunAnalysis, RunCaches, Selection
from dpmon.model.run_events import parse_ddp_wrapper
from dpmon.model.stragglers import (
    RankTimes,
)
from dpmon.record.history_rows import Row
from dpmon.record.record_types import BUCKET, Event, Step
from dpmon.record.schema import SPAN_PHASES
from dpmon.record.shared_names import DDP
from dpmon.store.activity_times import TIMES, read_times
from dpmon.store.definition_table import DEFINITIONS
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.node_table import NODE_DEVICES, NODES, NodeRow
from dpmon.store.quantile_sketch import pack
from dpmon.store.steps import STEPS
from dpmon.store.store_queries import Store
from dpmon.store.table import StoreTable
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_tables import SERIES, TALLIES, read_tallies
from support.history_builders import Recording
from support.record_builders import SECOND, Training, device_event, host_event, step_row, with_event_data

MS = 1_000_000
USUAL_PHASES_MS: Mapping[str, float] = {"data": 0.4, "forward": 3.1, "backward": 5.0, "optimizer": 1.0}
"""Phases of a step in ms, up to the last gradient of the backward pass."""
EXPOSED_MS = 2.1
EVALUATION_MS = 2000


class _Rank(Training):
    """One rank; `times`: duration of each phase of its next step, ns."""

    times: Mapping[str, int] = {}

    def _wobble(self, ns: float) -> int:
        return int(ns)

    def evaluated(self) -> list[Row]:
        """Return an evaluation of EVALUATION_MS in steps of 100 ms."""
        self.shares = {"single": {"data": 50 * MS, "rest": 50 * MS}}
        rows = []
        for _ in range(EVALUATION_MS // 100):
            rows += self.step(evaluates=True)
        return rows

    def joined(self, number: int, sync_ns: int, passes: tuple[int, int]) -> list[Row]:
        """Return a step whose backward pass ends `sync_ns` after its last gradient, if it has synchronized passes."""
        start, took, (synced, unsynced) = self.now, dict(self.times), passes
        self.shares = {"single": {"rest" if name == "forward" else name: ns for name, ns in took.items()}}
        sync_ns = sync_ns if synced else 0
        *rows, whole = self.step()
        assert isinstance(whole, Step)
        wall = sum(took.values()) + sync_ns
        names = ("data", "forward", "backward", "optimizer")
        spans, at = [], start
        for name in names:
            phase_ns = took[name] + (sync_ns if name == "backward" else 0)
            spans.append((SPAN_PHASES.index(name), at, phase_ns))
            if name == "backward" and synced:
                ready = at + took[name]
                spans += [(BUCKET, ready - took[name] // 2, 0), (BUCKET, ready, 0)]
                spans.append((SPAN_PHASES.index("sync"), ready, sync_ns))
            at += phase_ns
        parts = [took[name] for name in names]
        extras = {"sync": sync_ns, "synced": synced, "sync_number": number} if synced else {}
        extras |= {"updates": 1} if synced else {}
        extras |= {"unsynced": unsynced} if unsynced else {}
        self.now = start + wall
        step = step_row("single", self.steps, start, wall, self.batch, parts, spans, **extras)
        return [*rows, step._replace(calls=whole.calls)]


def record_ddp_ranks(number: int, **how: Any) -> tuple[Recording, int]:
    """Return a run of ranks and its end (ns); `how`: arguments of `ddp_rank_rows`."""
    run = Recording()
    rows, end = ddp_rank_rows(number, **how)
    for rank, own in rows.items():
        run.add(own, rank, rank)
    return run, end


def ddp_rank_rows(
    number: int,
    *,
    slow: int | tuple[int, ...] | None = None,
    phase: str = "backward",
    extra_ms: float = 6.0,
    steps: int = 400,
    passes: Sequence[tuple[int, int]] = ((1, 0),),
    world: int | None = None,
    wrapper: Mapping[str, Any] | None = None,
    exposed_ms: float = EXPOSED_MS,
    noise: float = 0.02,
    then: tuple[int, int] | None = None,
    evaluations: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[dict[int, list[Row]], int]:
    """Return the rows of each rank, and the end (ns).

    `slow`: the rank or ranks that need `extra_ms` more for `phase` in each step. `passes`: numbers of synchronized and
    other backward passes of a step, repeated over the steps. `wrapper`: fields of the `ddp` record. `then`: a
    step, and the rank that is slow from there on. `evaluations`: the ranks that evaluate before a step, by step.
    """
    ranks = make_ranks(number)
    rows = [startup_rows(one, world or number, wrapper or {}) for one in ranks]
    wanted: dict[str, Any] = {
        "slow": slow,
        "phase": phase,
        "extra_ms": extra_ms,
        "passes": passes,
        "exposed_ms": exposed_ms,
        "evaluations": evaluations,
    }
    for own in islice(ddp_rank_steps(ranks, noise=noise, then=then, **wanted), steps):
        for whole, part in zip(rows, own, strict=True):
            whole += part
    return dict(enumerate(rows)), ranks[0].now


def make_ranks(number: int, **more: Any) -> list[_Rank]:
    """Return ranks that have not begun; `more`: arguments of Training."""
    usually: dict[str, Any] = {"virtual": False, "mode": "single", "via": DDP, "step_ns": 100, **more}
    return [_Rank(process=rank, rank=rank, devices=(f"cuda:{rank % 8}",), **usually) for rank in range(number)]


def startup_rows(rank: _Rank, world: int, wrapper: Mapping[str, Any]) -> list[Row]:
    """Return what a rank writes first; `wrapper`: fields of its `ddp` record."""
    return [*(with_world_size(row, world) for row in rank.begin()), ddp_event(rank.process, world, **wrapper)]


def ddp_rank_steps(
    ranks: Sequence[_Rank],
    *,
    slow: int | tuple[int, ...] | None = None,
    phase: str = "backward",
    extra_ms: float = 6.0,
    passes: Sequence[tuple[int, int]] = ((1, 0),),
    exposed_ms: float = EXPOSED_MS,
    noise: float = 0.02,
    then: tuple[int, int] | None = None,
    times: float = 1.0,
    evaluations: Mapping[int, tuple[int, ...]] | None = None,
) -> Iterator[list[list[Row]]]:
    """Yield the rows of each rank, step after step, without end; `times`: how many times as long as usual they take.

    A rank whose `now` the caller moves on after a step begins the next one late.
    """
    chance = random.Random(len(ranks))
    slow_ones = (slow,) if isinstance(slow, int) else slow or ()
    for number in count():
        if then is not None and number == then[0]:
            slow_ones = (then[1],)
        for rank, one in enumerate(ranks):
            took = {
                name: ms + (extra_ms if rank in slow_ones and name == phase else 0)
                for name, ms in USUAL_PHASES_MS.items()
            }
            one.times = {name: int(ms * MS * times * chance.gauss(1, noise)) for name, ms in took.items()}
        evaluating = (evaluations or {}).get(number, ())
        before = [one.evaluated() if rank in evaluating else [] for rank, one in enumerate(ranks)]
        ready = [one.now + sum(one.times.values()) - one.times["optimizer"] for one in ranks]
        rows = [
            rows + one.joined(number + 1, max(ready) - at + int(exposed_ms * MS * times), passes[number % len(passes)])
            for rows, one, at in zip(before, ranks, ready, strict=True)
        ]
        together = max(one.now for one in ranks)
        for one in ranks:
            one.now = together
        yield rows


def ddp_event(rank: int, size: int, **more: Any) -> Event:
    """Return a `ddp` record."""
    usual = {
        "process": rank,
        "rank": rank,
        "t_s": 2.5,
        "wrapper": 0,
        "root": "Model",
        "backend": "nccl",
        "group_size": size,
        "group": list(range(size)),
        "parameters": 18,
        "parameter_bytes": 130 << 20,
        "bucket_bytes": [1 << 20, *[25 << 20] * 5],
        "bucket_cap_bytes": 25 << 20,
        "find_unused_parameters": False,
        "unused_bytes": 0,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "comm_hook": None,
        "broadcast_buffers": False,
        "sync_batch_norm": False,
        "iteration": 300,
        "comm_ms": 8.0 + rank,
        "overlap_ms": 5.9,
        "absent": {},
    }
    return Event("ddp", {**usual, **more})


def with_world_size(row: Row, world: int) -> Row:
    """Return a row; in the record of the process, set the number of ranks."""
    return with_event_data(row, world=world) if isinstance(row, Event) and row.kind == "process" else row


# ------------------------------------------------------------------------------------------------ many nodes

_RECORDED_RANKS = 9
"""Ranks of the recorded run; the last one is slow."""
_COPIED_SECOND = 3
"""The second of the recorded run that is copied."""
_WIDER_WIDTHS = (10, 60)


class _CopiedSecond:
    """One second of one rank of the recorded run."""

    def __init__(self, store: Store, process: int) -> None:
        newest = "WHERE process = ? AND start_ns < ? ORDER BY id DESC LIMIT 1"
        before_ns = (_COPIED_SECOND + 1) * SECOND - 20_000_000
        (self.step,) = STEPS.select(store.connection, newest, (process, before_ns))
        ((self.key, tally),) = read_tallies(store, _COPIED_SECOND, _COPIED_SECOND + 1, process=process).items()
        self.tallies = {1: tally}
        for width in _WIDER_WIDTHS:
            self.tallies[width] = Tally()
            for _ in range(width):
                self.tallies[width].merge(tally)
        (self.times,) = read_times(store, _COPIED_SECOND, _COPIED_SECOND + 1, process=process)
        self.definitions = store.query("SELECT number, value FROM definitions WHERE process = ?", (process,))


class ManyNodes:
    """A run of `nodes` nodes with `each` ranks; all steps are alike. The rank `slow` holds the others up.

    `groups`: process groups, of neighbors; `wrapper`: further facts of each DistributedDataParallel.
    """

    def __init__(
        self,
        nodes: int,
        each: int = 8,
        *,
        slow: int = 0,
        phase: str = "data",
        directory: Path | None = None,
        groups: int = 1,
        **wrapper: Any,
    ):
        run = Recording()
        rows, _ = ddp_rank_rows(_RECORDED_RANKS, slow=_RECORDED_RANKS - 1, phase=phase, steps=200)
        for rank, own in rows.items():
            run.add(own, rank, rank)
        store = run.store()
        self._kinds = [_CopiedSecond(store, kind) for kind in range(_RECORDED_RANKS)]
        about = {"run": "test"}
        if directory is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._history = HistoryWriter(self._db, about, 1 << 34)
        else:
            self._history = HistoryWriter.open(directory, about, 1 << 34)
            self._db = self._history._db
        self.nodes, self.each, self.slow = nodes, each, slow
        self.silent: set[int] = set()
        """Nodes that send nothing."""
        self.samples = True
        self._id = 1
        self._caches = RunCaches()
        self._wrapper, self._of_group = wrapper, self.ranks // groups
        self._begin(store, rows)

    def rows_of(self, rank: int) -> _CopiedSecond:
        """What is copied for a rank."""
        return self._kinds[_RECORDED_RANKS - 1 if rank == self.slow else rank % (_RECORDED_RANKS - 1)]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.each

    def _ring(self, rank: int) -> str:
        return f"{rank // self.each}/process-{rank % self.each}.ring"

    def _begin(self, store: Store, rows: Mapping[int, Any]) -> None:
        many = self._db.executemany
        self._db.execute("BEGIN")
        for number in range(self.nodes):
            self.node(number, "connected")
        for rank in range(self.ranks):
            kind, place = self.rows_of(rank), (self._ring(rank), rank, rank)
            self._db.execute(
                "INSERT INTO rings (name, process, rank, pid, position, missed, calls, steps, events, ended,"
                " open_calls, evaluations, forward_steps, evaluation_phases, last_step, node, seq)"
                " VALUES (?, ?, ?, 4242, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, ?, 0)",
                (*place, rank // self.each),
            )
            self._history.key_numbers.number(kind.key._replace(process=rank))
            defined = [(rank, *definition) for definition in kind.definitions]
            many(DEFINITIONS.insert_sql, defined)
            for event in (one for one in rows[0] if isinstance(one, Event)):
                own: dict[str, Any] = {"process": rank, "rank": rank}
                own |= {"world": self.ranks} if event.kind == "process" else {}
                if event.kind == "ddp":
                    first = rank // self._of_group * self._of_group
                    own |= {"group": list(range(first, first + self._of_group)), "group_size": self._of_group}
                    own |= self._wrapper
                self._event(with_event_data(event, **own), rank)
        self._db.execute("COMMIT")

    def node(self, number: int, state: str, why: str | None = None, since_s: float = 0.0, **more: Any) -> None:
        """Set the state of a node."""
        row = NodeRow(number, f"gpu-{number}", "run", state, why, int(since_s * SECOND), **more)
        if row.heard_ns is None and state in ("connected", "cut"):
            row.heard_ns = row.since_ns
        NODES.insert(self._db, [row])

    def _event(self, event: Event, process: int | None) -> None:
        t_ns = int(event.data["t_s"] * SECOND)
        text = json.dumps({"kind": event.kind, **event.data})
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (self._id, process, event.kind, t_ns, text))
        self._id += 1

    def second(self, at_s: int) -> None:
        """Write the records of one second, in one transaction."""
        many, shift = self._db.executemany, at_s - _COPIED_SECOND
        self._db.execute("BEGIN IMMEDIATE")
        there = [rank for rank in range(self.ranks) if rank // self.each not in self.silent]
        steps, rings = [], []
        for rank in there:
            kind = self.rows_of(rank)
            step = self._id
            self._id += 1
            per_s = kind.tallies[1].steps
            values = STEPS.to_values(kind.step._replace(id=step, process=rank))
            ahead = dict(zip(STEPS.columns, values, strict=True))
            for name, later in (("step", per_s), ("last_call", per_s), ("sync_number", per_s), ("start_ns", SECOND)):
                ahead[name] += shift * later
            steps.append(tuple(ahead.values()))
            rings.append((step, step, ahead["step"], self._ring(rank)))
        many(STEPS.insert_sql, steps)
        many("UPDATE rings SET first_id = ifnull(first_id, ?), last_id = ?, last_step = ? WHERE name = ?", rings)
        self._tallies(1, at_s, there)
        for width in _WIDER_WIDTHS:
            if (at_s + 1) % width == 0:
                self._tallies(width, at_s + 1 - width, there)
                self._db.execute("INSERT OR REPLACE INTO widths VALUES (?, ?, 0)", (width, at_s + 1))
        for node in range(self.nodes) if self.samples else ():
            if node not in self.silent:
                self._event(with_event_data(host_event(at_s + 0.5, 40.0, None), node=node), -1 - node)
                for device in range(self.each):
                    index = node * NODE_DEVICES + device
                    own = {"index": index, "util_pct": 60 + (device * 7 + at_s) % 40, "node": node}
                    self._event(with_event_data(device_event(at_s + 0.5, 0), **own), -1 - node)
        heard = [((at_s + 1) * SECOND, node) for node in range(self.nodes) if node not in self.silent]
        many("UPDATE nodes SET heard_ns = ? WHERE number = ?", heard)
        self._db.execute("COMMIT")

    def _tallies(self, width: int, start_s: int, there: list[int]) -> None:
        rows, series, times = [], [], []
        for rank in there:
            kind = self.rows_of(rank)
            tally, shift_s = kind.tallies[width], start_s - _COPIED_SECOND
            assert tally.last_step is not None
            assert tally.first_ns is not None
            assert tally.last_ns is not None
            place = width, start_s, self._history.key_numbers.number(kind.key._replace(process=rank))
            last_step = tally.last_step + (shift_s + width - 1) * kind.tallies[1].steps
            first_ns, last_ns = tally.first_ns + shift_s * SECOND, tally.last_ns + (shift_s + width - 1) * SECOND
            plain = tally.steps, tally.calls, last_step, tally.low_ns, tally.high_ns, first_ns, last_ns
            rows.append((*place, *plain))
            for name, stats in tally.stats.items():
                series.append((*place, name, stats.count, stats.total, pack(stats.counts)))
            for activity, ns in kind.times.spent.items():
                times.append((width, start_s, rank, kind.times.mode, activity, ns * width))
        tables: tuple[tuple[StoreTable[Any], list[Any]], ...] = ((TALLIES, rows), (SERIES, series), (TIMES, times))
        for table, added in tables:
            self._db.executemany(table.insert_sql, added)

    def run(self, begin_s: int, end_s: int) -> ManyNodes:
        """Write the seconds from one up to another."""
        for at_s in range(begin_s, end_s):
            self.second(at_s)
        return self

    def store(self) -> Store:
        """Return the store with all records so far."""
        return Store(self._history.connection)

    def state(self, *, ended: Iterable[int] = (), **selected: Any) -> RunAnalysis:
        """Return the state of the screen; `selected`: fields of Selection."""
        return RunAnalysis(self.store(), Selection(**selected), frozenset(ended), self._caches)

    def close(self) -> None:
        """Close the history in a directory."""
        self._history.close()


# ------------------------------------------------------------------------------------------------ conclusions


def ddp_wrapper(rank: int = 0, **more: Any) -> Wrapper:
    found = parse_ddp_wrapper(ddp_event(rank, 2, **more).data)
    assert found is not None
    return found


def rank_times(number: int, wait_ms: float, *, steps: int = 200, exposed_ms: float = 1.0, **more: Any) -> RankTimes:
    phases = {"data": 1.0 * MS, "forward": 5.0 * MS, "backward": 10.0 * MS, "sync": (wait_ms + exposed_ms) * MS}
    found = RankTimes(number, number, steps, 20.0 * MS, phases, steps, exposed_ms * MS, wait_ms * MS)
    return found._replace(synced=steps, updates=steps)._replace(**more)


def communication_of(
    ranks: list[RankTimes], *wrappers: Wrapper, unsynced: int = 0, lately: bool = False
) -> Communication:
    """Return the communication of ranks. `unsynced`: backward passes under no_sync of the first one."""
    first = ranks[0]
    sums = {"synced": first.synced, "unsynced": unsynced, "updates": first.updates}
    tally = Tally(first.steps, stats={name: SeriesStats(first.steps, total) for name, total in sums.items()})
    wrappers = wrappers or (ddp_wrapper(group=list(range(len(ranks)))),)
    found = build_communication(ranks, wrappers, tally=tally, lately=lately)
    assert found is not None
    return found

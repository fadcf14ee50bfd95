"""Writes the history of a run on many nodes, as a mirror does, without nodes: seconds of one recorded run, copied."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joined import joined_rows
from stored import Recording
from synthetic import SECOND, changed, device_event, host_event

from dpmon.model.run_snapshot import RunSnapshot, SnapshotRequest
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.record.record_types import Event
from dpmon.store.history_schema import CALL_COLUMNS, NODE_COLUMNS, STEP_COLUMNS
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.query_results import NODE_DEVICES, NodeRow
from dpmon.store.store_queries import Store
from dpmon.store.tally import COLUMNS, TALLY, TALLY_AT, SeriesNames, Tally

_KINDS = 9
"""Ranks of the recorded run; the last one is slow."""
_FROM_S = 3
"""The second of the recorded run that is copied."""
_WIDER = (10, 60)


class _Copied:
    """One second of one rank of the recorded run."""

    def __init__(self, store: Store, process: int) -> None:
        def newest(table: str, columns: Mapping[str, str]) -> list[Any]:
            query = (
                f"SELECT {', '.join(columns)} FROM {table} WHERE process = ? AND start_ns < ? ORDER BY id DESC LIMIT 1"
            )
            ((*row,),) = store.query(query, (process, (_FROM_S + 1) * SECOND - 20_000_000))
            return row

        self.step, self.call = newest("steps", STEP_COLUMNS), newest("calls", CALL_COLUMNS)
        query = f"SELECT {', '.join(TALLY)} FROM tallies WHERE width = 1 AND start_s = ? AND process = ?"
        ((*tally,),) = store.query(query, (_FROM_S, process))
        self.key, row = tally[2:TALLY_AT], tally[TALLY_AT:]
        self.tallies = {1: row}
        names = SeriesNames(store._series_names.items())
        for width in _WIDER:
            whole = Tally()
            for _ in range(width):
                whole.merge(Tally.from_row(row, names.by_number))
            self.tallies[width] = list(whole.row(names))
        query = "SELECT * FROM times WHERE width = 1 AND start_s = ? AND process = ?"
        ((*_, self.times),) = [(row[:4], row[4:]) for row in store.query(query, (_FROM_S, process))]
        self.definitions = store.definitions(process)


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
        **wrapper: object,
    ):
        run = Recording()
        rows, _ = joined_rows(_KINDS, slow=_KINDS - 1, phase=phase, steps=200)
        for rank, own in rows.items():
            run.add(own, rank, rank)
        store = run.store()
        self._kinds = [_Copied(store, kind) for kind in range(_KINDS)]
        about = {"run": "test", "start_ns": 0}
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
        self._snapshots = SnapshotBuilder()
        self._wrapper, self._of_group = wrapper, self.ranks // groups
        self._begin(store, rows)

    def rows_of(self, rank: int) -> _Copied:
        """What is copied for a rank."""
        return self._kinds[_KINDS - 1 if rank == self.slow else rank % (_KINDS - 1)]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.each

    def _ring(self, rank: int) -> str:
        return f"{rank // self.each}/process-{rank % self.each}.ring"

    def _begin(self, store: Store, rows: Mapping[int, Any]) -> None:
        many = self._db.executemany
        self._history._connection.set_size(1 << 30, writes=True)
        self._db.execute("BEGIN")
        many("INSERT INTO series VALUES (?, ?)", store._series_names.items())
        for number in range(self.nodes):
            self.node(number, "connected")
        for rank in range(self.ranks):
            kind, place = self.rows_of(rank), (self._ring(rank), rank, rank)
            self._db.execute(
                "INSERT INTO rings (name, process, rank, pid, position, sequence, missed, calls, steps, pending, ended,"
                " open_calls, node) VALUES (?, ?, ?, 4242, 0, 0, 0, 1, 1, '', 0, 0, ?)",
                (*place, rank // self.each),
            )
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?)", (rank, *kind.key))
            defined = [(rank, number, json.dumps(value)) for number, value in kind.definitions.items()]
            many("INSERT INTO definitions VALUES (?, ?, ?)", defined)
            for event in (one for one in rows[0] if isinstance(one, Event)):
                own: dict[str, Any] = {"process": rank, "rank": rank}
                own |= {"world": self.ranks} if event.kind == "process" else {}
                if event.kind == "ddp":
                    first = rank // self._of_group * self._of_group
                    own |= {"group": list(range(first, first + self._of_group)), "group_size": self._of_group}
                    own |= self._wrapper
                self._event(changed(event, **own), rank)
        self._db.execute("COMMIT")

    def node(self, number: int, state: str, why: str | None = None, since_s: float = 0.0, **more: Any) -> None:
        """Set the state of a node."""
        row = NodeRow(number, f"gpu-{number}", "host", "run", "1", state, why, int(since_s * SECOND), **more)
        if row.heard_ns is None and state in ("connected", "cut"):
            row.heard_ns = row.since_ns
        self._db.execute(
            f"INSERT OR REPLACE INTO nodes VALUES ({', '.join('?' * len(NODE_COLUMNS))})", [*vars(row).values()]
        )

    def _event(self, event: Event, process: int) -> None:
        t_ns = int(event.data["t_s"] * SECOND)
        text = json.dumps({"kind": event.kind, **event.data})
        self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (self._id, process, event.kind, t_ns, text))
        self._id += 1

    def second(self, at_s: int) -> None:
        """Write the records of one second, in one transaction."""
        many, shift = self._db.executemany, at_s - _FROM_S
        self._history._connection.set_size(1 << 30, writes=True)
        self._history._connection.reset_instruction_count()
        self._db.execute("BEGIN IMMEDIATE")
        there = [rank for rank in range(self.ranks) if rank // self.each not in self.silent]
        steps, calls, rings = [], [], []
        for rank in there:
            kind = self.rows_of(rank)
            call, step = self._id, self._id + 1
            self._id += 2
            per_s = kind.tallies[1][0]
            ahead = dict(zip(STEP_COLUMNS, (step, rank, *kind.step[2:]), strict=True))
            for name, later in (("step", per_s), ("sync_number", per_s), ("start_ns", SECOND)):
                ahead[name] += shift * later
            steps.append(tuple(ahead.values()))
            of_call = dict(zip(CALL_COLUMNS, (call, rank, *kind.call[2:]), strict=True))
            of_call |= {"step": ahead["step"], "call": ahead["step"], "start_ns": kind.call[6] + shift * SECOND}
            calls.append(tuple(of_call.values()))
            rings.append((call, step, ahead["step"], self._ring(rank)))
        for table, rows in (("steps", steps), ("calls", calls)):
            many(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows) if rows else None
        many("UPDATE rings SET first_id = ifnull(first_id, ?), last_id = ?, last_step = ? WHERE name = ?", rings)
        self._tallies(1, at_s, there)
        for width in _WIDER:
            if (at_s + 1) % width == 0:
                self._tallies(width, at_s + 1 - width, there)
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"whole_{width}", at_s + 1))
        for node in range(self.nodes) if self.samples else ():
            if node not in self.silent:
                self._event(changed(host_event(at_s + 0.5, 40.0, None), node=node), -1 - node)
                for device in range(self.each):
                    index = node * NODE_DEVICES + device
                    own = {"index": index, "util_pct": 60 + (device * 7 + at_s) % 40, "node": node}
                    self._event(changed(device_event(at_s + 0.5, 0), **own), -1 - node)
        heard = [((at_s + 1) * SECOND, node) for node in range(self.nodes) if node not in self.silent]
        many("UPDATE nodes SET heard_ns = ? WHERE number = ?", heard)
        self._db.execute("COMMIT")

    def _tallies(self, width: int, start_s: int, there: list[int]) -> None:
        rows, times = [], []
        for rank in there:
            kind = self.rows_of(rank)
            times.append((width, start_s, rank, kind.key[0], *(ns * width for ns in kind.times)))
            own = dict(zip(COLUMNS, kind.tallies[width], strict=True))
            own["last_step"] += (start_s + width - 1 - _FROM_S) * kind.tallies[1][0]
            own["first_ns"] += (start_s - _FROM_S) * SECOND
            own["last_ns"] += (start_s + width - 1 - _FROM_S) * SECOND
            rows.append((width, start_s, rank, *kind.key, *own.values()))
        names = f"width, start_s, process, mode, kind, batch, {', '.join(COLUMNS)}"
        self._db.executemany(f"INSERT INTO tallies ({names}) VALUES ({', '.join('?' * len(rows[0]))})", rows)
        self._db.executemany(f"INSERT INTO times VALUES ({', '.join('?' * len(times[0]))})", times)

    def run(self, begin_s: int, end_s: int) -> ManyNodes:
        """Write the seconds from one up to another."""
        for at_s in range(begin_s, end_s):
            self.second(at_s)
        return self

    def store(self) -> Store:
        """Return the store with all records so far."""
        return Store(self._history.checked_connection)

    def state(self, **wanted: Any) -> RunSnapshot:
        """Return the state of the screen; `wanted`: fields of SnapshotRequest."""
        return self._snapshots.build(self.store(), SnapshotRequest(**wanted))

    def close(self) -> None:
        """Close the history in a directory."""
        self._history.close()

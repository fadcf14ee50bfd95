"""Waits between ranks on different nodes, which no single node can compute (dpmon.store.sync_passes).

They are known when the steps of all ranks have arrived, and are added to the tallies of the nodes.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

from dpmon.record.schema import EXPOSED, SECOND, STRAGGLER_DELAY, SYNC_NUMBER, UNCOMPARED, WAIT
from dpmon.store.history_schema import STEP_COLUMNS
from dpmon.store.query_results import NodeRow
from dpmon.store.sync_passes import RankStepWait, SyncPassMatcher, SyncStep, sync_device_ns
from dpmon.store.tally import WIDTHS, SeriesNames, TallyKey
from dpmon.store.tally_encoding import encode_entry, merge_sketches

_MAX_DELAY_S = 5
"""Waits that become known later than this are added to the stored tally of their second, others to the next tally."""
_MAX_PENDING = 1 << 16
"""Maximum number of tallies with pending waits."""
_COLUMN_POSITIONS = {name: at for at, name in enumerate(STEP_COLUMNS)}
_synced_of = itemgetter(
    *(
        _COLUMN_POSITIONS[name]
        for name in ("mode", "kind", "start_ns", "wall_ns", SYNC_NUMBER, "synced", "sync_ns", "device")
    )
)
_ANY_BATCH = "width = ? AND start_s = ? AND process = ? AND mode = ? AND kind = ?"
_ROW = f"{_ANY_BATCH} AND batch = ?"
_SERIES = (EXPOSED, WAIT, STRAGGLER_DELAY, UNCOMPARED)
_TallyPlace = tuple[int, str, int]
"""Process, mode and kind of a tally."""


class CrossNodeWaits:
    """The waits between nodes in the history of a mirror."""

    def __init__(self, db: sqlite3.Connection, names: SeriesNames) -> None:
        """`names`: the names of the history's series."""
        self._db, self._names = db, names
        self._matcher = SyncPassMatcher()
        self._ranks: dict[int, set[int]] = defaultdict(set)
        """The ranks on each node."""
        self._spans_nodes_by_process: dict[int, bool] = {}
        """Whether a process averages its gradients with ranks on other nodes, by process."""
        self._nodes_by_process: dict[int, NodeRow] = {}
        """The node of each process."""
        self.pending: dict[_TallyPlace, tuple[RankStepWait, ...]] = {}
        """Waits that are not in a tally yet, by tally."""
        self.completed: list[RankStepWait] = []
        """All waits since the last call of `begin_transaction`. `_late`: those whose seconds have stored tallies."""
        self._late: list[RankStepWait] = []

    def register_process(self, node: NodeRow, process: int, rank: int | None) -> None:
        """Register the node and the rank of a process."""
        self._nodes_by_process[process] = node
        if rank is not None and rank not in self._ranks[node.number]:
            self._ranks[node.number].add(rank)
            self._spans_nodes_by_process.clear()

    def handle_event(self, process: int, kind: str, data: Mapping[str, Any]) -> None:
        """Note the rank or the process group that an event of a process contains."""
        self._matcher.handle_event(process, kind, data)
        self._spans_nodes_by_process.clear()

    def begin_transaction(self) -> None:
        """Begin a transaction."""
        self.completed, self._late = [], []

    def roll_back(self, first_id: int, pending: dict[_TallyPlace, tuple[RankStepWait, ...]]) -> None:
        """Roll back the steps with ids of `first_id` or higher. `pending`: the waits that were pending before them."""
        self._matcher.roll_back(first_id, self.completed)
        self.pending = pending

    def spans_nodes(self, node: NodeRow, process: int) -> bool:
        """Return whether a process averages its gradients with ranks on other nodes."""
        spans = self._spans_nodes_by_process.get(process)
        if spans is None:
            group = self._matcher.rank_group(process)
            spans = group is not None and not set(group) <= self._ranks[node.number]
            self._spans_nodes_by_process[process] = spans
        return spans

    def add_steps(self, node: NodeRow, steps: Sequence[tuple[Any, ...]]) -> None:
        """Add steps of a node, and note all waits that they make known."""
        shift_ns = max(node.clock_ns or 0, 0) - (node.shift_s or 0) * SECOND
        for row in steps:
            mode, kind, start, wall, sync_number, synced, sync_ns, device = _synced_of(row)
            if sync_number is None or not self.spans_nodes(node, row[1]):
                continue
            tail = sync_ns if device is None else sync_device_ns(json.loads(device)[1:])
            if tail is not None:
                key, second = TallyKey(row[1], mode, kind, 0), (start + wall - shift_ns) // SECOND
                step = SyncStep(row[0], key, second, sync_number, synced or 0, tail, wall)
                waits = self._matcher.add_step(row[1], step)
                self.completed += waits
                for wait in waits:
                    place, tallied_s = wait.step.key[:3], self._nodes_by_process[wait.step.key.process].tallied_s
                    if wait.step.second < tallied_s - _MAX_DELAY_S:
                        self._late.append(wait)
                    else:
                        self.pending[place] = (*self.pending.get(place, ()), wait)
        while len(self.pending) > _MAX_PENDING:
            del self.pending[next(iter(self.pending))]

    @cached_property
    def _series(self) -> list[int]:
        """The numbers of the series of waits.

        They come after the numbers of the first node's series. So most nodes have the same numbers as this history, and
        their sketches are copied unchanged.
        """
        return [self._names.number(name) or 0 for name in _SERIES]

    def pop_due_entries(self, place: _TallyPlace, second: int) -> bytes:
        """Remove the pending waits up to a second, and return their entries for the tally of this second.

        Older waits are written to the tallies of their own time: after a long disconnect, those seconds arrive only as
        wider tallies.
        """
        pending = self.pending.pop(place, None)
        if pending is None:
            return b""
        if later := tuple(wait for wait in pending if wait.step.second > second):
            self.pending[place] = later
        self._late += [wait for wait in pending if wait.step.second < second - _MAX_DELAY_S]
        return self._encode_waits([wait for wait in pending if second - _MAX_DELAY_S <= wait.step.second <= second])

    def late_tally_rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield stored tallies to which late waits were added: of steps of a node that was disconnected."""
        waits_by_tally: dict[tuple[Any, ...], list[RankStepWait]] = defaultdict(list)
        for wait in self._late:
            for width in WIDTHS:
                place = (width, wait.step.second // width * width, *wait.step.key[:3])
                waits_by_tally[place].append(wait)
        for place, waits in waits_by_tally.items():
            for row in self._db.execute(f"SELECT * FROM tallies WHERE {_ANY_BATCH} LIMIT 1", place).fetchall():
                yield (*row[:-1], merge_sketches([self._encode_waits(waits), row[-1]]))

    def _encode_waits(self, waits: Sequence[RankStepWait]) -> bytes:
        """Return the entries of waits for a tally."""
        values: dict[str, list[int]] = defaultdict(list)
        for wait in waits:
            for name, ns in wait.tally_values.items():
                values[name].append(ns)
        numbers = zip(_SERIES, self._series, strict=True)
        return b"".join(encode_entry(number, values[name]) for name, number in numbers if name in values)

    def read_stored_waits(self, width: int, start: int, length: int, key: TallyKey, more: bytes = b"") -> bytes:
        """Return the waits in `more` and in the stored tallies of a time bucket.

        In tallies of 1 s, the entries of waits come first, so the rest is not read.
        """
        starts = ", ".join(map(str, range(start, start + length, width)))
        query = f"SELECT sketches FROM tallies WHERE {_ROW.replace('start_s = ?', f'start_s IN ({starts})')}"
        rows = self._db.execute(query, (width, *key))
        return merge_sketches(chain([more], (data for (data,) in rows)), self._series, leading=width == 1)

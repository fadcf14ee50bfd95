"""The waits between ranks of several machines, which no machine knows alone (dpmon.store.sync_passes).

They are known when the steps of all ranks have come, and are added to the tallies of the machines.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

from dpmon.record.schema import EXPOSED, SECOND, STRAGGLER_DELAY, SYNC_NUMBER, WAIT
from dpmon.store.history_schema import STEP_COLUMNS
from dpmon.store.query_results import NodeRow, parse_numbers
from dpmon.store.sync_passes import RankStepWait, SyncPassMatcher, SyncStep, sync_device_ns
from dpmon.store.tally import WIDTHS, SeriesNames, TallyKey
from dpmon.store.tally_encoding import encode_entry, merge_sketches

_LATE_S, _MOST_PENDING = 5, 1 << 16
"""Waits that become known later than this change the stored tally of their second; others go into the next tally.

The second number: most tallies with pending waits.
"""
_AT = {name: at for at, name in enumerate(STEP_COLUMNS)}
_synced_of = itemgetter(
    *(_AT[name] for name in ("mode", "kind", "start_ns", "wall_ns", SYNC_NUMBER, "synced", "sync_ns", "device"))
)
_ANY_BATCH = "width = ? AND start_s = ? AND process = ? AND mode = ? AND kind = ?"
_ROW = f"{_ANY_BATCH} AND batch = ?"
_Place = tuple[int, str, int]
"""Process, mode and kind of a tally."""


class CrossNodeWaits:
    """The waits in the history of a mirror."""

    def __init__(self, db: sqlite3.Connection, names: SeriesNames) -> None:
        """`names`: of the series of the history."""
        self._db, self._names = db, names
        self._rounds = SyncPassMatcher()
        self._ranks: dict[int, set[int]] = defaultdict(set)
        """The ranks on each machine."""
        self._of_several: dict[int, bool] = {}
        """By process: whether it averages its gradients with ranks of other machines."""
        self._node_of: dict[int, NodeRow] = {}
        """The machine of each process."""
        self.pending: dict[_Place, tuple[RankStepWait, ...]] = {}
        """Waits that are not in a tally yet."""
        self.joined: list[RankStepWait] = []
        """All waits since the last call of `begin_transaction`; `_late`: those of seconds with stored tallies."""
        self._late: list[RankStepWait] = []

    def register_process(self, node: NodeRow, process: int, rank: int | None) -> None:
        """Note the machine and the rank of a process."""
        self._node_of[process] = node
        if rank is not None and rank not in self._ranks[node.number]:
            self._ranks[node.number].add(rank)
            self._of_several.clear()

    def handle_event(self, process: int, kind: str, data: Mapping[str, Any]) -> None:
        """Note the rank or the process group of a process, as an event of it says."""
        self._rounds.handle_event(process, kind, data)
        self._of_several.clear()

    def begin_transaction(self) -> None:
        """Begin a transaction."""
        self.joined, self._late = [], []

    def roll_back(self, first_id: int, pending: dict[_Place, tuple[RankStepWait, ...]]) -> None:
        """Forget the steps of a transaction, with ids from `first_id` on; `pending`: what was pending before it."""
        self._rounds.roll_back(first_id, self.joined)
        self.pending = pending

    def spans_nodes(self, node: NodeRow, process: int) -> bool:
        """Whether the ranks that a process averages its gradients with are on several machines."""
        found = self._of_several.get(process)
        if found is None:
            group = self._rounds.rank_group(process)
            found = group is not None and not set(group) <= self._ranks[node.number]
            self._of_several[process] = found
        return found

    def add_steps(self, node: NodeRow, steps: Sequence[tuple[Any, ...]]) -> None:
        """Take steps of a machine; note those of all ranks whose waits are known now."""
        shift_ns = max(node.clock_ns or 0, 0) - (node.shift_s or 0) * SECOND
        for row in steps:
            mode, kind, start, wall, sync_number, synced, sync_ns, device = _synced_of(row)
            if sync_number is None or not self.spans_nodes(node, row[1]):
                continue
            tail = sync_ns if device is None else sync_device_ns(parse_numbers(device)[1:])
            if tail is not None:
                key, second = TallyKey(row[1], mode, kind, 0), (start + wall - shift_ns) // SECOND
                joined = self._rounds.add_step(row[1], SyncStep(row[0], key, second, sync_number, synced or 0, tail))
                self.joined += joined
                for one in joined:
                    place, tallied_s = one.step.key[:3], self._node_of[one.step.key.process].tallied_s
                    if one.step.second < tallied_s - _LATE_S:
                        self._late.append(one)
                    else:
                        self.pending[place] = (*self.pending.get(place, ()), one)
        while len(self.pending) > _MOST_PENDING:
            del self.pending[next(iter(self.pending))]

    @cached_property
    def _series(self) -> list[int]:
        """The numbers of the series of waits.

        They come after the numbers of the first machine's series. So most machines have the same numbers as this
        history, and their sketches are copied unchanged.
        """
        return [self._names.number(name) or 0 for name in (EXPOSED, WAIT, STRAGGLER_DELAY)]

    def pop_due_entries(self, place: _Place, second: int) -> bytes:
        """Return the entries of the waits up to a second, and remove them from the pending ones.

        Older ones are put where they belong: after a very long cut, their own seconds are sent only as wider tallies.
        """
        pending = self.pending.pop(place, None)
        if pending is None:
            return b""
        if later := tuple(one for one in pending if one.step.second > second):
            self.pending[place] = later
        self._late += [one for one in pending if one.step.second < second - _LATE_S]
        return self._encode_waits([one for one in pending if second - _LATE_S <= one.step.second <= second])

    def late_tally_rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the tallies with the late waits of their seconds: of steps of a machine that was cut off."""
        found: dict[tuple[Any, ...], list[RankStepWait]] = defaultdict(list)
        for one in self._late:
            for width in WIDTHS:
                place = (width, one.step.second // width * width, *one.step.key[:3])
                found[place].append(one)
        for place, joined in found.items():
            for row in self._db.execute(f"SELECT * FROM tallies WHERE {_ANY_BATCH} LIMIT 1", place).fetchall():
                yield (*row[:-1], merge_sketches([self._encode_waits(joined), row[-1]]))

    def _encode_waits(self, joined: Sequence[RankStepWait]) -> bytes:
        """Return the entries of waits for a tally."""
        if not joined:
            return b""
        exposed, wait, held = self._series
        found = encode_entry(exposed, [one.exposed_ns for one in joined]) + encode_entry(
            wait, [one.wait_ns for one in joined]
        )
        delays = [one.held_ns for one in joined if one.held_ns is not None]
        return found + encode_entry(held, delays) if delays else found

    def read_stored_waits(self, width: int, start: int, length: int, key: TallyKey, more: bytes = b"") -> bytes:
        """Return the waits in `more` and in the stored tallies of a stretch.

        In tallies of 1 s, the entries of waits come first, so the rest is not read.
        """
        starts = ", ".join(map(str, range(start, start + length, width)))
        query = f"SELECT sketches FROM tallies WHERE {_ROW.replace('start_s = ?', f'start_s IN ({starts})')}"
        rows = self._db.execute(query, (width, *key))
        return merge_sketches(chain([more], (data for (data,) in rows)), self._series, leading=width == 1)

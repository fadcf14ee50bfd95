"""Waits between ranks on different nodes, which no single node can compute (dpmon.store.sync_passes)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dpmon.record.schema import SECOND
from dpmon.store.node_table import NodeRow
from dpmon.store.steps import StepRow
from dpmon.store.sync_passes import RankGroups, SyncStep, sync_device_ns
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES, KeyNumbers, TallyKey


class CrossNodeWaits:
    """The process groups that span nodes, and their steps."""

    def __init__(self, keys: KeyNumbers) -> None:
        """`keys`: of the history of the mirror."""
        self._keys = keys
        self._groups = RankGroups()
        self._ranks: dict[int, set[int]] = defaultdict(set)
        """The ranks on each node."""
        self._spans_nodes_by_process: dict[int, bool] = {}
        """Whether a process averages its gradients with ranks on other nodes, by process."""

    def register_rank(self, node: NodeRow, rank: int | None) -> None:
        """Register the rank of a process on a node."""
        if rank is not None and rank not in self._ranks[node.number]:
            self._ranks[node.number].add(rank)
            self._spans_nodes_by_process.clear()

    def handle_event(self, process: int, kind: str, data: Mapping[str, Any]) -> None:
        """Note the rank or the process group that an event of a process contains."""
        self._groups.handle_event(process, kind, data)
        self._spans_nodes_by_process.clear()

    def _spans_nodes(self, node: NodeRow, process: int) -> bool:
        """Return whether a process averages its gradients with ranks on other nodes."""
        spans = self._spans_nodes_by_process.get(process)
        if spans is None:
            ranks = self._groups.ranks(process)
            own_ranks = self._ranks[node.number]
            spans = ranks is not None and (len(ranks) > len(own_ranks) or not own_ranks.issuperset(ranks))
            self._spans_nodes_by_process[process] = spans
        return spans

    def sync_steps(self, node: NodeRow, steps: Iterable[StepRow]) -> Iterator[SyncStep]:
        """Yield the steps of a node that wait for steps of ranks on other nodes."""
        shift_ns, first_s = max(node.clock_ns or 0, 0), (node.origin_s or 0) + (node.shift_s or 0)
        for row in steps:
            if row.sync_number is None or not self._spans_nodes(node, row.process):
                continue
            tail_ns = row.measurement("sync") if row.device is None else sync_device_ns(json.loads(row.device)[1:])
            key = TallyKey(row.process, row.mode, row.kind, row.known.get("samples", NO_SAMPLES))
            if self._keys.find(key) is None:
                key = key._replace(batch=OTHER_SIZES)
            if self._keys.find(key) is not None:
                step = self._groups.sync_step(key, row, tail_ns, (row.end_ns - shift_ns) // SECOND + first_s)
                if step is not None:
                    yield step

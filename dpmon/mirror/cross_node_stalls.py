"""Detects stalls of a job that runs on several nodes. Each node's supervisor sees only its own ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmon.record.safe_json import ns_member
from dpmon.record.schema import SECOND
from dpmon.record.typed_json import from_json
from dpmon.run.run_directory import RunInfo
from dpmon.stalls.rank_inspector import RankInspector
from dpmon.stalls.stacks import ProcessStacks
from dpmon.stalls.stall_detection import NodeActivities, RankActivity
from dpmon.stalls.stall_report import StallReport
from dpmon.supervise.stall_watch import StallRecorder, StallWatch

_MAX_NODE_RANKS = 512
"""Most ranks of one node."""


class _ReportedRanks(RankInspector):
    """The ranks of all nodes, as the nodes' supervisors report them while a rank makes no progress."""

    def __init__(self, directory: Path, run_info: RunInfo) -> None:
        super().__init__(directory, run_info.cwd)
        self.ranks_by_node: dict[int, list[RankActivity]] = {}
        """Ranks by node; empty if all ranks of the node make progress. A disconnected node is missing."""

    def inspect_ranks(self, steps: Mapping[int, int | None], now_ns: int) -> list[RankActivity]:
        if not all(self.ranks_by_node.values()):
            return []  # a rank that makes progress delays the others only briefly
        ranks = [rank for node in self.ranks_by_node.values() for rank in node]
        live_ranks = {rank.rank for rank in ranks if not rank.is_over}
        # A job may have restarted its ranks.
        return [rank for rank in ranks if not rank.is_over or rank.rank not in live_ranks]

    def with_exceptions(self, ranks: list[RankActivity]) -> list[RankActivity]:
        return ranks

    def take_stacks(self, *, still_ns: int = 0) -> Mapping[int, ProcessStacks]:
        return {}  # the supervisors report them


class CrossNodeStallDetector:
    """Detector of stalls among the ranks of all nodes of a job. It records them instead of the nodes' supervisors."""

    def __init__(
        self,
        directory: Path,
        run_info: RunInfo,
        recorder: StallRecorder,
        node_count: int,
        local_process_number: Callable[[int, int], int],
    ) -> None:
        """`local_process_number`: returns the number in this run of a process of a node."""
        self.info = run_info
        self._directory, self._recorder, self._local_process_number = directory, recorder, local_process_number
        self._inspector = _ReportedRanks(directory, run_info)
        self._node_count = node_count
        self._awaited_nodes = set(range(node_count))
        """The nodes that have neither reported yet nor been disconnected."""
        self._watch: StallWatch | None = None
        self._judged_nodes: set[int] = set()
        self._stored_starts: set[tuple[int, int | None]] = set()

    def receive_rank_report(self, node: int, name: str, report: Mapping[str, Any], age_ns: int) -> None:
        """Add what a node's supervisor reported (`NodeActivities`) `age_ns` ago. Raises ValueError."""
        activities = from_json(NodeActivities, report)
        clock_offset_ns = time.monotonic_ns() - age_ns - activities.now_ns
        self._awaited_nodes.discard(node)
        # Ranks of a node that belong to another job, or to none, are compared only with each other.
        self._inspector.ranks_by_node[node] = [
            rank._replace(
                process=None if rank.process is None else self._local_process_number(node, rank.process),
                job=rank.job and hash((node, rank.job)),
                node=name,
                since_ns=rank.since_ns and rank.since_ns + clock_offset_ns,
            )
            for rank in activities.ranks[:_MAX_NODE_RANKS]
        ]
        if activities.ranks:
            self._judged_nodes.add(node)
            if self._watch is None:
                self._watch = StallWatch(
                    self._directory, self.info, self._recorder, is_takeover=True, inspector=self._inspector
                )

    def drop_node(self, node: int) -> None:
        """Forget what the ranks of a disconnected node do."""
        self._awaited_nodes.discard(node)
        self._inspector.ranks_by_node.pop(node, None)

    def should_store_stall(self, node: int, stall: Mapping[str, Any]) -> bool:
        """Return whether to store a stall that a node's own supervisor has recorded.

        Not if the ranks of the node are judged here. The end of a stall is stored if its start was.
        """
        key = node, ns_member(stall, "since_s")
        if "ranks" not in stall:
            return key in self._stored_starts
        if node not in self._judged_nodes:
            self._stored_starts.add(key)
        return node not in self._judged_nodes

    def poll(self) -> None:
        """Check the ranks once per second. Never blocks, never raises."""
        reports = self._inspector.ranks_by_node
        if self._watch is None or self._awaited_nodes:
            return
        if self._watch.stall is not None and len(reports) < self._node_count and all(reports.values()):
            return  # no known rank makes progress, so the stall continues, whatever the unknown ranks do
        self._watch.poll()

    def close(self) -> None:
        """Close the watch. The record of a current stall has no end."""
        if self._watch is not None:
            self._watch.close()

    def merge_replies(
        self, replies: Mapping[int, tuple[str, StallReport]], now_ns: int, missing: Sequence[str] = ()
    ) -> StallReport:
        """Return one reply to `dpmon why` made of the nodes' replies, each with the node's name.

        The ranks that the others wait for come first. `missing`: the nodes without a reply, and why.
        """
        stall, waits = (None, {}) if self._watch is None else (self._watch.stall, self._watch.waits)
        texts, ranks = [], []
        for node, (name, reply) in replies.items():
            is_judged = node in self._judged_nodes
            if reply.text is not None and not is_judged:
                texts.append(f"{name}: {reply.text}")
            for rank in reply.ranks[:_MAX_NODE_RANKS]:
                number = None if rank.process is None else self._local_process_number(node, rank.process)
                rank = replace(rank, node=name, process=number)
                if is_judged:
                    is_waiter = waits.get((name, rank.pid))  # None if the rank is not part of the stall
                    rank = replace(rank, waits=is_waiter is True, apart=stall is not None and is_waiter is None)
                ranks.append(rank)
        ranks.sort(key=lambda rank: (rank.apart, rank.waits, -1 if rank.rank is None else rank.rank))
        starts_s = [reply.since_s for _, reply in replies.values() if reply.since_s is not None]
        if stall is not None and self._watch is not None:
            texts.insert(0, self._watch.stall_text)
            starts_s = [(stall.since_ns - self.info.start_ns) / SECOND]
        return StallReport(
            (now_ns - self.info.start_ns) / SECOND,
            min(starts_s, default=None),
            "; ".join(texts) or None,
            tuple(ranks),
            tuple(missing),
        )

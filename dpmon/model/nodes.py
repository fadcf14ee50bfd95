"""The nodes of a multi-node run: the processes of each, and whether its records arrive."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.sanitize import sanitize_line
from dpmon.store.node_table import NODE_DEVICES, read_node_rows

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.model.run_process import Process
    from dpmon.store.store_queries import Store

SLOW_NS = 3 * SECOND
"""A connected node sends something once a second. After this silence it is called slow."""
_SHORT_WORDS = {"disconnected": "cut", "given up": "gone"}
_LASTING = ("ended", "stopped", "failed", "given up")
"""Problems without a duration."""
_WORDS = {"connecting": "connecting", "cut": "disconnected", "refused": "given up"}
SILENT = tuple(_WORDS.values())
"""Problems in which the current state of a node's ranks is unknown."""


class NodeProblem(NamedTuple):
    """Why the records of a node do not arrive as usual."""

    word: str
    """"connecting", "slow", "disconnected", "given up", "ended", "stopped" or "failed"."""
    since_ns: int
    why: str | None = None
    """A sentence, if there is one; clean."""

    def words(self, now_ns: int) -> str:
        """Return the word, for how long, and why: "disconnected for 12 s: connection timed out"."""
        since = "" if self.word in _LASTING else f" for {format_age(now_ns - self.since_ns)}"
        return f"{self.word}{since}{f': {self.why}' if self.why else ''}"

    def brief(self, now_ns: int, width: int) -> str:
        """Return a short word and the time in `width` cells, or less: "cut 12 s", "cut", "c"."""
        word = _SHORT_WORDS.get(self.word, self.word)
        full_text = self.word if self.word in _LASTING else f"{word} {format_age(now_ns - self.since_ns)}"
        return full_text if len(full_text) <= width else word[:width]


class NodeStatus(NamedTuple):
    """One node of the run. Times in ns since the run's start, by the clock of this machine."""

    number: int
    name: str
    """The name by which the user reaches it; clean."""
    state: str
    """One of dpmon.store.node_table.NODE_STATES."""
    why: str | None
    since_ns: int
    heard_ns: int | None
    """When it sent something last; None if it has not yet."""
    status: int | None
    """The exit status of its run; None while it runs, or if unknown."""
    processes: tuple[int, ...]
    """Its processes, in the order in which they were seen."""
    stopped: bool = False
    """Whether the user stopped its run."""

    def problem_at(self, now_ns: int) -> NodeProblem | None:
        """Return why its records do not arrive; None if they do, or if the problem began after `now_ns`."""
        heard_ns = self.since_ns if self.heard_ns is None else self.heard_ns
        if self.state == "connected":
            return NodeProblem("slow", heard_ns, "nothing was heard") if now_ns - heard_ns > SLOW_NS else None
        if self.since_ns > now_ns:
            return None
        if self.state == "ended" and self.stopped:
            return NodeProblem("stopped", self.since_ns)
        if self.state == "ended":
            word = "failed" if self.status else "ended"
            return NodeProblem(word, self.since_ns, f"status {self.status}" if self.status else self.why)
        since_ns = heard_ns if self.state == "cut" else self.since_ns
        return NodeProblem(_WORDS.get(self.state, "disconnected"), since_ns, self.why)


def format_age(ns: int) -> str:
    """Return a time in one unit: "12 s", "3 min", "2 h"."""
    seconds = max(ns, 0) // SECOND
    if seconds < 100:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 6000 else f"{seconds // 3600} h"


def read_nodes(store: Store) -> tuple[NodeStatus, ...]:
    """Return the nodes of a run, in the order in which the user named them; none if it runs on one machine."""
    processes = defaultdict[int, list[int]](list)
    for ring in store.rings.values():
        if ring.node is not None:
            processes[ring.node].append(ring.process)
    return tuple(
        NodeStatus(
            row.number,
            sanitize_line(row.name, 40),
            row.state,
            None if row.why is None else sanitize_line(row.why, 300),
            row.since_ns,
            row.heard_ns,
            exited.get("status"),
            tuple(sorted(processes[row.number])),
            bool(exited.get("stopped")),
        )
        for row in read_node_rows(store.connection)
        for exited in (json.loads(row.exit or "{}"),)
    )


def node_of(nodes: Sequence[NodeStatus], process: Process | None) -> int | None:
    """Return the number of a process's node; of the first node without a process; None on one machine."""
    return next((node.number for node in nodes if process is None or process.process in node.processes), None)


def find_rank(run: RunAnalysis, text: str) -> int | None:
    """Return the process of a rank by its number, or of the slowest rank of a node by its name; None if unknown."""
    text = text.strip().removeprefix("rank ").strip()
    if text.isdecimal():
        return next((process.process for process in run.training_processes if process.rank == int(text)), None)
    node = next((node for node in run.nodes if node.name == text), None)
    ranks = [rank for rank in run.ranks if node is not None and rank.process in node.processes]
    first = node.processes[0] if node is not None and node.processes else None
    return min(ranks, key=lambda rank: rank.wait_ns or 0.0).process if ranks else first


def gpu_name(index: int, nodes: Sequence[NodeStatus]) -> str:
    """Return the name of a GPU or host by its index in records: "GPU 3", "host"; with several nodes "GPU 3 (gpu-1)"."""
    if not nodes:
        return "host" if index < 0 else f"GPU {index}"
    number = -1 - index if index < 0 else index // NODE_DEVICES
    name = "host" if index < 0 else f"GPU {index % NODE_DEVICES}"
    return name + node_suffix(next((node.name for node in nodes if node.number == number), None))

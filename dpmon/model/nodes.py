"""The nodes of a run on several machines: the processes of each, and whether its records arrive. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.record.safe_json import int_member, load_json
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.sanitize import sanitize_line
from dpmon.store.query_results import NODE_DEVICES

if TYPE_CHECKING:
    from dpmon.model.run_snapshot import Process, RunSnapshot
    from dpmon.store.store_queries import Store

SLOW_NS = 3 * SECOND
"""A connected node sends something once a second. After this silence it is called slow."""
_LASTING = ("ended", "stopped", "failed", "left out")
"""Troubles without a duration."""
_WORDS = {"connecting": "connecting", "cut": "cut off", "refused": "left out"}
SILENT = tuple(_WORDS.values())
"""Troubles in which nothing is known about the ranks of a node now."""


class NodeProblem(NamedTuple):
    """Why the records of a node do not arrive as usual."""

    word: str
    """"connecting", "slow", "cut off", "left out", "ended", "stopped" or "failed"."""
    since_ns: int
    why: str | None = None
    """A sentence, if there is one; clean."""

    def words(self, now_ns: int) -> str:
        """The word, for how long, and why: "cut off for 12 s: connection timed out"."""
        since = "" if self.word in _LASTING else f" for {format_age(now_ns - self.since_ns)}"
        return f"{self.word}{since}{f': {self.why}' if self.why else ''}"

    def brief(self, now_ns: int, width: int) -> str:
        """The word and the time in `width` cells, or less: "cut 12 s", "cut", "c"."""
        word = self.word.partition(" ")[0]
        whole = self.word if self.word in _LASTING else f"{word} {format_age(now_ns - self.since_ns)}"
        return whole if len(whole) <= width else word[:width]


class NodeStatus(NamedTuple):
    """A machine of the run. Times in ns since the run's start, by the clock of this machine."""

    number: int
    name: str
    """The name by which the user reaches it; clean."""
    state: str
    """One of dpmon.store.query_results.NODE_STATES."""
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
        """Why its records do not arrive; None if they do, or if the trouble began after `now_ns`."""
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
        return NodeProblem(
            _WORDS.get(self.state, "cut off"), heard_ns if self.state == "cut" else self.since_ns, self.why
        )


def format_age(ns: int) -> str:
    """A time in one unit: "12 s", "3 min", "2 h"."""
    seconds = max(ns, 0) // SECOND
    return f"{seconds} s" if seconds < 100 else f"{seconds // 60} min" if seconds < 6000 else f"{seconds // 3600} h"


def read_nodes(rows: Store) -> tuple[NodeStatus, ...]:
    """The nodes of a run, in the order in which the user named them; none if it runs on one machine."""
    processes = defaultdict[int, list[int]](list)
    for ring in rows.rings.values():
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
            int_member(exited, "status"),
            tuple(sorted(processes[row.number])),
            exited.get("stopped") is True,
        )
        for row in rows.nodes()
        for exited in (_parse_exit(row.exit),)
    )


def node_of(nodes: Sequence[NodeStatus], process: Process | None) -> int | None:
    """The number of a process's node; of the first node without a process; None on one machine."""
    return next((one.number for one in nodes if process is None or process.process in one.processes), None)


def find_rank(state: RunSnapshot, text: str) -> int | None:
    """The process of a rank by its number, or of the slowest rank of a node by its name; None if there is none."""
    text = text.strip().removeprefix("rank ").strip()
    if text.isdecimal():
        return next((one.process for one in state.training_processes if one.rank == int(text)), None)
    node = next((one for one in state.nodes if one.name == text), None)
    own = [one for one in state.ranks if node is not None and one.process in node.processes]
    first = node.processes[0] if node is not None and node.processes else None
    return min(own, key=lambda one: one.wait_ns or 0.0).process if own else first


def gpu_name(index: int, nodes: Sequence[NodeStatus]) -> str:
    """The name of a GPU or host by its index in records: "GPU 3", "host"; with several nodes "GPU 3 (gpu-1)"."""
    if not nodes:
        return "host" if index < 0 else f"GPU {index}"
    number = -1 - index if index < 0 else index // NODE_DEVICES
    what = "host" if index < 0 else f"GPU {index % NODE_DEVICES}"
    return what + node_suffix(next((one.name for one in nodes if one.number == number), None))


def _parse_exit(exited: str | None) -> Mapping[str, Any]:
    if exited is None:
        return {}
    try:
        found = load_json(exited)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

"""Forwards the requests of readers to the nodes of a mirror, and collects the replies."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpmon.record.safe_json import int_member, load_json, number_member, text_member
from dpmon.record.schema import SECOND
from dpmon.record.typed_json import from_json
from dpmon.run import proc
from dpmon.run.mirror_state import REQUESTS_FILE
from dpmon.run.safe_files import read_new_lines
from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_report import StallReport, last_request_number, write_reply

if TYPE_CHECKING:
    from dpmon.mirror.mirror import Mirror
    from dpmon.store.node_table import NodeRow

MAX_WHY_WAIT_S, MAX_CONNECT_WAIT_S = 7.0, 3.0
"""Longest wait for the replies to `dpmon why`, of which up to MAX_CONNECT_WAIT_S are to connect to all nodes."""
_MAX_READ_BYTES, _MAX_TEXT_CHARS = 1 << 16, 300


@dataclass
class _RelayedRequest:
    """A request that was sent to all connected nodes."""

    number: int = 0
    node_count: int = 0
    """How many nodes it was sent to."""
    awaited: set[int] = field(default_factory=set)
    """The nodes that have not replied yet."""
    failed: dict[int, str] = field(default_factory=dict)
    """Why a node did not carry it out, by the node's number."""
    stacks: dict[int, tuple[str, StallReport]] = field(default_factory=dict)
    """For a request for stacks: name and reply of each node, by its number."""


class RequestRelay:
    """The relay of the requests of all readers."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._path = mirror.directory / REQUESTS_FILE
        self._last_request, self._last_why = _RelayedRequest(), _RelayedRequest(last_request_number(mirror.directory))
        """The last request, and the last request for stacks."""
        self._why_deadline_s: float | None = None
        """When the wait for its replies ends (monotonic s); None if the reply was written."""
        self._subscriptions: dict[tuple[int, float], list[int]] = {}
        """The processes for which a reader wants all records, by pid and start of the reader."""
        self._processes_by_node: dict[int, list[int]] = {}
        """The subscribed processes by node, with their numbers on the node."""
        self._check_readers_at = 0.0
        self._file_offset = 0
        with contextlib.suppress(OSError):
            self._file_offset = max(self._path.lstat().st_size - _MAX_READ_BYTES, 0)
        for request in self._read_new_requests():  # also requests to an earlier mirror process
            self._add_subscription(request)

    @property
    def state(self) -> dict[str, Any]:
        """Members of the state file: the last request's number, how many nodes replied and got it, and which failed."""
        request = self._last_request
        return {
            "answered": [request.number, request.node_count - len(request.awaited), request.node_count],
            "failed": {self._node_name(node): text for node, text in request.failed.items()},
        }

    def _node_name(self, node: int) -> str:
        return self._mirror.peers[node].node.name

    def poll(self, now_s: float) -> None:
        """Forward new requests, and write the reply to `dpmon why` when it is complete. `now_s`: monotonic s."""
        for request in self._read_new_requests():
            if request.get("ask") == "records":
                self._add_subscription(request)
                self._check_readers_at = now_s
            else:
                self._last_request = self._send_to_all(request)
        if self._subscriptions and now_s >= self._check_readers_at:
            self._check_readers_at = now_s + 2.0
            self._update_subscriptions()
        directory = self._mirror.directory
        if (request_number := last_request_number(directory)) > self._last_why.number:
            age_s = max((time.time_ns() - request_number) / SECOND, 0.0)
            nodes = [peer.node for peer in self._mirror.peers]
            if age_s > MAX_CONNECT_WAIT_S or not any(node.state == "connecting" and node.why is None for node in nodes):
                why = {"ask": "why", "id": request_number}
                self._last_why = self._send_to_all(why)
                self._why_deadline_s = now_s + MAX_WHY_WAIT_S - min(age_s, MAX_CONNECT_WAIT_S)
                missing_nodes = (node.number for node in nodes if node.state in ("cut", "connecting"))
                self._last_why.failed |= dict.fromkeys(missing_nodes, "it is not connected")
        if self._why_deadline_s is not None and (now_s > self._why_deadline_s or not self._last_why.awaited):
            failed = self._last_why.failed | dict.fromkeys(self._last_why.awaited, "it did not answer in time")
            missing = [f"{self._node_name(node)}: {text}" for node, text in sorted(failed.items())]
            now_ns = self._mirror.now_ns() + self._mirror.info.start_ns
            write_reply(
                directory,
                self._last_why.number,
                self._mirror.stall_detector.merge_replies(self._last_why.stacks, now_ns, missing),
            )
            self._why_deadline_s = None

    def handle_reply(self, node: NodeRow, reply: Mapping[str, Any]) -> None:
        """Note a node's reply. Raises ValueError if its report on the ranks is invalid."""
        for request in (self._last_request, self._last_why):
            if reply.get("answer") == request.number and node.number in request.awaited:
                request.awaited.discard(node.number)
                if (error := text_member(reply, "error")) is not None:
                    request.failed[node.number] = sanitize_line(error, _MAX_TEXT_CHARS)
                elif (report := reply.get("why")) is not None:
                    request.stacks[node.number] = node.name, from_json(StallReport, report)

    def drop_node(self, node: int) -> None:
        """Stop waiting for a node that was disconnected or has ended."""
        for request in (self._last_request, self._last_why):
            if node in request.awaited and self._mirror.peers[node].node.state != "ended":
                request.failed[node] = "it was disconnected before it replied"
            request.awaited.discard(node)

    def _send_to_all(self, request: Mapping[str, Any]) -> _RelayedRequest:
        """Send a request to all connected nodes."""
        text = json.dumps(request)
        relayed = _RelayedRequest(request["id"])
        for node in (peer.node.number for peer in self._mirror.peers if peer.node.state == "connected"):
            relayed.node_count += 1
            if self._mirror.links.send(node, text):
                relayed.awaited.add(node)
            else:
                relayed.failed[node] = "it accepts no requests now"
        return relayed

    def _add_subscription(self, request: Mapping[str, Any]) -> None:
        pid, start_s = int_member(request, "pid"), number_member(request, "started")
        processes = request.get("processes")
        if request.get("ask") == "records" and pid is not None and start_s is not None and isinstance(processes, list):
            self._subscriptions[pid, start_s] = [process for process in processes if type(process) is int]

    def _update_subscriptions(self) -> None:
        """Send each node the list of its processes that living readers want, if it has changed."""
        items = self._subscriptions.items()
        self._subscriptions = {reader: wanted for reader, wanted in items if wanted and proc.is_alive(*reader)}
        earlier, self._processes_by_node = self._processes_by_node, defaultdict(list)
        for process in sorted(set().union(*self._subscriptions.values())):
            node, remote_number = self._mirror.history.node_and_process(process)
            self._processes_by_node[node].append(remote_number)
        for node in earlier.keys() | self._processes_by_node.keys():
            if earlier.get(node) != self._processes_by_node.get(node):
                self.send_subscription(node)

    def send_subscription(self, node: int) -> None:
        """Ask a node for all records of the processes that readers want."""
        request = {"ask": "records", "processes": self._processes_by_node.get(node, [])}
        self._mirror.links.send(node, json.dumps(request))

    def _read_new_requests(self) -> list[Mapping[str, Any]]:
        """Return the requests that were written since the last call."""
        lines = read_new_lines(self._path, self._file_offset, _MAX_READ_BYTES)
        self._file_offset += len(lines)
        requests: list[Mapping[str, Any]] = []
        for line in lines.splitlines():
            with contextlib.suppress(ValueError):
                request = load_json(line)
                if isinstance(request, dict) and type(request.get("id")) is int:
                    requests.append(request)
        return requests

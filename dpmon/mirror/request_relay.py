"""Passes the requests of readers on to the machines of a mirror, and collects their answers."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpmon.record.safe_json import int_member, load_json, number_member, text_member
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.mirror_state import REQUESTS_FILE
from dpmon.run.safe_files import open_file
from dpmon.sanitize import sanitize_line
from dpmon.stalls.why_reply import last_request_number, wants_native, write_reply

if TYPE_CHECKING:
    from dpmon.mirror.mirror import Mirror
    from dpmon.store.query_results import NodeRow

WHY_S, BEGIN_S = 7.0, 3.0
"""Longest wait for the answers to "why is it stuck". The first BEGIN_S may pass until each machine was tried."""
_LIVING_S = 2.0
"""Time between two checks whether the readers that want all records are alive."""
_MOST_BYTES, _MOST_TEXT = 1 << 16, 300


@dataclass
class _RelayedRequest:
    """A request that was sent to all machines."""

    number: int = 0
    asked: int = 0
    """How many machines got it."""
    waited: set[int] = field(default_factory=set)
    """The machines that have not answered."""
    failed: dict[int, str] = field(default_factory=dict)
    """Why a machine did not do it, by its number."""
    stacks: dict[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """For a request for stacks: the name and the answer of each machine."""


class RequestRelay:
    """The requests of all readers."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._path = mirror.directory / REQUESTS_FILE
        self._last, self._why = _RelayedRequest(), _RelayedRequest(last_request_number(mirror.directory))
        """The last request, and the last one for stacks."""
        self._why_until: float | None = None
        """The end of the wait for its answers; None: it is answered."""
        self._wanted: dict[tuple[int, float], list[int]] = {}
        """By pid and start of a reader: the processes for which it wants all records."""
        self._whole: dict[int, list[int]] = {}
        """By machine: these processes, with their numbers there."""
        self._living_at = 0.0
        self._at = max(_size(self._path) - _MOST_BYTES, 0)
        for request in self._read_new_requests():  # also those to the mirror before this one
            self._add_subscription(request)

    @property
    def state(self) -> dict[str, Any]:
        """The number of the last request, how many machines have answered it, how many got it, and which failed."""
        last = self._last
        return {
            "answered": [last.number, last.asked - len(last.waited), last.asked],
            "failed": {self._node_name(number): text for number, text in last.failed.items()},
        }

    def _node_name(self, node: int) -> str:
        return self._mirror.machines[node].node.name

    def poll(self, now: float) -> None:
        """Pass new requests on; `now`: monotonic s."""
        for request in self._read_new_requests():
            if request.get("ask") == "records":
                self._add_subscription(request)
                self._living_at = now
            else:
                self._last = self._send_to_all(request)
        if self._wanted and now >= self._living_at:
            self._living_at = now + _LIVING_S
            self._update_subscriptions()
        directory = self._mirror.directory
        if (number := last_request_number(directory)) > self._why.number:
            age_s, nodes = max((time.time_ns() - number) / SECOND, 0.0), [each.node for each in self._mirror.machines]
            if age_s > BEGIN_S or not any(node.state == "connecting" and node.why is None for node in nodes):
                self._why = self._send_to_all({"ask": "why", "id": number, "native": wants_native(directory)})
                self._why_until = now + WHY_S - min(age_s, BEGIN_S)
                away = (node.number for node in nodes if node.state in ("cut", "connecting"))
                self._why.failed |= dict.fromkeys(away, "it is not connected")
        if self._why_until is not None and (now > self._why_until or not self._why.waited):
            failed = self._why.failed | dict.fromkeys(self._why.waited, "it did not answer in time")
            without = [f"{self._node_name(node)}: {text}" for node, text in sorted(failed.items())]
            now_ns = self._mirror.now_ns() + self._mirror.info.start_ns
            write_reply(
                directory, self._why.number, self._mirror.joint.merge_replies(self._why.stacks, now_ns, without)
            )
            self._why_until = None

    def handle_reply(self, node: NodeRow, answer: Mapping[str, Any]) -> None:
        """Take a machine's answer."""
        for sent in (self._last, self._why):
            if answer.get("answer") == sent.number and node.number in sent.waited:
                sent.waited.discard(node.number)
                if (error := text_member(answer, "error")) is not None:
                    sent.failed[node.number] = sanitize_line(error, _MOST_TEXT)
                elif isinstance(why := answer.get("why"), dict):
                    sent.stacks[node.number] = node.name, why

    def drop_node(self, node: int) -> None:
        """Stop waiting for a machine that was cut off or has ended."""
        for sent in (self._last, self._why):
            if node in sent.waited and self._mirror.machines[node].node.state != "ended":
                sent.failed[node] = "it was cut off before it answered"
            sent.waited.discard(node)

    def resend_subscription(self, node: int) -> None:
        """Ask a machine for the records that readers want, after it was connected again."""
        if node in self._whole:
            self._send_subscription(node)

    def _send_to_all(self, request: Mapping[str, Any]) -> _RelayedRequest:
        """Send a request to all machines that are connected."""
        text = json.dumps(request)
        sent = _RelayedRequest(request["id"])
        for number in (each.node.number for each in self._mirror.machines if each.node.state == "connected"):
            sent.asked += 1
            if self._mirror.links.send(number, text):
                sent.waited.add(number)
            else:
                sent.failed[number] = "it accepts no requests now"
        return sent

    def _add_subscription(self, request: Mapping[str, Any]) -> None:
        pid, started, wanted = int_member(request, "pid"), number_member(request, "started"), request.get("processes")
        if request.get("ask") == "records" and pid is not None and started is not None and isinstance(wanted, list):
            self._wanted[pid, started] = [one for one in wanted if type(one) is int]

    def _update_subscriptions(self) -> None:
        """Tell the machines which processes living readers want."""
        self._wanted = {reader: each for reader, each in self._wanted.items() if each and proc.is_alive(*reader)}
        before, there = self._whole, self._mirror.records.remote_processes()
        self._whole = defaultdict(list)
        for process in sorted({one for each in self._wanted.values() for one in each if one in there}):
            node, number = there[process]
            self._whole[node].append(number)
        for node in before.keys() | self._whole.keys():
            if before.get(node) != self._whole.get(node):
                self._send_subscription(node)

    def _send_subscription(self, node: int) -> None:
        request = {"ask": "records", "processes": self._whole.get(node, [])}
        self._mirror.links.send(node, json.dumps(request))

    def _read_new_requests(self) -> list[Mapping[str, Any]]:
        """The new requests."""
        size = _size(self._path)
        found: list[Mapping[str, Any]] = []
        if size <= self._at:
            return found
        with contextlib.suppress(OSError), open(open_file(self._path), "rb") as file:
            file.seek(self._at)
            data = file.read(_MOST_BYTES)
            self._at += data.rfind(b"\n") + 1 or len(data)
            for line in data.splitlines():
                with contextlib.suppress(ValueError):
                    request = load_json(line)
                    if isinstance(request, dict) and type(request.get("id")) is int:
                        found.append(request)
        return found


def _size(path: os.PathLike[str]) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_size
    return 0

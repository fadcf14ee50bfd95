"""Passes the requests of readers on to the machines of a mirror, and collects their answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpmon.record.plainjson import load_json
from dpmon.run.files import open_file
from dpmon.run.mirrored import ASKED_FILE
from dpmon.stalls.answer import ASKED_FILE as WHY_FILE
from dpmon.stalls.answer import save_answer, wants_native

if TYPE_CHECKING:
    from dpmon.mirror.mirror import Mirror
    from dpmon.store.answers import NodeRow

WHY_S = 7.0
"""Longest wait for the answers to "why is it stuck"."""
_MOST_BYTES = 1 << 16


class Requests:
    """The requests of all readers."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._path, self._why_path = mirror.directory / ASKED_FILE, mirror.directory / WHY_FILE
        self._at = _size(self._path)
        self._whys = _stamp(self._why_path)
        self._waited: set[int] = set()
        """Machines that have not answered the last request; `_asked` is its number."""
        self._asked, self._count = 0, 0
        self._why: int | None = None
        """The request for stacks that is not answered, and the machines that have not."""
        self._why_waited: set[int] = set()
        self._why_until = 0.0
        self._stacks: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._whole: Mapping[int, list[int]] = {}
        """By machine: the processes of which a reader wants all records."""

    @property
    def answered(self) -> list[int]:
        """The number of the last request, how many machines have answered it, and how many got it."""
        return [self._asked, self._count - len(self._waited), self._count]

    def look(self, now: float) -> None:
        """Pass new requests on; `now`: monotonic s."""
        for line in self._lines():
            request = {}
            with contextlib.suppress(ValueError):
                request = load_json(line)
            if isinstance(request, dict) and type(request.get("id")) is int:
                self._send(request)
        if (stamp := _stamp(self._why_path)) > self._whys:
            self._whys = self._why = stamp
            self._why_until, self._stacks = now + WHY_S, {}
            self._send({"ask": "why", "id": stamp, "native": wants_native(self._mirror.directory)})
            self._why_waited = set(self._waited)
        if self._why is not None and (now > self._why_until or not self._why_waited):
            found = self._mirror.joint.joined(self._stacks, self._mirror.now_ns() + self._mirror.info.start_ns)
            save_answer(self._mirror.directory, self._why, found)
            self._why = None

    def take(self, node: NodeRow, answer: Mapping[str, Any]) -> None:
        """Take a machine's answer."""
        number = answer.get("answer")
        if number == self._asked:
            self._waited.discard(node.number)
        if number == self._why:
            self._why_waited.discard(node.number)
            if isinstance(why := answer.get("why"), dict):
                self._stacks[node.number] = node.name, why

    def lose(self, node: int) -> None:
        """Wait no longer for a machine."""
        self._waited.discard(node)
        self._why_waited.discard(node)

    def renew(self, node: int) -> None:
        """Ask a machine that was connected again for the records that a reader wants."""
        if node in self._whole:
            self._mirror.links.send(node, json.dumps({"ask": "records", "processes": self._whole[node]}))

    def _send(self, request: Mapping[str, Any]) -> None:
        whole: dict[int, list[int]] = defaultdict(list)
        if request.get("ask") == "records":
            there = self._mirror.records.processes()
            for process in request.get("processes") or ():
                if process in there:
                    node, number = there[process]
                    whole[node].append(number)
            self._whole = dict(whole)
        self._asked, self._waited = request["id"], set()
        for machine in self._mirror.machines:
            number = machine.node.number
            own = {**request, "processes": whole[number]} if request.get("ask") == "records" else request
            if machine.node.state == "connected" and self._mirror.links.send(number, json.dumps(own)):
                self._waited.add(number)
        self._count = len(self._waited)

    def _lines(self) -> list[bytes]:
        size = _size(self._path)
        if size <= self._at:
            return []
        with contextlib.suppress(OSError), open(open_file(self._path), "rb") as file:
            file.seek(self._at)
            data = file.read(_MOST_BYTES)
            self._at += data.rfind(b"\n") + 1 or len(data)
            return data.splitlines()
        return []


def _size(path: os.PathLike[str]) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_size
    return 0


def _stamp(path: os.PathLike[str]) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_mtime_ns
    return 0

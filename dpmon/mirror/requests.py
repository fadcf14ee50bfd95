"""Passes the requests of readers on to the machines of a mirror, and collects their answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpmon.cleaning import clean
from dpmon.record.plainjson import load_json, number_in, text_in, whole_in
from dpmon.run import proc
from dpmon.run.files import open_file
from dpmon.run.mirrored import ASKED_FILE
from dpmon.stalls.answer import request_in, save_answer, wants_native

if TYPE_CHECKING:
    from dpmon.mirror.mirror import Mirror
    from dpmon.store.answers import NodeRow

WHY_S = 7.0
"""Longest wait for the answers to "why is it stuck"."""
_LIVING_S = 2.0
"""Time between two looks whether the readers that want all records live."""
_MOST_BYTES, _MOST_TEXT = 1 << 16, 300


class Requests:
    """The requests of all readers."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._path = mirror.directory / ASKED_FILE
        self._asked, self._count = 0, 0
        """The number of the last request, and how many machines got it."""
        self._waited: set[int] = set()
        """Machines that have not answered it."""
        self._failed: dict[int, str] = {}
        """What machines answered that did not do it."""
        self._last_why = request_in(mirror.directory)
        self._why: int | None = None
        """The request for stacks that is not answered, and the machines that have not."""
        self._why_waited: set[int] = set()
        self._why_until = 0.0
        self._stacks: dict[int, Mapping[str, Any]] = {}
        self._without: dict[int, str] = {}
        """Why machines have no stacks."""
        self._wanted: dict[tuple[int, float], list[int]] = {}
        """By reader, its pid and start: the processes of which it wants all records."""
        self._whole: dict[int, list[int]] = {}
        """The same by machine, with the numbers there."""
        self._living_at = 0.0
        self._at = max(_size(self._path) - _MOST_BYTES, 0)
        for request in self._new():  # of the mirror before this one
            self._take_wanted(request)

    @property
    def state(self) -> dict[str, Any]:
        """The number of the last request, how many machines have answered it, how many got it, and which failed."""
        return {
            "answered": [self._asked, self._count - len(self._waited), self._count],
            "failed": {self._name(number): text for number, text in self._failed.items()},
        }

    def _name(self, node: int) -> str:
        return self._mirror.machines[node].node.name

    def look(self, now: float) -> None:
        """Pass new requests on; `now`: monotonic s."""
        for request in self._new():
            if request.get("ask") == "records":
                self._take_wanted(request)
                self._living_at = now
            else:
                self._asked = request["id"]
                self._waited, self._failed = self._send(request)
                self._count = len(self._waited) + len(self._failed)
        if self._wanted and now >= self._living_at:
            self._living_at = now + _LIVING_S
            self._pass_wanted()
        if (last := request_in(self._mirror.directory)) > self._last_why:
            self._last_why = self._why = last
            self._why_until, self._stacks = now + WHY_S, {}
            native = wants_native(self._mirror.directory)
            self._why_waited, self._without = self._send({"ask": "why", "id": last, "native": native})
            away = (each.node.number for each in self._mirror.machines if each.node.state in ("cut", "connecting"))
            self._without |= dict.fromkeys(away, "it is not connected")
        if self._why is not None and (now > self._why_until or not self._why_waited):
            self._without |= dict.fromkeys(self._why_waited, f"it did not answer within {WHY_S:.0f} s")
            stacks = {number: (self._name(number), found) for number, found in self._stacks.items()}
            without = [f"{self._name(number)}: {text}" for number, text in sorted(self._without.items())]
            now_ns = self._mirror.now_ns() + self._mirror.info.start_ns
            save_answer(self._mirror.directory, self._why, self._mirror.joint.joined(stacks, now_ns, without))
            self._why = None

    def take(self, node: NodeRow, answer: Mapping[str, Any]) -> None:
        """Take a machine's answer."""
        number, error = answer.get("answer"), text_in(answer, "error")
        error = None if error is None else clean(error, _MOST_TEXT)
        if number == self._asked:
            self._waited.discard(node.number)
            if error is not None:
                self._failed[node.number] = error
        if number == self._why:
            self._why_waited.discard(node.number)
            if isinstance(why := answer.get("why"), dict):
                self._stacks[node.number] = why
            else:
                self._without[node.number] = error or "its supervisor did not answer"

    def lose(self, node: int) -> None:
        """Wait no longer for a machine, which was cut off or has ended."""
        ended = self._mirror.machines[node].node.state == "ended"
        for waited, failed in ((self._waited, self._failed), (self._why_waited, self._without)):
            if node in waited and not ended:
                failed[node] = "it was cut off before it answered"
            waited.discard(node)

    def renew(self, node: int) -> None:
        """Ask a machine that was connected again for the records that a reader wants."""
        if node in self._whole:
            self._tell(node)

    def _send(self, request: Mapping[str, Any]) -> tuple[set[int], dict[int, str]]:
        """Send a request to all machines; return those that got it, and why others did not."""
        text = json.dumps(request)
        connected = [each.node.number for each in self._mirror.machines if each.node.state == "connected"]
        got = {number for number in connected if self._mirror.links.send(number, text)}
        return got, dict.fromkeys((number for number in connected if number not in got), "it takes no requests now")

    def _take_wanted(self, request: Mapping[str, Any]) -> None:
        pid, started, wanted = whole_in(request, "pid"), number_in(request, "started"), request.get("processes")
        if request.get("ask") == "records" and pid is not None and started is not None and isinstance(wanted, list):
            self._wanted[pid, started] = [one for one in wanted if type(one) is int]

    def _pass_wanted(self) -> None:
        """Tell the machines which processes living readers want."""
        self._wanted = {reader: each for reader, each in self._wanted.items() if each and proc.alive(*reader)}
        before, there = self._whole, self._mirror.records.processes()
        self._whole = defaultdict(list)
        for process in sorted({one for each in self._wanted.values() for one in each if one in there}):
            node, number = there[process]
            self._whole[node].append(number)
        for node in before.keys() | self._whole.keys():
            if before.get(node) != self._whole.get(node):
                self._tell(node)

    def _tell(self, node: int) -> None:
        request = {"ask": "records", "processes": self._whole.get(node, [])}
        self._mirror.links.send(node, json.dumps(request))

    def _new(self) -> list[Mapping[str, Any]]:
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

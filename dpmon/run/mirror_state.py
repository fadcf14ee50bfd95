"""The state of a mirror's processes, for its readers, and the requests that readers send to it (dpmon.mirror).

The mirror writes one small file once per second, so that a reader of a thousand ranks need not open a thousand files.
Requests are lines of another file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpmon.record.safe_json import int_member, load_json, text_member
from dpmon.run import proc
from dpmon.run.safe_files import open_file, read_file
from dpmon.sanitize import sanitize_line

STATE_FILE, REQUESTS_FILE = "nodes.json", "asked.jsonl"
_MAX_BYTES = 8 << 20


def parse_activities(value: object, start_ns: int = 0) -> dict[int, tuple[str, int]]:
    """Return the activity of each process, and its start (ns), from the JSON of `activities_by_word`.

    Damaged entries are omitted. `start_ns` is added to each time except 0.
    """
    activities = {}
    for word, numbers in value.items() if isinstance(value, Mapping) else ():
        activity = sanitize_line(word)[:40]
        for process_index, since_ns in numbers.items() if isinstance(numbers, Mapping) else ():
            if type(since_ns) is int and process_index.isdecimal() and len(process_index) < 10:
                activities[int(process_index)] = activity, since_ns and since_ns + start_ns
    return activities


def activities_by_word(activities: Mapping[int, tuple[str, int]]) -> dict[str, dict[int, int]]:
    """Return the JSON that `parse_activities` reads: grouped by word, because there may be a thousand processes."""
    starts_by_activity: dict[str, dict[int, int]] = {}
    for process_index, (activity, since_ns) in activities.items():
        starts_by_activity.setdefault(activity, {})[process_index] = since_ns
    return starts_by_activity


class NodeReplies(NamedTuple):
    """The replies of a mirror's nodes to a request."""

    reply_count: int
    request_count: int
    failures: Mapping[str, str] = {}
    """Why a node did not carry it out, by the node's name, for some time after the request; sanitized."""


class MirrorState:
    """The state of the mirror in `directory`, and its requests. `start_ns`: the start of its run (monotonic)."""

    def __init__(self, directory: Path, start_ns: int) -> None:
        self._path = directory / STATE_FILE
        self._requests_path = directory / REQUESTS_FILE
        self._start_ns = start_ns
        self._stamp = 0
        self._state: Mapping[str, Any] = {}
        self._activities: dict[int, tuple[str, int]] | None = None
        """Parsed from `_state` on demand; None until then."""
        self._request_id: int | None = None
        """Id of the last request of this reader."""

    def _read(self) -> None:
        """Read the mirror's file if it was replaced."""
        with contextlib.suppress(OSError, ValueError):
            stamp = os.lstat(self._path).st_mtime_ns
            if stamp != self._stamp:
                self._state = load_json(read_file(self._path, _MAX_BYTES))
                self._stamp, self._activities = stamp, None

    @property
    def state(self) -> Mapping[str, Any]:
        """The members of the mirror's file, as last written."""
        self._read()
        return self._state

    def activities(self) -> dict[int, tuple[str, int]]:
        """Return the activity of each process, and its start (monotonic ns)."""
        self._read()
        if self._activities is None:
            self._activities = parse_activities(self._state.get("doing"), self._start_ns)
        return self._activities

    def time_member(self, name: str) -> int | None:
        """Return the time under a name (monotonic ns); None if there is none."""
        time_ns = int_member(self.state, name)
        return None if time_ns is None else time_ns + self._start_ns

    def text_member(self, name: str) -> str | None:
        """Return the text under a name; None if there is none."""
        return text_member(self.state, name)

    def send_request(self, request: Mapping[str, Any]) -> int:
        """Send a request to all nodes. Return the number of connected nodes. Raises OSError if it cannot be sent."""
        self._request_id = self._write(request)
        return len(self.state.get("connected") or ())

    def subscribe(self, processes: Collection[int]) -> None:
        """Ask for all records of these processes while the caller's process lives. Raises OSError if that fails."""
        pid = os.getpid()
        self._write({"ask": "records", "processes": sorted(processes), "pid": pid, "started": proc.start_time_s(pid)})

    def _write(self, request: Mapping[str, Any]) -> int:
        """Write a request. Return its id."""
        request_id = time.time_ns()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with open(open_file(self._requests_path, flags), "a", encoding="utf-8") as file:
            file.write(json.dumps({**request, "id": request_id}) + "\n")
        return request_id

    def replies(self) -> NodeReplies | None:
        """Return the replies to the last request of this reader; None if it has sent none."""
        if self._request_id is None:
            return None
        request_id, reply_count, request_count = self.state.get("answered") or (-1, 0, 0)
        if request_id < self._request_id:
            return NodeReplies(0, len(self.state.get("connected") or ()))
        failures = self.state.get("failed") or {}
        if time.time_ns() - self._request_id > 30 * 10**9:
            failures = {}
        return NodeReplies(
            reply_count,
            request_count,
            {sanitize_line(name, 40): sanitize_line(text, 300) for name, text in failures.items()},
        )

"""What readers of a mirror see of its processes, and the requests that they send to it (dpmon.mirror).

The mirror writes one small file once a second, so that a thousand ranks do not cost a thousand files. Requests are
lines of another file.
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

STATE_FILE, ASKED_FILE = "nodes.json", "asked.jsonl"
_MOST_BYTES = 8 << 20
_MOST_WORD = 40
_SHOWN_NS = 30 * 10**9
"""How long a reader shows which machines did not do what they were asked for."""


def parse_activities(value: object, start_ns: int = 0) -> dict[int, tuple[str, int]]:
    """Return what each process does, and since when (ns), from JSON by word and number; leave out what is damaged.

    `start_ns` is added to each time except 0.
    """
    found = {}
    for word, numbers in value.items() if isinstance(value, Mapping) else ():
        what = sanitize_line(word)[:_MOST_WORD]
        for number, since in numbers.items() if isinstance(numbers, Mapping) else ():
            if type(since) is int and number.isdecimal() and len(number) < 10:
                found[int(number)] = what, since and since + start_ns
    return found


def activities_by_word(doing: Mapping[int, tuple[str, int]]) -> dict[str, dict[int, int]]:
    """Return the JSON that `parse_activities` reads: grouped by word, because there may be a thousand processes."""
    found: dict[str, dict[int, int]] = {}
    for number, (what, since) in doing.items():
        found.setdefault(what, {})[number] = since
    return found


class NodeReplies(NamedTuple):
    """How the machines of a mirror have answered a request."""

    answered: int
    asked: int
    failed: Mapping[str, str] = {}
    """Why a machine did not do it, by its name, for some time after the request; both clean."""


class MirrorState:
    """The processes of the mirror in `directory`; `start_ns`: the start of its run (monotonic)."""

    def __init__(self, directory: Path, start_ns: int) -> None:
        self._path = directory / STATE_FILE
        self._asked_path = directory / ASKED_FILE
        self._start_ns = start_ns
        self._stamp = 0
        self._state: Mapping[str, Any] = {}
        self._doing: dict[int, tuple[str, int]] | None = {}
        """From `_state`; None until it is asked for."""
        self._asked: int | None = None
        """The last request of this reader."""

    def _read(self) -> None:
        """Read what the mirror wrote last, if it is new."""
        with contextlib.suppress(OSError, ValueError):
            stamp = os.lstat(self._path).st_mtime_ns
            if stamp != self._stamp:
                found = load_json(read_file(self._path, _MOST_BYTES))
                self._state, self._stamp, self._doing = found if isinstance(found, dict) else {}, stamp, None

    @property
    def state(self) -> Mapping[str, Any]:
        """What the mirror wrote last."""
        self._read()
        return self._state

    def activities(self) -> dict[int, tuple[str, int]]:
        """What each process does, and since when (monotonic ns)."""
        self._read()
        if self._doing is None:
            self._doing = parse_activities(self._state.get("doing"), self._start_ns)
        return self._doing

    def time_member(self, name: str) -> int | None:
        """The time under a name (monotonic ns)."""
        at = int_member(self.state, name)
        return None if at is None else at + self._start_ns

    def text_member(self, name: str) -> str | None:
        """The text under a name."""
        return text_member(self.state, name)

    def send_request(self, request: Mapping[str, Any]) -> int:
        """Send a request to all machines; return the number of those that it can reach. OSError if that fails."""
        self._asked = self._write(request)
        return len(self.state.get("connected") or ())

    def subscribe(self, processes: Collection[int]) -> None:
        """Ask for all records of these processes while the caller's process lives. OSError if that fails."""
        pid = os.getpid()
        self._write({"ask": "records", "processes": sorted(processes), "pid": pid, "started": proc.start_time_s(pid)})

    def _write(self, request: Mapping[str, Any]) -> int:
        """Write a request; return its number."""
        number = time.time_ns()
        line = json.dumps({**request, "id": number}).encode() + b"\n"
        fd = open_file(self._asked_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
        return number

    def replies(self) -> NodeReplies | None:
        """The answers to the last request of this reader; None without one."""
        if self._asked is None:
            return None
        found = self.state.get("answered")
        if not isinstance(found, list) or [*map(type, found)] != [int] * 3 or found[0] < self._asked:
            return NodeReplies(0, len(self.state.get("connected") or ()))
        failed = self.state.get("failed")
        if not isinstance(failed, dict) or time.time_ns() - self._asked > _SHOWN_NS:
            failed = {}
        return NodeReplies(
            found[1],
            found[2],
            {sanitize_line(name, 40): sanitize_line(str(text), 300) for name, text in failed.items()},
        )

    def ended_counts(self) -> tuple[int, int]:
        """How many machines' runs have ended, and the number of machines."""
        found = self.state.get("ended")
        return (found[0], found[1]) if isinstance(found, list) and [*map(type, found)] == [int] * 2 else (0, 0)

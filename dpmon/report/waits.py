"""When a run's command waited for a line of input, and whose steps have that time."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.report.pause_spans import Span

if TYPE_CHECKING:
    from dpmon.store.queries import Store

__all__ = ["KEPT", "Inputs", "Wait", "inputs_in"]

KEPT = 1000
"""The longest waits: where there were more, they are what a step can have been long by."""


class Wait(NamedTuple):
    """A wait for input of a process that trains: its begin and end (ns)."""

    process: int
    begin_ns: int
    end_ns: int


class Inputs:
    """Takes `input` and `process` records."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        """By pid, the number of the process that had it last."""
        self._early: dict[int, list[Span]] = {}
        """By pid, for processes that have no number yet."""
        self._found: list[tuple[int, Span, int]] = []
        """A heap, by how long they were: that, from when to when, and whose (a pid; -1: not told)."""

    def process(self, data: Mapping[str, Any]) -> list[Wait]:
        """Take a `process` record, which must have a number. Return its waits whose records came earlier."""
        if type(data.get("pid")) is not int:
            return []
        self._pids[data["pid"]] = data["process"]
        return [Wait(data["process"], *span) for span in self._early.pop(data["pid"], ())]

    def event(self, data: Mapping[str, Any]) -> list[Wait]:
        """Take an `input` record: times in s since the run's start. A record that makes no sense is ignored.

        Return the wait if the process is known; otherwise `process` returns it later.
        """
        at, took, pid = data.get("t_s"), data.get("waited_s"), data.get("pid")
        if not (_is_time(at) and _is_time(took)):
            return []
        begin, lasted = int(at * 1e9), int(took * 1e9)  # type: ignore[operator]
        one = lasted, (begin, begin + lasted), pid if type(pid) is int else -1
        if len(self._found) < KEPT:
            heappush(self._found, one)
        else:
            heappushpop(self._found, one)
        process = self._pids.get(one[2])
        if process is not None:
            return [Wait(process, *one[1])]
        early = self._early.setdefault(one[2], [])
        if len(self._early) <= KEPT and len(early) < KEPT:
            early.append(one[1])
        return []

    def spans(self) -> list[tuple[int | None, Span]]:
        """From when to when (ns) which process waited; None: one that does not train, such as a launcher."""
        return [(self._pids.get(pid), span) for _, span, pid in sorted(self._found, key=lambda one: one[1])]


def inputs_in(store: Store) -> Inputs:
    """All waits for input of a run."""
    found = Inputs()
    for event in store.events("process", "input"):
        if event.kind == "input":
            found.event(event.data)
        elif type(event.data.get("process")) is int:
            found.process(event.data)
    return found


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9

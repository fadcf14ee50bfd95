"""When a run's command waited for a line of input, and whose steps have that time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpmon.run.pauses import Span

__all__ = ["Inputs"]

KEPT = 1000


class Inputs:
    """Takes `input` and `process` records."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        """By pid, the number of the process that had it last."""
        self._found: list[tuple[int | None, Span]] = []

    def process(self, data: Mapping[str, Any]) -> None:
        """A `process` record; its process must be a number."""
        if type(data.get("pid")) is int:
            self._pids[data["pid"]] = data["process"]

    def event(self, data: Mapping[str, Any]) -> None:
        """An `input` record: times in s since the run's start; what makes no sense is left out."""
        at, took, pid = data.get("t_s"), data.get("waited_s"), data.get("pid")
        if len(self._found) >= KEPT or not (_is_time(at) and _is_time(took)):
            return
        begin = int(at * 1e9)  # type: ignore[operator]
        self._found.append((pid if type(pid) is int else None, (begin, begin + int(took * 1e9))))  # type: ignore[operator]

    def spans(self) -> list[tuple[int | None, Span]]:
        """From when to when (ns) which process waited; None: one that does not train, such as a launcher."""
        return [(None if pid is None else self._pids.get(pid), span) for pid, span in self._found]


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9

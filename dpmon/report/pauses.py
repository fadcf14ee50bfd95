"""The pauses of a run: when each began, after which step, how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.report.story import Paused

__all__ = ["Pauses", "Stretch", "together", "within"]

KEPT = 1000
_LEFT_OUT = -1

Stretch = tuple[int, int]
"""Begin and end in ns since the run's start."""


class Pauses:
    """Takes `pause` records and steps, those of one process in their order."""

    def __init__(self) -> None:
        self.found: list[Paused] = []
        self.left_out = 0
        """Beyond KEPT."""
        self._open: dict[int, int] = {}
        """By process the place of the pause it is in."""

    def event(self, data: Mapping[str, Any]) -> None:
        """A `pause` record; its process must be a number."""
        process, paused = data["process"], data.get("paused")
        if not isinstance(paused, bool):
            return
        refused, reason = (value if isinstance(value := data.get(key), str) else None for key in ("refused", "reason"))
        at = _ns(data.get("t_s"))
        step = value if type(value := data.get("step")) is int else None
        place = None if refused is not None else self._open.pop(process, None)
        if paused or refused is not None:
            self._keep(Paused(process, step, at, None, None, refused is None, reason, refused))
            return
        took = _ns(data.get("paused_s"))
        if place == _LEFT_OUT:
            return
        if place is not None:
            began = self.found[place].start_ns
            if took is None and at is not None and began is not None:
                took = max(at - began, 0)
            self.found[place] = self.found[place]._replace(
                took_ns=took, end_ns=_sum(began, took), on=False, reason=reason
            )
        elif took is not None:  # that it began was not recorded
            start = None if at is None else max(at - took, 0)
            self._keep(Paused(process, step, start, took, at, False, reason, None))

    def _keep(self, pause: Paused) -> None:
        if len(self.found) >= KEPT:
            self.left_out += 1
            if pause.on:
                self._open[pause.process] = _LEFT_OUT
            return
        if pause.on:
            self._open[pause.process] = len(self.found)
        self.found.append(pause)

    def step(self, process: int, start: int) -> None:
        """A step that began after a pause whose end was not recorded: that one is over, and took no longer."""
        place = self._open.get(process)
        if place is None:
            return
        began = None if place == _LEFT_OUT else self.found[place].start_ns
        if began is not None and start >= began:
            del self._open[process]
            self.found[place] = self.found[place]._replace(end_ns=start, on=False)


def _ns(seconds: object) -> int | None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        return None
    return int(seconds * 1e9)


def _sum(start: int | None, took: int | None) -> int | None:
    return None if start is None or took is None else start + took


def together(pauses: Sequence[Paused], processes: int, end_ns: int | None) -> list[Stretch]:
    """The stretches in which all of so many processes were paused; one that goes on does so until `end_ns`."""
    edges: list[tuple[int, int]] = []
    for pause in pauses:
        end = end_ns if pause.on else pause.end_ns
        if pause.refused is None and pause.start_ns is not None and end is not None and end > pause.start_ns:
            edges += [(pause.start_ns, 1), (end, -1)]
    found: list[Stretch] = []
    count = since = 0
    for at, change in sorted(edges):
        before, count = count, count + change
        if before < processes <= count:
            since = at
        elif count < processes <= before:
            found.append((since, at))
    return found


def within(stretches: Sequence[Stretch], begin_ns: int, end_ns: int) -> int:
    """How much of the time from the one to the other they are, ns."""
    return sum(max(min(end, end_ns) - max(begin, begin_ns), 0) for begin, end in stretches)

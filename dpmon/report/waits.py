"""The run's waits for a line of input, and the processes that waited."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from dpmon.model.members import ns_in
from dpmon.record.kinds import Event

KEPT = 1000
"""Most waits to keep. The longest are kept, because only they can explain a long step."""


def waits_in(events: Sequence[Event]) -> list[tuple[int | None, int, int]]:
    """The longest waits for input in order of time: process (None: one that does not train), start, end (ns).

    `events`: all of the kinds "process" and "input". Invalid records are ignored.
    """
    numbers: dict[int, int] = {}
    """By pid, the number of its last process."""
    found: list[tuple[int, int, int]] = []
    for event in events:
        pid, process = event.data.get("pid"), event.data.get("process")
        at, took = ns_in(event.data, "t_s"), ns_in(event.data, "waited_s")
        if event.kind == "input" and at is not None and took is not None:
            found.append((took, at, pid if type(pid) is int else -1))
        elif event.kind == "process" and type(pid) is int and type(process) is int:
            numbers[pid] = process
    longest = sorted(nlargest(KEPT, found), key=lambda one: (one[1], one[0]))
    return [(numbers.get(pid), at, at + took) for took, at, pid in longest]

"""The events of a run, from its state. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dpmon.model.finding import Finding
from dpmon.model.state import State
from dpmon.model.stragglers import sentence
from dpmon.record.schema import SECOND
from dpmon.report.health import HAS_FAILED, Health

WEIGHTY = 0.3
"""Weight of the findings that are told."""
STEADY_S = 60
"""A straggler is told when it has been the same for this long, and again when it has been gone for this long."""


class Happened(NamedTuple):
    """An event: its type, a key that is unique among the events of this type of the run, and its data."""

    type: str
    key: str
    data: dict[str, Any]


class Happenings:
    """Finds the events of one run, in one look after the other."""

    def __init__(self, alive_s: float | None = None) -> None:
        """`alive_s`: seconds between two events `alive`; None for no such events."""
        self._alive_s = alive_s
        self._straggler: tuple[int, float] | None = None
        """The rank that holds the others up, and since when (s); -1 for none."""
        self._told = -1
        """The straggler that was told last; -1 for none."""

    def look(
        self, state: State, now: Health, elapsed_s: float, found: Sequence[Finding] | None = None
    ) -> Iterator[Happened]:
        """The events that a look shows, also those that earlier looks have shown. `found`: the findings, if known."""
        yield Happened("dpmon.run.started", "", {})
        for stall in state.stalls:
            at = {"since_s": stall.since_ns / SECOND, "text": stall.text}
            yield Happened("dpmon.run.stalled", str(stall.since_ns), {**at, "ranks": stall.ranks})
            if stall.end_ns is not None and now.end is None:
                lasted = (stall.end_ns - stall.since_ns) / SECOND
                yield Happened("dpmon.run.resumed", str(stall.since_ns), {**at, "lasted_s": lasted})
        yield from self._slow_rank(state, elapsed_s)
        for finding in found or ():
            if finding.weight >= WEIGHTY and finding.kind != "straggler":
                kind = "dpmon.run.slowed" if finding.kind == "drift" else "dpmon.finding"
                yield Happened(kind, finding.kind, finding._asdict())
        if now.end is not None:
            failed = now.status == HAS_FAILED
            yield Happened(f"dpmon.run.{'failed' if failed else 'ended'}", "", {"end": now.end, "reason": now.reason})
        elif self._alive_s is not None:
            yield Happened("dpmon.run.alive", str(int(elapsed_s // self._alive_s)), {})

    def _slow_rank(self, state: State, elapsed_s: float) -> Iterator[Happened]:
        slow = state.straggler
        rank = -1 if slow is None else slow.rank
        if self._straggler is None or self._straggler[0] != rank:
            self._straggler = rank, elapsed_s
        since = self._straggler[1]
        if rank == self._told or elapsed_s - since < STEADY_S:
            return
        before, self._told = self._told, rank
        text = f"rank {before} holds the others up no longer" if slow is None else sentence(slow, lately=True)
        yield Happened("dpmon.finding", f"straggler {rank} {since:.0f}", {"kind": "straggler", "text": text})

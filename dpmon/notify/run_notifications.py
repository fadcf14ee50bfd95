"""The events of a run, from its state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dpmon.model.finding_text import Finding
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_snapshot import RunSnapshot
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.schema import SECOND
from dpmon.report.health import HAS_FAILED, Health
from dpmon.text.formatting import format_long_duration

WEIGHTY = 0.3
"""Weight of the findings that are told."""
STEADY_S = 60
"""A straggler is told when it has been the same for this long, and again when it has been gone for this long."""
_TOLD_OTHERWISE = ("straggler", "stall", "quiet", "failed")
"""Findings that are events of another type."""
_STRAGGLER = "straggler/"


class Notification(NamedTuple):
    """An event. Type and key together are unique in the run, and stay the same when it is found again."""

    type: str
    key: str
    data: dict[str, Any]
    at_s: float | None = None
    """When it happened, in seconds since the run's start; None: now."""

    def id_in(self, run: str) -> str:
        """The id of the event in the run with this id."""
        return "/".join(part for part in (run, self.type, self.key) if part)


class NotificationFinder:
    """Finds the events of one run, in one look after the other."""

    def __init__(self, alive_s: float | None = None, ids: Iterable[str] = ()) -> None:
        """`alive_s`: seconds between two events `alive`; None: none. `ids`: those of events that were told before."""
        self._alive_s = alive_s
        before = [each.rpartition(_STRAGGLER)[2].partition("/") for each in ids if _STRAGGLER in each]
        self._slow = before[-1][2] if before else ""
        """The rank of the newest event about a straggler; empty for none."""
        self._number = len(before)
        self._seen: tuple[str, float] = self._slow, 0.0
        """The rank that holds the others up, or empty, and since when (s)."""
        self._stragglers: list[Notification] = []

    def find(
        self, state: RunSnapshot, now: Health, elapsed_s: float, found: Sequence[Finding] = ()
    ) -> Iterator[Notification]:
        """All events so far, also those that earlier looks have shown, in their order. `found`: the newest findings."""
        yield Notification("dpmon.run.started", "", {"text": "the run began"}, 0.0)
        last = final_stall(state.stalls, state.newest_ns)
        for stall in state.stalls:
            key, data = str(stall.since_ns), {"since_s": stall.since_ns / SECOND, "text": stall.text}
            yield Notification("dpmon.run.stalled", key, {**data, "ranks": stall.ranks}, stall.noticed_ns / SECOND)
            if stall.end_ns is not None and (now.end is None or stall is not last):
                lasted_ns = stall.duration_ns(stall.end_ns)
                data |= {"lasted_s": lasted_ns / SECOND, "text": f"goes on after {format_long_duration(lasted_ns)}"}
                yield Notification("dpmon.run.resumed", key, data, stall.end_ns / SECOND)
        self._find_straggler_change(state, elapsed_s)
        yield from self._stragglers
        for finding in found:
            if finding.weight >= WEIGHTY and finding.kind not in _TOLD_OTHERWISE:
                kind = "dpmon.run.slowed" if finding.kind == "drift" else "dpmon.finding"
                yield Notification(kind, finding.kind, finding._asdict())
        if now.end is not None:
            kind = "dpmon.run.failed" if now.exit_status == HAS_FAILED else "dpmon.run.ended"
            text = now.sentence(elapsed_s)
            text += f"; in a stall: {last.text}" if last is not None else ""
            yield Notification(kind, "", {"end": now.end, "text": text}, now.since_s)
        elif self._alive_s is not None:
            yield Notification(
                "dpmon.run.alive", str(int(elapsed_s // self._alive_s)), {"text": now.sentence(elapsed_s)}
            )

    def _find_straggler_change(self, state: RunSnapshot, elapsed_s: float) -> None:
        found = state.straggler
        rank = "" if found is None else str(found.rank)
        if rank != self._seen[0]:
            self._seen = rank, elapsed_s
        if rank == self._slow or elapsed_s - self._seen[1] < STEADY_S:
            return
        text = (
            f"rank {self._slow} no longer holds the others up"
            if found is None
            else straggler_sentence(found, lately=True)
        )
        self._slow, self._number = rank, self._number + 1
        data = {"kind": "straggler", "rank": None if found is None else found.rank, "text": text}
        self._stragglers.append(Notification("dpmon.finding", f"{_STRAGGLER}{self._number}/{rank}", data))

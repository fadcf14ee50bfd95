"""Finds the events of a run in snapshots of its state, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_snapshot import RunSnapshot
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.schema import SECOND
from dpmon.report.health import HAS_FAILED, Health
from dpmon.text.formatting import format_long_duration

MIN_WEIGHT = 0.3
"""Smallest weight of a finding that is an event."""
MIN_STRAGGLER_S = 60
"""Report a straggler after it has been the same rank for this long, and report its end after it has been gone for this
long."""
_OTHER_EVENT_KINDS = ("straggler", "stall", "quiet", "failed")
"""Kinds of findings that are reported as events of another type."""
_STRAGGLER_PREFIX = "straggler/"


class Notification(NamedTuple):
    """One notification. (type, key) is unique within a run and stable: finding it again gives the same pair."""

    type: str
    key: str
    data: dict[str, Any]
    at_s: float | None = None
    """Time of the event in seconds since the run's start; None means now."""

    def id_in(self, run_id: str) -> str:
        """Return the notification's id, which begins with the id of the run."""
        return "/".join(part for part in (run_id, self.type, self.key) if part)


class NotificationFinder:
    """Finder of the notifications of one run, called with one snapshot after the other."""

    def __init__(self, alive_s: float | None = None, sent_ids: Iterable[str] = ()) -> None:
        """`alive_s`: seconds between two `alive` events; None for no such events. `sent_ids`: ids of earlier ones."""
        self._alive_s = alive_s
        changes = [sent_id for sent_id in sent_ids if _STRAGGLER_PREFIX in sent_id]
        self._reported_rank = ""
        """The rank of the newest notification about a straggler; empty for none."""
        if changes:
            _, _, number_and_rank = changes[-1].rpartition(_STRAGGLER_PREFIX)
            _, _, self._reported_rank = number_and_rank.partition("/")
        self._change_count = len(changes)
        self._straggler_rank = self._reported_rank
        """The rank that delays the others now; empty for none."""
        self._straggler_since_s = 0.0
        self._straggler_changes: list[Notification] = []

    def find(
        self, snapshot: RunSnapshot, health: Health, elapsed_s: float, findings: Sequence[Finding] = ()
    ) -> Iterator[Notification]:
        """Yield every notification of the run so far, in order, including those already found."""
        yield Notification("dpmon.run.started", "", {"text": "the run began"}, 0.0)
        last_stall = final_stall(snapshot.stalls, snapshot.newest_ns)
        for stall in snapshot.stalls:
            key, data = str(stall.since_ns), {"since_s": stall.since_ns / SECOND, "text": stall.text}
            yield Notification("dpmon.run.stalled", key, {**data, "ranks": stall.ranks}, stall.noticed_ns / SECOND)
            if stall.end_ns is not None and (health.end is None or stall is not last_stall):
                lasted_ns = stall.duration_ns(stall.end_ns)
                data |= {"lasted_s": lasted_ns / SECOND, "text": f"resumed after {format_long_duration(lasted_ns)}"}
                yield Notification("dpmon.run.resumed", key, data, stall.end_ns / SECOND)
        self._find_straggler_change(snapshot, elapsed_s)
        yield from self._straggler_changes
        for finding in findings:
            if finding.weight >= MIN_WEIGHT and finding.kind not in _OTHER_EVENT_KINDS:
                event_type = "dpmon.run.slowed" if finding.kind == "drift" else "dpmon.finding"
                yield Notification(event_type, finding.kind, finding._asdict())
        if health.end is not None:
            event_type = "dpmon.run.failed" if health.exit_status == HAS_FAILED else "dpmon.run.ended"
            text = health.sentence(elapsed_s)
            if last_stall is not None:
                text += f"; in a stall: {last_stall.text}"
            yield Notification(event_type, "", {"end": health.end, "text": text}, health.since_s)
        elif self._alive_s is not None:
            yield Notification(
                "dpmon.run.alive", str(int(elapsed_s // self._alive_s)), {"text": health.sentence(elapsed_s)}
            )

    def _find_straggler_change(self, snapshot: RunSnapshot, elapsed_s: float) -> None:
        """Add a notification if another rank, or none, has been the straggler for MIN_STRAGGLER_S."""
        straggler = snapshot.straggler
        rank = "" if straggler is None else str(straggler.rank)
        if rank != self._straggler_rank:
            self._straggler_rank, self._straggler_since_s = rank, elapsed_s
        if rank == self._reported_rank or elapsed_s - self._straggler_since_s < MIN_STRAGGLER_S:
            return
        if straggler is None:
            text = f"rank {self._reported_rank} no longer delays the others"
        else:
            text = straggler_sentence(straggler, lately=True)
        self._reported_rank, self._change_count = rank, self._change_count + 1
        data = {"kind": "straggler", "rank": None if straggler is None else straggler.rank, "text": text}
        self._straggler_changes.append(
            Notification("dpmon.finding", f"{_STRAGGLER_PREFIX}{self._change_count}/{rank}", data)
        )

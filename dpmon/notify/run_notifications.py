"""Finds the events of a run in snapshots of its state, without I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dpmon.model.findings.correctness_findings import KIND as WRONG
from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import RecordedStall, final_stall, final_stall_sentence
from dpmon.record.schema import SECOND
from dpmon.report.health import HAS_FAILED, Health
from dpmon.run.lifecycle import has_succeeded
from dpmon.text.formatting import format_long_duration

MIN_WEIGHT = 0.3
"""Smallest weight of a finding that is an event."""
_OTHER_EVENT_KINDS = ("stall", "quiet", "failed")
"""Kinds of findings that are reported as events of another type."""


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


def find_notifications(
    stalls: Sequence[RecordedStall],
    newest_ns: int,
    health: Health,
    elapsed_s: float,
    findings: Sequence[Finding] = (),
    alive_s: float | None = None,
) -> Iterator[Notification]:
    """Yield every notification of the run so far, in order.

    `newest_ns`: end of the newest step or call. `alive_s`: seconds between two `alive` events, if any.
    """
    yield Notification("dpmon.run.started", "", {"text": "the run began"}, 0.0)
    last_stall = final_stall(stalls, newest_ns, has_succeeded(health.exit_info))
    for stall in stalls:
        key, data = str(stall.since_ns), {"since_s": stall.since_ns / SECOND, "text": stall.text}
        yield Notification("dpmon.run.stalled", key, {**data, "ranks": stall.ranks}, stall.noticed_ns / SECOND)
        if stall.end_ns is not None and (health.end is None or stall is not last_stall):
            lasted_ns = stall.duration_ns(stall.end_ns)
            data |= {"lasted_s": lasted_ns / SECOND, "text": f"resumed after {format_long_duration(lasted_ns)}"}
            yield Notification("dpmon.run.resumed", key, data, stall.end_ns / SECOND)
    for finding in findings:
        if finding.weight >= MIN_WEIGHT and finding.kind not in _OTHER_EVENT_KINDS:
            event_type = "dpmon.run.slowed" if finding.kind == "drift" else "dpmon.finding"
            key = finding.kind
            if key == WRONG:  # one event for each problem: its advice stays, but names in its text may change
                key += f"-{zlib.crc32(finding.advice.encode()):08x}"
            yield Notification(event_type, key, finding._asdict())
    if health.end is not None:
        event_type = "dpmon.run.failed" if health.exit_status == HAS_FAILED else "dpmon.run.ended"
        text = health.sentence(elapsed_s)
        if last_stall is not None:
            end_s = elapsed_s if health.since_s is None else health.since_s
            text += f"; {final_stall_sentence(last_stall.duration_ns(int(end_s * SECOND)), last_stall.text)}"
        yield Notification(event_type, "", {"end": health.end, "text": text}, health.since_s)
    elif alive_s is not None:
        yield Notification("dpmon.run.alive", str(int(elapsed_s // alive_s)), {"text": health.sentence(elapsed_s)})

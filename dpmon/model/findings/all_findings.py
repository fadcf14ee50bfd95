"""Finds all findings of a run."""

from __future__ import annotations

from dpmon.model.findings import device_findings, failure_findings, memory_findings, rank_findings, time_findings
from dpmon.model.findings.correctness_findings import find_wrong_training
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import measured_modes
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.schema import SECOND

MIN_SAVED_SHARE = 0.02
"""A finding is omitted if its advice saves less than this share of the time of steps and between them."""
_FIRST_KINDS = ("failed", "loss", "quiet", "stall", "wrong", "memory")
"""Kinds that come before all others: the run failed, stood still, is wrong, or will fail."""
_FINDERS = (*failure_findings.FINDERS, *memory_findings.FINDERS, *time_findings.FINDERS, *device_findings.FINDERS)


def find_all(run: RunAnalysis) -> list[Finding]:
    """Return all findings, a failure or a stall first, then in order of the seconds they could save.

    Empty if there are none, or if the run is too short to tell. A finding whose advice saves almost nothing is omitted.
    """
    findings = [finding for find in (find_wrong_training, *_FINDERS) for finding in find(run)]
    findings += rank_findings.find_rank_problems(run.whole_communication, run)
    return _order(run, findings)


def find_causes(run: RunAnalysis) -> list[Finding]:
    """Return the findings for the message on the screen of a live run: a wrong training, or a line that costs time.

    Of the whole run, only the losses are read, unless a record suggests such a finding.
    """
    findings = [*find_wrong_training(run), *time_findings.find_compilations(run), *time_findings.find_host_syncs(run)]
    if run.events.checkpoints:
        findings += time_findings.find_costly_checkpoints(run)
    if run.memory_events["loader_lines"]:
        findings += time_findings.find_data_waits(run)
    return _order(run, findings)


def _order(run: RunAnalysis, findings: list[Finding]) -> list[Finding]:
    """Return the findings that are worth reporting, in the order of `find_all`."""

    def is_worth_it(finding: Finding) -> bool:
        if finding.saves_s is None or finding.kind in _FIRST_KINDS:
            return True
        if finding.kind == "in turn" and finding.saves_s <= _excess_between_steps(run):
            return False  # the finding about the time between steps, or about evaluations, names the cause
        return finding.saves_s >= MIN_SAVED_SHARE * run.active_ns / SECOND

    def sort_key(finding: Finding) -> tuple[bool, float]:
        affected_s = finding.weight * run.active_ns / SECOND
        return finding.kind in _FIRST_KINDS, affected_s if finding.saves_s is None else finding.saves_s

    ordered = sorted(filter(is_worth_it, findings), key=sort_key, reverse=True)
    return [finding._replace(elapsed_s=run.until_ns / SECOND) for finding in ordered]


def _excess_between_steps(run: RunAnalysis) -> float:
    """Return how much longer one process evaluates, or is between steps, than another (s): ranks wait for it."""
    processes = {stats.process for stats in measured_modes(run)}
    spent = [run.spent_by_process.get(process, {}) for process in processes]
    outside_ns = [times.get("between", 0) + times.get("evaluation", 0) for times in spent]
    return (max(outside_ns) - min(outside_ns)) / SECOND if outside_ns else 0.0

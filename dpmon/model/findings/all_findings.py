"""Finds all findings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dpmon.model.findings.device_findings import (
    find_busy_cpus,
    find_idle_devices,
    find_low_utilization,
    find_throttling,
    find_uneven_memory,
    find_uneven_replicas,
)
from dpmon.model.findings.failure_findings import find_failure, find_invalid_losses, find_quiet_end
from dpmon.model.findings.finding import OF_RUN, Finding
from dpmon.model.findings.rank_findings import find_rank_problems
from dpmon.model.findings.time_findings import (
    find_costly_evaluation,
    find_data_waits,
    find_dp_overhead,
    find_gaps_between_steps,
    find_long_steps,
    find_recovered_stalls,
    find_slow_copies,
    find_slow_dp,
    find_slowdown,
    find_uneven_steps,
)
from dpmon.model.run_analysis import RunAnalysis

MIN_SAVED_SHARE = 0.02
"""A finding is omitted if its advice saves less than this share of the time."""
_FINDERS: tuple[Callable[[RunAnalysis], Iterator[Finding]], ...] = (
    *(
        find_failure,
        find_data_waits,
        find_slow_copies,
        find_slow_dp,
        find_dp_overhead,
        find_idle_devices,
        find_uneven_replicas,
        find_uneven_memory,
        find_throttling,
        find_low_utilization,
        find_busy_cpus,
    ),
    *(
        find_slowdown,
        find_recovered_stalls,
        find_long_steps,
        find_uneven_steps,
        find_gaps_between_steps,
        find_costly_evaluation,
        find_quiet_end,
        find_invalid_losses,
    ),
    lambda run: find_rank_problems(run.communication),
)


def find_all(run: RunAnalysis) -> list[Finding]:
    """Return all findings, the most important first; empty if there are none, or if the run is too short to tell.

    A finding whose advice saves almost nothing is omitted.
    """
    findings = [finding for find in _FINDERS for finding in find(run)]
    findings = [finding for finding in findings if finding.saves is None or finding.saves >= MIN_SAVED_SHARE]
    return sorted(findings, key=_sort_weight, reverse=True)


def _sort_weight(finding: Finding) -> float:
    """Return the weight for sorting. "busy" counts half: users can rarely end other work, but can change the script."""
    weight = finding.weight if finding.saves is None else finding.saves
    return weight / 2 if finding.kind == "busy" else weight


def combined_savings(findings: Iterable[Finding], run: RunAnalysis) -> float | None:
    """Return an upper bound on the share of run time (0 to 1) saved if every cause is fixed.

    None unless at least two findings save time. Time that several findings share counts once, with the largest saving.
    """
    active_ns = sum(run.time_by_activity.get(name, 0) for name in ("training", "between", "evaluation"))
    training_share = run.time_by_activity.get("training", 0) / active_ns if active_ns else 0.0
    shared_savings: dict[str, float] = {}
    unshared_savings, count = 0.0, 0
    for finding in findings:
        if finding.saves is None:
            continue
        count += 1
        time_share = 1.0 if finding.kind in OF_RUN else training_share
        unshared_savings += max(finding.saves - sum(finding.parts.values()), 0.0) * time_share
        for name, saves in finding.parts.items():
            shared_savings[name] = max(shared_savings.get(name, 0.0), saves * time_share)
    return min(unshared_savings + sum(shared_savings.values()), 1.0) if count > 1 else None

"""All findings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dpmon.model.findings.device_findings import (
    find_busy_processors,
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

LEAST_SAVED = 0.02
"""Smallest share of the time that an advice can save, for its finding to be told."""
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
        find_busy_processors,
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
    lambda facts: find_rank_problems(facts.communication),
)


def find_all(facts: RunAnalysis) -> list[Finding]:
    """All findings, the most important first; empty if there is nothing to report, or too little was seen.

    A finding whose advice can bring almost nothing is left out.
    """
    found = [finding for find in _FINDERS for finding in find(facts)]
    found = [finding for finding in found if finding.saves is None or finding.saves >= LEAST_SAVED]
    return sorted(found, key=_sort_weight, reverse=True)


def _sort_weight(finding: Finding) -> float:
    """What findings are sorted by. Other work counts half: the user can seldom end it, but can change the script."""
    size = finding.weight if finding.saves is None else finding.saves
    return size / 2 if finding.kind == "busy" else size


def combined_savings(found: Iterable[Finding], facts: RunAnalysis) -> float | None:
    """The share of the run's time (0 to 1) that goes at most if all causes go; None without two advices that save time.

    A part of the time that several findings are about counts once, as long as the longest of them takes it.
    """
    whole = sum(facts.time_by_activity.get(name, 0) for name in ("training", "between", "evaluation"))
    training = facts.time_by_activity.get("training", 0) / whole if whole else 0.0
    parts: dict[str, float] = {}
    own, count = 0.0, 0
    for finding in found:
        if finding.saves is not None:
            count += 1
            of = 1.0 if finding.kind in OF_RUN else training
            own += max(finding.saves - sum(finding.parts.values()), 0.0) * of
            for name, saves in finding.parts.items():
                parts[name] = max(parts.get(name, 0.0), saves * of)
    return min(own + sum(parts.values()), 1.0) if count > 1 else None

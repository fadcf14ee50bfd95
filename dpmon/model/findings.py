"""All findings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dpmon.model.finding import OF_RUN, Finding
from dpmon.model.found_between_ranks import between_ranks
from dpmon.model.found_in_failures import failed, losses, quiet
from dpmon.model.found_in_time import (
    between,
    copies,
    data,
    drift,
    evaluation,
    slower,
    spread,
    stalled,
    stalls,
    transfers,
)
from dpmon.model.found_on_devices import busy, fuller, idle, low_use, throttled, uneven
from dpmon.model.run_facts import RunFacts

LEAST_SAVED = 0.02
"""Smallest share of the time that an advice can save, for its finding to be told."""
_FINDERS: tuple[Callable[[RunFacts], Iterator[Finding]], ...] = (
    *(failed, data, transfers, slower, copies, idle, uneven, fuller, throttled, low_use, busy),
    *(drift, stalled, stalls, spread, between, evaluation, quiet, losses),
    lambda facts: between_ranks(facts.communication),
)


def findings(facts: RunFacts) -> list[Finding]:
    """All findings, the most important first; empty if there is nothing to report, or too little was seen.

    A finding whose advice can bring almost nothing is left out.
    """
    found = [finding for find in _FINDERS for finding in find(facts)]
    found = [finding for finding in found if finding.saves is None or finding.saves >= LEAST_SAVED]
    return sorted(found, key=_size, reverse=True)


def _size(finding: Finding) -> float:
    """What findings are sorted by. Other work counts half: the user can seldom end it, but can change the script."""
    size = finding.weight if finding.saves is None else finding.saves
    return size / 2 if finding.kind == "busy" else size


def together(found: Iterable[Finding], facts: RunFacts) -> float | None:
    """The share of the run's time (0 to 1) that goes at most if all causes go; None without two advices that save time.

    A part of the time that several findings are about counts once, as long as the longest of them takes it.
    """
    whole = sum(facts.spent.get(name, 0) for name in ("training", "between", "evaluation"))
    training = facts.spent.get("training", 0) / whole if whole else 0.0
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

"""What is worth a look in a run, with its ground in figures and what to try. Pure: Evidence in, findings out.

A finding is a statement about what was measured, never a guess at what was not: the ground gives the figures it stands
on, and there is none from too few steps. Thresholds are named beside what uses them, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dpmon.model.evidence import Evidence
from dpmon.model.finding import MIN_STEPS, Finding
from dpmon.model.found_between_ranks import between_ranks
from dpmon.model.found_in_time import between, copies, data, drift, failed, quiet, slower, spread, stalls, transfers
from dpmon.model.found_on_devices import busy, fuller, idle, low_use, throttled, uneven

__all__ = ["MIN_STEPS", "Finding", "findings"]

_FINDERS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    *(data, transfers, slower, copies, idle, uneven, fuller, throttled, low_use, busy),
    *(drift, stalls, spread, between, quiet, failed),
    lambda evidence: between_ranks(evidence.communication),
)


def findings(evidence: Evidence) -> list[Finding]:
    """Everything worth a look, the heaviest first; empty if there is nothing, or too little was seen."""
    found = [finding for find in _FINDERS for finding in find(evidence)]
    return sorted(found, key=lambda finding: -finding.weight)

"""The findings of a run, each with its figures and advice. Pure: Evidence in, findings out.

A finding states a measured fact, never a guess. Its ground holds the figures behind it; too few steps give no finding.
Thresholds stand beside the code that uses them, each with its reason.
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
    """All findings, the most important first; empty if there is nothing to report, or too little was seen."""
    found = [finding for find in _FINDERS for finding in find(evidence)]
    return sorted(found, key=lambda finding: -finding.weight)

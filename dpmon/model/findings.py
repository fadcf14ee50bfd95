"""All findings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dpmon.model.finding import Finding
from dpmon.model.found_between_ranks import between_ranks
from dpmon.model.found_in_time import (
    between,
    copies,
    data,
    drift,
    failed,
    quiet,
    slower,
    spread,
    stalled,
    stalls,
    transfers,
)
from dpmon.model.found_on_devices import busy, fuller, idle, low_use, throttled, uneven
from dpmon.model.run_facts import RunFacts

_FINDERS: tuple[Callable[[RunFacts], Iterator[Finding]], ...] = (
    *(data, transfers, slower, copies, idle, uneven, fuller, throttled, low_use, busy),
    *(drift, stalled, stalls, spread, between, quiet, failed),
    lambda facts: between_ranks(facts.communication),
)


def findings(facts: RunFacts) -> list[Finding]:
    """All findings, the most important first; empty if there is nothing to report, or too little was seen."""
    found = [finding for find in _FINDERS for finding in find(facts)]
    return sorted(found, key=lambda finding: -finding.weight)

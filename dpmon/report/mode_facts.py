"""The figures of a mode for findings and tables."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.model.evidence import ModeFacts
from dpmon.record.schema import STEP, STEP_PHASES
from dpmon.record.wire import CALL_PHASES
from dpmon.store.figures import Figures
from dpmon.store.tally import Tally
from dpmon.store.window import thirds

_LEAST = 30
"""Fewest steps in each of the two thirds for a comparison."""


def mode_facts(
    found: Figures, virtual: bool, distributed: str | None, rows: Sequence[tuple[int, Tally]] = ()
) -> ModeFacts:
    """Medians, tails and shares of a process in a mode, and the medians of its first and last third of steps.

    `rows`: tallies of its settled steps in order of time, with their start.
    """
    phases = {phase.name: phase for phase in found.phases if phase.ran}
    first, last = thirds(rows, sum(tally.steps for _, tally in rows))
    apart = min(first.steps, last.steps) >= _LEAST
    return ModeFacts(
        mode=found.mode,
        virtual=virtual and found.mode == "dp",
        distributed=distributed if found.mode == "single" else None,
        steps=found.steps,
        median_ns=found.median_ns,
        p95_ns=found.p95_ns,
        rate=found.rate,
        phases=tuple(phases[name] for name in (*STEP_PHASES, *CALL_PHASES) if name in phases),
        early=_medians(first) if apart else {},
        late=_medians(last) if apart else {},
        early_p75_ns=first.quantile(STEP, 0.75) if apart else None,
        late_p25_ns=last.quantile(STEP, 0.25) if apart else None,
        mean_ns=found.mean_ns,
        counted=found.counted,
        calls=found.calls,
    )


def _medians(tally: Tally) -> dict[str, float]:
    medians = {name: tally.median(name) for name in (STEP, *STEP_PHASES)}
    return {name: value for name, value in medians.items() if value is not None}

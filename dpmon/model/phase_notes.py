"""Notes on phase times: where the host waits for the GPU, and how many steps have device times. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dpmon.model.finding import duration_words
from dpmon.model.numbers import count_of
from dpmon.record.schema import STEP_PHASES
from dpmon.store.figures import PhaseFigures

_WHERE = ("copy", "forward", "backward", "optimizer")
"""Phases that `host_waits` may name. `data` is not one of them: its wait is not for the GPU."""
KNOWN = 0.9
"""`partly_timed` makes a note if a smaller share of the steps has device times."""
SHARE, RATIO = 0.2, 2.0
"""Smallest share of the step, and smallest ratio of host to device time (near 1 if the device waits for the host)."""


def host_waits(phases: Iterable[PhaseFigures]) -> list[str]:
    """A sentence for each phase that is long only on the host."""
    notes = []
    for phase in phases:
        device = phase.device_ns
        if phase.name not in _WHERE or device is None or phase.median_ns is None or (phase.share or 0) < SHARE:
            continue
        if phase.median_ns >= RATIO * device:
            own = f"the phase itself takes the GPU {duration_words(device)}"
            notes.append(f"in {phase.name} the host waits for the GPU's earlier work: {own}")
    return notes


def partly_timed(phases: Iterable[PhaseFigures]) -> list[str]:
    """The number of steps with device times, unless nearly all have them; for the phase with the fewest."""
    timed = [phase for phase in phases if phase.device_count and phase.name in STEP_PHASES]
    fewest = min(timed, key=lambda phase: phase.device_count / phase.ran, default=None)
    if fewest is None or fewest.device_count >= KNOWN * fewest.ran:
        return []
    count, ran = fewest.device_count, fewest.ran
    return [f"device times are known for {count:,} of the {count_of(ran, 'step')} (1 in {ran / count:.3g})"]

"""What has to be known of phases' times: where the host waits for the GPU, and how many steps a device timed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dpmon.model.finding import many, took
from dpmon.record.schema import STEP_PHASES
from dpmon.store.figures import PhaseFigures

_WHERE = ("copy", "forward", "backward", "optimizer")
"""A loader that is waited for is another matter: the GPU may be at work meanwhile."""
KNOWN = 0.9
"""Of the steps: where the devices' times are known of fewer, that is said."""
SHARE, RATIO = 0.2, 2.0
"""Of the step, and host by device: where the host is behind, the device's time is as long as its own."""


def host_waits(phases: Iterable[PhaseFigures]) -> list[str]:
    """A sentence for each phase that is long on the host only."""
    said = []
    for phase in phases:
        device = phase.device_ns
        if phase.name not in _WHERE or device is None or phase.median_ns is None or (phase.share or 0) < SHARE:
            continue
        if phase.median_ns >= RATIO * device:
            own = f"its own time there is {took(device)}"
            said.append(f"in {phase.name} the host waits for the GPU's earlier work: {own}")
    return said


def partly_timed(phases: Iterable[PhaseFigures]) -> list[str]:
    """Of how many steps the devices' times are, if these are not nearly all; of the phase that has the fewest."""
    timed = [phase for phase in phases if phase.device_count and phase.name in STEP_PHASES]
    fewest = min(timed, key=lambda phase: phase.device_count / phase.ran, default=None)
    if fewest is None or fewest.device_count >= KNOWN * fewest.ran:
        return []
    count, ran = fewest.device_count, fewest.ran
    return [f"times on the device: of {count:,} of the {many(ran, 'step')} (1 in {ran / count:.3g})"]

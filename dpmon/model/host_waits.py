"""Where the host stands still in a phase until the GPU has done what was queued before: time that is not its own."""

from __future__ import annotations

from collections.abc import Iterable

from dpmon.model.finding import took
from dpmon.store.figures import PhaseFigures

__all__ = ["host_waits"]

_WHERE = ("copy", "forward", "backward", "optimizer")
"""A loader that is waited for is another matter: the GPU may be at work meanwhile."""
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

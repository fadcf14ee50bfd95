"""Where the host stands still in a phase until the GPU has done what was queued before: time that is not its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from dpmon.model.finding import took

__all__ = ["host_waits"]

_WHERE = ("copy", "forward", "backward", "optimizer")
"""A loader that is waited for is another matter: the GPU may be at work meanwhile."""
SHARE, RATIO = 0.2, 2.0
"""Of the step, and host by device: where the host is behind, the device's time is as long as its own."""


class _Phase(Protocol):
    """The figures of a phase, of the screen's or of dpmon.store.figures."""

    @property
    def name(self) -> str: ...
    @property
    def median_ns(self) -> float | None: ...
    @property
    def share(self) -> float | None: ...


def host_waits(phases: Iterable[_Phase], device_ns: Mapping[str, float | None]) -> list[str]:
    """A sentence for each phase that is long on the host only; `device_ns`: the median of each phase on the device."""
    said = []
    for phase in phases:
        device = device_ns.get(phase.name)
        if phase.name not in _WHERE or device is None or phase.median_ns is None or (phase.share or 0) < SHARE:
            continue
        if phase.median_ns >= RATIO * device:
            own = f"its own time there is {took(device)}"
            said.append(f"in {phase.name} the host waits for the GPU's earlier work: {own}")
    return said

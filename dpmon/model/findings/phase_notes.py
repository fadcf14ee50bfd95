"""Notes on phase times: phases in which the host waits for the GPU, and how many steps have device times."""

from __future__ import annotations

from collections.abc import Iterable

from dpmon.record.schema import STEP_PHASES
from dpmon.store.step_stats import PhaseStats
from dpmon.text.formatting import format_count_with_noun, format_long_duration

_WHERE = ("copy", "forward", "backward", "optimizer")
"""Phases that `host_waits` may name. `data` is not one of them: its wait is not for the GPU."""
KNOWN = 0.9
"""`timed_steps_note` makes a note if a smaller share of the steps has device times."""
HOST_SHARE, HOST_RATIO = 0.2, 2.0
"""Smallest share of the step, and smallest ratio of host to device time (near 1 if the device waits for the host)."""


def host_waits(phases: Iterable[PhaseStats]) -> list[str]:
    """A sentence for each phase that is long only on the host."""
    notes = []
    for phase in phases:
        device = phase.device_ns
        if phase.name not in _WHERE or device is None or phase.median_ns is None or (phase.share or 0) < HOST_SHARE:
            continue
        if phase.median_ns >= HOST_RATIO * device:
            own = f"the phase itself takes the GPU {format_long_duration(device)}"
            notes.append(f"in {phase.name} the host waits for the GPU's earlier work: {own}")
    return notes


def timed_steps_note(phases: Iterable[PhaseStats]) -> list[str]:
    """The number of steps with device times, unless nearly all have them; for the phase with the fewest."""
    timed = [phase for phase in phases if phase.device_count and phase.name in STEP_PHASES]
    fewest = min(timed, key=lambda phase: phase.device_count / phase.ran, default=None)
    if fewest is None or fewest.device_count >= KNOWN * fewest.ran:
        return []
    count, ran = fewest.device_count, fewest.ran
    return [
        f"device times are known for {count:,} of the {format_count_with_noun(ran, 'step')} (1 in {ran / count:.3g})"
    ]

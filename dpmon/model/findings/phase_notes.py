"""Notes on phase times: phases in which the host waits for the GPU, and how many steps have device times."""

from __future__ import annotations

from collections.abc import Iterable

from dpmon.record.schema import STEP_PHASES
from dpmon.store.step_stats import PhaseStats
from dpmon.text.formatting import format_count_with_noun, format_long_duration

_HOST_WAIT_PHASES = ("copy", "forward", "backward", "optimizer")
"""Phases that `host_waits` may name. `data` is not one of them: its wait is not for the GPU."""
MIN_TIMED_SHARE = 0.9
"""`timed_steps_note` returns a note if a smaller share of the steps has device times."""
MIN_HOST_SHARE, MIN_HOST_RATIO = 0.2, 2.0
"""Smallest share of the step and smallest ratio of host to device time; the ratio is near 1 if the device waits."""


def host_waits(phases: Iterable[PhaseStats]) -> list[str]:
    """Return a sentence for each phase that takes long on the host only."""
    long_phases = [
        phase for phase in phases if phase.name in _HOST_WAIT_PHASES and (phase.share or 0) >= MIN_HOST_SHARE
    ]
    return [
        f"in {phase.name} the host waits for the GPU's earlier work: the phase itself takes the GPU"
        f" {format_long_duration(phase.device_ns)}"
        for phase in long_phases
        if phase.device_ns is not None and (phase.median_ns or 0) >= MIN_HOST_RATIO * phase.device_ns
    ]


def timed_steps_note(phases: Iterable[PhaseStats]) -> list[str]:
    """Return how many steps have device times, for the phase with the fewest; empty if nearly all steps have them."""
    timed = [phase for phase in phases if phase.device_count and phase.name in STEP_PHASES]
    fewest = min(timed, key=lambda phase: phase.device_count / phase.ran, default=None)
    if fewest is None or fewest.device_count >= MIN_TIMED_SHARE * fewest.ran:
        return []
    count, ran = fewest.device_count, fewest.ran
    return [
        f"device times are known for {count:,} of the {format_count_with_noun(ran, 'step')} (1 in {ran / count:.3g})"
    ]

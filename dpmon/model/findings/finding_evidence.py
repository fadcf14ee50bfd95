"""The evidence that findings share: modes with enough steps, the share of data in a step, and phrases for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dpmon.store.step_stats import PhaseStats, StepStats
from dpmon.text.formatting import format_long_duration

if TYPE_CHECKING:
    from dpmon.model.mode_stats import ModeStats
    from dpmon.model.run_analysis import RunAnalysis

MIN_STEPS = 30
"""Fewest steps for a median; in fewer, start-up (caches, allocator, loader workers) weighs too much."""
DATA_SHARE = 0.2
"""Smallest share of the step to report. A loader that keeps up takes a few per cent (taking a batch from a queue)."""


def measured_modes(facts: RunAnalysis) -> Iterator[ModeStats]:
    """The modes of each process with enough steps for findings; the shown processes come first.

    Without the first steps, in which the loader starts and memory is allocated.
    """
    usual = (mode.settled_stats for mode in (*facts.modes, *facts.other_process_modes))
    yield from (mode for mode in usual if mode.steps >= MIN_STEPS)


def most_affected(facts: RunAnalysis, share: Callable[[ModeStats], float], least: float) -> Iterator[ModeStats]:
    """For each mode, the process with the largest share of a kind of time, if that is `least` or more."""
    found: dict[str, ModeStats] = {}
    for mode in measured_modes(facts):
        if share(mode) >= least and (mode.mode not in found or share(mode) > share(found[mode.mode])):
            found[mode.mode] = mode
    yield from found.values()


def rank_suffix(mode: ModeStats) -> str:
    """The words " of rank 1" if the run has several processes; else empty."""
    return "" if mode.who is None else f" of {mode.who}"


def mode_suffix(mode: ModeStats, facts: RunAnalysis) -> str:
    """The words " in mode dp" if the run has several modes; else empty."""
    return f" in mode {mode.mode}" if len(facts.modes) > 1 and mode.mode else ""


def format_phase_times(mode: ModeStats, name: str) -> str:
    """Median and p95 of a phase."""
    found = mode.phase(name)
    return (
        "did not run"
        if found is None
        else f"median {format_long_duration(found.median_ns)}, p95 {format_long_duration(found.p95_ns)}"
    )


def format_sample_basis(mode: ModeStats) -> str:
    """The median step, to which shares refer, and the number and the process of the steps."""
    return f"step median {format_long_duration(mode.median_ns)} over {mode.steps:,} steps{rank_suffix(mode)}"


def process_suffix(process: int, facts: RunAnalysis) -> str:
    """The words " of rank 1" if the run has several processes; else empty."""
    return f" of {facts.names.get(process, f'process {process}')}" if facts.names else ""


def format_ratio(one: float | None, other: float | None) -> str:
    """The ratio of `one` to `other` in words."""
    ratio = (one or 0) / (other or 1)
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def is_timed(phase: PhaseStats) -> bool:
    """Whether the device times of a phase are known in enough steps."""
    return phase.device_share is not None and phase.device_count >= MIN_STEPS


def data_share(steps: StepStats) -> float:
    """The share of the steps' time spent waiting for data; by device times if they are known."""
    figures = steps.phase("data")
    if figures is None:
        return 0.0
    return (figures.device_share if is_timed(figures) else figures.share) or 0.0


def data_ceiling(mode: ModeStats, facts: RunAnalysis) -> float | None:
    """The share of the steps' time that goes at most if no process waits for data; None if unknown."""
    return data_share(mode) if mode.who is None else facts.longest_fetches.get(mode.mode)

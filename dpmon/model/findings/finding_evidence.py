"""The evidence that findings share: modes with enough steps, the share of data in a step, and phrases for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dpmon.record.schema import SECOND
from dpmon.store.step_stats import PhaseStats, StepStats
from dpmon.text.formatting import format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.device_usage import HostUsage
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.store.step_stats import StepStats

MIN_STEPS = 30
"""Fewest steps for a median; in fewer, start-up (caches, allocator, loader workers) weighs too much."""
MIN_DATA_SHARE = 0.2
"""Smallest share of the step to report. A loader that keeps up takes a few per cent (taking a batch from a queue)."""
MIN_IDLE_CORES = 0.5
"""Fewest idle CPU cores (median) for another worker. With fewer, a worker that computes slows the training."""
LONG_STEP_SHARE = 0.05
"""Share of the steps that are at least as long as their 95th percentile. Inputs that are rarer do not explain it."""


def measured_modes(run: RunAnalysis) -> Iterator[StepStats]:
    """Yield the modes of each process that have enough steps for findings; the shown processes come first.

    The first steps are left out, because loaders start and memory is allocated in them.
    """
    settled = (stats.settled_stats for stats in (*run.modes, *run.other_process_modes))
    yield from (stats for stats in settled if stats.steps >= MIN_STEPS)


def most_affected(run: RunAnalysis, share_of: Callable[[StepStats], float], min_share: float) -> Iterator[StepStats]:
    """Yield for each mode the process with the largest share of a kind of time, if that is `min_share` or more."""
    worst_by_mode: dict[str, StepStats] = {}
    for stats in measured_modes(run):
        worst = worst_by_mode.get(stats.mode)
        if share_of(stats) >= min_share and (worst is None or share_of(stats) > share_of(worst)):
            worst_by_mode[stats.mode] = stats
    yield from worst_by_mode.values()


def rank_suffix(stats: StepStats) -> str:
    """Return " of rank 1" if the run has several processes; else empty."""
    return "" if stats.process_name is None else f" of {stats.process_name}"


def mode_suffix(stats: StepStats, run: RunAnalysis) -> str:
    """Return " in mode dp" if the run has several modes; else empty."""
    return f" in mode {stats.mode}" if len(run.modes) > 1 and stats.mode else ""


def format_phase_times(stats: StepStats, name: str) -> str:
    """Return the median and p95 of a phase as text, and its median on the device if it is known."""
    phase = stats.phase(name)
    if phase is None:
        return "did not run"
    text = f"median {format_long_duration(phase.median_ns)}, p95 {format_long_duration(phase.p95_ns)}"
    return f"{text}, on the device median {format_long_duration(phase.device_ns)}" if is_timed(phase) else text


def process_suffix(process: int, run: RunAnalysis) -> str:
    """Return " of rank 1" if the run has several processes; else empty."""
    return f" of {run.names.get(process, f'process {process}')}" if run.names else ""


def format_elapsed_share(ns: float, run: RunAnalysis) -> str:
    """Return the share of a time in the elapsed time of the run, to which gains refer: "27% of the elapsed time"."""
    return f"{format_percent(ns / run.until_ns)} of the elapsed time"


def format_ratio(numerator: float | None, denominator: float | None) -> str:
    """Return the ratio of two times: "2.1×", "12×"."""
    ratio = (numerator or 0) / (denominator or 1)
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×"


def is_timed(phase: PhaseStats) -> bool:
    """Return whether enough steps have device times of this phase."""
    return phase.device_share is not None and phase.device_count >= MIN_STEPS


def data_share(stats: StepStats) -> float:
    """Return the share of step time (0 to 1) spent waiting for data, by device times if they are known."""
    data = stats.phase("data")
    return 0.0 if data is None else step_share(data)


def step_share(phase: PhaseStats) -> float:
    """Return the share of step time (0 to 1) of a phase, by device times if they are known."""
    return (phase.device_share if is_timed(phase) else phase.share) or 0.0


def time_of_share(stats: StepStats, share: float) -> float:
    """Return the elapsed time (s) of a share of the step (0 to 1), over all steps of the process in this mode.

    Warm-up steps count with the mean of the others.
    """
    return share * (stats.mean_ns or 0.0) * (stats.steps + stats.warm_up_steps) / SECOND


def has_varied_inputs(run: RunAnalysis, process: int) -> bool:
    """Return whether a process's inputs have other sizes often enough to explain its longest steps."""
    return run.layouts.usual_input_share(process) <= 1 - LONG_STEP_SHARE


def has_idle_core(host: HostUsage) -> bool:
    """Return whether a CPU core of the host is usually idle."""
    return host.cpus * (1 - host.cpu_pct / 100) >= MIN_IDLE_CORES


def busy_cores_advice(run: RunAnalysis) -> str:
    """Return advice that frees CPU cores; empty if one is idle, or if the host was not sampled."""
    host = run.host_usage
    if host is None or has_idle_core(host):
        return ""
    in_use = f"{host.cpus} CPU cores, which are {format_percent(host.cpu_pct / 100)} in use"
    if host.others > host.own:
        return f"end other work: this run uses only {host.own:.1f} of {in_use}"
    workers = " or loader workers" if any(start.workers for start in run.loaders) else ""
    return f"fewer threads (OMP_NUM_THREADS){workers}, so that they fit on {in_use}"

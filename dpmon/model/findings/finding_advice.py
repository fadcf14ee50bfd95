"""Advice that several findings share.

Advice is given only where the run's metrics support it. Other advice can make a training slower: worker processes for
fetches of 100 us, or fewer threads on a host with idle CPU cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpmon.model.findings.finding_evidence import MIN_DATA_SHARE, data_share, most_affected, rank_suffix
from dpmon.text.formatting import format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.device_usage import HostUsage
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.model.run_events import LoaderStart
    from dpmon.store.step_stats import StepStats

WORTH_A_WORKER_NS = 1_000_000
"""Shortest fetch that justifies a worker: passing a batch between processes takes some hundreds of microseconds."""
MIN_IDLE_CORES = 0.5
"""Fewest idle CPU cores (median) for another worker. With fewer, a worker that computes slows the training."""
MIN_FETCH_CPU_SHARE = 0.5
"""Fetches that compute keep CPU cores busy. If the CPU time of the whole run is less than this share of its time in
fetches, the fetches mostly wait. More workers can then wait at the same time."""
SLOW_STEP_SHARE = 0.05
"""Share of the steps that are at least as long as their 95th percentile. Inputs that are rarer do not explain it."""
RARE_FETCH_RATIO = 3.0
"""Smallest ratio of mean to median fetch at which a few fetches (the first of each epoch) take most of the time."""


def data_advice(stats: StepStats, run: RunAnalysis) -> str:
    """Return advice for a training that waits for its loader."""
    fetch = stats.phase("data")
    median = None if fetch is None else fetch.median_ns
    mean = None if fetch is None or fetch.share is None or stats.mean_ns is None else fetch.share * stats.mean_ns
    if median and mean and mean >= RARE_FETCH_RATIO * median:
        times = f"mean {format_long_duration(mean)}, median {format_long_duration(median)}"
        few_fetches = f"a few fetches take most of the time ({times})"
        if worker_restarts(run, stats.process):
            return (
                f"{few_fetches}, such as the first of each epoch, for which workers start:"
                " persistent_workers=True keeps them"
            )
        return f"{few_fetches}: look for samples that take longer, a cold cache, a slow disk or network"
    if median is not None and median < WORTH_A_WORKER_NS:
        return (
            "not more workers: passing a batch between processes costs more than a fetch of"
            f" {format_long_duration(median)}; fetch larger batches, or index tensors in memory without a DataLoader"
        )
    host = run.host
    if host is not None and idle_cores(host) < MIN_IDLE_CORES:
        if host.own < MIN_FETCH_CPU_SHARE * stats.phase_share("data") * max(len(run.processes), 1):
            return (
                f"more workers (DataLoader num_workers){_persistent_workers_hint(run, stats.process)} if the fetches"
                " wait for a disk or network; otherwise end other work: the CPU is"
                f" {format_percent(host.cpu_pct / 100)}"
                f" in use, but this run uses only {host.own:.1f} of {host.cpus} cores"
            )
        return (
            "less work per sample (decoding, augmentation), or data prepared beforehand: the CPU is"
            f" {format_percent(host.cpu_pct / 100)} in use, so more workers help only if the fetches wait for a disk or"
            " network"
        )
    condition = "" if run.host is not None else ", if CPU cores are idle"
    return (
        f"more workers (DataLoader num_workers){condition}{_persistent_workers_hint(run, stats.process)};"
        " less work per sample; data on a faster disk"
    )


def _persistent_workers_hint(run: RunAnalysis, process: int) -> str:
    """Return the advice to keep workers, if a loader of the process has started again without keeping them."""
    return ", with persistent_workers=True" if _later_starts(run, process) else ""


def worker_restarts(run: RunAnalysis, process: int) -> list[LoaderStart]:
    """Return the starts at which a loader of the process started its workers again."""
    return [start for start in _later_starts(run, process) if start.workers]


def _later_starts(run: RunAnalysis, process: int) -> list[LoaderStart]:
    """Return the second and later starts of loaders that keep no workers.

    A loader that is created again for each epoch starts only once, and could not keep its workers.
    """
    starts = [start for start in run.loaders if start.process == process]
    return [start for start in starts if start.start > 1 and not start.persistent]


def copy_advice(run: RunAnalysis, process: int) -> str:
    """Return advice for slow copies of batches to the GPU."""
    loaders = [loader for loader in run.loaders if loader.process == process]
    pinned = (
        "" if loaders and all(loader.pinned for loader in loaders) else "pinned memory (DataLoader pin_memory) with "
    )
    return f"{pinned}.to(..., non_blocking=True); fewer bytes: copy as uint8 or half precision, and convert on the GPU"


def step_variance_advice(run: RunAnalysis, process: int, phase: str) -> str:
    """Return advice for step times of a process that vary widely. `phase`: the phase that takes most of the time."""
    host = run.host
    if host is not None and idle_cores(host) < MIN_IDLE_CORES:
        in_use = f"{host.cpus} CPU cores, which are {format_percent(host.cpu_pct / 100)} in use"
        if host.others > host.own:
            return f"end other work: this run uses only {host.own:.1f} of {in_use}"
        workers = " or loader workers" if any(start.workers for start in run.loaders) else ""
        return f"fewer threads (OMP_NUM_THREADS){workers}, so that they fit on {in_use}"
    sizes = "batches of similar size; " if run.layouts.usual_input_share(process) <= 1 - SLOW_STEP_SHARE else ""
    return f"{sizes}the longest steps show what {phase} waited for"


def low_utilization_advice(run: RunAnalysis) -> str:
    """Return advice for a GPU that is idle."""
    waits = max(most_affected(run, data_share, MIN_DATA_SHARE), key=data_share, default=None)
    if waits is not None:
        share = format_percent(data_share(waits))
        return f"the loader first: the steps{rank_suffix(waits)} wait for data {share} of step time"
    return (
        "fewer and larger kernels, if the host is the limit: torch.compile, CUDA graphs; larger batches change the"
        " training itself (learning rate)"
    )


def idle_cores(host: HostUsage) -> float:
    """Return the median number of idle CPU cores."""
    return host.cpus * (1 - host.cpu_pct / 100)

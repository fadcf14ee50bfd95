"""Advice that several findings share.

Advice is given only where the run's metrics support it. Other advice can make a training slower: worker processes for
fetches of 100 us, or fewer threads on a machine with room to spare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpmon.model.findings.finding_evidence import DATA_SHARE, data_share, most_affected, rank_suffix
from dpmon.text.formatting import format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.device_usage import HostUsage
    from dpmon.model.mode_stats import ModeStats
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.model.run_events import LoaderStart

WORTH_A_WORKER_NS = 1_000_000
"""Shortest fetch that justifies a worker: passing a batch between processes takes some hundreds of microseconds."""
ROOM = 0.5
"""Fewest idle processors (median) for another worker. With fewer, a worker that computes slows the training."""
WORKING = 0.5
"""Fetches that compute keep processors busy. If the whole run uses less processor time than this share of its time in
fetches, the fetches mostly wait. More workers can then wait at the same time."""
FEW_TAKE_MOST = 3.0
"""Smallest ratio of mean to median fetch at which a few fetches (the first of each epoch) take most of the time."""


def data_advice(mode: ModeStats, facts: RunAnalysis) -> str:
    """Advice where the training waits for its loader."""
    fetch = mode.phase("data")
    median = None if fetch is None else fetch.median_ns
    mean = None if fetch is None or fetch.share is None or mode.mean_ns is None else fetch.share * mode.mean_ns
    if median and mean and mean >= FEW_TAKE_MOST * median:
        times = f"mean {format_long_duration(mean)}, median {format_long_duration(median)}"
        few = f"a few fetches take most of the time ({times})"
        if worker_restarts(facts, mode.process):
            return f"{few}, as the first of an epoch does after it starts workers: persistent_workers=True keeps them"
        return f"{few}: look for samples that take longer, a cold cache, a slow disk or network"
    if median is not None and median < WORTH_A_WORKER_NS:
        return (
            "not more workers: passing a batch between processes costs more than a fetch of"
            f" {format_long_duration(median)}; fetch larger batches, or index tensors in memory without a DataLoader"
        )
    host = facts.host
    if host is not None and idle_processors(host) < ROOM:
        if host.own < WORKING * mode.phase_share("data") * max(len(facts.processes), 1):
            return (
                f"more workers (DataLoader num_workers){_persistent_workers_hint(facts, mode.process)} if the fetches"
                " wait for a disk or network; otherwise end other work: the processors are"
                f" {format_percent(host.cpu_pct / 100)} in use, but this run uses only {host.own:.1f} of {host.cpus}"
            )
        return (
            "less work for each sample (decoding, augmentation), or data prepared beforehand: the processors are"
            f" {format_percent(host.cpu_pct / 100)} in use, so more workers help only if the fetches wait for a disk or"
            " network"
        )
    unknown = "" if facts.host is not None else ", if the processors have room"
    return (
        f"more workers (DataLoader num_workers){unknown}{_persistent_workers_hint(facts, mode.process)};"
        " less work for each sample; data on a faster disk"
    )


def _persistent_workers_hint(facts: RunAnalysis, process: int) -> str:
    """The advice to keep new workers, if a loader that does not keep its workers starts again."""
    return ", with persistent_workers=True" if _later_starts(facts, process) else ""


def worker_restarts(facts: RunAnalysis, process: int) -> list[LoaderStart]:
    """The starts at which a loader started its workers again."""
    return [one for one in _later_starts(facts, process) if one.workers]


def _later_starts(facts: RunAnalysis, process: int) -> list[LoaderStart]:
    """The later starts of loaders that keep no workers. A loader made anew for each epoch could not keep them."""
    return [one for one in facts.loaders if one.process == process and not one.persistent and one.start > 1]


def copy_advice(facts: RunAnalysis, process: int) -> str:
    """Advice where copies of batches to the GPU take long."""
    own = [one for one in facts.loaders if one.process == process]
    pinned = "" if own and all(one.pinned for one in own) else "pinned memory (DataLoader pin_memory) with "
    return f"{pinned}.to(..., non_blocking=True); fewer bytes: copy as uint8 or half precision, and convert on the GPU"


def step_variance_advice(facts: RunAnalysis, phase: str) -> str:
    """Advice where step times vary widely; `phase` takes most of the time."""
    host = facts.host
    if host is not None and idle_processors(host) < ROOM:
        return (
            f"fewer threads (OMP_NUM_THREADS) or loader workers, so that they fit on {host.cpus} processors, which are"
            f" {format_percent(host.cpu_pct / 100)} in use"
        )
    return f"batches of similar size, if their sizes differ; the longest steps show what {phase} waited for"


def low_utilization_advice(facts: RunAnalysis) -> str:
    """Advice where a GPU is idle."""
    waits = max(most_affected(facts, data_share, DATA_SHARE), key=data_share, default=None)
    if waits is not None:
        share = format_percent(data_share(waits))
        return f"the loader first: the steps{rank_suffix(waits)} wait for data for {share} of their time"
    return (
        "fewer and larger kernels, if the host is the limit: torch.compile, CUDA graphs; larger batches change the"
        " training itself (learning rate)"
    )


def idle_processors(host: HostUsage) -> float:
    """Median number of idle processors."""
    return host.cpus * (1 - host.cpu_pct / 100)

"""What to try about a finding, as far as the run's figures support it. Pure.

Advice that the figures do not support can make a training slower: worker processes for fetches of 100 us, or fewer
threads on a machine with room to spare.
"""

from __future__ import annotations

from dpmon.model.evidence import Evidence, HostFacts, ModeFacts
from dpmon.model.finding import enough, percent, took

__all__ = ["DATA_SHARE", "for_data", "for_low_use", "for_spread", "room"]

DATA_SHARE = 0.2
"""Of the step. A loader that keeps up shows a few per cent (a queue's get); a fifth is worth a worker more."""
WORTH_A_WORKER_NS = 1_000_000
"""A fetch. Handing a batch over from another process takes some hundreds of microseconds by itself."""
ROOM = 0.5
"""Processors without work, on the median: a worker needs that much, or it takes its time from the training."""
FEW_TAKE_MOST = 3.0
"""Mean fetch by the median one: a few fetches take most of the time, as the first of an epoch do."""


def for_data(mode: ModeFacts, evidence: Evidence) -> str:
    """What to try where the training waits for its loader."""
    fetch = mode.phase("data")
    median = None if fetch is None else fetch.median_ns
    mean = None if fetch is None or fetch.share is None or mode.mean_ns is None else fetch.share * mode.mean_ns
    if median and mean and mean >= FEW_TAKE_MOST * median:
        return (
            f"a few fetches take most of it (mean {took(mean)}, median {took(median)}), as the first of an epoch do"
            " when it starts its workers anew: persistent_workers=True"
        )
    if median is not None and median < WORTH_A_WORKER_NS:
        return (
            f"not more workers: handing over a batch costs more than a fetch of {took(median)} here; build larger"
            " batches at once, or index tensors that are in memory without a DataLoader"
        )
    if evidence.host is not None and room(evidence.host) < ROOM:
        return (
            "less work for each sample (decoding, augmentation), or data prepared beforehand: the processors are"
            f" {percent(evidence.host.cpu_pct / 100)} in use, so more workers would take their time from the training"
        )
    unknown = "" if evidence.host is not None else ", if the processors have room"
    return (
        f"more workers (DataLoader num_workers){unknown}, with persistent_workers=True; less work for each sample; data"
        " on a faster disk"
    )


def for_spread(evidence: Evidence, phase: str) -> str:
    """What to try where step times are spread wide; `phase` takes most of the time."""
    host = evidence.host
    if host is not None and room(host) < ROOM:
        return (
            f"fewer threads (OMP_NUM_THREADS) or loader workers, so that they fit on {host.cpus} processors, which are"
            f" {percent(host.cpu_pct / 100)} in use"
        )
    return f"batches of like sizes, if their sizes differ; the longest steps show what {phase} waited for"


def for_low_use(evidence: Evidence) -> str:
    """What to try where a GPU has nothing to do."""
    waits = max((mode.share("data") for mode in enough(evidence)), default=0.0)
    if waits >= DATA_SHARE:
        return f"the loader first: the steps wait for data for {percent(waits)} of their time"
    return (
        "fewer and larger kernels, if the host is what limits it: torch.compile, CUDA graphs; larger batches change the"
        " training itself (learning rate)"
    )


def room(host: HostFacts) -> float:
    """Processors without work, on the median."""
    return host.cpus * (1 - host.cpu_pct / 100)

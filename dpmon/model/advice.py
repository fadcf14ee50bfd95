"""Advice for each finding, given only where the run's figures support it. Pure.

Advice that the figures do not support can make a training slower: worker processes for fetches of 100 us, or fewer
threads on a machine with room to spare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpmon.model.finding import MIN_STEPS, most_affected, of_whom
from dpmon.store.figures import PhaseFigures
from dpmon.text.quantities import duration_words, percent

if TYPE_CHECKING:
    from dpmon.model.announced import LoaderStart
    from dpmon.model.devices import HostFacts
    from dpmon.model.finding import ModeFacts
    from dpmon.model.run_facts import RunFacts

DATA_SHARE = 0.2
"""Smallest share of the step to report. A loader that keeps up takes a few per cent (taking a batch from a queue)."""
WORTH_A_WORKER_NS = 1_000_000
"""Shortest fetch that justifies a worker: passing a batch between processes takes some hundreds of microseconds."""
ROOM = 0.5
"""Fewest idle processors (median) for another worker. With fewer, a worker that computes slows the training."""
WORKING = 0.5
"""Fetches that compute keep processors busy. If the whole run uses less processor time than this share of its time in
fetches, the fetches mostly wait. More workers can then wait at the same time."""
FEW_TAKE_MOST = 3.0
"""Smallest ratio of mean to median fetch at which a few fetches (the first of each epoch) take most of the time."""


def is_timed(phase: PhaseFigures) -> bool:
    """Whether the device times of a phase are known in enough steps."""
    return phase.device_share is not None and phase.device_count >= MIN_STEPS


def data_share(mode: ModeFacts) -> float:
    """The share of the steps' time spent waiting for data; by device times if they are known."""
    figures = mode.phase("data")
    if figures is None or not is_timed(figures):
        return mode.share("data")
    return figures.device_share or 0.0


def for_data(mode: ModeFacts, facts: RunFacts) -> str:
    """Advice where the training waits for its loader."""
    fetch = mode.phase("data")
    median = None if fetch is None else fetch.median_ns
    mean = None if fetch is None or fetch.share is None or mode.mean_ns is None else fetch.share * mode.mean_ns
    if median and mean and mean >= FEW_TAKE_MOST * median:
        few = f"a few fetches take most of the time (mean {duration_words(mean)}, median {duration_words(median)})"
        if restarted(facts, mode.process):
            return f"{few}, as the first of an epoch does after it starts workers: persistent_workers=True keeps them"
        return f"{few}: look for samples that take longer, a cold cache, a slow disk or network"
    if median is not None and median < WORTH_A_WORKER_NS:
        return (
            "not more workers: passing a batch between processes costs more than a fetch of"
            f" {duration_words(median)}; fetch larger batches, or index tensors in memory without a DataLoader"
        )
    host = facts.host
    if host is not None and room(host) < ROOM:
        if host.own < WORKING * mode.share("data") * max(len(facts.processes), 1):
            return (
                f"the run uses only {host.own:.1f} of {host.cpus} processors, so its fetches mostly wait: if for a disk"
                f" or network, more workers (DataLoader num_workers){_keeping(facts, mode.process)}; if for the"
                f" processors, which are {percent(host.cpu_pct / 100)} in use, end other work"
            )
        return (
            "less work for each sample (decoding, augmentation), or data prepared beforehand: the processors are"
            f" {percent(host.cpu_pct / 100)} in use, so more workers help only if the fetches wait for a disk or"
            " network"
        )
    unknown = "" if facts.host is not None else ", if the processors have room"
    return (
        f"more workers (DataLoader num_workers){unknown}{_keeping(facts, mode.process)}; less work for each sample;"
        " data on a faster disk"
    )


def _keeping(facts: RunFacts, process: int) -> str:
    """The advice to keep new workers, if a loader that does not keep its workers starts again."""
    return ", with persistent_workers=True" if _later_starts(facts, process) else ""


def restarted(facts: RunFacts, process: int) -> list[LoaderStart]:
    """The starts at which a loader started its workers again."""
    return [one for one in _later_starts(facts, process) if one.workers]


def _later_starts(facts: RunFacts, process: int) -> list[LoaderStart]:
    """The later starts of loaders that keep no workers. A loader made anew for each epoch could not keep them."""
    return [one for one in facts.loaders if one.process == process and not one.persistent and one.start > 1]


def for_copies(facts: RunFacts, process: int) -> str:
    """Advice where copies of batches to the GPU take long."""
    own = [one for one in facts.loaders if one.process == process]
    pinned = "" if own and all(one.pinned for one in own) else "pinned memory (DataLoader pin_memory) with "
    return f"{pinned}.to(..., non_blocking=True); fewer bytes: copy as uint8 or half precision, and convert on the GPU"


def for_spread(facts: RunFacts, phase: str) -> str:
    """Advice where step times vary widely; `phase` takes most of the time."""
    host = facts.host
    if host is not None and room(host) < ROOM:
        return (
            f"fewer threads (OMP_NUM_THREADS) or loader workers, so that they fit on {host.cpus} processors, which are"
            f" {percent(host.cpu_pct / 100)} in use"
        )
    return f"batches of similar size, if their sizes differ; the longest steps show what {phase} waited for"


def for_low_use(facts: RunFacts) -> str:
    """Advice where a GPU is idle."""
    waits = max(most_affected(facts, data_share, DATA_SHARE), key=data_share, default=None)
    if waits is not None:
        share = percent(data_share(waits))
        return f"the loader first: the steps{of_whom(waits)} wait for data for {share} of their time"
    return (
        "fewer and larger kernels, if the host is the limit: torch.compile, CUDA graphs; larger batches change the"
        " training itself (learning rate)"
    )


def room(host: HostFacts) -> float:
    """Median number of idle processors."""
    return host.cpus * (1 - host.cpu_pct / 100)

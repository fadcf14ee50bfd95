"""The parts of a finding, the words and the advice that findings share, notes on phase times.

Advice is given only where the run's figures support it. Other advice can make a training slower: worker processes for
fetches of 100 us, or fewer threads on a machine with room to spare. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import STEP_PHASES
from dpmon.store.step_stats import PhaseStats, StepStats
from dpmon.text.formatting import format_count_with_noun, format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.device_usage import HostUsage
    from dpmon.model.mode_stats import ModeStats
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.model.run_events import LoaderStart

MIN_STEPS = 30
"""Fewest steps for a median; in fewer, start-up (caches, allocator, loader workers) weighs too much."""

OF_RUN = ("between", "evaluation")
"""Kinds of findings about the time of the run, not only of its training steps."""
MOST_SAVED, MOST_AS_RATE = 0.99, 0.95
"""The largest share of the time that advice promises to save, and the largest share with a rate."""


class Finding(NamedTuple):
    """One thing worth a look."""

    kind: str
    """data, copy, slower, replicate, transfer, idle, small batch, uneven, fuller, throttled, low use, drift, stall,
    spread, between, evaluation, quiet, failed, loss, busy, crowded, straggler, in turn, own collectives, exposed,
    bucket, accumulation, unused."""
    text: str
    """The fact, in one sentence."""
    ground: str
    """The figures behind it."""
    advice: str
    """What to try."""
    weight: float
    """Importance, by which findings are sorted: roughly the affected share of the time (0 to 1)."""
    saves: float | None = None
    """The share of the time (0 to 1) that goes at most if the cause goes: of the steps, or for the kinds in OF_RUN of
    the run. None where no bound is sound."""
    parts: Mapping[str, float] = {}
    """The parts of `saves` that other findings may be about, too: by phase, or "wait", "exposed", "between"."""

    @property
    def gain_limit_text(self) -> str:
        """The most that the advice can bring, in words: "steps at most 31% faster"; empty if unknown."""
        return (
            "" if self.saves is None else f"{'run' if self.kind in OF_RUN else 'steps'} {format_gain_limit(self.saves)}"
        )

    @property
    def advice_text(self) -> str:
        """The advice with the most that it can bring: "try (steps at most 31% faster): more workers"."""
        return f"try{f' ({self.gain_limit_text})' if self.gain_limit_text else ''}: {self.advice}"


def format_gain_limit(saves: float) -> str:
    """The most that is gained without this share of the time: "at most 31% faster", "at most 4.0 times as fast".

    If little time is left, "in 2% of the time at best": a small error of the share would change a rate much.
    """
    left = 1 - min(saves, MOST_SAVED)
    return (
        f"in {format_percent(left)} of the time at best" if saves > MOST_AS_RATE else f"at most {format_gain(1 / left)}"
    )


def format_gain(times: float) -> str:
    """A rate against another one (1 or more): "31% faster", "4.0 times as fast"."""
    return f"{format_percent(times - 1)} faster" if times < 2 else f"{times:.1f} times as fast"


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


# ------------------------------------------------------------------------------------------------ notes on phase times

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


# ------------------------------------------------------------------------------------------------ advice

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

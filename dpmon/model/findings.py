"""What is worth a look in a run, with its ground in figures and what to try. Pure: Evidence in, findings out.

A finding is a statement about what was measured, never a guess at what was not: the ground gives the figures it stands
on, and there is none from too few steps. Thresholds are named here, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from dpmon.model.evidence import BatchFacts, Evidence, LongStep, ModeFacts, ReplicaFacts

__all__ = ["Finding", "findings"]

MIN_STEPS = 30
"""Below this a median says little, and start-up (caches, allocator, loader workers) still weighs."""
DATA_SHARE = 0.2
"""Of the step. A loader that keeps up shows a few per cent (a queue's get); a fifth is worth a worker more."""
COPY_SHARE = 0.2
"""Of the step, for replicate, or for scatter and gather: what DataParallel itself costs, and DDP mostly does not."""
IDLE_CALLS = 0.5
"""Of the calls under dp. The last batch of an epoch is often short; every other batch is not chance."""
ROWS_RATIO = 0.75
"""Smallest share of rows by the largest. torch.chunk leaves up to one row less on large batches, which is no matter."""
TIME_RATIO = 1.5
"""Slowest replica's median by the fastest one's, with equal rows: more than the spread of equal GPUs."""
FULLER_RATIO, FULLER_BYTES = 1.25, 512 << 20
"""First GPU by the fullest of the others, and at least so much more: a context alone is some hundreds of MiB."""
THROTTLED = 0.05
"""Of the samples: short dips after a burst are usual."""
THROTTLE_SAMPLES = 10
DRIFT_RATIO, DRIFT_STEPS = 1.2, 150
"""Last third's median by the first third's, from so many steps (50 a third): well above a median's own noise. And three
quarters of the last third must be above three quarters of the first, lest a noisy machine is taken for a drift."""
STALL_RATIO, STALL_NS = 10, 500_000_000
"""Step by the median, and at least so long: nobody minds ten times a millisecond."""
SPREAD_RATIO, SPREAD_NS = 10, 50_000_000
"""p95 by the median, and at least so long: where one step in twenty takes that, there is no single stall to name."""
STALLS_SHARE, STALLS_NS = 0.02, 5_000_000_000
"""Of the time of all steps, or so long together: less is not worth a line."""
QUIET_NS, QUIET_SHARE = 30_000_000_000, 0.1
"""Without a step at the end, and of the run: saving and a last evaluation take some time."""
LOW_USE, USE_SAMPLES = 30.0, 20
"""Median of "any kernel ran" in per cent: most of the time the GPU had nothing to do at all."""

_DATA_ADVICE = (
    "more workers (DataLoader num_workers), persistent_workers and pin_memory; cheaper decoding or augmentation; data"
    " on a faster disk"
)
_STALL_ADVICE = {
    "data": "the loader stood still: a new epoch that starts its workers anew (persistent_workers), a cold cache, a"
    " slow disk or network",
    "forward": "a shape seen for the first time (compilation, kernel choice), or another process on the device",
    "backward": "a shape seen for the first time (compilation, kernel choice), or another process on the device",
    "optimizer": "a synchronisation in the optimizer or its scheduler",
    "other": "the script's own work between the phases: a checkpoint, an evaluation, logging, .item() on a GPU",
}


class Finding(NamedTuple):
    """One thing worth a look."""

    kind: str
    """data, slower, replicate, transfer, idle, small batch, uneven, fuller, throttled, low use, drift, stall, spread,
    quiet."""
    text: str
    """What was found, one sentence."""
    ground: str
    """The figures it stands on."""
    advice: str
    """What to try."""
    weight: float
    """How much it matters, to put the heaviest first: about the share of time (0 to 1) that it touches."""


def findings(evidence: Evidence) -> list[Finding]:
    """Everything worth a look, the heaviest first; empty if there is nothing, or too little was seen."""
    found = [finding for find in _FINDERS for finding in find(evidence)]
    return sorted(found, key=lambda finding: -finding.weight)


# ------------------------------------------------------------------------------------------------ phases


def _enough(evidence: Evidence) -> Iterator[ModeFacts]:
    yield from (mode for mode in evidence.modes if mode.steps >= MIN_STEPS)


def _data(evidence: Evidence) -> Iterator[Finding]:
    for mode in _enough(evidence):
        share = mode.share("data")
        if share >= DATA_SHARE:
            yield Finding(
                "data",
                f"The training waits for data{_under(mode, evidence)}: {_percent(share)} of the time of its steps.",
                f"data {_of(mode, 'data')}; {_basis(mode)}",
                _DATA_ADVICE,
                share,
            )


def _slower(evidence: Evidence) -> Iterator[Finding]:
    worth = evidence.worth
    if worth is not None and worth.high < 1:
        yield Finding(
            "slower",
            worth.sentence,
            f"the median step in single takes {worth.speedup:.2f} of that in dp (95 %: {worth.low:.2f} to"
            f" {worth.high:.2f})",
            "one device, larger batches (more work for every copy of the model), or DistributedDataParallel",
            1 - worth.speedup,
        )


def _copies(evidence: Evidence) -> Iterator[Finding]:
    for mode in _enough(evidence):
        if mode.mode != "dp":
            continue
        share = mode.share("replicate")
        virtual = " These replicas are virtual: on GPUs the share is another." if mode.virtual else ""
        if share >= COPY_SHARE:
            yield Finding(
                "replicate",
                f"Copying the model to the devices takes {_percent(share)} of the time of the steps.{virtual}",
                f"replicate {_of(mode, 'replicate')}; {_basis(mode)}",
                "DistributedDataParallel copies nothing in a step; under DataParallel larger batches and gradient"
                " accumulation make fewer copies",
                share,
            )
        share = mode.share("scatter", "gather")
        if share >= COPY_SHARE:
            yield Finding(
                "transfer",
                f"Scattering inputs and gathering outputs takes {_percent(share)} of the time of the steps.{virtual}",
                f"scatter {_of(mode, 'scatter')}; gather {_of(mode, 'gather')}; {_basis(mode)}",
                "compute the loss inside the forward, so that a number is gathered and not the outputs; pinned memory;"
                " DistributedDataParallel",
                share,
            )


# ------------------------------------------------------------------------------------------------ replicas


def _idle(evidence: Evidence) -> Iterator[Finding]:
    for batch in evidence.batches:
        if not _is_idle(batch):
            continue
        ground = f"{_many(batch.idle_calls, 'call')} of {batch.calls:,}, {batch.devices} devices"
        weight = batch.idle / batch.devices
        if batch.rows is not None and batch.rows < batch.devices:
            yield Finding(
                "small batch",
                f"The batch of {batch.root} ({_many(batch.rows, 'row')}) is smaller than the {batch.devices} devices:"
                f" {batch.idle} of them stay idle.",
                ground,
                f"a batch of {batch.devices} rows or more, or fewer devices",
                weight,
            )
            continue
        rows = "" if batch.rows is None else f": {batch.rows} rows do not make {batch.devices} chunks of one size"
        yield Finding(
            "idle",
            f"{batch.idle} of {batch.devices} devices receive no rows of {batch.root}{rows}.",
            ground,
            f"a batch that {batch.devices} divides (torch.chunk makes chunks of one size, rounded up)",
            weight,
        )


def _is_idle(batch: BatchFacts) -> bool:
    return batch.calls >= MIN_STEPS and batch.idle_calls >= IDLE_CALLS * batch.calls


def _uneven(evidence: Evidence) -> Iterator[Finding]:
    batches = {batch.root: batch for batch in evidence.batches}
    by_root: dict[str, list[ReplicaFacts]] = {}
    for replica in evidence.replicas:
        if replica.mode == "dp" and replica.calls >= MIN_STEPS:
            by_root.setdefault(replica.root, []).append(replica)
    for root, replicas in by_root.items():
        batch = batches.get(root)
        if len(replicas) > 1:
            uneven = list(_uneven_rows(root, replicas, batch.devices if batch is not None else len(replicas)))
            # That devices are idle says more of the same batch.
            yield from (uneven or _uneven_times(root, replicas)) if batch is None or not _is_idle(batch) else ()


def _uneven_rows(root: str, replicas: list[ReplicaFacts], devices: int) -> Iterator[Finding]:
    rows = [replica.rows for replica in replicas if replica.rows is not None]
    most = max(rows, default=0)
    if len(rows) == len(replicas) and most and min(rows) < ROWS_RATIO * most:
        yield Finding(
            "uneven",
            f"The replicas of {root} receive unequal shares: {', '.join(map(str, rows[:16]))} rows.",
            f"the sizes most often seen over {_many(max(replica.calls for replica in replicas), 'call')}",
            f"a batch that {devices} divides: the fullest replica sets the pace",
            (1 - min(rows) / most) / len(replicas),
        )


def _uneven_times(root: str, replicas: list[ReplicaFacts]) -> Iterator[Finding]:
    timed = [replica for replica in replicas if replica.median_ns]
    # Virtual replicas share processors: which of them gets one first says nothing of the data.
    if len(timed) < 2 or any(replica.virtual for replica in timed):
        return
    slow = max(timed, key=lambda replica: replica.median_ns or 0)
    fast = min(timed, key=lambda replica: replica.median_ns or 0)
    if (slow.median_ns or 0) >= TIME_RATIO * (fast.median_ns or 1):
        yield Finding(
            "uneven",
            f"Replica {slow.replica} of {root} ({slow.device}) takes {_times(slow.median_ns, fast.median_ns)} as long"
            f" as replica {fast.replica} ({fast.device}).",
            f"forward on the host, median {_time(slow.median_ns)} and {_time(fast.median_ns)}, equal rows",
            "another process on that GPU, a slower link or model of GPU, lower clocks: compare the devices",
            1 - (fast.median_ns or 0) / (slow.median_ns or 1),
        )


# ------------------------------------------------------------------------------------------------ devices


def _fuller(evidence: Evidence) -> Iterator[Finding]:
    held = _memory_by_device(evidence)
    if len(held) < 2:
        return
    (first, most), *others = held
    other, rest = max(others, key=lambda item: item[1])
    if most >= FULLER_RATIO * rest and most - rest >= FULLER_BYTES:
        yield Finding(
            "fuller",
            f"{first} is fuller than the others: {_gib(most)}, {other} {_gib(rest)} at most.",
            f"the most that this run held on each of {len(held)} devices",
            "under DataParallel the first device gathers the outputs, computes the loss and holds the optimizer's"
            " state: compute the loss inside the forward, or use DistributedDataParallel",
            0.1,
        )


def _memory_by_device(evidence: Evidence) -> list[tuple[str, float]]:
    """What the run held on each of its GPUs at most, in bytes, by name; as the driver says, or else as torch does."""
    ours = [device for device in evidence.devices if device.of_run and device.mem_run_max is not None]
    if len(ours) > 1:
        ours.sort(key=lambda device: (device.called is None, device.called or "", device.index))
        return [(device.called or f"GPU {device.index}", device.mem_run_max or 0.0) for device in ours]
    found = []
    for row in evidence.memory:
        parts = (row.model, row.gradients, row.optimizer, row.rest)
        if row.device.startswith("cuda") and all(part is not None for part in parts):
            found.append((row.device, float(sum(part or 0 for part in parts))))
    return found


def _throttled(evidence: Evidence) -> Iterator[Finding]:
    for device in evidence.devices:
        if device.of_run is False or device.throttle_samples < THROTTLE_SAMPLES or not device.throttled:
            continue
        reason, count = max(device.throttled.items(), key=lambda item: item[1])
        share = count / device.throttle_samples
        if share >= THROTTLED:
            yield Finding(
                "throttled",
                f"{device.called or f'GPU {device.index}'} ran below its clocks in {_percent(share)} of the samples:"
                f" {reason}.",
                f"{count} of {device.throttle_samples} samples"
                + (f", at most {device.temperature_max:.0f} °C" if device.temperature_max is not None else "")
                + (f", {device.power_max:.0f} W" if device.power_max is not None else ""),
                "cooling and airflow for heat; the power limit (nvidia-smi -q -d POWER) for power",
                share / 2,
            )


def _low_use(evidence: Evidence) -> Iterator[Finding]:
    for device in evidence.devices:
        if device.of_run is not True or device.util_median is None or device.util_samples < USE_SAMPLES:
            continue
        if device.util_median < LOW_USE:
            yield Finding(
                "low use",
                f"{device.called or f'GPU {device.index}'} had nothing to do most of the time.",
                f"a kernel ran in {device.util_median:.0f} % of the time (median of {device.util_samples} samples)",
                "larger batches, mixed precision or torch.compile where the host is the brake; and see what is said of"
                " the phases",
                (100 - device.util_median) / 200,
            )


# ------------------------------------------------------------------------------------------------ time


def _drift(evidence: Evidence) -> Iterator[Finding]:
    for mode in evidence.modes:
        early, late = mode.early.get("step"), mode.late.get("step")
        if mode.steps < DRIFT_STEPS or not early or not late or late < DRIFT_RATIO * early:
            continue
        if mode.early_p75_ns is None or mode.late_p25_ns is None or mode.late_p25_ns < mode.early_p75_ns:
            continue
        grown = {name: late - mode.early.get(name, 0) for name, late in mode.late.items() if name != "step"}
        phase = max(grown, key=lambda name: grown[name], default="")
        where = f"; {phase} grew most: {_time(mode.early.get(phase))}, then {_time(mode.late[phase])}" if phase else ""
        yield Finding(
            "drift",
            f"Steps became slower{_under(mode, evidence)}: in the end {_times(late, early)} as long as at first.",
            f"median {_time(early)} over the first third of {mode.steps:,} steps, {_time(late)} over the last{where}",
            "lists or graphs that grow (losses kept with their graph), memory that fills up, heat, a fuller disk, other"
            " work on the machine",
            1 - early / late,
        )


def _stalls(evidence: Evidence) -> Iterator[Finding]:
    medians = {mode.mode: mode.median_ns for mode in _enough(evidence) if mode.median_ns and not _is_spread(mode)}
    total = sum((mode.median_ns or 0) * mode.steps for mode in evidence.modes)
    stalls = [step for step in evidence.longest if _is_stall(step, medians.get(step.mode))]
    lost = sum(step.wall_ns for step in stalls)
    if not stalls or (lost < STALLS_SHARE * (total + lost) and lost < STALLS_NS):
        return
    worst = stalls[0]
    if len(stalls) > 1:
        least = "At least " if len(stalls) == len(evidence.longest) else ""
        text = f"{least}{len(stalls)} steps took more than {STALL_RATIO} times the median: {_time(lost)} together."
    else:
        text = f"One step took {_time(lost)}, {_times(lost, medians[worst.mode])} the median."
    yield Finding(
        "stall",
        text,
        f"the longest: step {worst.step}{_of_process(worst, evidence)} at {_clock(worst.start_ns)},"
        f" {_time(worst.wall_ns)}, of which {worst.phase} {_time(worst.phase_ns)}; median {_time(medians[worst.mode])}",
        _stall_advice(worst.phase, evidence),
        lost / (total + lost),
    )


def _stall_advice(phase: str, evidence: Evidence) -> str:
    if phase == "backward" and evidence.processes > 1:
        return _STALL_ADVICE[phase] + ", or a rank that the others waited for"
    return _STALL_ADVICE.get(phase, _STALL_ADVICE["other"])


def _is_spread(mode: ModeFacts) -> bool:
    return bool(mode.median_ns and mode.p95_ns and mode.p95_ns >= SPREAD_RATIO * mode.median_ns)


def _spread(evidence: Evidence) -> Iterator[Finding]:
    for mode in _enough(evidence):
        if _is_spread(mode) and (mode.p95_ns or 0) >= SPREAD_NS:
            share, phase = max(((phase.share or 0.0, phase.name) for phase in mode.phases), default=(0.0, "none"))
            yield Finding(
                "spread",
                f"Step times are spread wide{_under(mode, evidence)}: one in twenty takes"
                f" {_times(mode.p95_ns, mode.median_ns)} the median or more.",
                f"median {_time(mode.median_ns)}, p95 {_time(mode.p95_ns)} over {mode.steps:,} steps; {phase} takes"
                f" most of the time ({_percent(share)})",
                "other work on the processors (their use is under devices), fewer threads (OMP_NUM_THREADS) or loader"
                " workers than cores, batches of like sizes",
                0.3,
            )


def _is_stall(step: LongStep, median_ns: float | None) -> bool:
    return median_ns is not None and step.wall_ns >= max(STALL_RATIO * median_ns, STALL_NS)


def _quiet(evidence: Evidence) -> Iterator[Finding]:
    if evidence.end_ns is None or evidence.last_step_ns is None or not list(_enough(evidence)):
        return
    quiet = evidence.end_ns - evidence.last_step_ns
    if quiet >= max(QUIET_NS, QUIET_SHARE * evidence.end_ns):
        yield Finding(
            "quiet",
            f"No step ended in the last {_time(quiet)} of the run.",
            f"the last one at {_clock(evidence.last_step_ns)}, the end at {_clock(evidence.end_ns)}",
            "the end of the script's output says whether it saved, evaluated or hung",
            quiet / evidence.end_ns,
        )


_FINDERS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    _data, _slower, _copies, _idle, _uneven, _fuller, _throttled, _low_use, _drift, _stalls, _spread, _quiet,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ words


def _under(mode: ModeFacts, evidence: Evidence) -> str:
    """Which mode is meant, where there are several."""
    return f" in mode {mode.mode}" if len(evidence.modes) > 1 and mode.mode else ""


def _of(mode: ModeFacts, name: str) -> str:
    found = next((phase for phase in mode.phases if phase.name == name), None)
    return "did not run" if found is None else f"median {_time(found.median_ns)}, p95 {_time(found.p95_ns)}"


def _basis(mode: ModeFacts) -> str:
    return f"step median {_time(mode.median_ns)} over {mode.steps:,} steps"


def _of_process(step: LongStep, evidence: Evidence) -> str:
    return f" of process {step.process}" if evidence.processes > 1 else ""


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _times(one: float | None, other: float | None) -> str:
    ratio = (one or 0) / (other or 1)
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _time(ns: float | None) -> str:
    """A duration with three digits: 412 µs, 12.3 ms, 4.50 s, 3 min 20 s."""
    if ns is None:
        return "–"
    for scale, unit in ((1e3, "µs"), (1e6, "ms"), (1e9, "s")):
        value = ns / scale
        if value < (99.95 if unit == "s" else 999.5):
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    minutes, seconds = divmod(round(ns / 1e9), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _clock(ns: float) -> str:
    seconds = int(ns // 1_000_000_000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

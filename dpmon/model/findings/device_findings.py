"""Findings about the split between replicas, about their devices and about the machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_advice import low_utilization_advice
from dpmon.model.findings.finding_evidence import MIN_STEPS, format_ratio, measured_modes
from dpmon.model.nodes import gpu_name
from dpmon.text.formatting import format_bytes, format_count_with_noun, format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.device_usage import DeviceUsage, HostUsage
    from dpmon.model.layouts import IdleDeviceCounts, ReplicaStats
    from dpmon.model.run_analysis import RunAnalysis

IDLE_CALLS = 0.5
"""Smallest share of the calls under dp in which devices are idle. The last batch of an epoch is often too small; half
of all batches are not."""
ROWS_RATIO = 0.75
"""Smallest ratio of fewest to most rows without a finding. On a large batch, the last chunk of torch.chunk has
only a few rows fewer."""
TIME_RATIO = 1.5
"""Smallest ratio of the slowest to the fastest replica's median, with equal rows: above the spread of equal GPUs.
Device times are used if all are known."""
HOST_BOUND = 1.2
"""Up to this ratio of device to host time, a device counts as waiting for the host to queue work. Its time then
includes idle time, because it is measured between two events."""
FULLER_RATIO, FULLER_BYTES = 1.25, 512 << 20
"""Smallest ratio of the first GPU's memory to the largest of the others, and smallest excess: a CUDA context alone
takes 100 MiB or more."""
THROTTLED = 0.05
"""Smallest share of the samples: short dips after a burst are usual."""
THROTTLE_SAMPLES = 10
LOW_USE, USE_SAMPLES = 30.0, 20
"""Median share of time (per cent) in which a kernel ran, below which a GPU is reported as idle; and fewest samples."""
HOST_SAMPLES = 10
"""Fewest samples, one per second; fewer cover only the start."""
FULL_PCT = 90.0
"""Median use of all processors (per cent); below it, one is usually free."""
OTHERS_SHARE = 0.25
"""Smallest share of the processors that other work uses. A desktop, a monitor and the supervisor stay well below it."""
LOAD_RATIO = 2.0
"""Threads that want to run, per processor: at this ratio, a thread waits as long as it runs."""


def find_idle_devices(facts: RunAnalysis) -> Iterator[Finding]:
    """Devices without rows."""
    for batch in facts.batches:
        if not _is_idle(batch):
            continue
        ground = f"{format_count_with_noun(batch.idle_calls, 'call')} of {batch.calls:,}, {batch.devices} devices"
        weight = batch.idle / batch.devices
        if batch.rows is not None and batch.rows < batch.devices:
            yield Finding(
                "small batch",
                f"The batch of {batch.root} ({format_count_with_noun(batch.rows, 'row')}) is smaller than the"
                f" {batch.devices} devices: {batch.idle} of them {'stays' if batch.idle == 1 else 'stay'} idle.",
                ground,
                f"a batch of {batch.devices} rows or more, or fewer devices",
                weight,
            )
            continue
        rows = "" if batch.rows is None else f": {batch.rows} rows do not make {batch.devices} chunks of one size"
        yield Finding(
            "idle",
            f"{batch.idle} of {batch.devices} devices {'receives' if batch.idle == 1 else 'receive'} no rows of"
            f" {batch.root}{rows}.",
            ground,
            f"a batch that {batch.devices} divides (torch.chunk makes chunks of one size, rounded up)",
            weight,
        )


def _is_idle(batch: IdleDeviceCounts) -> bool:
    return batch.calls >= MIN_STEPS and batch.idle_calls >= IDLE_CALLS * batch.calls


def find_uneven_replicas(facts: RunAnalysis) -> Iterator[Finding]:
    """Replicas with unequal rows, or unequal times."""
    batches = {batch.root: batch for batch in facts.batches}
    by_root: dict[str, list[ReplicaStats]] = {}
    for replica in facts.replicas:
        if replica.mode == "dp" and replica.calls >= MIN_STEPS:
            by_root.setdefault(replica.root, []).append(replica)
    for root, replicas in by_root.items():
        batch = batches.get(root)
        if len(replicas) > 1:
            uneven = list(_uneven_rows(root, replicas, batch.devices if batch is not None else len(replicas)))
            # The finding about idle devices already explains this batch.
            yield from (uneven or _uneven_times(root, replicas)) if batch is None or not _is_idle(batch) else ()


def _uneven_rows(root: str, replicas: list[ReplicaStats], devices: int) -> Iterator[Finding]:
    rows = [replica.rows for replica in replicas if replica.rows is not None]
    most = max(rows, default=0)
    if len(rows) == len(replicas) and most and min(rows) < ROWS_RATIO * most:
        yield Finding(
            "uneven",
            f"The replicas of {root} receive unequal shares: {', '.join(map(str, rows[:16]))} rows.",
            "the split most often seen over"
            f" {format_count_with_noun(max(replica.calls for replica in replicas), 'call')}",
            f"a batch that {devices} divides: the fullest replica sets the pace",
            (1 - min(rows) / most) / len(replicas),
        )


def _uneven_times(root: str, replicas: list[ReplicaStats]) -> Iterator[Finding]:
    # The host only queues a GPU's work: prefer device times if those of all devices are known.
    on_device = all(replica.on_device.count >= MIN_STEPS for replica in replicas)
    middles = [((replica.on_device if on_device else replica.time).median, replica) for replica in replicas]
    timed = [(middle, replica) for middle, replica in middles if middle]
    # Virtual replicas share processors, so their times depend on the order in which they run.
    if len(timed) < 2 or any(replica.virtual for _, replica in timed):
        return
    slowest, slow = max(timed, key=itemgetter(0))
    fastest, fast = min(timed, key=itemgetter(0))
    if on_device and slowest <= HOST_BOUND * (slow.time.median or 0):
        return  # the host limits these devices: its threads queue work one after the other
    if slowest >= TIME_RATIO * fastest:
        where = "device" if on_device else "host"
        yield Finding(
            "uneven",
            f"Replica {slow.replica} of {root} ({slow.device}) takes {format_ratio(slowest, fastest)} as long"
            f" as replica {fast.replica} ({fast.device}).",
            f"forward on the {where}, median {format_long_duration(slowest)} and {format_long_duration(fastest)},"
            " equal rows",
            "compare the devices: another process on that GPU, a slower link or model of GPU, lower clocks",
            1 - fastest / slowest,
        )


def find_uneven_memory(facts: RunAnalysis) -> Iterator[Finding]:
    """A first GPU that holds more than the others."""
    held = _memory_by_device(facts)
    if len(held) < 2:
        return
    (first, most), *others = held
    other, rest = max(others, key=lambda item: item[1])
    replicated = any(mode.mode == "dp" for mode in facts.modes)
    # A model that the script spreads over devices need not fill them alike.
    if (replicated or facts.names) and most >= FULLER_RATIO * rest and most - rest >= FULLER_BYTES:
        yield Finding(
            "fuller",
            f"{first} is fuller than the others: {format_bytes(most)} against at most {format_bytes(rest)} ({other}).",
            f"the most that this run held on each of {len(held)} devices",
            "under DataParallel the first device gathers the outputs, computes the loss and holds the optimizer's"
            " state: compute the loss inside the forward, or use DistributedDataParallel"
            if replicated
            else "so that no rank uses the first GPU beside its own: torch.cuda.set_device(LOCAL_RANK) before anything"
            " else, and torch.load(..., map_location=...)",
            0.1,
        )


def _memory_by_device(facts: RunAnalysis) -> list[tuple[str, float]]:
    """The peak memory (bytes) of the run on each GPU with its name; from the driver, or else from torch."""
    ours = [device for device in facts.devices if device.of_run and device.mem_run_max is not None]
    if len(ours) > 1:
        ours.sort(key=lambda device: (device.called is None, device.called or "", device.index))
        return [(_device_name(device, facts), device.mem_run_max or 0.0) for device in ours]
    found = []
    for row in facts.memory:
        parts = (row.model, row.gradients, row.optimizer, row.rest)
        whole = None not in parts and all(known == row.processes for known in row.known)
        if row.device.startswith("cuda") and whole:
            found.append((row.device, float(sum(part or 0 for part in parts))))
    return found


def _device_name(device: DeviceUsage, facts: RunAnalysis) -> str:
    own = device.called if not facts.nodes else None  # each node has a cuda:0
    return own or gpu_name(device.index, facts.nodes)


def find_throttling(facts: RunAnalysis) -> Iterator[Finding]:
    """GPUs with lowered clocks."""
    for device in facts.devices:
        if device.of_run is False or device.throttle_samples < THROTTLE_SAMPLES or not device.throttled:
            continue
        reason, count = max(device.throttled.items(), key=lambda item: item[1])
        share = count / device.throttle_samples
        if share >= THROTTLED:
            yield Finding(
                "throttled",
                f"{_device_name(device, facts)} ran with lowered clocks in {format_percent(share)} of the samples:"
                f" {reason}.",
                f"{count} of {device.throttle_samples} samples"
                + (f", at most {device.temperature_max:.0f} °C" if device.temperature_max is not None else "")
                + (f", {device.power_max:.0f} W" if device.power_max is not None else ""),
                "cooling and airflow for heat; the power limit (nvidia-smi -q -d POWER) for power",
                share / 2,
            )


def find_low_utilization(facts: RunAnalysis) -> Iterator[Finding]:
    """GPUs that were idle."""
    for device in facts.devices:
        if device.of_run is not True or device.util_median is None or len(device.util) < USE_SAMPLES:
            continue
        if device.util_median < LOW_USE:
            yield Finding(
                "low use",
                f"{_device_name(device, facts)} had nothing to do most of the time.",
                f"a kernel ran in {device.util_median:.0f}% of the time (median of {len(device.util)} samples)",
                low_utilization_advice(facts),
                (100 - device.util_median) / 200,
            )


def find_busy_processors(facts: RunAnalysis) -> Iterator[Finding]:
    """Processors that are busy with other work, or too few for the run itself."""
    host = facts.host
    if host is None or host.samples < HOST_SAMPLES or host.cpu_pct < FULL_PCT or not list(measured_modes(facts)):
        return
    share, alone = host.others / host.cpus, host.machines == 1
    if share >= OTHERS_SHARE:
        yield Finding(
            "busy",
            f"{'The machine is' if alone else 'The machines are'} busy with other work: a median of"
            f" {host.others:.1f} of {'its ' if alone else ''}{_processors(host)}{'' if alone else ' per machine'}.",
            _processor_evidence(host),
            "times on a quieter machine will differ; find the other work (top), and end it if you can",
            share / 2,
        )
    elif host.load is not None and host.load >= LOAD_RATIO * host.cpus:
        yield Finding(
            "crowded",
            f"More threads want to run than there are processors: {host.load:.0f} on {_processors(host)}.",
            _processor_evidence(host),
            "fewer threads (torch.set_num_threads, OMP_NUM_THREADS) or loader workers: no more in all than processors",
            0.3,
        )


def _processors(host: HostUsage) -> str:
    return "1 processor" if host.cpus == 1 else f"{host.cpus} processors"


def _processor_evidence(host: HostUsage) -> str:
    load = f", load {host.load:.1f}" if host.load is not None else ""
    where = f" on {host.machines} machines" if host.machines > 1 else ""
    return (
        f"processors {host.cpu_pct:.0f}% in use, {host.own:.1f} of {host.cpus} by this run{load} (medians of"
        f" {host.samples:,} samples{where})"
    )

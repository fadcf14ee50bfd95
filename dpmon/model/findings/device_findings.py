"""Findings about the split between replicas, about GPUs and about the host."""

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

MIN_IDLE_CALL_SHARE = 0.5
"""Smallest share of the calls under dp in which devices are idle. The last batch of an epoch is often too small; half
of all batches are not."""
MIN_EVEN_ROWS_RATIO = 0.75
"""Smallest ratio of fewest to most rows without a finding. On a large batch, the last chunk of torch.chunk has
only a few rows fewer."""
MIN_UNEVEN_TIME_RATIO = 1.5
"""Smallest ratio of the slowest to the fastest replica's median, with equal rows: above the spread of equal GPUs.
Device times are used if all are known."""
MAX_HOST_BOUND_RATIO = 1.2
"""Up to this ratio of device to host time, a device counts as waiting for the host to queue work. Its time then
includes idle time, because it is measured between two events."""
MIN_MEMORY_RATIO, MIN_MEMORY_EXCESS_BYTES = 1.25, 512 << 20
"""Smallest ratio of the first GPU's memory to the largest of the others, and smallest excess: a CUDA context alone
takes 100 MiB or more."""
MIN_THROTTLED_SHARE = 0.05
"""Smallest share of the samples: short dips after a burst are usual."""
MIN_THROTTLE_SAMPLES = 10
MAX_LOW_UTILIZATION_PCT, MIN_UTILIZATION_SAMPLES = 30.0, 20
"""Median share of time (per cent) in which a kernel ran, below which a GPU is reported as idle; and fewest samples."""
MIN_HOST_SAMPLES = 10
"""Fewest samples, one per second; fewer cover only the start."""
MIN_FULL_PCT = 90.0
"""Median use of all CPU cores (per cent); below it, one core is usually idle."""
MIN_OTHERS_SHARE = 0.25
"""Smallest share of the CPU cores that other work uses. A desktop, a monitor and the supervisor stay well below it."""
MIN_LOAD_RATIO = 2.0
"""Load per CPU core: at this ratio, a thread waits as long as it runs."""


def find_idle_devices(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each root whose batches leave devices without rows."""
    for batch in run.batches:
        if not _is_idle(batch):
            continue
        evidence = f"{format_count_with_noun(batch.idle_calls, 'call')} of {batch.calls:,}, {batch.devices} devices"
        weight = batch.idle / batch.devices
        if batch.rows is not None and batch.rows < batch.devices:
            yield Finding(
                "small batch",
                f"The batch of {batch.root} ({format_count_with_noun(batch.rows, 'row')}) is smaller than the"
                f" {batch.devices} devices: {batch.idle} of them {'stays' if batch.idle == 1 else 'stay'} idle.",
                evidence,
                f"a batch of {batch.devices} rows or more, or fewer devices",
                weight,
            )
            continue
        rows = "" if batch.rows is None else f": {batch.rows} rows do not make {batch.devices} chunks of one size"
        yield Finding(
            "idle",
            f"{batch.idle} of {batch.devices} devices {'receives' if batch.idle == 1 else 'receive'} no rows of"
            f" {batch.root}{rows}.",
            evidence,
            f"a batch that {batch.devices} divides (torch.chunk makes chunks of one size, rounded up)",
            weight,
        )


def _is_idle(batch: IdleDeviceCounts) -> bool:
    return batch.calls >= MIN_STEPS and batch.idle_calls >= MIN_IDLE_CALL_SHARE * batch.calls


def find_uneven_replicas(run: RunAnalysis) -> Iterator[Finding]:
    """Yield findings about replicas with unequal rows, or unequal times."""
    batches = {batch.root: batch for batch in run.batches}
    by_root: dict[str, list[ReplicaStats]] = {}
    for replica in run.replicas:
        if replica.mode == "dp" and replica.calls >= MIN_STEPS:
            by_root.setdefault(replica.root, []).append(replica)
    for root, replicas in by_root.items():
        batch = batches.get(root)
        if len(replicas) < 2 or (batch is not None and _is_idle(batch)):
            continue  # the finding about idle devices already explains this batch
        uneven = list(_uneven_rows(root, replicas, batch.devices if batch is not None else len(replicas)))
        yield from uneven or _uneven_times(root, replicas)


def _uneven_rows(root: str, replicas: list[ReplicaStats], devices: int) -> Iterator[Finding]:
    rows = [replica.rows for replica in replicas if replica.rows is not None]
    largest = max(rows, default=0)
    if len(rows) == len(replicas) and largest and min(rows) < MIN_EVEN_ROWS_RATIO * largest:
        yield Finding(
            "uneven",
            f"The replicas of {root} receive unequal shares: {', '.join(map(str, rows[:16]))} rows.",
            "the most frequent split over"
            f" {format_count_with_noun(max(replica.calls for replica in replicas), 'call')}",
            f"a batch that {devices} divides: the fullest replica sets the pace",
            (1 - min(rows) / largest) / len(replicas),
        )


def _uneven_times(root: str, replicas: list[ReplicaStats]) -> Iterator[Finding]:
    # The host only queues a GPU's work: prefer device times if those of all devices are known.
    has_device_times = all(replica.on_device.count >= MIN_STEPS for replica in replicas)
    medians = [((replica.on_device if has_device_times else replica.time).median, replica) for replica in replicas]
    timed = [(median, replica) for median, replica in medians if median]
    # Virtual replicas share CPU cores, so their times depend on the order in which they run.
    if len(timed) < 2 or any(replica.virtual for _, replica in timed):
        return
    slowest, slow = max(timed, key=itemgetter(0))
    fastest, fast = min(timed, key=itemgetter(0))
    if has_device_times and slowest <= MAX_HOST_BOUND_RATIO * (slow.time.median or 0):
        return  # the host limits these devices: its threads queue work one after the other
    if slowest >= MIN_UNEVEN_TIME_RATIO * fastest:
        source = "device" if has_device_times else "host"
        yield Finding(
            "uneven",
            f"Replica {slow.replica} of {root} ({slow.device}) takes {format_ratio(slowest, fastest)} as long"
            f" as replica {fast.replica} ({fast.device}).",
            f"forward on the {source}, median {format_long_duration(slowest)} and {format_long_duration(fastest)},"
            " equal rows",
            "compare the devices: another process on that GPU, a slower link or model of GPU, lower clocks",
            1 - fastest / slowest,
        )


def find_uneven_memory(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the first GPU uses more memory than the others."""
    memory_by_device = _memory_by_device(run)
    if len(memory_by_device) < 2:
        return
    (first_name, first_bytes), *others = memory_by_device
    other_name, other_bytes = max(others, key=itemgetter(1))
    has_dp = any(stats.mode == "dp" for stats in run.modes)
    # A model that the script spreads over devices need not fill them alike.
    if (
        (has_dp or run.names)
        and first_bytes >= MIN_MEMORY_RATIO * other_bytes
        and first_bytes - other_bytes >= MIN_MEMORY_EXCESS_BYTES
    ):
        yield Finding(
            "fuller",
            f"{first_name} uses more memory than the other GPUs: {format_bytes(first_bytes)}, the others at most"
            f" {format_bytes(other_bytes)} ({other_name}).",
            f"peak memory of this run on each of {len(memory_by_device)} devices",
            "under DataParallel the first device gathers the outputs, computes the loss and holds the optimizer's"
            " state: compute the loss inside the forward, or use DistributedDataParallel"
            if has_dp
            else "so that no rank uses the first GPU in addition to its own: torch.cuda.set_device(LOCAL_RANK) before"
            " anything else, and torch.load(..., map_location=...)",
            0.1,
        )


def _memory_by_device(run: RunAnalysis) -> list[tuple[str, float]]:
    """Return the name of each GPU with the peak memory (bytes) of the run, from the driver, or else from torch."""
    run_devices = [device for device in run.device_usage if device.of_run and device.mem_run_max is not None]
    if len(run_devices) > 1:
        run_devices.sort(key=lambda device: (device.called is None, device.called or "", device.index))
        return [(_device_name(device, run), device.mem_run_max or 0.0) for device in run_devices]
    totals = []
    for row in run.device_memory:
        parts = (row.model, row.gradients, row.optimizer, row.rest)
        is_complete = None not in parts and all(known == row.processes for known in row.known)
        if row.device.startswith("cuda") and is_complete:
            totals.append((row.device, float(sum(part or 0 for part in parts))))
    return totals


def _device_name(device: DeviceUsage, run: RunAnalysis) -> str:
    local_name = device.called if not run.nodes else None  # each node has a cuda:0
    return local_name or gpu_name(device.index, run.nodes)


def find_throttling(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each GPU that was throttled."""
    for device in run.device_usage:
        if device.of_run is False or device.throttle_samples < MIN_THROTTLE_SAMPLES or not device.throttled:
            continue
        reason, count = max(device.throttled.items(), key=itemgetter(1))
        share = count / device.throttle_samples
        if share >= MIN_THROTTLED_SHARE:
            yield Finding(
                "throttled",
                f"{_device_name(device, run)} was throttled in {format_percent(share)} of the samples: {reason}.",
                f"{count} of {device.throttle_samples} samples"
                + (f", at most {device.temperature_max:.0f} °C" if device.temperature_max is not None else "")
                + (f", {device.power_max:.0f} W" if device.power_max is not None else ""),
                "cooling and airflow for heat; the power limit (nvidia-smi -q -d POWER) for power",
                share / 2,
            )


def find_low_utilization(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each GPU that was idle most of the time."""
    for device in run.device_usage:
        if device.of_run is not True or device.util_median is None or len(device.util) < MIN_UTILIZATION_SAMPLES:
            continue
        if device.util_median < MAX_LOW_UTILIZATION_PCT:
            yield Finding(
                "low use",
                f"{_device_name(device, run)} was idle most of the time.",
                f"a kernel ran in {device.util_median:.0f}% of the time (median of {len(device.util)} samples)",
                low_utilization_advice(run),
                (100 - device.util_median) / 200,
            )


def find_crowded_cpus(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the CPU cores are too few for the run itself."""
    host = _busy_host(run)
    if host is None or _is_used_by_others(host):
        return
    if host.load is not None and host.load >= MIN_LOAD_RATIO * host.cpus:
        yield Finding(
            "crowded",
            f"CPU oversubscribed: a load of {host.load:.0f} on {_core_count_text(host)}.",
            _cpu_evidence(host),
            "fewer threads (torch.set_num_threads, OMP_NUM_THREADS) or loader workers: at most one per core in total",
            0.3,
        )


def busy_cpus_note(run: RunAnalysis) -> list[str]:
    """Return a note that other work uses the CPU cores, which no change to the script removes; else empty."""
    host = _busy_host(run)
    if host is None or not _is_used_by_others(host):
        return []
    whose = "the host's" if host.machines == 1 else "the nodes'"
    per_node = "" if host.machines == 1 else " per node"
    cores = f"a median of {host.others:.1f} of {_core_count_text(host)}{per_node}"
    return [f"other processes are using {whose} CPUs: {cores}; times on a quieter machine will differ"]


def _busy_host(run: RunAnalysis) -> HostUsage | None:
    """Return the CPU use of a host whose cores are nearly all in use; None for other hosts, or with too few steps."""
    host = run.host_usage
    is_busy = host is not None and host.samples >= MIN_HOST_SAMPLES and host.cpu_pct >= MIN_FULL_PCT
    return host if is_busy and any(measured_modes(run)) else None


def _is_used_by_others(host: HostUsage) -> bool:
    return host.others >= MIN_OTHERS_SHARE * host.cpus


def _core_count_text(host: HostUsage) -> str:
    return "1 core" if host.cpus == 1 else f"{host.cpus} cores"


def _cpu_evidence(host: HostUsage) -> str:
    load = f", load {host.load:.1f}" if host.load is not None else ""
    node_text = f" on {host.machines} nodes" if host.machines > 1 else ""
    return (
        f"CPU {host.cpu_pct:.0f}% in use, {host.own:.1f} of {_core_count_text(host)} by this run{load} (medians of"
        f" {host.samples:,} samples{node_text})"
    )

"""Findings about the split between replicas, about GPUs and about the host."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING

from dpmon.model.device_usage import MIN_THROTTLED_SHARE, PCIE_LINK, format_pcie_link
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import (
    MIN_DATA_SHARE,
    MIN_STEPS,
    data_share,
    format_ratio,
    measured_modes,
    most_affected,
    rank_suffix,
)
from dpmon.model.nodes import gpu_name
from dpmon.record.safe_json import int_member, number_member
from dpmon.store.events import read_highest_samples
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
MIN_THROTTLE_SAMPLES = 10
MAX_LOW_UTILIZATION_PCT, MIN_UTILIZATION_SAMPLES = 30.0, 20
"""Median share of time (per cent) in which a kernel ran, below which a GPU is reported as idle; and fewest samples."""
MAX_LOW_MFU, MIN_HIGH_UTILIZATION_PCT, MAX_LOW_SM_ACTIVE_PCT, MAX_SMALL_KERNEL_NS = 0.25, 80.0, 40.0, 20_000
"""Largest MFU that is low, and smallest utilization of a GPU that is the limit itself. Its kernels are small if fewer
multiprocessors are active, or if an operator takes less time there: a kernel of 20 µs is not longer than its launch."""
_LINK_PROBLEMS = {
    "pcie_slow_readings": (
        *(2, "{} readings in a row, one a minute; it received {}/s"),
        "{}'s PCIe link runs at {} under load: copies take up to {:.0f} times as long.",
        "reseat the card; check the riser or cable, and the generation and lanes of its slot in the BIOS",
    ),
    "nvlinks_down": (
        *(1, "{} links down"),
        "{} has NVLinks down while others are up: GPUs exchange data more slowly.",
        "reseat the bridge, unless the GPU has fewer bridges than it could; dmesg | grep -i nvlink",
    ),
    "nvlink_errors": (
        *(10, "{} replays and recoveries since the run's start"),
        "{}'s NVLinks repeat data or recover, which takes time.",
        "clean and reseat the bridge or board; dmesg | grep -i nvlink",
    ),
}
"""By member of device records: smallest value with a finding (NVLinks may err a few times), evidence, text, advice."""
MIN_HOST_SAMPLES = 10
"""Fewest samples, one per second; fewer cover only the start."""
MIN_FULL_PCT = 90.0
"""Median use of all CPU cores (per cent); below it, one core is usually idle."""
MIN_OTHERS_SHARE = 0.25
"""Smallest share of the CPU cores that other work uses. A desktop, a monitor and the supervisor stay well below it."""
MIN_LOAD_RATIO = 2.0
"""Load per CPU core: at this ratio, a thread waits as long as it runs."""


# ------------------------------------------------------------------------------------------------ replicas


def find_idle_devices(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each root whose batches leave devices without rows."""
    for batch in filter(_is_idle, run.batches):
        rows_text = "" if batch.rows is None else format_count_with_noun(batch.rows, "row")
        if batch.rows is not None and batch.rows < batch.devices:
            kind, advice = "small batch", f"a batch of {batch.devices} rows or more, or fewer devices"
            text = (
                f"The batch of {batch.root} ({rows_text}) is smaller than the {batch.devices} devices: {batch.idle} of"
            )
            text += " them stays idle." if batch.idle == 1 else " them stay idle."
        else:
            kind = "idle"
            advice = f"a batch that {batch.devices} divides (torch.chunk makes chunks of one size, rounded up)"
            receive = "receives" if batch.idle == 1 else "receive"
            text = f"{batch.idle} of {batch.devices} devices {receive} no rows of {batch.root}"
            text += f": {rows_text} do not make {batch.devices} chunks of one size." if rows_text else "."
        evidence = f"{format_count_with_noun(batch.idle_calls, 'call')} of {batch.calls:,}, {batch.devices} devices"
        yield Finding(kind, text, evidence, advice, batch.idle / batch.devices)


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
        rows = [replica.rows for replica in replicas if replica.rows is not None]
        if len(rows) == len(replicas) and min(rows) < MIN_EVEN_ROWS_RATIO * max(rows):
            yield Finding(
                "uneven",
                f"The replicas of {root} receive unequal shares: {', '.join(map(str, rows[:16]))} rows.",
                "the most frequent split over"
                f" {format_count_with_noun(max(replica.calls for replica in replicas), 'call')}",
                f"a batch that {len(replicas) if batch is None else batch.devices} divides: the fullest replica sets"
                " the pace",
                (1 - min(rows) / max(rows)) / len(replicas),
            )
        # Virtual replicas share CPU cores, so their times depend on the order in which they run.
        elif not any(replica.virtual for replica in replicas):
            yield from _find_uneven_times(root, replicas)


def _find_uneven_times(root: str, replicas: list[ReplicaStats]) -> Iterator[Finding]:
    # The host only queues a GPU's work: prefer device times if those of all devices are known.
    has_device_times = all(replica.on_device.count >= MIN_STEPS for replica in replicas)
    source = "device" if has_device_times else "host"
    medians = [((replica.on_device if has_device_times else replica.time).median, replica) for replica in replicas]
    timed = [(median, replica) for median, replica in medians if median]
    if len(timed) < 2:
        return
    slowest, slow = max(timed, key=itemgetter(0))
    fastest, fast = min(timed, key=itemgetter(0))
    if has_device_times and slowest <= MAX_HOST_BOUND_RATIO * (slow.time.median or 0):
        return  # the host limits these devices: its threads queue work one after the other
    if slowest >= MIN_UNEVEN_TIME_RATIO * fastest:
        yield Finding(
            "uneven",
            f"Replica {slow.replica} of {root} ({slow.device}) takes {format_ratio(slowest, fastest)} as long"
            f" as replica {fast.replica} ({fast.device}).",
            f"forward on the {source}, median {format_long_duration(slowest)} and {format_long_duration(fastest)},"
            " equal rows",
            "compare the devices: another process on that GPU, a slower link or model of GPU, lower clocks",
            1 - fastest / slowest,
        )


# ------------------------------------------------------------------------------------------------ GPUs


def find_uneven_memory(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the first GPU uses more memory than the others."""
    has_dp = any(stats.mode == "dp" for stats in run.modes)
    memory_by_device = _memory_by_device(run)
    # A model that the script spreads over devices need not fill them alike.
    if len(memory_by_device) < 2 or not (has_dp or run.names):
        return
    (first_name, first_bytes), *others = memory_by_device
    other_name, other_bytes = max(others, key=itemgetter(1))
    if first_bytes >= max(MIN_MEMORY_RATIO * other_bytes, other_bytes + MIN_MEMORY_EXCESS_BYTES):
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
        parts = [part for part in (row.model, row.gradients, row.optimizer, row.rest) if part is not None]
        is_complete = len(parts) == 4 and all(known == row.processes for known in row.known)
        if row.device.startswith("cuda") and is_complete:
            totals.append((row.device, float(sum(parts))))
    return totals


def _device_name(device: DeviceUsage, run: RunAnalysis) -> str:
    local_name = device.called if not run.nodes else None  # each node has a cuda:0
    return local_name or gpu_name(device.index, run.nodes)


def find_throttling(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each GPU that was throttled."""
    for device in run.device_usage:
        samples = device.throttle_samples
        if device.of_run is False or samples < MIN_THROTTLE_SAMPLES or not device.throttled:
            continue
        reason, count = max(device.throttled.items(), key=itemgetter(1))
        extremes = "" if device.temperature_max is None else f", at most {device.temperature_max:.0f} °C"
        extremes += "" if device.power_max is None else f", {device.power_max:.0f} W"
        if count >= MIN_THROTTLED_SHARE * samples:
            share_text = format_percent(count / samples)
            yield Finding(
                "throttled",
                f"{_device_name(device, run)} was throttled in {share_text} of the samples: {reason}.",
                f"{count} of {samples} samples{extremes}",
                "cooling and airflow for heat; the power limit (nvidia-smi -q -d POWER) for power",
                count / samples / 2,
            )


def find_low_utilization(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each GPU that was idle most of the time."""
    waiting = max(most_affected(run, data_share, MIN_DATA_SHARE), key=data_share, default=None)
    advice = (
        "fewer and larger kernels, if the host is the limit: torch.compile, CUDA graphs; larger batches change the"
        " training itself (learning rate)"
    )
    if waiting is not None:
        share = format_percent(data_share(waiting))
        advice = f"the loader first: the steps{rank_suffix(waiting)} wait for data {share} of step time"
    for device in run.device_usage:
        if device.of_run is not True or device.util_median is None or len(device.util) < MIN_UTILIZATION_SAMPLES:
            continue
        if device.util_median < MAX_LOW_UTILIZATION_PCT:
            yield Finding(
                "low use",
                f"{_device_name(device, run)} was idle most of the time.",
                f"a kernel ran in {device.util_median:.0f}% of the time (median of {len(device.util)} samples)",
                advice,
                (100 - device.util_median) / 200,
            )


def find_small_kernels(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the GPUs are busy, but use little of their peak because their kernels are small."""
    efficiency, gpus = run.whole_efficiency, [gpu for gpu in run.device_usage if gpu.of_run]
    is_low = efficiency.mfu is not None and efficiency.mfu <= MAX_LOW_MFU and not efficiency.is_lower_bound
    if not is_low or any(len(gpu.util) < MIN_UTILIZATION_SAMPLES for gpu in gpus):
        return
    busy_pct = min((gpu.util_median or 0.0 for gpu in gpus), default=0.0)
    active_pcts, operator_ns = [pct for gpu in gpus for pct in gpu.sm_active], efficiency.operator_ns * busy_pct / 100
    if active_pcts and median(active_pcts) < MAX_LOW_SM_ACTIVE_PCT:
        proof = f"{median(active_pcts):.0f}% of the multiprocessors are active (median of {len(active_pcts)} samples)"
    elif operator_ns < MAX_SMALL_KERNEL_NS:
        proof = f"an operator takes {format_long_duration(operator_ns)} of GPU time, as a mean"
    else:
        return
    if busy_pct >= MIN_HIGH_UTILIZATION_PCT:
        text = f"MFU {format_percent(efficiency.mfu)}: the GPU is busy {busy_pct:.0f}% of the time with small kernels."
        advice = "fewer and larger kernels: torch.compile, CUDA graphs, fused=True for the optimizer, larger batches"
        yield Finding("small kernels", text, proof, advice, 0.2)


def find_slow_links(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each GPU with a PCIe link that is slow under load, or with NVLinks down or with errors."""
    for member, (least, ground, problem, advice) in _LINK_PROBLEMS.items():
        for data in (event.data for event in read_highest_samples(run.store, member, least)):
            if data.get("of_run") is not False:
                generation, highest, width, widest = (int_member(data, name) or 1 for name in PCIE_LINK)
                factor = 2.0 ** min(highest - generation, 8) * widest / width  # a generation doubles the rate of a lane
                gpu = gpu_name(int_member(data, "index") or 0, run.nodes)
                text = problem.format(gpu, format_pcie_link(data), factor)
                evidence = ground.format(data[member], format_bytes(number_member(data, "pcie_rx_bytes_s")))
                yield Finding("slow link", text, evidence, advice, 0.3)


# ------------------------------------------------------------------------------------------------ host


def find_crowded_cpus(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the CPU cores are too few for the run itself."""
    host = _busy_host(run)
    if host is None or _is_used_by_others(host) or host.load is None or host.load < MIN_LOAD_RATIO * host.cpus:
        return
    cores = format_count_with_noun(host.cpus, "core")
    node_text = f" on {host.machines} nodes" if host.machines > 1 else ""
    yield Finding(
        "crowded",
        f"CPU oversubscribed: a load of {host.load:.0f} on {cores}.",
        f"CPU {host.cpu_pct:.0f}% in use, {host.own:.1f} of {cores} by this run, load {host.load:.1f} (medians of"
        f" {host.samples:,} samples{node_text})",
        "fewer threads (torch.set_num_threads, OMP_NUM_THREADS) or loader workers: at most one per core in total",
        0.3,
    )


def busy_cpus_note(run: RunAnalysis) -> list[str]:
    """Return a note that other work uses the CPU cores, which no change to the script removes; else empty."""
    host = _busy_host(run)
    if host is None or not _is_used_by_others(host):
        return []
    whose, per_node = ("the host's", "") if host.machines == 1 else ("the nodes'", " per node")
    cores = f"a median of {host.others:.1f} of {format_count_with_noun(host.cpus, 'core')}{per_node}"
    return [f"other processes are using {whose} CPUs: {cores}; times on a quieter machine will differ"]


def _busy_host(run: RunAnalysis) -> HostUsage | None:
    """Return the CPU use of a host whose cores are nearly all in use; None for other hosts, or with too few steps."""
    host = run.host_usage
    is_busy = host is not None and host.samples >= MIN_HOST_SAMPLES and host.cpu_pct >= MIN_FULL_PCT
    return host if is_busy and any(measured_modes(run)) else None


def _is_used_by_others(host: HostUsage) -> bool:
    return host.others >= MIN_OTHERS_SHARE * host.cpus


FINDERS = (
    *(find_idle_devices, find_uneven_replicas, find_uneven_memory),
    *(find_throttling, find_slow_links, find_low_utilization, find_small_kernels, find_crowded_cpus),
)

"""A sample of one GPU at one instant."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it (include/linux/proc_ns.h)


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One GPU at one instant. An unknown field is None, and `absent` has the reason by field name.

    The units are bytes, bytes per second, percent (0..100), degrees Celsius, watts, joules and MHz.
    """

    index: int
    """NVML's index, which may differ from CUDA's: see `ordinals`."""
    uuid: str | None = None
    name: str | None = None
    of_run: bool | None = None
    """Whether processes of this run hold memory on the GPU."""
    visible: bool | None = None
    """Whether the command's CUDA_VISIBLE_DEVICES lets CUDA see the GPU."""
    ordinals: list[dict[str, Any]] | None = None
    """Names of the GPU in the run's processes, as reported by torch: [{"process": 0, "device": "cuda:1"}]."""
    util_pct: int | None = None
    """Share of the time in which any kernel ran, however small."""
    mem_used_bytes: int | None = None
    """Memory in use, without the driver's own memory if that is reported separately."""
    mem_total_bytes: int | None = None
    mem_reserved_bytes: int | None = None
    """The driver's own memory."""
    mem_run_bytes: int | None = None
    """Held by the run's processes, as counted by the driver: it includes CUDA contexts, unlike torch's allocator."""
    mem_others_bytes: int | None = None
    mem_torch_bytes: int | None = None
    """Reserved by torch's allocators in the run's processes, from their last reports."""
    temperature_c: int | None = None
    temperature_limit_c: int | None = None
    """Temperature at which the clocks are lowered."""
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Energy since the driver was loaded."""
    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    throttle: list[str] | None = None
    """Reasons why the clocks are lowered, in words; empty if they are not."""
    fan_pct: int | None = None
    pcie_rx_bytes_s: int | None = None
    pcie_tx_bytes_s: int | None = None
    nvlink_rx_bytes_s: int | None = None
    nvlink_tx_bytes_s: int | None = None
    ecc_corrected: int | None = None
    """Errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    remapped_rows: int | None = None
    xid: int | None = None
    """The newest XID error since the run's start."""
    mig: bool | None = None
    mig_devices: list[dict[str, Any]] | None = None
    """The instances: uuid, mem_used_bytes, mem_total_bytes."""
    persistence: bool | None = None
    sm_active_pct: float | None = None
    """Share of the multiprocessors that were busy (GPM: Hopper and later)."""
    tensor_active_pct: float | None = None
    dram_active_pct: float | None = None
    processes: list[dict[str, Any]] | None = None
    """Processes with the most memory, the run's first: pid, mem_bytes, of_run; at most MAX_PROCESSES."""
    process_count: int | None = None
    absent: dict[str, str] = field(default_factory=dict)


VALUES = tuple(each.name for each in fields(DeviceSample) if each.name not in ("index", "absent"))


def without_values(sample: DeviceSample, reason: str) -> DeviceSample:
    """Return a sample with only the GPU's identity and torch's reports; `reason` applies to all other fields."""
    kept = {name: getattr(sample, name) for name in ("uuid", "name", "visible", "ordinals", "mem_torch_bytes")}
    absent = {name: sample.absent.get(name, reason) if name in kept else reason for name in VALUES}
    for name, value in kept.items():
        if value is not None:
            del absent[name]
    return DeviceSample(sample.index, absent=absent, **kept)


def pids_are_shared() -> bool:
    """Whether this process is in the initial pid namespace; NVML reports ids of that namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False

"""What is known of one GPU at one instant."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it (include/linux/proc_ns.h)


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One GPU at one instant. What could not be had is None and its reason is in `absent`, by field.

    Bytes, bytes a second, percent (0..100), degrees Celsius, watts, joules, MHz.
    """

    index: int
    """NVML's, which is not CUDA's: see `ordinals`."""
    uuid: str | None = None
    name: str | None = None
    of_run: bool | None = None
    """Whether processes of this run hold memory on the GPU."""
    visible: bool | None = None
    """Whether CUDA_VISIBLE_DEVICES, as the command was given it, lets CUDA see the GPU."""
    ordinals: list[dict[str, Any]] | None = None
    """What the run's processes call it: [{"process": 0, "device": "cuda:1"}], by UUID, as torch said in them."""
    util_pct: int | None = None
    """Share of the time in which any kernel ran, however small."""
    mem_used_bytes: int | None = None
    """Without what the driver keeps for itself where it tells them apart."""
    mem_total_bytes: int | None = None
    mem_reserved_bytes: int | None = None
    """What the driver keeps for itself."""
    mem_run_bytes: int | None = None
    """Held by the run's processes, as the driver counts: with the contexts, beyond torch's allocator."""
    mem_others_bytes: int | None = None
    mem_torch_bytes: int | None = None
    """Reserved by torch's allocators in the run's processes, as they last said."""
    temperature_c: int | None = None
    temperature_limit_c: int | None = None
    """At which the clocks are lowered."""
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Since the driver was loaded."""
    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    throttle: list[str] | None = None
    """Why the clocks are lower than they could be, in words; empty when nothing holds them down."""
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
    """Those that hold most memory, the run's first: pid, mem_bytes, of_run; at most MAX_PROCESSES of them."""
    process_count: int | None = None
    absent: dict[str, str] = field(default_factory=dict)


VALUES = tuple(each.name for each in fields(DeviceSample) if each.name not in ("index", "absent"))


def without_values(sample: DeviceSample, reason: str) -> DeviceSample:
    """The same GPU with nothing known of it but who it is, for the reason given."""
    kept = {name: getattr(sample, name) for name in ("uuid", "name", "visible", "ordinals", "mem_torch_bytes")}
    absent = {name: sample.absent.get(name, reason) if name in kept else reason for name in VALUES}
    for name, value in kept.items():
        if value is not None:
            del absent[name]
    return DeviceSample(sample.index, absent=absent, **kept)


def pids_are_shared() -> bool:
    """Whether this process lives in the machine's first pid namespace, the one whose ids NVML reports."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False

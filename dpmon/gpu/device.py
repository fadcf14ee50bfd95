"""What is known of one GPU at one instant, and which part of it is this run's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields

__all__ = ["DeviceSample", "pids_are_shared", "share_of_run", "without_values"]

NO_PIDS_IN_CONTAINER = "inside a container the driver's process ids cannot be matched to ours"
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it (include/linux/proc_ns.h)


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One GPU at one instant. What could not be had is None and its reason is in `absent`, by field.

    Bytes, percent (0..100), degrees Celsius, watts, MHz. `mem_used_bytes` is without what the driver keeps
    for itself where it tells them apart. `of_run`: processes of this run hold memory on the GPU.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    of_run: bool | None = None
    util_pct: int | None = None
    mem_used_bytes: int | None = None
    mem_total_bytes: int | None = None
    mem_run_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    absent: dict[str, str] = field(default_factory=dict)


def without_values(sample: DeviceSample, reason: str) -> DeviceSample:
    """The same GPU with nothing known of it but who it is, for the reason given."""
    absent = {each.name: reason for each in fields(DeviceSample) if each.name not in ("index", "absent")}
    for name in ("uuid", "name"):
        if getattr(sample, name) is not None:
            del absent[name]
        elif name in sample.absent:
            absent[name] = sample.absent[name]
    return DeviceSample(sample.index, sample.uuid, sample.name, absent=absent)


def share_of_run(
    held: Mapping[int, int | None], run_pids: Set[int], same_pids: bool
) -> tuple[bool | None, int | None, dict[str, str]]:
    """Whether the run holds memory on a GPU, how much (bytes), and why that is not known, by field.

    `held`: bytes by process id, None where the driver does not tell; `same_pids`: its ids are ours.
    """
    ours = [used for pid, used in held.items() if pid in run_pids]
    if not ours:
        if same_pids or not held:
            return False, 0, {}
        return None, None, {"of_run": NO_PIDS_IN_CONTAINER, "mem_run_bytes": NO_PIDS_IN_CONTAINER}
    known = [used for used in ours if used is not None]
    if len(known) < len(ours):
        return True, None, {"mem_run_bytes": "the driver does not tell memory by process"}
    return True, sum(known), {}


def pids_are_shared() -> bool:
    """Whether this process lives in the machine's first pid namespace, the one whose ids NVML reports."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False

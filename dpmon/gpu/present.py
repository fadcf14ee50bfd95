"""Checks that the GPUs named on a command line exist, as far as is possible without torch."""

from __future__ import annotations

import os
import threading

from dpmon.gpu.failure import NO_START, CallFailed
from dpmon.gpu.nvml import NO_GPU, Nvml

WAIT_S = 3.0
"""Longest wait for the driver. Without an answer, no device counts as missing."""
_NONE = (NO_GPU, NO_START[9], NO_START[12])
"""NVML's reasons on a machine without an NVIDIA GPU."""
_OTHERS = ("/dev/kfd", "/dev/dxg", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/nvmap")
"""Device files of GPUs that torch calls cuda but NVML does not list: of AMD, WSL and NVIDIA Jetson."""


def missing(names: str) -> str | None:
    """Return why a device in `names` (cuda:0,cuda:1) is unavailable; None if all exist or if that is unknown."""
    wanted = [name for name in names.split(",") if name.startswith("cuda")]
    if not wanted or any(os.path.exists(path) for path in _OTHERS):
        return None
    found: list[tuple[int, str | None]] = []
    thread = threading.Thread(target=lambda: found.append(_count()), name="dpmon NVML", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    if not found:
        return None
    count, reason = found[0]
    if reason is not None:
        return f"{wanted[0]} is not available: {reason}" if reason in _NONE else None
    for name in wanted:
        if int(name.partition(":")[2] or 0) >= count:
            there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            return f"there is no {name} here, only {there}"
    return None


def _count() -> tuple[int, str | None]:
    """Return the number of GPUs, and why there are none (or None)."""
    nvml = Nvml()
    try:
        reason = nvml.open()
        count = nvml.count() if reason is None else 0
    except CallFailed as failure:
        count, reason = 0, f"NVML cannot count the GPUs: {failure.reason}"
    nvml.close()
    return count, reason if reason or count else NO_GPU

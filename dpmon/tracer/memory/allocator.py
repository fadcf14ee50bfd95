"""torch's allocator of each GPU: its statistics, and its state just before an out-of-memory error.

Statistics are read between two steps, and only after CUDA is initialized: by then CUDA_VISIBLE_DEVICES has taken
effect, even if the script sets it late. No function here waits for a stream. torch calls an observer before it raises
an out-of-memory error; until then, the observer costs nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import is_cuda_initialized

MAX_REPORTS = 16
"""Most records of out-of-memory errors per process: a script may try smaller and smaller batches."""
_STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_bytes": "allocated_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "alloc_retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
_watched: list[Session] = []
_reports = [0]


def statistics() -> dict[str, dict[str, object]]:
    """Return the UUID and the statistics of each GPU that torch uses in this process, by name (`cuda:1`).

    `inactive_split_bytes`: free remainders of blocks in use (fragmentation). `alloc_retries`: allocations that failed
    until the cache was emptied. `ooms`: allocations that failed even then.
    """
    found = {}
    for index in range(torch.cuda.device_count() if is_cuda_initialized() else 0):
        known = torch.cuda.memory_stats(index)
        stats = {name: known.get(key) for name, key in _STATISTICS.items()}
        if stats["reserved_bytes"] or stats["peak_bytes"]:
            found[f"cuda:{index}"] = {**stats, "uuid": _uuid_of(index)}
    return found


@cache
def _uuid_of(index: int) -> str | None:
    """Return the UUID of torch's cuda:<index> or of its MIG instance, without prefix; None if unknown.

    The driver is asked (cuDeviceGetUuid_v2): only newer versions of torch report a UUID, and none reports that of a MIG
    instance.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it
        ask = driver.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return None
    device = ctypes.c_int()
    raw = (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), index) or ask(raw, device):
        return None
    text = bytes(raw).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


# ------------------------------------------------------------------------------------------------ out of memory


def watch_out_of_memory(session: Session) -> None:
    """Record out-of-memory errors from now on. Does nothing before CUDA is initialized, or on later calls."""
    if _watched or not is_cuda_initialized():
        return
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return
    _watched.append(session)
    with session.guard("out-of-memory error", fatal=False):  # an allocator may have no observers
        attach(_on_out_of_memory)


def _on_out_of_memory(device: int, asked: int, total: int, free: int) -> None:
    """Called by torch on the allocating thread, without torch's lock, before the error is raised."""
    session = _watched[0]
    with session.guard("out-of-memory error", fatal=False):
        _reports[0] += 1
        if _reports[0] > MAX_REPORTS:
            return
        stats = torch.cuda.memory_stats(device)
        names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        state: dict[str, Any] = {"device": f"cuda:{device}"}
        state |= {"asked_bytes": asked, "total_bytes": total, "free_bytes": free}
        state |= {name: stats.get(_STATISTICS[name]) for name in names}
        session.record_event("oom", **state)
        gib = {name: _gib(state[f"{name}_bytes"]) for name in ("asked", "free", "total", "allocated", "reserved")}
        session.warn(
            f"{state['device']} is out of memory: {gib['asked']} GiB were requested, {gib['free']} of {gib['total']}"
            f" GiB are free; torch holds {gib['reserved']} GiB, tensors use {gib['allocated']} GiB of that"
        )


def _gib(count: object) -> str:
    return f"{count / (1 << 30):.2f}" if isinstance(count, int) else "–"

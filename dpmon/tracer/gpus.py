"""The GPUs that torch uses in this process, and statistics of torch's allocator.

Both are read between two steps, and only after CUDA is initialised: by then CUDA_VISIBLE_DEVICES has taken effect, even
if the script sets it late. No function here waits for a stream.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_uuids: dict[int, str | None] = {}
_COUNTS = {"alloc_retries": "num_alloc_retries", "ooms": "num_ooms"}


def uuid_of(index: int) -> str | None:
    """Return the UUID of torch's cuda:<index> or of its MIG instance, without prefix; None if unknown.

    The driver is asked first (cuDeviceGetUuid_v2): only newer versions of torch report a UUID, and none reports that
    of a MIG instance.
    """
    if index not in _uuids:
        _uuids[index] = _by_driver(index) or _by_torch(index)
    return _uuids[index]


def _by_driver(index: int) -> str | None:
    if torch.version.hip is not None:
        return None
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


def _by_torch(index: int) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else str(uuid)


def allocator(device: str) -> dict[str, Any]:
    """Return the UUID and allocator statistics of a GPU that torch uses (`cuda:1`).

    `inactive_split_bytes`: free remainders of blocks in use (fragmentation). `alloc_retries`: allocations that failed
    until the cache was emptied. `ooms`: allocations that failed even then.
    """
    index = int(device.partition(":")[2])
    stats = torch.cuda.memory_stats(index)
    found: dict[str, Any] = {"uuid": uuid_of(index)}
    found["inactive_split_bytes"] = stats.get("inactive_split_bytes.all.current")
    found.update({name: stats.get(key) for name, key in _COUNTS.items()})
    return found

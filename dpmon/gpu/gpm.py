"""Reads rates that need two readings: GPM's metrics (Hopper and later) and NVLink's counters."""

from __future__ import annotations

import time
from typing import Any

from dpmon.gpu.failure import CallFailed, Missing, words_of

# By NVML's metric numbers (nvmlGpmMetricId_t): percent, then MiB/s.
_PERCENT = {"sm_active_pct": 2, "tensor_active_pct": 5, "dram_active_pct": 10}
_MIB_S = {"pcie_tx_bytes_s": 20, "pcie_rx_bytes_s": 21, "nvlink_rx_bytes_s": 60, "nvlink_tx_bytes_s": 61}
_METRICS = {**_PERCENT, **_MIB_S}
GPM_FIELDS = tuple(_METRICS)

_NVLINK_TX_KIB, _NVLINK_RX_KIB = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX: payload in KiB, ever growing
_ALL_LINKS = 0xFFFFFFFF
FIRST = Missing("needs two readings")


def gpm(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return GPM_FIELDS averaged since the last reading, with two calls (four at first). Each metric may be Missing.

    The two sample buffers are never freed: freeing them is unsafe while the driver has lost the GPU.
    """
    if "now" not in memo:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise CallFailed("not supported", never=True)
        memo["now"], memo["before"] = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        memo["first"] = True
        nvml.nvmlGpmSampleGet(handle, memo["now"])
        return (FIRST,) * len(GPM_FIELDS)
    # The older buffer takes the new reading, which is then compared with the newer buffer.
    memo["now"], memo["before"] = memo["before"], memo["now"]
    nvml.nvmlGpmSampleGet(handle, memo["now"])
    asked = nvml.c_nvmlGpmMetricsGet_t()
    asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(_METRICS)
    asked.sample1, asked.sample2 = memo["before"], memo["now"]
    for i, number in enumerate(_METRICS.values()):
        asked.metrics[i].metricId = number
    nvml.nvmlGpmMetricsGet(asked)
    found: list[Any] = []
    for i, name in enumerate(_METRICS):
        metric = asked.metrics[i]
        value = float(metric.value)
        if metric.nvmlReturn:
            found.append(Missing(words_of(int(metric.nvmlReturn))))
        elif not 0 <= value < 1e9:  # also true for NaN
            found.append(Missing("NVML returned an implausible value"))
        else:
            found.append(round(value, 1) if name in _PERCENT else int(value * (1 << 20)))
    return tuple(found)


def nvlink(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the bytes per second received and sent over all links since the last reading. Makes one call."""
    values = nvml.nvmlDeviceGetFieldValues(handle, [(_NVLINK_RX_KIB, _ALL_LINKS), (_NVLINK_TX_KIB, _ALL_LINKS)])
    now = time.monotonic()
    codes = [int(value.nvmlReturn) for value in values]
    if any(codes):
        code = next(code for code in codes if code)
        raise CallFailed(words_of(code), code)
    counts = [int(value.value.ullVal) for value in values]
    before, memo["at"] = memo.get("at"), (now, counts)
    if before is None:
        return (FIRST, FIRST)
    then, old = before
    if any(new < last for new, last in zip(counts, old, strict=True)):
        return (Missing("the counter was reset"),) * 2
    return tuple(int((new - last) * 1024 / max(now - then, 1e-6)) for new, last in zip(counts, old, strict=True))

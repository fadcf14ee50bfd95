"""The NVML queries about a GPU: fields, functions that read them, period, and number of library calls.

A getter is a function of pynvml, the GPU's handle and a memo of its own (kept while the handle is valid). It returns a
value or a `MissingValue` for each field of the query. Exceptions of pynvml pass through it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpmon.gpu.device_record import MissingValue
from dpmon.gpu.nvml import TIMEOUT, NvmlCallError, call_nvml, describe_return_code

MAX_CALLS_PER_S = 8
"""Maximum number of library calls per GPU and second, after its first round."""

Getter = Callable[[Any, Any, dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class NvmlQuery:
    """A query for fields that come from one answer, with its period (s) and maximum number of library calls.

    The first answer may take more calls. If a getter is not supported, the next one is tried. `replaces`: a query that
    must have left the first field unknown before this one runs.
    """

    fields: tuple[str, ...]
    period_s: float
    max_calls: int
    getters: tuple[Getter, ...]
    replaces: NvmlQuery | None = None


NEEDS_TWO_READINGS = MissingValue("needs two readings")
_IMPLAUSIBLE = MissingValue("NVML returned an implausible value")
_NO_XID = MissingValue("no XID error since the run's start")
_MAX_INSTANCES = 8
_NEVER_AGAIN = math.inf

# nvml.h: NVML_CLOCKS_EVENT_REASON_*. The first bit (idle) does not count as throttling.
_THROTTLE_REASONS = {
    0x002: "clocks set by hand",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
_IDLE = 0x001

# GPM's metrics by NVML's numbers (nvmlGpmMetricId_t): percent, then MiB/s.
_PERCENT_METRICS = {"sm_active_pct": 2, "tensor_active_pct": 5, "dram_active_pct": 10}
_MIB_S_METRICS = {"pcie_tx_bytes_s": 20, "pcie_rx_bytes_s": 21, "nvlink_rx_bytes_s": 60, "nvlink_tx_bytes_s": 61}
_GPM_METRICS = {**_PERCENT_METRICS, **_MIB_S_METRICS}
_NVLINK_TX_KIB, _NVLINK_RX_KIB = 138, 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX: payload in KiB, ever growing
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_STATE, *_NVLINK_ERRORS = 165, 161, 162  # NVML_FI_DEV_NVLINK_GET_STATE, _ERROR_DL_REPLAY, _ERROR_DL_RECOVERY
_PCIE_LINK = ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth")
MIN_LOAD_PCT = 20
"""Smallest utilization (per cent) at which a slow link counts: an idle GPU lowers the speed of its link."""


def _device_getter(convert: Callable[[Any], Any], call: str) -> Getter:
    """Return a getter that calls nvmlDeviceGet<first word>; further words are numbers or constants of pynvml."""
    name, *words = call.split()

    def read_field(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        arguments = [int(word) if word.isdigit() else getattr(nvml, word) for word in words]
        read = getattr(nvml, f"nvmlDeviceGet{name}")
        return (convert(read(handle, *arguments)),)

    return read_field


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _percent(value: Any) -> Any:
    return int(value) if 0 <= value <= 100 else _IMPLAUSIBLE


def _positive(value: Any) -> Any:
    return int(value) if value > 0 else _IMPLAUSIBLE


def _divide_by_1000(value: Any) -> float:
    return float(value / 1000)


def _multiply_by_1000(value: Any) -> int:
    return int(value * 1000)


def throttle_reasons(bits: int) -> list[str]:
    """Return the reasons for throttling, from NVML's bits; unknown bits are given as a number."""
    bits = int(bits)
    reasons = [reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit]
    unknown_bits = bits & ~(_IDLE | sum(_THROTTLE_REASONS))
    return [*reasons, f"reason {unknown_bits:#x}"] if unknown_bits else reasons


def _memory_by_pid(processes: Any) -> dict[int, int | None]:
    """Return bytes by process id; None if the driver does not report them."""
    bytes_by_pid: dict[int, int | None] = {}
    for process in processes:
        used_bytes = process.usedGpuMemory
        earlier_bytes = bytes_by_pid.get(int(process.pid))
        bytes_by_pid[int(process.pid)] = earlier_bytes if used_bytes is None else int(used_bytes) + (earlier_bytes or 0)
    return bytes_by_pid


def _memory_v2(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return int(memory.used), int(memory.total), int(memory.reserved)


def _memory_v1(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total), MissingValue("this driver counts it as used")


def _slowdown_by_margin(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the limit from its distance, because newer drivers report only the distance to the nearest limit."""
    margin = int(nvml.nvmlDeviceGetMarginTemperature(handle))
    return (int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)) + margin,)


def _retired_pages(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the number of retired pages, for both causes. Two calls each: their number, then the list."""
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return (sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes),)


def _xid(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the newest XID error. The first time, it creates the event set (2 library calls); later it takes 1."""
    if "set" not in memo:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        memo["set"], memo["xid"] = events, _NO_XID
        return (_NO_XID,)
    try:
        event = call_nvml(lambda: nvml.nvmlEventSetWait_v2(memo["set"], 0))
        memo["xid"] = int(event.eventData)
    except NvmlCallError as failure:
        if failure.code != TIMEOUT:  # no new event
            raise
    return (memo["xid"],)


def _mig(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return whether the GPU is divided, and its instances. Each time, it reads one of them, with three calls."""
    current_mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    if not current_mode:
        return False, []
    instances = memo.setdefault("instances", {})
    index = memo["index"] = (memo.get("index", -1) + 1) % _MAX_INSTANCES
    instances.pop(index, None)
    handle_of_instance = None
    try:
        handle_of_instance = call_nvml(lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        if handle_of_instance:
            instances[index] = call_nvml(lambda: _instance(nvml, handle_of_instance))
    except NvmlCallError as failure:
        if failure.is_gpu_gone:
            raise
        if handle_of_instance:  # otherwise, there is no such instance
            return True, MissingValue(failure.reason)
    return True, [instances[index] for index in sorted(instances)]


def _instance(nvml: Any, handle: Any) -> dict[str, Any]:
    uuid, memory = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"uuid": uuid, "mem_used_bytes": int(memory.used), "mem_total_bytes": int(memory.total)}


def _gpm(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the metrics averaged since the last reading, with two calls (four at first). Each may be a MissingValue.

    The two sample buffers are never freed: freeing them is unsafe while the driver has lost the GPU.
    """
    if "now" not in memo:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise NvmlCallError("not supported", is_permanent=True)
        memo["before"], memo["now"] = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, memo["now"])
        return (NEEDS_TWO_READINGS,) * len(_GPM_METRICS)
    # The older buffer receives the new reading, which is then compared with the other buffer.
    memo["now"], memo["before"] = memo["before"], memo["now"]
    nvml.nvmlGpmSampleGet(handle, memo["now"])
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(_GPM_METRICS)
    request.sample1, request.sample2 = memo["before"], memo["now"]
    for index, number in enumerate(_GPM_METRICS.values()):
        request.metrics[index].metricId = number
    nvml.nvmlGpmMetricsGet(request)
    values: list[Any] = []
    for index, name in enumerate(_GPM_METRICS):
        metric = request.metrics[index]
        value = float(metric.value)
        if metric.nvmlReturn:
            values.append(MissingValue(describe_return_code(int(metric.nvmlReturn))))
        elif not 0 <= value < 1e9:  # also true for NaN
            values.append(_IMPLAUSIBLE)
        else:
            values.append(round(value, 1) if name in _PERCENT_METRICS else int(value * (1 << 20)))
    return tuple(values)


def _nvlink(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the bytes per second received and sent over all links since the last reading."""
    fields = nvml.nvmlDeviceGetFieldValues(handle, [(_NVLINK_RX_KIB, _ALL_LINKS), (_NVLINK_TX_KIB, _ALL_LINKS)])
    now_s = time.monotonic()
    for field in fields:
        if field.nvmlReturn:
            raise NvmlCallError(describe_return_code(int(field.nvmlReturn)), int(field.nvmlReturn))
    counts = [int(field.value.ullVal) for field in fields]
    last_reading, memo["at"] = memo.get("at"), (now_s, counts)
    if last_reading is None:
        return NEEDS_TWO_READINGS, NEEDS_TWO_READINGS
    last_s, last_counts = last_reading
    growth = [count - last_count for count, last_count in zip(counts, last_counts, strict=True)]
    if min(growth) < 0:
        return (MissingValue("the counter was reset"),) * 2
    return tuple(int(kib * 1024 / max(now_s - last_s, 1e-6)) for kib in growth)


def _pcie_link(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return PCIe generation and width, their maximums, and the number of readings in a row that were slow under load.

    NVML's maximums are what the GPU and the system can reach together: a slower slot alone is not a slow link.
    """
    link = [int(getattr(nvml, f"nvmlDeviceGet{name}")(handle)) for name in _PCIE_LINK]
    generation, width, max_generation, max_width = link
    slow_readings = memo.pop("slow", 0)
    if not (1 <= generation <= max_generation and 1 <= width <= max_width):  # some machines report 0
        return (_IMPLAUSIBLE,) * 5
    if link[:2] != link[2:] and nvml.nvmlDeviceGetUtilizationRates(handle).gpu >= MIN_LOAD_PCT:
        memo["slow"] = slow_readings + 1
    return *link, memo.get("slow", 0)


def _nvlink_health(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the number of links that are down (0 if all are: no bridge), and their errors since the first reading."""
    numbers = [(number, link) for number in (_NVLINK_STATE, *_NVLINK_ERRORS) for link in range(18)]
    fields = [field for field in nvml.nvmlDeviceGetFieldValues(handle, numbers) if not field.nvmlReturn]
    states = [int(field.value.uiVal) for field in fields if field.fieldId == _NVLINK_STATE]
    if not states:
        raise NvmlCallError("not supported", is_permanent=True)
    errors = sum(int(field.value.uiVal) for field in fields if field.fieldId in _NVLINK_ERRORS)
    return states.count(0) * any(states), errors - memo.setdefault("errors", errors)


def _make_query(
    field: str,
    period_s: float,
    convert: Callable[[Any], Any],
    *getters: str,
    max_calls: int = 1,
    replaces: NvmlQuery | None = None,
) -> NvmlQuery:
    return NvmlQuery((field,), period_s, max_calls, tuple(_device_getter(convert, call) for call in getters), replaces)


_SLOWDOWN = _device_getter(_positive, "TemperatureThreshold NVML_TEMPERATURE_THRESHOLD_SLOWDOWN")
_GPM = NvmlQuery(tuple(_GPM_METRICS), 3, 3, (_gpm,))
QUERIES = (
    # These take microseconds.
    _make_query("uuid", _NEVER_AGAIN, _text, "UUID"),
    _make_query("name", _NEVER_AGAIN, _text, "Name"),
    _make_query("util_pct", 1, lambda rates: _percent(rates.gpu), "UtilizationRates"),
    NvmlQuery(("mem_used_bytes", "mem_total_bytes", "mem_reserved_bytes"), 1, 1, (_memory_v2, _memory_v1)),
    _make_query("power_w", 1, _divide_by_1000, "PowerUsage"),
    _make_query("sm_clock_mhz", 2, int, "ClockInfo NVML_CLOCK_SM"),
    _make_query("throttle", 2, throttle_reasons, "CurrentClocksEventReasons", "CurrentClocksThrottleReasons"),
    _make_query("temperature_c", 2, int, "Temperature NVML_TEMPERATURE_GPU", "TemperatureV NVML_TEMPERATURE_GPU"),
    _make_query("power_limit_w", 30, _divide_by_1000, "EnforcedPowerLimit", "PowerManagementLimit"),
    NvmlQuery(("temperature_limit_c",), 60, 2, (_SLOWDOWN, _slowdown_by_margin)),
    _make_query("mem_clock_mhz", 5, int, "ClockInfo NVML_CLOCK_MEM"),
    _make_query("energy_j", 5, _divide_by_1000, "TotalEnergyConsumption"),
    _make_query("fan_pct", 10, _percent, "FanSpeed", "FanSpeed_v2 0"),
    # These take milliseconds, are rarely needed, or are known to block.
    NvmlQuery(("mig", "mig_devices"), 6, 4, (_mig,)),
    # Two calls each: the number of processes, then the list.
    _make_query("compute", 5, _memory_by_pid, "ComputeRunningProcesses_v3", "ComputeRunningProcesses_v2", max_calls=2),
    _make_query(
        "graphics", 10, _memory_by_pid, "GraphicsRunningProcesses_v3", "GraphicsRunningProcesses_v2", max_calls=2
    ),
    _GPM,
    # The driver measures for 20 ms, in units of 1000 bytes/s.
    _make_query("pcie_rx_bytes_s", 10, _multiply_by_1000, "PcieThroughput NVML_PCIE_UTIL_RX_BYTES", replaces=_GPM),
    _make_query("pcie_tx_bytes_s", 10, _multiply_by_1000, "PcieThroughput NVML_PCIE_UTIL_TX_BYTES", replaces=_GPM),
    NvmlQuery(("nvlink_rx_bytes_s", "nvlink_tx_bytes_s"), 5, 1, (_nvlink,), _GPM),
    _make_query("ecc_corrected", 30, int, "TotalEccErrors NVML_MEMORY_ERROR_TYPE_CORRECTED NVML_VOLATILE_ECC"),
    _make_query("ecc_uncorrected", 30, int, "TotalEccErrors NVML_MEMORY_ERROR_TYPE_UNCORRECTED NVML_VOLATILE_ECC"),
    _make_query("remapped_rows", 60, lambda counts: sum(counts[:2]), "RemappedRows"),
    NvmlQuery(("retired_pages",), 60, 4, (_retired_pages,)),
    NvmlQuery(("pcie_gen", "pcie_width", "pcie_gen_max", "pcie_width_max", "pcie_slow_readings"), 60, 5, (_pcie_link,)),
    NvmlQuery(("nvlinks_down", "nvlink_errors"), 60, 1, (_nvlink_health,)),
    _make_query("persistence", 60, bool, "PersistenceMode"),
    NvmlQuery(("xid",), 5, 2, (_xid,)),
)
"""All queries. Those that the first sample needs come first."""

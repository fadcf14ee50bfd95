"""The questions to NVML about a GPU: fields, ways to ask, period, and number of library calls.

A way to ask is a function of pynvml, the GPU's handle and its own memo (kept while the handle is valid). It returns a
value, or `Missing`, for each field of the question. It raises what pynvml raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpmon.gpu.failure import CallFailed, Missing, call
from dpmon.gpu.gpm import GPM_FIELDS, gpm, nvlink

CHEAP_CALLS, EXPENSIVE_CALLS = 5, 3
"""Most library calls per GPU and second by each of its two threads; 8 in total.

When a GPU is first found, all questions in CHEAP are asked at once, so that its first sample has their answers."""
OPENING_CALLS = 3
"""Calls to open a GPU: handle, UUID, name."""

Way = Callable[[Any, Any, dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Fields that come from one answer, with the period of the question and its largest number of library calls.

    The first answer of `gpm` takes one call more. If a way is not supported, the next one is tried. `instead_of`: ask
    only if that question has left the first field unanswered. `only_if`: ask only while that field is known to be true.
    """

    fields: tuple[str, ...]
    every_s: float
    calls: int
    ways: tuple[Way, ...]
    instead_of: Question | None = None
    only_if: str = ""


NOT_SENSIBLE = Missing("NVML returned an implausible value")
_NO_XID = Missing("no XID error since the run's start")
_MAX_INSTANCES = 8

# nvml.h: NVML_CLOCKS_EVENT_REASON_*. The first bit (idle) does not count as throttling.
_THROTTLE = {
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


def throttle_words(bits: int) -> list[str]:
    """Return the reasons for lowered clocks from NVML's bits; unknown bits are given as a number."""
    bits = int(bits)
    named = [word for bit, word in _THROTTLE.items() if bits & bit]
    unnamed = bits & ~(_IDLE | sum(_THROTTLE))
    return [*named, f"reason {unnamed:#x}"] if unnamed else named


def _percent(value: Any) -> Any:
    return int(value) if 0 <= value <= 100 else NOT_SENSIBLE


def _thousandth(value: Any) -> float:
    return float(value / 1000)


def _got(take: Callable[[Any], Any], *names: str) -> tuple[Way, ...]:
    """Return ways that call nvmlDeviceGet<name> with only the handle; `take` converts the result to a value."""

    def way(name: str) -> Way:
        return lambda nvml, handle, memo: (take(getattr(nvml, f"nvmlDeviceGet{name}")(handle)),)

    return tuple(map(way, names))


def _clock(which: str) -> tuple[Way, ...]:
    return (lambda n, h, memo: (int(n.nvmlDeviceGetClockInfo(h, getattr(n, which))),),)


def _ecc(which: str) -> tuple[Way, ...]:
    return (lambda n, h, memo: (int(n.nvmlDeviceGetTotalEccErrors(h, getattr(n, which), n.NVML_VOLATILE_ECC)),),)


def _pcie(which: str) -> tuple[Way, ...]:
    """Return a way to read PCIe throughput; the driver measures for 20 ms, in units of 1000 bytes/s."""
    return (lambda n, h, memo: (n.nvmlDeviceGetPcieThroughput(h, getattr(n, which)) * 1000,),)


def _memory_v2(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return int(memory.used), int(memory.total), int(memory.reserved)


def _memory_v1(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total), Missing("this driver counts it as used")


def _temperature(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    return (int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),)


def _temperature_v(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    return (int(nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)),)


def _slowdown_at(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    limit = int(nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
    return (limit if limit > 0 else NOT_SENSIBLE,)


def _slowdown_by_margin(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Newer drivers report the distance to the nearest limit, not the limit."""
    margin = int(nvml.nvmlDeviceGetMarginTemperature(handle))
    return (int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)) + margin,)


def _held(processes: Any) -> dict[int, int | None]:
    """Return bytes by process id; None if the driver does not report them."""
    held: dict[int, int | None] = {}
    for process in processes:
        used = process.usedGpuMemory
        before = held.get(int(process.pid))
        held[int(process.pid)] = before if used is None else int(used) + (before or 0)
    return held


def _retired(cause: str) -> tuple[Way, ...]:
    return (lambda n, h, memo: (len(n.nvmlDeviceGetRetiredPages(h, getattr(n, cause))),),)


def _xid(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the newest XID error. The first call makes the event set (2 library calls), later ones take 1."""
    if "set" not in memo:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        memo["set"], memo["xid"] = events, _NO_XID
        return (_NO_XID,)
    try:
        event = call(lambda: nvml.nvmlEventSetWait_v2(memo["set"], 0))
        memo["xid"] = int(event.eventData)
    except CallFailed as failure:
        if failure.code != 10:  # no new event
            raise
    return (memo["xid"],)


def _instances(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """Return the MIG instances. Each call updates the UUID or the memory of one, with at most two library calls."""
    known = memo.setdefault("instances", {})
    turn = memo["turn"] = (memo.get("turn", -1) + 1) % (2 * _MAX_INSTANCES)
    _look_at_instance(nvml, handle, memo, turn // 2, turn % 2 == 0)
    return ([dict(known[index]["said"]) for index in sorted(known)],)


def _look_at_instance(nvml: Any, handle: Any, memo: dict[str, Any], index: int, first: bool) -> None:
    known = memo["instances"]
    if first:
        try:
            found = call(lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
            if not found:
                raise CallFailed("no handle")
        except CallFailed as failure:
            if failure.gone:
                raise
            known.pop(index, None)
            return
        said = {"uuid": nvml.nvmlDeviceGetUUID(found), "mem_used_bytes": None, "mem_total_bytes": None}
        before = known.get(index)
        if before is None or before["said"]["uuid"] != said["uuid"]:
            known[index] = {"handle": found, "said": said}
    elif index in known:
        memory = nvml.nvmlDeviceGetMemoryInfo(known[index]["handle"])
        known[index]["said"].update(mem_used_bytes=int(memory.used), mem_total_bytes=int(memory.total))


CHEAP = (
    Question(("util_pct",), 1, 1, _got(lambda rates: _percent(rates.gpu), "UtilizationRates")),
    Question(("mem_used_bytes", "mem_total_bytes", "mem_reserved_bytes"), 1, 1, (_memory_v2, _memory_v1)),
    Question(("power_w",), 1, 1, _got(_thousandth, "PowerUsage")),
    Question(("sm_clock_mhz",), 2, 1, _clock("NVML_CLOCK_SM")),
    Question(("throttle",), 2, 1, _got(throttle_words, "CurrentClocksEventReasons", "CurrentClocksThrottleReasons")),
    Question(("temperature_c",), 2, 1, (_temperature, _temperature_v)),
    Question(("power_limit_w",), 30, 1, _got(_thousandth, "EnforcedPowerLimit", "PowerManagementLimit")),
    Question(("temperature_limit_c",), 60, 2, (_slowdown_at, _slowdown_by_margin)),
    Question(("mem_clock_mhz",), 5, 1, _clock("NVML_CLOCK_MEM")),
    Question(("energy_j",), 10, 1, _got(_thousandth, "TotalEnergyConsumption")),
    Question(
        ("fan_pct",),
        10,
        1,
        (*_got(_percent, "FanSpeed"), lambda n, h, memo: (_percent(n.nvmlDeviceGetFanSpeed_v2(h, 0)),)),
    ),
)
"""Questions that take microseconds."""

_GPM = Question(GPM_FIELDS, 3, 3, (gpm,))
EXPENSIVE = (
    Question(("mig",), 30, 1, _got(lambda modes: bool(modes[0]), "MigMode")),
    Question(("mig_devices",), 3, 2, (_instances,), only_if="mig"),
    # Two calls each: the number of processes, then the list.
    Question(("compute",), 5, 2, _got(_held, "ComputeRunningProcesses_v3", "ComputeRunningProcesses_v2")),
    Question(("graphics",), 10, 2, _got(_held, "GraphicsRunningProcesses_v3", "GraphicsRunningProcesses_v2")),
    _GPM,
    Question(("pcie_rx_bytes_s",), 10, 1, _pcie("NVML_PCIE_UTIL_RX_BYTES"), instead_of=_GPM),
    Question(("pcie_tx_bytes_s",), 10, 1, _pcie("NVML_PCIE_UTIL_TX_BYTES"), instead_of=_GPM),
    Question(("nvlink_rx_bytes_s", "nvlink_tx_bytes_s"), 5, 1, (nvlink,), instead_of=_GPM),
    Question(("ecc_corrected",), 30, 1, _ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED")),
    Question(("ecc_uncorrected",), 30, 1, _ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED")),
    Question(("remapped_rows",), 60, 1, _got(lambda counts: sum(counts[:2]), "RemappedRows")),
    Question(("retired_single",), 60, 2, _retired("NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS")),
    Question(("retired_double",), 60, 2, _retired("NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR")),
    Question(("persistence",), 60, 1, _got(bool, "PersistenceMode")),
    Question(("xid",), 5, 2, (_xid,)),
)
"""Questions that take milliseconds, are rarely needed, or are known to block."""

"""What a GPU is asked, how, how often, and for how many calls into the library.

A way to ask takes pynvml, the GPU's handle and a memo of its own (kept as long as the handle is good), and returns a
value for each of the question's fields, or `Missing` in the place of one. It raises what pynvml raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpmon.gpu.failure import Failure, Missing, call
from dpmon.gpu.gpm import GPM_FIELDS, gpm, nvlink

CHEAP_CALLS, DEAR_CALLS = 5, 3
"""Most library calls for one GPU in one second by the thread that asks; 8 for all threads.

The first second asks everything in CHEAP, so that the first sample is complete."""
OPENING_CALLS = 3
"""Handle, UUID, name."""

Way = Callable[[Any, Any, dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Fields that come from one answer: asked every so many seconds, for at most so many library calls.

    A way that is not supported gives place to the next. `instead_of`: asked only where that other question left the
    first field open. `only_if`: asked only while that field is known to be true.
    """

    fields: tuple[str, ...]
    every_s: float
    calls: int
    ways: tuple[Way, ...]
    instead_of: Question | None = None
    only_if: str = ""


NOT_SENSIBLE = Missing("NVML gave no sensible value")
_NO_XID = Missing("no XID error since the run's start")
_MAX_INSTANCES = 8

# nvml.h: NVML_CLOCKS_EVENT_REASON_*. The first bit (nothing to do) holds no clock down that anybody would miss.
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
    """Why clocks are held down, from NVML's bits; one that has no name yet is told by its number."""
    bits = int(bits)
    named = [word for bit, word in _THROTTLE.items() if bits & bit]
    unnamed = bits & ~(_IDLE | sum(_THROTTLE))
    return [*named, f"reason {unnamed:#x}"] if unnamed else named


def _percent(value: Any) -> Any:
    return int(value) if 0 <= value <= 100 else NOT_SENSIBLE


def _thousandth(value: Any) -> float:
    return float(value / 1000)


def _got(take: Callable[[Any], Any], *names: str) -> tuple[Way, ...]:
    """Ways to ask functions nvmlDeviceGet... that want the handle alone; `take` makes a value of what they return."""

    def way(name: str) -> Way:
        return lambda nvml, handle, memo: (take(getattr(nvml, f"nvmlDeviceGet{name}")(handle)),)

    return tuple(map(way, names))


def _clock(which: str) -> tuple[Way, ...]:
    return (lambda n, h, memo: (int(n.nvmlDeviceGetClockInfo(h, getattr(n, which))),),)


def _ecc(which: str) -> tuple[Way, ...]:
    return (lambda n, h, memo: (int(n.nvmlDeviceGetTotalEccErrors(h, getattr(n, which), n.NVML_VOLATILE_ECC)),),)


def _pcie(which: str) -> tuple[Way, ...]:
    """The driver watches the bus for 20 ms to answer this, in units of 1000 bytes a second."""
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
    """Newer drivers tell the distance to the nearest limit in place of the limit."""
    margin = int(nvml.nvmlDeviceGetMarginTemperature(handle))
    return (int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)) + margin,)


def _held(processes: Any) -> dict[int, int | None]:
    """Bytes by process id; None: the driver does not tell."""
    held: dict[int, int | None] = {}
    for process in processes:
        used = process.usedGpuMemory
        before = held.get(int(process.pid))
        held[int(process.pid)] = before if used is None else int(used) + (before or 0)
    return held


def _retired(cause: str) -> tuple[Way, ...]:
    return (lambda n, h, memo: (len(n.nvmlDeviceGetRetiredPages(h, getattr(n, cause))),),)


def _xid(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """The newest XID error; the set of events is made at the first time (2 calls), then one call that does not wait."""
    if "set" not in memo:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        memo["set"], memo["xid"] = events, _NO_XID
        return (_NO_XID,)
    try:
        event = call(lambda: nvml.nvmlEventSetWait_v2(memo["set"], 0))
        memo["xid"] = int(event.eventData)
    except Failure as failure:
        if failure.code != 10:  # nothing has happened
            raise
    return (memo["xid"],)


def _instances(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
    """The MIG instances, half a one at a time: at most two calls."""
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
                raise Failure("no handle")
        except Failure as failure:
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
"""What takes microseconds."""

_GPM = Question(GPM_FIELDS, 3, 3, (gpm,))
DEAR = (
    Question(("mig",), 30, 1, _got(lambda modes: bool(modes[0]), "MigMode")),
    Question(("mig_devices",), 3, 2, (_instances,), only_if="mig"),
    # Two calls each: how many there are, then who they are.
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
"""What takes milliseconds, is rarely needed, or has been seen to block."""

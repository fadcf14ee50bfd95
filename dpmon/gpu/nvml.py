"""What every GPU does, asked of NVML: the only importer of pynvml.

One `Nvml` belongs to one thread. Any call may take seconds, or never return: nobody else may depend on that
thread (see `sampler`). Each quantity stands on its own: one that fails is None, with its reason in `absent`, and
touches no other; one that this GPU or driver does not support is not asked again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from dpmon.gpu.device import DeviceSample, pids_are_shared, share_of_run, without_values
from dpmon.gpu.failure import GPU_IS_LOST, NO_START, UNINITIALIZED, Failure, call

__all__ = ["CALLS_A_SAMPLE", "NO_GPU", "RETRY_S", "Nvml"]

NO_GPU = "the NVIDIA driver is loaded but sees no GPU"

CALLS_A_SAMPLE = 8
"""Calls into the library for one GPU in one sample, at most; whatever does not fit waits for the next one."""
RETRY_S = 5.0
"""After this long a GPU that was lost, or a library that did not start, is tried again."""

_OPENING_CALLS = 3  # handle, uuid, name


@dataclass(frozen=True, slots=True)
class _Quantity:
    """Fields that come from one question: asked every so many samples, for so many library calls.

    There may be several ways to ask; one that is not supported gives place to the next.
    """

    fields: tuple[str, ...]
    every: int
    calls: int
    ways: tuple[Callable[[Any, Any], tuple[Any, ...]], ...]


def _memory_v2(nvml: Any, handle: Any) -> tuple[int, int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return int(memory.used), int(memory.total)


def _memory_v1(nvml: Any, handle: Any) -> tuple[int, int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total)


def _processes(nvml: Any, handle: Any) -> tuple[dict[int, int | None]]:
    """Bytes by process id (None: the driver does not tell); a process in both lists holds them once."""
    held: dict[int, int | None] = {}
    for process in (
        *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
    ):
        used = process.usedGpuMemory
        before = held.get(process.pid)
        held[process.pid] = before if used is None else max(int(used), before or 0)
    return (held,)


_PROCESSES = _Quantity(("processes",), 5, 4, (_processes,))
_QUANTITIES = (
    _Quantity(("util_pct",), 1, 1, (lambda n, h: (int(n.nvmlDeviceGetUtilizationRates(h).gpu),),)),
    _Quantity(("mem_used_bytes", "mem_total_bytes"), 1, 1, (_memory_v2, _memory_v1)),
    _Quantity(("power_w",), 1, 1, (lambda n, h: (n.nvmlDeviceGetPowerUsage(h) / 1000,),)),
    _Quantity(
        ("temperature_c",),
        2,
        1,
        (
            lambda n, h: (int(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),),
            lambda n, h: (int(n.nvmlDeviceGetTemperatureV(h, n.NVML_TEMPERATURE_GPU)),),
        ),
    ),
    _Quantity(("sm_clock_mhz",), 1, 1, (lambda n, h: (int(n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),),)),
    _PROCESSES,
    _Quantity(
        ("power_limit_w",),
        30,
        1,
        (
            lambda n, h: (n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,),
            lambda n, h: (n.nvmlDeviceGetPowerManagementLimit(h) / 1000,),
        ),
    ),
)


class _Device:
    """One GPU: its handle, what was last read of it and when each question is due again."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid: str | None = None
        self.name: str | None = None
        self.handle: Any = None
        self.lost = ""
        self.retry_at = 0.0
        self.identity_absent: dict[str, str] = {}
        self._turn = 0
        self._due: dict[_Quantity, int] = {}
        self._way: dict[_Quantity, int] = {}
        self._values: dict[str, Any] = {}
        self._absent: dict[str, str] = {}

    def open(self, nvml: Any) -> None:
        """Find the GPU by its index; raises Failure. Its uuid and name may be missing."""
        handle = call(lambda: nvml.nvmlDeviceGetHandleByIndex(self.index))
        if not handle:  # some drivers die of a null handle
            raise Failure("NVML gave no handle for this GPU", GPU_IS_LOST)
        self.identity_absent = {}
        self.uuid = self._identity("uuid", lambda: nvml.nvmlDeviceGetUUID(handle))
        self.name = self._identity("name", lambda: nvml.nvmlDeviceGetName(handle))
        self.handle = handle
        self.lost = ""

    def _identity(self, name: str, ask: Callable[[], Any]) -> str | None:
        try:
            text = call(ask)
        except Failure as failure:
            self.identity_absent[name] = failure.reason
            return None
        return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)

    def lose(self, reason: str, now_s: float) -> None:
        """The GPU does not answer any more; it is looked for again later."""
        self.handle = None
        self.lost = reason
        self.retry_at = now_s + RETRY_S
        self._values.clear()
        self._absent.clear()
        self._due.clear()

    def read(self, nvml: Any, calls: int) -> None:
        """Ask what is due, as far as `calls` goes; raises Failure only if the GPU is gone."""
        for quantity in _QUANTITIES:
            way = self._way.get(quantity, 0)
            if self._due.get(quantity, 0) > self._turn or way == len(quantity.ways):
                continue
            if calls < quantity.calls:
                unknown = [name for name in quantity.fields if name not in self._values]
                self._absent.update(dict.fromkeys(unknown, "not asked yet"))
                continue
            calls -= quantity.calls
            self._due[quantity] = self._turn + quantity.every
            self._ask(nvml, quantity, way)
        self._turn += 1

    def _ask(self, nvml: Any, quantity: _Quantity, way: int) -> None:
        try:
            values = call(lambda: quantity.ways[way](nvml, self.handle))
        except Failure as failure:
            if failure.gone:
                raise
            if failure.never:
                self._way[quantity] = way + 1
                self._due[quantity] = self._turn + 1  # another way, if there is one, at the next sample
            self._absent.update(dict.fromkeys(quantity.fields, failure.reason))
            for name in quantity.fields:
                self._values.pop(name, None)
            return
        for name, value in zip(quantity.fields, values, strict=True):
            self._values[name] = value
            self._absent.pop(name, None)

    def sample(self, run_pids: Set[int], same_pids: bool) -> DeviceSample:
        """What is known now; `same_pids`: NVML's process ids mean what ours mean."""
        if self.handle is None:
            who = DeviceSample(self.index, self.uuid, self.name, absent=self.identity_absent)
            return without_values(who, self.lost)
        values = {name: value for name, value in self._values.items() if name != "processes"}
        absent = {**self.identity_absent, **self._absent}
        reason = absent.pop("processes", "")
        if reason:
            absent.update(of_run=reason, mem_run_bytes=reason)
        else:
            of_run, mem_run, why = share_of_run(self._values["processes"], run_pids, same_pids)
            values.update(of_run=of_run, mem_run_bytes=mem_run)
            absent.update(why)
        return DeviceSample(self.index, self.uuid, self.name, absent=absent, **values)


class Nvml:
    """The GPUs of this machine. Not for more than one thread; nothing is imported or loaded before `open`."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[_Device] = []
        self._same_pids = pids_are_shared()

    def open(self) -> str | None:
        """Start NVML and count the GPUs; None if there is one, otherwise one sentence: why there is none."""
        try:
            import pynvml  # noqa: TID251 - this is the doorway
        except Exception as error:  # noqa: BLE001 - a broken installation is a reason like any other
            if isinstance(error, ModuleNotFoundError):
                return "the Python package nvidia-ml-py is not installed"
            return f"the Python package nvidia-ml-py does not load: {type(error).__name__}: {error}"
        try:
            call(pynvml.nvmlInit)
        except Failure as failure:
            return NO_START.get(failure.code, f"NVML does not start: {failure.reason}")
        self._nvml = pynvml
        try:
            count = call(pynvml.nvmlDeviceGetCount)
        except Failure as failure:
            self.close()
            return f"NVML cannot count the GPUs: {failure.reason}"
        if not count:
            self.close()
            return NO_GPU
        self._devices = [_Device(index) for index in range(count)]
        return None

    @property
    def is_open(self) -> bool:
        """Whether there are GPUs to sample."""
        return self._nvml is not None

    @property
    def count(self) -> int:
        """How many GPUs there are."""
        return len(self._devices)

    def sample(self, run_pids: Set[int], now_s: float) -> list[DeviceSample]:
        """One sample a GPU, at most CALLS_A_SAMPLE calls each; `now_s` is any monotonic clock, in seconds.

        It is closed afterwards if the library itself has stopped.
        """
        stopped = False
        for device in self._devices:
            calls = CALLS_A_SAMPLE
            try:
                if device.handle is None:
                    if now_s < device.retry_at:
                        continue
                    calls -= _OPENING_CALLS
                    device.open(self._nvml)
                device.read(self._nvml, calls)
            except Failure as failure:
                device.lose(failure.reason, now_s)
                stopped = stopped or failure.code == UNINITIALIZED
        samples = [device.sample(run_pids, self._same_pids) for device in self._devices]
        if stopped:  # the library forgot us: only a new start helps
            self.close()
        return samples

    def close(self) -> None:
        """Shut NVML down; only the thread that made the calls may, since one in flight would crash us."""
        nvml, self._nvml = self._nvml, None
        self._devices = []
        if nvml is not None:
            with contextlib.suppress(Failure):  # then there is nothing left to be shut down
                call(nvml.nvmlShutdown)

"""Samples the devices and the host of a run, once per second.

One thread samples the host. Another one starts NVML and counts the GPUs. Each GPU has a thread that queries it. An NVML
call may take seconds or never return. It blocks only its own thread; the GPU then gets a second one. Nothing waits for
these threads: samples are built from the answers that they have stored (`GpuState.sample`).
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import psutil

from dpmon.gpu.device_record import NOT_QUERIED, RunContext, TorchReservation, visible_gpus
from dpmon.gpu.gpu_state import MAX_SILENCE_S, RETRY_S, GpuPoller, GpuState
from dpmon.gpu.host_sampler import HostSampler
from dpmon.gpu.nvml import Nvml, NvmlCallError, exit_past_nvml
from dpmon.record.safe_json import int_member, text_member

NVML_PERIOD_S = 1.0
"""Minimum period of NVML queries, because the driver holds a lock that the training needs while it answers."""
MAX_GPUS = 64
SAME_WARNING_S = 60.0
"""Minimum time between two warnings with the same text."""
_MAX_POLLERS = 2
"""Maximum number of threads per GPU."""
_STOP_S = 1.0
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it (include/linux/proc_ns.h)


class DeviceSampler:
    """A sampler of the GPUs and the host, on threads of its own."""

    def __init__(
        self,
        emit: Callable[[str, Mapping[str, Any]], None],
        root_pid: Callable[[], int | None],
        interval_s: float = 1.0,
        *,
        nvml: Callable[[], Nvml] = Nvml,
    ) -> None:
        """Create a sampler. `emit` records an event, from any thread. `root_pid` returns the command's pid, or None."""
        self._emit = emit
        self._root_pid = root_pid
        self._interval_s = interval_s
        self._period_s = max(interval_s, NVML_PERIOD_S)
        self._nvml = nvml()
        self._environment: dict[str, str] | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._gpus: tuple[GpuState, ...] = ()
        self._opening_s: float | None = None
        self._absent: str | None = "NVML has not answered yet"
        self._pids: frozenset[int] = frozenset()
        self._same_pids = pids_are_shared()
        self._uses: dict[int, tuple[TorchReservation, ...]] = {}
        """The last report of each process of the run, by process id."""
        self._warned: dict[str, float] = {}

    def start(self) -> None:
        """Start sampling. The first samples are written at once."""
        self._spawn(self._keep_open, "dpmon nvml")
        self._spawn(self._watch_host, "dpmon host")

    def stop(self) -> None:
        """Stop sampling within about a second, even if NVML never returns."""
        self._stop.set()
        deadline = time.monotonic() + _STOP_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._nvml.close():
            atexit.register(exit_past_nvml, 0)

    def add_torch_memory(self, data: Mapping[str, Any], pid: int) -> None:
        """Add a `memory` record of the training process `pid`, which names the GPUs that torch uses there."""
        self._uses = self._uses | {pid: _parse_torch_reservations(data)}

    def warn(self, text: str) -> None:
        """Write a warning, at most once a minute for each text."""
        now = time.monotonic()
        if now - self._warned.get(text, -math.inf) >= SAME_WARNING_S:
            self._warned[text] = now
            self._emit("warning", {"process": None, "text": text})

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    # ------------------------------------------------------------------------------------------ host thread

    def _watch_host(self) -> None:
        host = HostSampler()
        due = time.monotonic()
        while not self._stop.is_set():
            self._warn_on_error("the host could not be sampled", lambda: self._emit_host(host))
            self._warn_on_error("the GPUs could not be checked", self._check_unanswered_calls)
            # After a pause (a suspended machine, SIGSTOP), one sample follows, not all missed ones.
            due = max(due + self._interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _warn_on_error(self, failure: str, action: Callable[[], None]) -> None:
        """Run `action`. An error becomes a warning: if the thread died, all later samples would be missing."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - see above
            self.warn(f"{failure}: {type(error).__name__}: {error}")

    def _emit_host(self, host: HostSampler) -> None:
        sample = host.sample(self._root_pid())
        self._pids = host.pids()
        self._emit("host", {**sample, "gpu_absent": self._why_no_gpu()})

    def _why_no_gpu(self) -> str | None:
        """Return why there is no GPU; None if there is one."""
        opening_s = self._opening_s
        if self._gpus or opening_s is None or time.monotonic() - opening_s < MAX_SILENCE_S:
            return self._absent
        return f"NVML has not answered for {time.monotonic() - opening_s:.0f} s"

    def _check_unanswered_calls(self) -> None:
        """Handle NVML calls that hang: warn, start a second poller, and keep emitting the last values."""
        now = time.monotonic()
        for gpu in self._gpus:
            gpu.pollers = tuple(poller for poller in gpu.pollers if not poller.has_ended)
            unanswered = [poller.unanswered_s(now) for poller in gpu.pollers]
            is_silent = max(unanswered, default=0.0) >= MAX_SILENCE_S
            if is_silent != gpu.is_silent:
                gpu.is_silent = is_silent
                self.warn(f"NVML {'does not answer' if is_silent else 'answers again'} for GPU {gpu.index}")
            if not unanswered or (unanswered[-1] >= MAX_SILENCE_S and len(unanswered) < _MAX_POLLERS):
                self._start(gpu, GpuPoller(gpu, self._nvml))
            # The newest thread is stuck, so it will not emit the device in this period.
            if not unanswered or unanswered[-1] >= self._period_s / 2:
                self._emit_device(gpu)

    # ------------------------------------------------------------------------------------------ NVML's threads

    def _keep_open(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            if not self._gpus or self._nvml.uninitialized:
                self._opening_s = time.monotonic()
                try:
                    count, self._absent = self._nvml.count()
                except Exception as error:  # noqa: BLE001 - NVML is tried again
                    count, self._absent = 0, f"NVML cannot count the GPUs: {_describe_error(error)}"
                self._opening_s = None
                for index in range(len(self._gpus), min(count, MAX_GPUS)):
                    gpu = GpuState(index)
                    poller = GpuPoller(gpu, self._nvml)
                    self._gpus = (*self._gpus, gpu)
                    self._start(gpu, poller)
            pause_s = RETRY_S if self._absent is not None else self._period_s

    def _start(self, gpu: GpuState, poller: GpuPoller) -> None:
        self._spawn(lambda: self._poll_gpu(gpu, poller), f"dpmon gpu {gpu.index}")

    def _poll_gpu(self, gpu: GpuState, poller: GpuPoller) -> None:
        """Poll a GPU until `stop` is called, or until a newer thread replaces this one."""
        pause_s = 0.0
        while poller.is_current and not self._stop.wait(pause_s):
            start_s = time.monotonic()
            if gpu.handle is not None or start_s >= gpu.retry_at_s:
                self._poll_gpu_once(gpu, poller)
            if poller.is_current and not self._stop.is_set():
                self._emit_device(gpu)
            pause_s = max(0.0, start_s + self._period_s - time.monotonic())
        poller.has_ended = True

    def _poll_gpu_once(self, gpu: GpuState, poller: GpuPoller) -> None:
        previous_reason = gpu.lost_reason
        try:
            poller.poll_due_queries()
        except Exception as error:  # noqa: BLE001 - if the thread died, all later values would be missing
            if poller.is_current and not self._stop.is_set():
                reason = _describe_error(error)
                if gpu.lost_reason != reason:
                    self.warn(f"GPU {gpu.index}: {reason}")
                gpu.mark_lost(reason, time.monotonic())
            return
        if previous_reason not in ("", gpu.lost_reason, NOT_QUERIED.reason):
            self.warn(f"GPU {gpu.index} is back")

    # ------------------------------------------------------------------------------------------ devices

    def _emit_device(self, gpu: GpuState) -> None:
        def emit() -> None:
            self._emit("device", gpu.sample(self._run_context(gpu), time.monotonic()))

        self._warn_on_error(f"the sample of GPU {gpu.index} could not be written", emit)

    def _run_context(self, gpu: GpuState) -> RunContext:
        # An ended process holds no memory.
        live = [reservations for pid, reservations in self._uses.items() if os.path.exists(f"/proc/{pid}")]
        return RunContext(self._pids, self._same_pids, tuple(chain(*live)), self._is_visible_to_cuda(gpu))

    def _is_visible_to_cuda(self, gpu: GpuState) -> bool | None:
        """Return whether the command's environment variables let CUDA see the GPU; None if unknown."""
        if self._environment is None:
            self._environment = _environment_of(self._root_pid())
        if self._environment is None or gpu.uuid is None:
            return None
        text, order = map(self._environment.get, ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
        has_mig_instances = any(len(other.uuids()) > 1 for other in self._gpus)
        return visible_gpus(text, order, [other.uuid for other in self._gpus], has_mig_instances)[gpu.index]


def _parse_torch_reservations(data: Mapping[str, Any]) -> tuple[TorchReservation, ...]:
    """Return the GPUs in a `memory` record, without invalid entries, because any program may have written it."""
    process, devices = int_member(data, "process"), data.get("devices")
    if process is None or not isinstance(devices, list):
        return ()
    return tuple(
        TorchReservation(process, name, uuid, int_member(device, "reserved_bytes"))
        for device in devices
        if isinstance(device, dict)
        and (name := text_member(device, "device")) is not None
        and (uuid := text_member(device, "uuid")) is not None
    )


def _environment_of(pid: int | None) -> dict[str, str] | None:
    """Return the initial environment of a process; None if it is unreadable, has ended or has not started yet."""
    if pid is None:
        return None
    try:
        return psutil.Process(pid).environ() or None
    except (psutil.Error, OSError):
        return None


def pids_are_shared() -> bool:
    """Return whether this process is in the initial pid namespace, whose ids NVML reports."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _describe_error(error: Exception) -> str:
    return error.reason if isinstance(error, NvmlCallError) else f"{type(error).__name__}: {error}"

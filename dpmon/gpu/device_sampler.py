"""Samples the devices and the host of a run, once per second.

One thread samples the host. Another one starts NVML and counts the GPUs. Each GPU has a thread that queries it. An NVML
call may take seconds or never return. It blocks only its own thread, and nothing waits for these threads: samples are
built from the answers that they have stored (`GpuState.sample`).
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import psutil

from dpmon.gpu.device_record import RunContext, TorchReservation, visible_gpus
from dpmon.gpu.gpu_state import MAX_SILENCE_S, RETRY_S, GpuState
from dpmon.gpu.host_sampler import HostSampler
from dpmon.gpu.nvml import Nvml, exit_past_nvml

PERIOD_S = 1.0
"""Time between two samples (s). It is not shorter, because the driver holds a lock that the training needs while it
answers."""
MAX_GPUS = 64
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it (include/linux/proc_ns.h)


class DeviceSampler:
    """A sampler of the GPUs and the host, on threads of its own."""

    def __init__(
        self,
        emit: Callable[[str, Mapping[str, Any]], None],
        root_pid: Callable[[], int | None],
        nvml: Nvml | None = None,
    ) -> None:
        """Create a sampler. `emit` records an event, from any thread. `root_pid` returns the command's pid, or None."""
        self._emit = emit
        self._root_pid = root_pid
        self._nvml = nvml or Nvml()
        self._environment: dict[str, str] | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._gpus: tuple[GpuState, ...] = ()
        self._gpu_absent: str | None = "NVML has not answered yet"
        """Why there is no GPU; None if there is one."""
        self._pids: frozenset[int] = frozenset()
        self._same_pids = pids_are_shared()
        self._reservations: dict[int, tuple[TorchReservation, ...]] = {}
        """The last report of each process of the run, by process id."""
        self._warned: dict[str, float] = {}

    def start(self) -> None:
        """Start sampling. The first samples are written at once."""
        self._spawn(self._start_nvml, "dpmon nvml")
        self._spawn(self._watch_host, "dpmon host")

    def stop(self) -> None:
        """Stop sampling within about a second, even if NVML never returns."""
        self._stop.set()
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._nvml.close():
            atexit.register(exit_past_nvml, 0)

    def add_torch_memory(self, data: Mapping[str, Any], pid: int) -> None:
        """Add a `memory` record of the training process `pid`, which names the GPUs that torch uses there."""
        reservations = tuple(
            TorchReservation(data["process"], device["device"], device["uuid"], device.get("reserved_bytes"))
            for device in data["devices"]
            if device.get("uuid") is not None
        )
        self._reservations = self._reservations | {pid: reservations}

    def warn(self, text: str) -> None:
        """Write a warning, at most once a minute for each text."""
        now = time.monotonic()
        if now - self._warned.get(text, -math.inf) >= 60.0:
            self._warned[text] = now
            self._emit("warning", {"process": None, "text": text})

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _warn_on_error(self, failure: str, action: Callable[[], None]) -> None:
        """Run `action`. An error becomes a warning: if the thread died, all later samples would be missing."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - see above
            self.warn(f"{failure}: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------------------------------ host thread

    def _watch_host(self) -> None:
        host = HostSampler()
        due = time.monotonic()
        while not self._stop.is_set():
            self._warn_on_error("the host could not be sampled", lambda: self._emit_host(host))
            self._warn_on_error("the GPUs could not be checked", self._check_unanswered_calls)
            # After a pause (a suspended machine, SIGSTOP), one sample follows, not all missed ones.
            due = max(due + PERIOD_S, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _emit_host(self, host: HostSampler) -> None:
        sample = host.sample(self._root_pid())
        self._pids = host.pids()
        self._emit("host", {**sample, "gpu_absent": self._gpu_absent})

    def _check_unanswered_calls(self) -> None:
        """Handle NVML calls that hang: warn, and emit the sample that the blocked thread does not emit."""
        for gpu in self._gpus:
            unanswered_s = gpu.unanswered_s()
            is_silent = unanswered_s >= MAX_SILENCE_S
            if is_silent != gpu.is_silent:
                gpu.is_silent = is_silent
                self.warn(f"NVML {'does not answer' if is_silent else 'answers again'} for GPU {gpu.index}")
            if unanswered_s >= PERIOD_S / 2:
                self._emit_device(gpu)

    # ------------------------------------------------------------------------------------------ NVML's threads

    def _start_nvml(self) -> None:
        """Start NVML and a thread for each GPU. Try again until there is one."""
        while not self._gpus and not self._stop.is_set():
            self._warn_on_error("the GPUs could not be found", self._find_gpus)
            self._stop.wait(RETRY_S)

    def _find_gpus(self) -> None:
        count, self._gpu_absent = self._nvml.count()
        for index in range(len(self._gpus), min(count, MAX_GPUS)):
            gpu = GpuState(index, self._nvml)
            self._spawn(partial(self._poll_gpu, gpu), f"dpmon gpu {index}")
            self._gpus = (*self._gpus, gpu)

    def _poll_gpu(self, gpu: GpuState) -> None:
        """Poll a GPU until `stop` is called."""
        while not self._stop.is_set():
            start_s = time.monotonic()
            warning = gpu.poll()
            if self._stop.is_set():
                return
            if warning is not None:
                self.warn(warning)
            self._emit_device(gpu)
            self._stop.wait(max(0.0, start_s + PERIOD_S - time.monotonic()))

    # ------------------------------------------------------------------------------------------ devices

    def _emit_device(self, gpu: GpuState) -> None:
        self._warn_on_error(
            f"the sample of GPU {gpu.index} could not be written",
            lambda: self._emit("device", gpu.sample(self._run_context(gpu))),
        )

    def _run_context(self, gpu: GpuState) -> RunContext:
        # An ended process holds no memory.
        live = [reservations for pid, reservations in self._reservations.items() if os.path.exists(f"/proc/{pid}")]
        return RunContext(self._pids, self._same_pids, tuple(chain(*live)), self._is_visible_to_cuda(gpu))

    def _is_visible_to_cuda(self, gpu: GpuState) -> bool | None:
        """Return whether the command's environment variables let CUDA see the GPU; None if unknown."""
        pid = self._root_pid()
        if self._environment is None and pid is not None:
            with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
                self._environment = psutil.Process(pid).environ() or None
        if self._environment is None or gpu.uuid is None:
            return None
        text, order = map(self._environment.get, ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
        has_mig_instances = any(len(other.uuids()) > 1 for other in self._gpus)
        return visible_gpus(text, order, [other.uuid for other in self._gpus], has_mig_instances)[gpu.index]


def pids_are_shared() -> bool:
    """Return whether this process is in the initial pid namespace, whose ids NVML reports."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False

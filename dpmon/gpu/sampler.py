"""Samples the devices and the host of a run, once a second.

One thread samples the host. Other threads ask NVML (see `watch`). An NVML call may take seconds or never return, so
nothing waits for these threads.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from dpmon.gpu.card import Card
from dpmon.gpu.host import HostSampler
from dpmon.gpu.nvml import Nvml, leave
from dpmon.gpu.sample import Run, TorchUse, uses_of
from dpmon.gpu.visible import Gpu, visible_gpus
from dpmon.gpu.watch import GpuWatch

SAME_WARNING_S = 60.0
"""Shortest time between two warnings with the same text."""
MAX_WARNINGS = 256
MAX_USES = 1024
_STOP_S = 1.0
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # the kernel's fixed inode number for it (include/linux/proc_ns.h)


class DeviceSampler:
    """Samples GPUs and host on its own threads."""

    def __init__(
        self,
        emit: Callable[[str, Mapping[str, Any]], None],
        root_pid: Callable[[], int | None],
        interval_s: float = 1.0,
        *,
        nvml: Callable[[], Nvml] = Nvml,
    ) -> None:
        """`emit` records an event, from any thread. `root_pid` returns the command's process id, or None."""
        self._emit = emit
        self._root_pid = root_pid
        self._interval_s = interval_s
        self._environment: dict[str, str] | None = None
        self._stop = threading.Event()
        self._pids: frozenset[int] = frozenset()
        self._same_pids = pids_are_shared()
        self._uses: dict[int, tuple[int, tuple[TorchUse, ...]]] = {}
        """Per process of the run: its process id, and its last report of GPUs."""
        self._warned: dict[str, float] = {}
        self._warned_lock = threading.Lock()
        self._watch = GpuWatch(nvml(), interval_s, self._emit_device, self.warn)
        self._host = threading.Thread(target=self._watch_host, name="dpmon host", daemon=True)

    def start(self) -> None:
        """Begin to sample; the first samples are written at once."""
        self._watch.start()
        self._host.start()

    def stop(self) -> None:
        """Stop sampling within about a second, even if NVML never answers."""
        self._stop.set()
        until = time.monotonic() + _STOP_S
        if self._host.ident is None:
            return
        self._host.join(max(0.0, until - time.monotonic()))
        if not self._watch.stop(until):
            atexit.register(leave, 0)

    def take_memory(self, data: Mapping[str, Any], pid: int) -> None:
        """Take a `memory` record of the training process `pid`. It names the GPUs that torch uses there."""
        process, devices = data.get("process"), data.get("devices")
        if isinstance(process, int) and (process in self._uses or len(self._uses) < MAX_USES):
            self._uses = {**self._uses, process: (pid, uses_of(process, devices))}

    def warn(self, text: str) -> None:
        """Write a warning, at most once a minute for each text."""
        now = time.monotonic()
        with self._warned_lock:
            recent = {old: at for old, at in self._warned.items() if now - at < SAME_WARNING_S}
            if text in recent or len(recent) >= MAX_WARNINGS:
                return
            self._warned = {**recent, text: now}
        self._emit("warning", {"process": None, "text": text})

    # ------------------------------------------------------------------------------------------ host thread

    def _watch_host(self) -> None:
        host = HostSampler()
        due = time.monotonic()
        while not self._stop.is_set():
            self._emit_host(host)
            try:
                self._watch.look()
            except Exception as error:  # noqa: BLE001 - as in `_emit_host`
                self.warn(f"the GPUs could not be checked: {type(error).__name__}: {error}")
            # After a pause (a suspended machine, SIGSTOP), one sample follows, not all missed ones.
            due = max(due + self._interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _emit_host(self, host: HostSampler) -> None:
        try:
            sample = host.sample(self._root_pid())
            self._pids = host.pids()
        except Exception as error:  # noqa: BLE001 - if the thread died, all later samples would be missing
            self.warn(f"the host could not be sampled: {type(error).__name__}: {error}")
            return
        self._emit("host", {**sample, "gpu_absent": self._watch.absent()})

    # ------------------------------------------------------------------------------------------ devices

    def _emit_device(self, card: Card) -> None:
        try:
            self._emit("device", card.sample(self._run(card), time.monotonic()))
        except Exception as error:  # noqa: BLE001 - a bad answer must not end the thread that asks NVML
            self.warn(f"the sample of GPU {card.index} could not be written: {type(error).__name__}: {error}")

    def _run(self, card: Card) -> Run:
        # An ended process holds no memory.
        uses = tuple(use for pid, of_process in self._uses.values() if psutil.pid_exists(pid) for use in of_process)
        return Run(self._pids, self._same_pids, uses, self._visible(card))

    def _visible(self, card: Card) -> bool | None:
        """Return whether the command's environment lets CUDA see the GPU; None if unknown."""
        if self._environment is None:
            self._environment = _environment_of(self._root_pid())
        if self._environment is None or card.uuid is None:
            return None
        gpus = [Gpu(each.uuid, each.uuids()) for each in self._watch.cards]
        order = self._environment.get("CUDA_DEVICE_ORDER")
        return visible_gpus(self._environment.get("CUDA_VISIBLE_DEVICES"), order, gpus)[card.index]


def _environment_of(pid: int | None) -> dict[str, str] | None:
    """Return the initial environment of a process; None if it is unreadable, gone or not started yet."""
    if pid is None:
        return None
    try:
        return psutil.Process(pid).environ() or None
    except (psutil.Error, OSError):
        return None


def pids_are_shared() -> bool:
    """Whether this process is in the initial pid namespace; NVML reports ids of that namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False

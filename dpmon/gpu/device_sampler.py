"""Samples the devices and the host of a run, once a second.

One thread samples the host. One starts NVML and counts the GPUs, and one asks about each GPU. An NVML call may take
seconds or never return. It blocks only its own thread; a GPU then gets a second one. Nothing waits for these threads:
samples are composed from the answers that they have stored (`GpuState.sample`).
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from dpmon.gpu.device_record import NOT_ASKED, RunContext, TorchReservation, visible_gpus
from dpmon.gpu.gpu_state import RETRY_S, SILENT_S, GpuPoller, GpuState
from dpmon.gpu.host_sampler import HostSampler
from dpmon.gpu.nvml import Nvml, NvmlCallError, exit_past_nvml
from dpmon.record.safe_json import int_member, text_member

NVML_PERIOD_S = 1.0
"""Shortest period of questions to NVML, because the driver answers while it holds a lock that the training needs."""
MAX_GPUS = 64
SAME_WARNING_S = 60.0
"""Shortest time between two warnings with the same text."""
_MAX_ASKERS = 2
"""Most threads of one GPU."""
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
        self._period_s = max(interval_s, NVML_PERIOD_S)
        self._nvml = nvml()
        self._environment: dict[str, str] | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._cards: tuple[GpuState, ...] = ()
        self._opening_s: float | None = None
        self._absent: str | None = "NVML has not answered yet"
        self._pids: frozenset[int] = frozenset()
        self._same_pids = pids_are_shared()
        self._uses: dict[int, tuple[TorchReservation, ...]] = {}
        """What each process of the run last reported, by process id."""
        self._warned: dict[str, float] = {}

    def start(self) -> None:
        """Begin to sample; the first samples are written at once."""
        self._spawn(self._keep_open, "dpmon nvml")
        self._spawn(self._watch_host, "dpmon host")

    def stop(self) -> None:
        """Stop sampling within about a second, even if NVML never answers."""
        self._stop.set()
        until = time.monotonic() + _STOP_S
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        if not self._nvml.close():
            atexit.register(exit_past_nvml, 0)

    def add_torch_memory(self, data: Mapping[str, Any], pid: int) -> None:
        """Take a `memory` record of the training process `pid`. It names the GPUs that torch uses there."""
        self._uses = self._uses | {pid: _parse_torch_reservations(data)}

    def warn(self, text: str) -> None:
        """Write a warning, at most once a minute for each text."""
        now = time.monotonic()
        if now - self._warned.get(text, -math.inf) >= SAME_WARNING_S:
            self._warned[text] = now
            self._emit("warning", {"process": None, "text": text})

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

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

    def _warn_on_error(self, failure: str, work: Callable[[], None]) -> None:
        """Do `work`; an error becomes a warning, because if the thread died, all later samples would be missing."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - see above
            self.warn(f"{failure}: {type(error).__name__}: {error}")

    def _emit_host(self, host: HostSampler) -> None:
        sample = host.sample(self._root_pid())
        self._pids = host.pids()
        self._emit("host", {**sample, "gpu_absent": self._why_no_gpu()})

    def _why_no_gpu(self) -> str | None:
        """Return why there is no GPU; None if there is one."""
        since = self._opening_s
        if self._cards or since is None or time.monotonic() - since < SILENT_S:
            return self._absent
        return f"NVML has not answered for {time.monotonic() - since:.0f} s"

    def _check_unanswered_calls(self) -> None:
        """Find calls that do not return: warn, let a second thread ask, and pass on the last answers."""
        now = time.monotonic()
        for card in self._cards:
            card.askers = tuple(asker for asker in card.askers if not asker.ended)
            silences = [asker.unanswered_s(now) for asker in card.askers]
            silent = max(silences, default=0.0) >= SILENT_S
            if silent != card.silent:
                card.silent = silent
                self.warn(f"NVML {'does not answer' if silent else 'answers again'} for GPU {card.index}")
            if not silences or (silences[-1] >= SILENT_S and len(silences) < _MAX_ASKERS):
                self._start(card, GpuPoller(card, self._nvml))
            if not silences or silences[-1] >= self._period_s / 2:  # its thread will not pass them on in this period
                self._emit_device(card)

    # ------------------------------------------------------------------------------------------ NVML's threads

    def _keep_open(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            if not self._cards or self._nvml.uninitialized:
                self._opening_s = time.monotonic()
                try:
                    count, self._absent = self._nvml.count()
                except Exception as error:  # noqa: BLE001 - NVML is tried again
                    count, self._absent = 0, f"NVML cannot count the GPUs: {_describe_error(error)}"
                self._opening_s = None
                for index in range(len(self._cards), min(count, MAX_GPUS)):
                    card = GpuState(index)
                    asker = GpuPoller(card, self._nvml)
                    self._cards = (*self._cards, card)
                    self._start(card, asker)
            pause = RETRY_S if self._absent is not None else self._period_s

    def _start(self, card: GpuState, asker: GpuPoller) -> None:
        self._spawn(lambda: self._poll_gpu(card, asker), f"dpmon gpu {card.index}")

    def _poll_gpu(self, card: GpuState, asker: GpuPoller) -> None:
        """Ask one GPU until `stop`, or until this thread is left behind."""
        pause = 0.0
        while asker.is_current and not self._stop.wait(pause):
            began = time.monotonic()
            if card.handle is not None or began >= card.retry_at_s:
                self._poll_gpu_once(card, asker)
            if asker.is_current and not self._stop.is_set():
                self._emit_device(card)
            pause = max(0.0, began + self._period_s - time.monotonic())
        asker.ended = True

    def _poll_gpu_once(self, card: GpuState, asker: GpuPoller) -> None:
        was = card.lost
        try:
            asker.poll_due_queries()
        except Exception as error:  # noqa: BLE001 - if the thread died, all later values would be missing
            if asker.is_current and not self._stop.is_set():
                reason = _describe_error(error)
                if card.lost != reason:
                    self.warn(f"GPU {card.index}: {reason}")
                card.mark_lost(reason, time.monotonic())
            return
        if was not in ("", card.lost, NOT_ASKED.reason):
            self.warn(f"GPU {card.index} is back")

    # ------------------------------------------------------------------------------------------ devices

    def _emit_device(self, card: GpuState) -> None:
        def emit() -> None:
            self._emit("device", card.sample(self._run_context(card), time.monotonic()))

        self._warn_on_error(f"the sample of GPU {card.index} could not be written", emit)

    def _run_context(self, card: GpuState) -> RunContext:
        # An ended process holds no memory.
        uses = tuple(
            use for pid, of_process in self._uses.items() if os.path.exists(f"/proc/{pid}") for use in of_process
        )
        return RunContext(self._pids, self._same_pids, uses, self._is_visible_to_cuda(card))

    def _is_visible_to_cuda(self, card: GpuState) -> bool | None:
        """Return whether the command's environment lets CUDA see the GPU; None if unknown."""
        if self._environment is None:
            self._environment = _environment_of(self._root_pid())
        if self._environment is None or card.uuid is None:
            return None
        text, order = map(self._environment.get, ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"))
        divided = any(len(each.uuids()) > 1 for each in self._cards)
        return visible_gpus(text, order, [each.uuid for each in self._cards], divided)[card.index]


def _parse_torch_reservations(data: Mapping[str, Any]) -> tuple[TorchReservation, ...]:
    """Return the GPUs in a `memory` record without invalid entries: any program may have written it."""
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


def _describe_error(error: Exception) -> str:
    return error.reason if isinstance(error, NvmlCallError) else f"{type(error).__name__}: {error}"

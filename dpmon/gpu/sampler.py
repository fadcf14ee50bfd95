"""Device and host samples of a run, once a second, into its gpu.ring.

Two threads: one samples the host, the other asks NVML, whose calls may take seconds or never return. Nobody
ever waits for the second one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpmon.gpu.device import DeviceSample, without_values
from dpmon.gpu.host import HostSampler
from dpmon.gpu.nvml import RETRY_S, Nvml
from dpmon.records import pack_event
from dpmon.ring import Ring

__all__ = ["DeviceSampler"]

RING_BYTES = 1 << 20
SILENT_S = 3.0
"""Without an answer for this long, the GPUs' values are no longer shown as if they were of now."""
NVML_PERIOD_S = 1.0
"""NVML is asked no more often, whatever the interval: drivers answer under a lock that training needs too."""
_STOP_S = 1.0

_NO_ANSWER_YET = "NVML has not answered yet"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the NVML thread last had to say: samples, or why there is no GPU."""

    absent: str | None
    samples: tuple[DeviceSample, ...] = ()


class DeviceSampler:
    """Samples GPUs and host on its own threads, and writes what else the supervisor has to tell."""

    def __init__(
        self,
        ring_path: Path,
        start_ns: int,
        root_pid: Callable[[], int | None],
        interval_s: float = 1.0,
        *,
        nvml: Callable[[], Nvml] = Nvml,
    ) -> None:
        """Make the ring, so that `emit` works from here on; `root_pid` gives the command's id, or None.

        Raises OSError (FileExistsError if the name is taken): without a ring there is nothing to sample for.
        """
        self._ring = Ring(os.fspath(ring_path), process=-1, start_ns=start_ns, capacity=RING_BYTES)
        self._start_ns = start_ns
        self._root_pid = root_pid
        self._interval_s = interval_s
        self._make_nvml = nvml
        self._stop = threading.Event()
        self._pids: frozenset[int] = frozenset()
        self._answer = _Answer(_NO_ANSWER_YET)
        self._asked_s: float | None = None  # since when an answer is awaited
        self._silent = False
        self._host_fault = ""
        self._threads = (
            threading.Thread(target=self._watch_host, name="dpmon host", daemon=True),
            threading.Thread(target=self._watch_gpus, name="dpmon nvml", daemon=True),
        )

    def start(self) -> None:
        """Begin to sample; the first samples are written at once, not after an interval."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop sampling, within about a second even if NVML never answers; `emit` works after it too."""
        self._stop.set()
        until = time.monotonic() + _STOP_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Write one event, from any thread; `t_s` (seconds since the run's start) is added if missing."""
        if "t_s" not in data:
            data = {"t_s": (time.monotonic_ns() - self._start_ns) / 1e9, **data}
        self._ring.write(pack_event(kind, data))

    # ------------------------------------------------------------------------------------------ host thread

    def _watch_host(self) -> None:
        host = HostSampler()
        due = time.monotonic()
        while not self._stop.is_set():
            self._tell_host(host)
            self._tell_silence()
            # After a pause (a suspended machine, SIGSTOP) one sample follows, not all that were missed.
            due = max(due + self._interval_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _tell_host(self, host: HostSampler) -> None:
        try:
            sample = host.sample(self._root_pid())
            self._pids = host.pids()
        except Exception as error:  # noqa: BLE001 - a thread that dies would take every later sample with it
            text = f"the host could not be sampled: {type(error).__name__}: {error}"
            if text != self._host_fault:  # once, not once a second
                self._host_fault = text
                self._warn(text)
            return
        self.emit("host", {**asdict(sample), "gpu_absent": self._answer.absent})

    def _tell_silence(self) -> None:
        """While NVML does not answer, say so in the place of its samples, and once in words."""
        asked_s = self._asked_s
        silence = 0.0 if asked_s is None else time.monotonic() - asked_s
        if silence < SILENT_S:
            if self._silent:
                self._silent = False
                self._warn("NVML answers again")
            return
        if not self._silent:
            self._silent = True
            self._warn(f"NVML has not answered for {silence:.0f} s")
        for sample in self._answer.samples:
            self._tell_device(without_values(sample, f"NVML has not answered for {silence:.0f} s"))

    # ------------------------------------------------------------------------------------------ NVML thread

    def _watch_gpus(self) -> None:
        nvml = self._make_nvml()
        period = max(self._interval_s, NVML_PERIOD_S)
        pause = 0.0
        while not self._stop.wait(pause):
            self._asked_s = began = time.monotonic()
            try:
                absent = None if nvml.is_open else nvml.open()
                samples = tuple(nvml.sample(self._pids, began)) if absent is None else ()
            except Exception as error:  # noqa: BLE001 - a thread that dies would take every later sample with it
                absent, samples = f"NVML could not be asked: {type(error).__name__}: {error}", ()
            self._answer = _Answer(absent, samples)
            self._asked_s = None
            if self._stop.is_set():  # it may have taken long: nothing follows what is written after stop
                break
            for sample in samples:
                self._tell_device(sample)
            pause = RETRY_S if absent is not None else max(0.0, began + period - time.monotonic())
        nvml.close()  # here and nowhere else: a call in flight on another thread would crash the process

    def _tell_device(self, sample: DeviceSample) -> None:
        self.emit("device", asdict(sample))

    def _warn(self, text: str) -> None:
        self.emit("warning", {"process": None, "text": text})

"""The sampler: an NVML that is slow, silent or broken holds up neither the host samples nor stop()."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.gpu import device_sampler as sampler_module
from dpmon.gpu import gpu_state as card_module
from dpmon.gpu.device_record import OPTIONAL_FIELDS
from dpmon.gpu.device_sampler import DeviceSampler
from dpmon.gpu.nvml import Nvml
from dpmon.record.record_types import Event

INTERVAL_S = 0.02
LIMIT_S = 60.0


class FakeNvml(Nvml):
    """A fake pynvml with two GPUs. While `gate` is closed, calls do not return.

    It lacks all functions that these tests do not need.
    """

    def __init__(self, *, absent: str | None = None) -> None:
        super().__init__()
        self.absent = absent
        self.gate = threading.Event()
        self.gate.set()

    def open(self) -> str | None:
        if self.absent is None:
            self.module = SimpleNamespace(
                nvmlDeviceGetCount=lambda: 2,
                nvmlShutdown=lambda: None,
                nvmlDeviceGetHandleByIndex=lambda index: index + 1,
                nvmlDeviceGetUUID=lambda handle: f"GPU-{handle - 1}",
                nvmlDeviceGetName=lambda handle: "Fake",
                nvmlDeviceGetUtilizationRates=self._rates,
                nvmlDeviceGetComputeRunningProcesses_v3=lambda handle: [],
                nvmlDeviceGetGraphicsRunningProcesses_v3=lambda handle: [],
            )
        return self.absent

    def _rates(self, handle: int) -> SimpleNamespace:
        self.gate.wait()
        return SimpleNamespace(gpu=49 + handle)


class Watch:
    """Takes the events of a sampler, and waits until a condition holds."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._taken: list[Event] = []

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        self._taken.append(Event(kind, {"t_s": time.monotonic() - self.began, **data}))

    def until(self, holds: Callable[[list[Event]], Any], what: str) -> list[Event]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            events = list(self._taken)
            if holds(events):
                return events
            assert time.monotonic() < deadline, f"{what}: {[event.kind for event in events][-20:]}"
            threading.Event().wait(0.005)


def of_kind(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return [dict(event.data) for event in events if event.kind == kind]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[DeviceSampler, Watch]]]:
    """A function that starts a fast sampler over a fake NVML; all are stopped afterwards."""
    monkeypatch.setattr(sampler_module, "PERIOD_S", INTERVAL_S)
    monkeypatch.setattr(sampler_module, "RETRY_S", INTERVAL_S)
    monkeypatch.setattr(card_module, "RETRY_S", INTERVAL_S)
    monkeypatch.setattr(sampler_module, "pids_are_shared", lambda: True)
    made: list[tuple[DeviceSampler, FakeNvml]] = []

    def maker(nvml: FakeNvml, root_pid: Callable[[], int | None] = lambda: None) -> tuple[DeviceSampler, Watch]:
        watch = Watch()
        sampler = DeviceSampler(watch.take, root_pid, nvml)
        made.append((sampler, nvml))
        sampler.start()
        return sampler, watch

    yield maker
    for sampler, nvml in made:
        nvml.gate.set()
        sampler.stop()


def test_a_device_event_for_each_gpu_and_a_host_event_every_interval(make: Any) -> None:
    _, watch = make(FakeNvml())

    def told(events: list[Event]) -> bool:
        devices = of_kind(events, "device")
        each = [
            sum(device["index"] == index and device["util_pct"] == 50 + index for device in devices) for index in (0, 1)
        ]
        return min(each) >= 2 and len(of_kind(events, "host")) >= 4

    events = watch.until(told, "samples")
    devices = of_kind(events, "device")
    assert {device["uuid"] for device in devices if device["index"] == 1} == {"GPU-1"}
    assert set(devices[0]) == {"t_s", "index", "absent", *OPTIONAL_FIELDS}
    host = of_kind(events, "host")[-1]
    assert host["gpu_absent"] is None
    assert host["mem_total_bytes"] > host["mem_used_bytes"] > 0
    assert (host["run_cpu_pct"], host["run_mem_bytes"]) == (None, None)
    assert host["absent"]["run_mem_bytes"] == "the command has not started"
    times = [data["t_s"] for data in of_kind(events, "host")]
    assert times == sorted(times)
    assert 0 <= times[0] < LIMIT_S


def test_a_driver_that_comes_later(make: Any) -> None:
    nvml = FakeNvml(absent="no driver here")
    _, watch = make(nvml)
    watch.until(lambda e: len(of_kind(e, "host")) > 1, "host samples")
    nvml.absent = None
    watch.until(lambda e: of_kind(e, "device") and of_kind(e, "host")[-1]["gpu_absent"] is None, "devices")


@pytest.mark.parametrize(
    ("place", "name"),
    [(DeviceSampler, "_check_unanswered_calls"), (card_module.GpuState, "_run_due_queries"), (FakeNvml, "count")],
)
def test_an_error_of_dpmon_ends_no_thread(make: Any, monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
    work = getattr(place, name)
    failures = [0]

    def fail_three_times(*args: Any) -> Any:
        failures[0] += 1
        if failures[0] <= 3:
            raise ValueError("odd")
        return work(*args)

    monkeypatch.setattr(place, name, fail_three_times)
    _, watch = make(FakeNvml())
    watch.until(lambda e: failures[0] > 3 and [d for d in of_kind(e, "device") if d["util_pct"] is not None], "values")
    hosts = len(of_kind(watch._taken, "host"))
    watch.until(lambda e: len(of_kind(e, "host")) > hosts + 2, "host samples")


def test_memory_of_a_process_that_has_ended_no_longer_counts(make: Any) -> None:
    sampler, watch = make(FakeNvml())
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for process, pid in ((0, os.getpid()), (1, ended.pid)):
        devices = [{"device": "cuda:0", "uuid": "1", "reserved_bytes": 500 + process}]
        sampler.add_torch_memory({"process": process, "devices": devices}, pid)

    def last(events: Any) -> Any:
        return next((e.data for e in reversed(events) if e.kind == "device" and e.data["index"] == 1), {})

    watch.until(lambda e: last(e).get("mem_torch_bytes") == 1001, "what both hold")
    ended.communicate(b"\n")
    device = last(watch.until(lambda e: last(e).get("mem_torch_bytes") == 500, "what the other holds"))
    assert device["ordinals"] == [{"process": 0, "device": "cuda:0"}]


def test_stop_without_start() -> None:
    DeviceSampler(Watch().take, lambda: None).stop()

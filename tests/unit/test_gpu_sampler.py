"""The sampler: an NVML that is slow, silent or broken holds up neither the host samples nor stop()."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import pytest

from dpmon.gpu import sampler as sampler_module
from dpmon.gpu.device import DeviceSample
from dpmon.gpu.nvml import Nvml
from dpmon.gpu.sampler import DeviceSampler
from dpmon.records import Decoder, Event
from dpmon.ring import RingReader

INTERVAL_S = 0.02
LIMIT_S = 60.0


class FakeNvml(Nvml):
    """Two GPUs; with `gate` closed a sample does not return until it opens; `failure` is raised."""

    def __init__(self, *, absent: str | None = None) -> None:
        super().__init__()
        self.absent = absent
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked_for: list[frozenset[int]] = []
        self.closed_by: list[str] = []
        self._open = False

    def open(self) -> str | None:
        self._open = self.absent is None
        return self.absent

    @property
    def is_open(self) -> bool:
        return self._open

    def sample(self, run_pids: Set[int], now_s: float) -> list[DeviceSample]:
        self.asked_for.append(frozenset(run_pids))
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return [DeviceSample(i, f"GPU-{i}", "Fake", util_pct=50 + i) for i in range(2)]

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


class Watch:
    """Reads what a sampler writes, until something holds."""

    def __init__(self, path: Path) -> None:
        self.reader = RingReader(str(path))
        self.decoder = Decoder(-1)
        self.events: list[Event] = []

    def until(self, holds: Callable[[list[Event]], Any], what: str) -> list[Event]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            for payload in self.reader.read():
                event = self.decoder.decode(payload)
                assert isinstance(event, Event)
                self.events.append(event)
            if holds(self.events):
                return self.events
            assert time.monotonic() < deadline, f"{what}: {[event.kind for event in self.events][-20:]}"
            threading.Event().wait(0.005)


def of_kind(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return [dict(event.data) for event in events if event.kind == kind]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is silent for a tenth of a second is silent; elsewhere a machine with much to do must not look like it."""
    monkeypatch.setattr(sampler_module, "SILENT_S", 0.1)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[DeviceSampler, Watch]]]:
    """Makes a started sampler over a fake NVML, quick enough for a test, and stops it afterwards."""
    monkeypatch.setattr(sampler_module, "NVML_PERIOD_S", INTERVAL_S)
    monkeypatch.setattr(sampler_module, "RETRY_S", INTERVAL_S)
    made: list[tuple[DeviceSampler, FakeNvml]] = []

    def maker(nvml: FakeNvml, root_pid: Callable[[], int | None] = lambda: None) -> tuple[DeviceSampler, Watch]:
        path = tmp_path / f"gpu-{len(made)}.ring"
        sampler = DeviceSampler(path, time.monotonic_ns(), root_pid, INTERVAL_S, nvml=lambda: nvml)
        made.append((sampler, nvml))
        sampler.start()
        return sampler, Watch(path)

    yield maker
    for sampler, nvml in made:
        nvml.gate.set()
        sampler.stop()


def test_a_device_event_for_each_gpu_and_a_host_event_every_interval(make: Any) -> None:
    _, watch = make(FakeNvml())
    events = watch.until(lambda e: len(of_kind(e, "device")) >= 6 and len(of_kind(e, "host")) >= 4, "samples")
    devices = of_kind(events, "device")
    assert [device["index"] for device in devices[:4]] == [0, 1, 0, 1]
    assert (devices[1]["util_pct"], devices[1]["uuid"]) == (51, "GPU-1")
    assert set(devices[0]) == {"t_s", *DeviceSample.__slots__}
    host = of_kind(events, "host")[-1]
    assert host["gpu_absent"] is None
    assert host["mem_total_bytes"] > host["mem_used_bytes"] > 0
    assert (host["run_cpu_pct"], host["run_mem_bytes"]) == (None, None)
    assert host["absent"]["run_mem_bytes"] == "the command has not started"
    times = [data["t_s"] for data in of_kind(events, "host")]
    assert times == sorted(times)
    assert 0 <= times[0] < LIMIT_S


def test_why_there_is_no_gpu(make: Any) -> None:
    _, watch = make(FakeNvml(absent="no driver here"))
    events = watch.until(lambda e: of_kind(e, "host") and of_kind(e, "host")[-1]["gpu_absent"] == "no driver here", "")
    assert of_kind(events, "device") == []


def test_to_ask_rarely_is_no_silence(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "RETRY_S", LIMIT_S)
    monkeypatch.setattr(sampler_module, "SILENT_S", 0.5)
    _, watch = make(FakeNvml(absent="no driver here"))
    until_s = sampler_module.SILENT_S + 10 * INTERVAL_S
    events = watch.until(lambda e: of_kind(e, "host") and of_kind(e, "host")[-1]["t_s"] > until_s, "host samples")
    assert of_kind(events, "warning") == []


def test_a_driver_that_comes_later(make: Any) -> None:
    nvml = FakeNvml(absent="no driver here")
    _, watch = make(nvml)
    watch.until(lambda e: len(of_kind(e, "host")) > 1, "host samples")
    nvml.absent = None
    watch.until(lambda e: of_kind(e, "device") and of_kind(e, "host")[-1]["gpu_absent"] is None, "devices")


def test_an_nvml_that_never_answers_holds_up_neither_host_nor_stop(make: Any, impatient: None) -> None:
    nvml = FakeNvml()
    nvml.gate.clear()
    sampler, watch = make(nvml)
    events = watch.until(lambda e: len(of_kind(e, "host")) >= 20 and of_kind(e, "warning"), "host samples")
    assert of_kind(events, "host")[-1]["gpu_absent"] == "NVML has not answered yet"
    assert of_kind(events, "device") == []
    sampler.stop()  # comes back, though the gate is closed
    assert nvml.closed_by == []  # to shut NVML down under a call crashes
    sampler.emit("exit", {"status": 0, "signal": None})
    nvml.gate.set()
    events = watch.until(lambda e: of_kind(e, "exit") and nvml.closed_by, "the end")
    assert events[-1].kind == "exit"  # a late answer is not written after the end
    assert nvml.closed_by == ["dpmon nvml"]


def test_a_gpu_that_falls_silent_is_shown_as_unknown_and_comes_back(make: Any, impatient: None) -> None:
    nvml = FakeNvml()
    _, watch = make(nvml)
    watch.until(lambda e: of_kind(e, "device"), "devices")
    nvml.gate.clear()
    events = watch.until(lambda e: [d for d in of_kind(e, "device") if d["util_pct"] is None], "silence")
    device = next(d for d in of_kind(events, "device") if d["util_pct"] is None)
    assert (device["uuid"], device["name"]) == ("GPU-0", "Fake")
    assert device["absent"]["util_pct"].startswith("NVML has not answered for")
    told, hosts = len(of_kind(events, "warning")), len(of_kind(events, "host"))
    assert told >= 1
    watch.until(lambda e: len(of_kind(e, "host")) > hosts + 20, "host samples")
    assert len(of_kind(watch.events, "warning")) == told  # once, not once a sample
    nvml.gate.set()
    watch.until(lambda e: of_kind(e, "warning")[-1]["text"] == "NVML answers again", "the second warning")
    watch.until(lambda e: of_kind(e, "device")[-1]["util_pct"] is not None, "values")


def test_an_exception_in_nvml_is_a_reason_and_passes(make: Any) -> None:
    nvml = FakeNvml()
    nvml.failure = RuntimeError("odd")
    _, watch = make(nvml)
    watch.until(lambda e: "RuntimeError: odd" in ((of_kind(e, "host") or [{}])[-1].get("gpu_absent") or ""), "reason")
    nvml.failure = None
    watch.until(lambda e: of_kind(e, "device"), "devices")


def test_nvml_learns_the_processes_of_the_run(make: Any) -> None:
    nvml = FakeNvml()
    _, watch = make(nvml, os.getpid)
    watch.until(lambda e: nvml.asked_for and os.getpid() in nvml.asked_for[-1], "our own process id")
    host = of_kind(watch.until(lambda e: len(of_kind(e, "host")) > 2, "host"), "host")[-1]
    assert host["run_mem_bytes"] > 1 << 20
    assert host["run_cpu_pct"] >= 0


def test_events_from_many_threads_are_all_whole(make: Any) -> None:
    sampler, watch = make(FakeNvml())
    threads = [
        threading.Thread(target=lambda n=n: [sampler.emit("warning", {"text": f"{n}:{i}"}) for i in range(100)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = watch.until(lambda e: len(of_kind(e, "warning")) >= 800, "warnings")
    assert {data["text"] for data in of_kind(events, "warning")} == {f"{n}:{i}" for n in range(8) for i in range(100)}
    assert all(data["t_s"] > 0 for data in of_kind(events, "warning"))


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.ring").touch()
    with pytest.raises(FileExistsError):
        DeviceSampler(tmp_path / "gpu.ring", 0, lambda: None)


def test_stop_without_start(tmp_path: Path) -> None:
    sampler = DeviceSampler(tmp_path / "gpu.ring", 0, lambda: None)
    sampler.stop()
    sampler.emit("exit", {"status": 0, "signal": None, "t_s": 1.5})
    assert Watch(tmp_path / "gpu.ring").until(bool, "the event")[0].data["t_s"] == 1.5

"""Device times from events that are queried, never waited for, on a simulated device."""

from __future__ import annotations

import signal
import weakref
from typing import Any

import pytest
import torch
from played import Device

from dpmon.record.names import Untimed
from dpmon.tracer.devices.events import MAX_FAULTS, MAX_PENDING, DeviceSpan, DeviceTimes, TorchEvents, watch_captures


class Bench:
    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self.device = Device()
        self.faults: list[BaseException] = []
        device: Any = self.device
        self.times = DeviceTimes(device, self.faults.append, max_pending)

        self.spans: list[DeviceSpan] = []

    def begin(self, device: int = 0, after: DeviceSpan | None = None) -> DeviceSpan:
        span = self.times.begin(device, after)
        self.spans.append(span)
        return span

    def phase(self, took: float, device: int = 0) -> DeviceSpan:
        span = self.begin(device)
        self.device.now += took
        self.times.end(span)
        return span

    def collected(self) -> list[float | None]:
        """Return the spans settled since the last call, in the order of their beginnings."""
        self.times.collect()
        found = [span for span in self.spans if span.settled]
        self.spans = [span for span in self.spans if not span.settled]
        return [span.ms for span in found]


def test_a_time_is_read_when_the_device_has_come_to_its_end() -> None:
    bench = Bench()
    bench.phase(3.0)
    bench.phase(5.0)
    assert bench.collected() == []
    bench.device.reached = 3.0
    assert bench.collected() == [3.0]
    bench.device.reached = 8.0
    assert bench.collected() == [5.0]
    assert bench.collected() == []
    assert bench.times.waiting() == 0


def test_phases_that_touch_share_an_event() -> None:
    bench = Bench()
    span = None
    for took in (1.0, 2.0, 4.0, 8.0):
        span = bench.begin(0, span)
        bench.device.now += took
        bench.times.end(span)
    assert len(bench.device.recorded) == 5
    bench.device.reached = 100.0
    assert bench.collected() == [1.0, 2.0, 4.0, 8.0]
    assert bench.device.made == 5
    bench.phase(1.0)
    assert bench.device.made == 5


def test_the_last_lap_is_the_end() -> None:
    bench = Bench()
    span = bench.begin()
    for took in (1.0, 2.0, 4.0):
        bench.device.now += took
        bench.times.lap(span)
    bench.device.now += 100.0
    bench.times.end(span)
    bench.device.reached = 200.0
    assert bench.collected() == [7.0]
    assert bench.device.made <= 3
    other = bench.begin()
    bench.times.lap(other)
    bench.times.abandon(other)
    assert other.why == Untimed.RAISED
    assert bench.times.waiting() == 0


def test_events_of_the_pool_are_reused() -> None:
    bench = Bench()
    for _ in range(10_000):
        bench.phase(1.0)
        bench.device.reached = bench.device.now
        assert bench.collected() == [1.0]
    assert bench.device.made == 2


def test_a_device_that_is_far_behind_costs_no_more_events_and_is_counted() -> None:
    bench = Bench()
    spans = [bench.phase(1.0) for _ in range(1000)]
    assert bench.device.made == 2 * MAX_PENDING
    assert bench.times.waiting() == MAX_PENDING
    assert {span.why for span in spans[MAX_PENDING:]} == {Untimed.NO_EVENT}
    bench.device.reached = bench.device.now
    assert bench.collected() == [1.0] * MAX_PENDING + [None] * (1000 - MAX_PENDING)
    bench.phase(1.0)
    assert bench.times.waiting() == 1


def test_collecting_asks_a_slow_device_only_once() -> None:
    bench = Bench()
    for _ in range(100):
        bench.phase(1.0)
    bench.device.asked = 0
    assert bench.collected() == []
    assert bench.device.asked == 1


def test_events_of_an_abandoned_span_are_free_again() -> None:
    bench = Bench()
    for _ in range(1000):
        bench.times.abandon(bench.begin())
    assert bench.device.made == 1


@pytest.mark.parametrize("where", ["record", "between_ms", "done", "capturing"])
def test_after_some_faults_timing_stops(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of a device, every call to the driver raises."""
    bench = Bench()
    bench.device.reached = 1e9

    def fails(*_: Any) -> Any:
        raise RuntimeError("odd driver")

    monkeypatch.setattr(bench.device, where, fails)
    for _ in range(10):
        bench.phase(1.0)
        assert bench.collected() == [None]
    assert len(bench.faults) == MAX_FAULTS
    assert bench.times.off
    assert bench.times.waiting() == 0


def test_streams_that_passed_each_other_give_no_negative_time() -> None:
    bench = Bench()
    span = bench.begin()
    bench.device.now = -1.0
    bench.times.end(span)
    bench.device.reached = 1.0
    assert bench.collected() == [None]
    assert span.why == Untimed.CROSSED
    assert bench.times.waiting() == 0


def test_the_stream_is_looked_up_once_and_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {0: 11, 1: 11}
    looked: list[int] = []
    recorded: list[tuple[int, int]] = []

    def stream(device: int) -> tuple[int, int]:
        looked.append(device)
        return device, current[device]

    class Event:
        query = elapsed_time = None

        def record(self, stream: tuple[int, int]) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    events = TorchEvents()
    for device in (0, 1, 0):
        events.record(Event(), device)
    current[0] = 12
    events.record(Event(), 0)
    assert recorded == [(0, 11), (1, 11), (0, 11), (0, 12)]
    assert looked == [0, 1, 0]


class Graph:
    """A fake torch.cuda.CUDAGraph; its capture fails with the argument "refused"."""

    def capture_begin(self, how: str = "well") -> str:
        if how == "refused":
            raise RuntimeError("not now")
        return how

    def capture_end(self, how: str = "well") -> str:
        if how == "spoilt":
            raise RuntimeError("it was ended by somebody's question")
        return how


def test_a_capture_is_known_from_begin_to_end() -> None:
    class Kind(Graph):
        pass

    captures = watch_captures([Kind])
    one, two = Kind(), Kind()
    assert not captures
    assert (one.capture_begin(), two.capture_begin("so")) == ("well", "so")
    assert one.capture_end() == "well"
    assert captures
    with pytest.raises(RuntimeError, match="somebody's question"):
        two.capture_end("spoilt")
    assert not captures
    with pytest.raises(RuntimeError, match="not now"):
        one.capture_begin("refused")
    assert not captures
    one.capture_begin()
    assert captures
    del one
    assert not captures
    assert (Kind.capture_begin.__name__, Kind.capture_end.__name__) == ("capture_begin", "capture_end")


def test_an_exception_of_a_signal_handler_reaches_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def capture_begin(self) -> None: ...
        def capture_end(self) -> None: ...

    def handler(*_: object) -> None:
        raise TimeoutError("the script's own")

    watch_captures([Graph])
    monkeypatch.setattr(weakref, "ref", lambda *_: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="the script's own"):
            Graph().capture_begin()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_device_that_is_far_behind_has_all_or_no_phases_of_a_step_timed() -> None:
    """Otherwise the first phases of a step would use up the events, and its last phases would never have one."""
    bench = Bench(max_pending=8)
    timed: list[list[bool]] = []
    for number in range(40):
        spans = [bench.phase(1.0) for _ in range(3)]
        timed.append([span.why == Untimed.NONE for span in spans])
        bench.device.reached = bench.device.now - 30.0  # ten steps behind
        bench.times.collect()
        bench.times.end_step()
        assert len(spans) == 3, number
    assert {tuple(one) for one in timed[1:]} == {(True,) * 3, (False,) * 3}
    assert sum(all(one) for one in timed) >= 4, "events that are read make room for others"

"""Device times from events that are queried, never waited for, on a simulated device."""

from __future__ import annotations

import signal
import weakref
from typing import Any

import pytest
import torch

from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import SITE_AT
from dpmon.tracer.core.session import Session, TracerConfig
from dpmon.tracer.devices import device_timing
from dpmon.tracer.devices.cuda_events import TorchEvents, watch_captures
from dpmon.tracer.devices.device_timing import MAX_FAULTS, MAX_UNREAD_PHASES, PhaseTimer
from support.fake_devices import SimulatedProcess

NO_OPTIONS = TracerConfig("", 0, "auto", None, ())


class Bench(SimulatedProcess):
    """Phases on one device, each with a mark of its own."""

    def begin(self, shares: bool = False) -> PhaseTimer:
        mark = self.timing.begin(self.me, (0,), is_call_phase=shares)
        assert mark is not None
        return mark

    def end(self, mark: PhaseTimer, took: float = 0.0) -> None:
        self.device.now += took
        mark.end()
        mark.set_span_number(0)

    def phases(self, *took: float) -> None:
        for each in took:
            self.end(self.begin(), each)

    def collected(self) -> list[float | int]:
        """Return the times (ms) written since the last call; in place of an unknown time, the reason."""
        self.timing.write_known_times()
        times = [(took, head >> SITE_AT + 16) for head, _, took, _ in self.spans]
        self.spans.clear()
        return [why or took / 1e6 for took, why in times]


def test_phases_that_touch_share_an_event() -> None:
    bench = Bench()
    for took in (1.0, 2.0, 4.0, 8.0):
        bench.end(bench.begin(shares=True), took)
    assert len(bench.device.recorded) == 5
    bench.device.reached = 3.0
    assert bench.collected() == [1.0, 2.0]
    bench.device.reached = 100.0
    assert bench.collected() == [4.0, 8.0]
    assert bench.device.made == 5
    for _ in range(3):
        bench.phases(1.0, 1.0)
        bench.device.reached = bench.device.now
        assert bench.collected() == [1.0, 1.0]
    assert bench.device.made == 5, "the events are used again"


def test_the_last_lap_is_the_end() -> None:
    bench = Bench()
    mark = bench.begin()
    for took in (1.0, 2.0, 4.0):
        bench.device.now += took
        mark.mark_possible_end()
    bench.end(mark, 100.0)
    bench.device.reached = 200.0
    assert bench.collected() == [7.0]
    assert bench.device.made == 2


def test_a_device_that_is_far_behind_costs_no_more_events_and_is_counted() -> None:
    bench = Bench()
    bench.phases(*[1.0] * 1000)
    assert bench.device.made == 2 * MAX_UNREAD_PHASES
    assert bench.collected() == [Untimed.NO_EVENT] * (1000 - MAX_UNREAD_PHASES)
    assert bench.device.asked == 1, "a slow device is asked only once"
    bench.device.reached = bench.device.now
    assert bench.collected() == [1.0] * MAX_UNREAD_PHASES
    bench.phases(1.0)
    bench.device.reached = bench.device.now
    assert bench.collected() == [1.0]


@pytest.mark.parametrize("where", ["record", "elapsed_ms", "is_done", "is_capturing"])
def test_after_some_faults_timing_stops(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loss of a device, every call to the driver raises."""
    bench = Bench()
    bench.device.reached = 1e9

    def fails(*_: Any) -> Any:
        raise RuntimeError("odd driver")

    monkeypatch.setattr(bench.device, where, fails)
    for _ in range(10):
        bench.phases(1.0)
        assert bench.collected() == [Untimed.FAULT]
    assert len(bench.faults) == MAX_FAULTS
    assert not bench.timing._unread_phases


def test_streams_that_passed_each_other_give_no_negative_time() -> None:
    bench = Bench()
    bench.phases(-1.0)
    bench.device.reached = 1.0
    assert bench.collected() == [Untimed.CROSSED]


def test_a_device_that_is_far_behind_has_all_or_no_phases_of_a_step_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first phases of a step would use up the events, and its last phases would never have one."""
    monkeypatch.setattr(device_timing, "MAX_UNREAD_PHASES", 8)
    bench = Bench()
    timed: list[int] = []
    for _ in range(40):
        before = len(bench.device.recorded)
        bench.phases(1.0, 1.0, 1.0)
        timed.append(len(bench.device.recorded) - before)
        bench.device.reached = bench.device.now - 30.0  # ten steps behind
        bench.timing.end_step()
    assert set(timed[1:]) == {6, 0}
    assert timed.count(6) >= 4, "events that are read make room for others"


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

    monkeypatch.setattr(torch._C, "_CudaEventBase", Event, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    events = TorchEvents(Session(NO_OPTIONS))
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

    captures = watch_captures([Kind], Session(NO_OPTIONS))
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

    watch_captures([Graph], Session(NO_OPTIONS))
    monkeypatch.setattr(weakref, "ref", lambda *_: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="the script's own"):
            Graph().capture_begin()
    finally:
        signal.signal(signal.SIGUSR1, before)

"""Device times from events that are asked, never waited for: over a device that is as far as the test says."""

from __future__ import annotations

from typing import Any

import pytest

from dpmon.tracer.events import MAX_FAULTS, DeviceTimes


class Device:
    """Events get the time at which they were queued; the device has come as far as `reached`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = -1.0
        self.graph = False
        self.made = 0
        self.recorded: list[tuple[int, float]] = []
        self.asked = 0
        self.failure: Exception | None = None

    def capturing(self) -> bool:
        return self.graph

    def make(self) -> dict[str, Any]:
        self.made += 1
        return {}

    def record(self, event: dict[str, Any], device: int) -> None:
        if self.failure is not None:
            raise self.failure
        assert not self.graph, "it would become a part of the graph"
        assert event.setdefault("device", device) == device, "an event belongs to one device"
        event["at"] = self.now
        self.recorded.append((device, self.now))

    def done(self, event: dict[str, Any]) -> bool:
        self.asked += 1
        return float(event["at"]) <= self.reached

    def between_ms(self, first: dict[str, Any], last: dict[str, Any]) -> float:
        assert self.done(first)
        assert self.done(last)
        return float(last["at"] - first["at"])


class Bench:
    def __init__(self, pool_events: int = 256) -> None:
        self.device = Device()
        self.faults: list[BaseException] = []
        self.times = DeviceTimes(self.device, self.faults.append, pool_events)

    def phase(self, key: str, took: float, device: int = 0) -> None:
        span = self.times.begin(key, device)
        self.device.now += took
        self.times.end(span)

    def collected(self) -> list[tuple[Any, int, float]]:
        return [tuple(time) for time in self.times.collect()]


def test_a_time_is_read_when_the_device_has_come_to_its_end() -> None:
    bench = Bench()
    bench.phase("forward", 3.0)
    bench.phase("backward", 5.0)
    assert bench.collected() == []
    bench.device.reached = 3.0
    assert bench.collected() == [("forward", 0, 3.0)]
    bench.device.reached = 8.0
    assert bench.collected() == [("backward", 0, 5.0)]
    assert bench.collected() == []
    assert bench.times.waiting() == 0


def test_phases_that_touch_share_an_event() -> None:
    bench = Bench()
    span = bench.times.begin("scatter", 0)
    for key, took in (("replicate", 1.0), ("parallel_apply", 2.0), ("gather", 4.0)):
        bench.device.now += took
        span = bench.times.next(span, key, 0)
    bench.device.now += 8.0
    bench.times.end(span)
    assert len(bench.device.recorded) == 5
    bench.device.reached = 100.0
    assert bench.collected() == [
        ("scatter", 0, 1.0),
        ("replicate", 0, 2.0),
        ("parallel_apply", 0, 4.0),
        ("gather", 0, 8.0),
    ]


def test_every_device_has_its_own_events_and_its_own_pace() -> None:
    bench = Bench()
    span = bench.times.begin("a", 0)
    span = bench.times.next(span, "b", 1)  # on another device nothing is shared
    bench.device.now = 1.0
    bench.times.end(span)
    bench.device.reached = 0.5
    assert bench.collected() == [("a", 0, 0.0)]
    bench.device.reached = 2.0
    assert bench.collected() == [("b", 1, 1.0)]


def test_the_pool_is_used_again_and_again() -> None:
    bench = Bench()
    for _ in range(10_000):
        bench.phase("forward", 1.0)
        bench.device.reached = bench.device.now
        assert len(bench.collected()) == 1
    assert bench.device.made == 2
    assert bench.times.untimed == 0


def test_a_device_that_is_far_behind_costs_no_more_events_and_is_counted() -> None:
    bench = Bench()
    for _ in range(1000):
        bench.phase("forward", 1.0)
    assert bench.device.made == 256
    assert bench.times.waiting() == 128
    assert bench.times.untimed == 1000 - 128
    bench.device.reached = bench.device.now
    assert len(bench.collected()) == 128
    bench.phase("forward", 1.0)
    assert bench.times.waiting() == 1


def test_an_end_that_finds_no_event_gives_the_first_back() -> None:
    bench = Bench(pool_events=1)
    bench.phase("forward", 1.0)
    assert bench.times.waiting() == 0
    assert bench.times.untimed == 1
    span = bench.times.begin("forward", 0)
    assert span is not None
    assert bench.times.next(span, "backward", 0) is None
    assert bench.times.begin("forward", 0) is not None


def test_nothing_is_recorded_while_a_graph_is_captured() -> None:
    bench = Bench()
    bench.device.graph = True
    bench.phase("forward", 1.0)
    assert bench.device.recorded == []
    bench.device.graph = False
    span = bench.times.begin("forward", 0)
    bench.device.graph = True  # begun in between: this phase is not timed, its event is free again
    bench.times.end(span)
    assert len(bench.device.recorded) == 1
    assert bench.times.waiting() == 0
    bench.device.graph = False
    bench.phase("forward", 1.0)
    bench.device.reached = bench.device.now
    assert len(bench.collected()) == 1
    assert bench.device.made == 2
    assert bench.times.untimed == 0


def test_to_collect_costs_one_question_a_device_that_is_behind() -> None:
    bench = Bench()
    for _ in range(100):
        bench.phase("forward", 1.0)
    bench.device.asked = 0
    assert bench.collected() == []
    assert bench.device.asked == 1


def test_what_was_abandoned_is_free_again() -> None:
    bench = Bench()
    for _ in range(1000):
        bench.times.abandon(bench.times.begin("forward", 0))
    assert bench.device.made == 1
    bench.times.abandon(None)


@pytest.mark.parametrize("where", ["record", "between_ms", "capturing"])
def test_after_some_faults_it_leaves_off(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.device.reached = 1e9

    def fails(*_: Any) -> Any:
        raise RuntimeError("odd driver")

    monkeypatch.setattr(bench.device, where, fails)
    for _ in range(10):
        bench.phase("forward", 1.0)
        assert bench.collected() == []
    assert len(bench.faults) == MAX_FAULTS
    assert bench.times.off
    assert bench.times.waiting() == 0


def test_streams_that_passed_each_other_give_no_negative_time() -> None:
    bench = Bench()
    span = bench.times.begin("forward", 0)
    bench.device.now = -1.0
    bench.times.end(span)
    bench.device.reached = 1.0
    assert bench.collected() == []
    assert bench.times.waiting() == 0

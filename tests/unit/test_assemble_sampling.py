"""How the rate of steps timed on devices is chosen and sent to the training process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.assemble import Assembler
from dpmon.assemble.device_times import DECISION_STEPS, MAX_INTERVAL, TimingIntervalController
from dpmon.record.record_types import UNTIMED
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import Flag
from dpmon.span_ring import HeaderWord, SpanRing
from dpmon.store.span_source import SpanSource
from support.ring_writers import Lines
from support.script_simulator import Script, decode_rows

MS = 1_000_000


def decided(
    wall_ns: int, times: int, steps: int = DECISION_STEPS, sampling: TimingIntervalController | None = None
) -> int:
    """Return the chosen N (one timed step in each block of N) after these steps."""
    sampling = sampling or TimingIntervalController()
    for number in range(steps):
        timed = number % max(sampling.interval, 1) == 0
        for _ in range(times * timed):
            sampling.count_device_time()
        sampling.count_step(wall_ns, timed)
    return sampling.interval


@pytest.mark.parametrize(
    ("wall_ns", "times", "one_in"),
    [
        (100 * MS, 4, 1),
        (5 * MS, 4, 1),
        (4 * MS, 4, 2),
        (1 * MS, 5, 6),
        (1 * MS, 40, 48),
        (1_000, 40, MAX_INTERVAL),
        (0, 4, MAX_INTERVAL),
    ],
)
def test_timing_costs_at_most_one_per_cent(wall_ns: int, times: int, one_in: int) -> None:
    assert decided(wall_ns, times) == one_in
    assert decided(wall_ns, times, 20 * DECISION_STEPS) == one_in, "it stays so when only some steps are timed"


def test_no_sampling_rate_is_requested_before_costs_are_known() -> None:
    assert decided(1 * MS, 5, DECISION_STEPS - 1) == 0
    sampling = TimingIntervalController()
    for _ in range(10 * DECISION_STEPS):
        sampling.count_step(1 * MS, False)
    assert sampling.interval == 0


def test_a_small_change_of_the_rate_is_not_requested() -> None:
    sampling = TimingIntervalController()
    assert decided(1 * MS, 40, sampling=sampling) == 48
    assert decided(1_100_000, 40, 2 * DECISION_STEPS, sampling) == 48
    assert decided(5 * MS, 40, 20 * DECISION_STEPS, sampling) == 10
    assert decided(1_000 * MS, 40, 20 * DECISION_STEPS, sampling) == 1


def test_one_long_step_does_not_change_the_rate() -> None:
    sampling = TimingIntervalController()
    for number in range(3 * DECISION_STEPS):
        for _ in range(5):
            sampling.count_device_time()
        sampling.count_step(3_600_000 * MS if number == 70 else 1 * MS, True)
    assert sampling.interval == 6


def test_steps_without_devices_request_no_sampling() -> None:
    script = Script().play("d l " * 3 * DECISION_STEPS)
    assembler = Assembler()
    assembler.feed(script.spans, script.lines_between(0, len(script.lines)))
    assert assembler.timing_interval == 0


@pytest.mark.parametrize(("wall_ms", "one_in"), [(0.1, 4), (50.0, 1)])
def test_the_rate_is_requested_through_the_ring_of_the_process(tmp_path: Path, wall_ms: float, one_in: int) -> None:
    script = Script()
    net = script.model(devices=["cuda:0"])
    for _ in range(2 * DECISION_STEPS):
        script.fetch(wall_ms / 2)
        script.call(net, timed=True, ms=wall_ms / 2)
        script.times(script.spans[-1], 0, 0.5)
    script.fetch()
    path = tmp_path / "process-0.ring"
    ring = SpanRing(str(path), process=0)
    script.write_to(ring, Lines(path))
    source = SpanSource(path, None)
    try:
        assert ring.words[HeaderWord.TIMED_ONE_IN] == 0
        source.read_rows(0, False)
        assert ring.words[HeaderWord.TIMED_ONE_IN] == one_in
    finally:
        source.close()


def test_a_step_that_is_left_out_is_not_waited_for() -> None:
    script = Script()
    net = script.model(via="DataParallel", devices=["cuda:0", "cuda:1"])
    script.fetch()
    script.parallel(net)
    with script.phase("backward"):
        script.copy()
    script.spans = [span._replace(flags=span.flags | Flag.UNTIMED) for span in script.spans]
    script.fetch()
    (call,), (step,), *_ = decode_rows(Assembler().feed(script.spans, script.lines_between(0, len(script.lines))))
    assert call.absent["device_ms"] == step.untimed == UNTIMED[Untimed.SAMPLED]
    assert step.device_ms == dict.fromkeys(("data", "copy", "forward", "backward"))

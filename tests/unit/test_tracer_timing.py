"""Which phases are timed on (simulated) devices, and how their times are recorded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from dpmon.record.record_types import UNTIMED
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import DOING, FLAGS_AT, Flag, Kind, unpack_span
from dpmon.tracer.devices.device_timing import gpu_of
from dpmon.tracer.steps.span_recorder import ThreadState
from support.fake_devices import SimulatedProcess

WHOLE = {"data": 0.5, "forward": 2.0, "backward": 3.0, "optimizer": 1.0}
SAMPLED = UNTIMED[Untimed.SAMPLED]


def times(process: SimulatedProcess) -> list[int]:
    """Return the numbers of the spans whose device times have been written."""
    spans = [unpack_span(number, *words) for number, words in enumerate(process.spans)]
    return [span.inputs | span.outputs << 32 for span in spans if span.kind == Kind.DEVICE_TIME]


def phases(process: SimulatedProcess, start: int = 0) -> dict[int, int]:
    """Return the flags of the spans that are phases, by number, from span `start` on."""
    spans = enumerate(process.spans[start:], start)
    return {number: head >> FLAGS_AT & 0x3FF for number, (head, *_) in spans if head & 0xFF in DOING}


def test_every_phase_of_a_step_is_timed_from_the_first_call_on() -> None:
    process = SimulatedProcess()
    for _ in range(3):
        process.step(0)
    first, *rest = process.records().steps
    assert first.device_ms == {**WHOLE, "data": None}
    assert [step.device_ms for step in rest] == [WHOLE] * 2
    assert [step.untimed for step in rest] == [None] * 2
    assert process.faults == []


def test_a_device_time_is_written_in_a_later_step_without_waiting() -> None:
    process = SimulatedProcess()
    process.step(0)
    process.step(0)
    assert times(process) == []
    process.device.reached = 0.5 + 2.0  # the end of the forward of the first step
    process.step(0)
    assert times(process) == [1]
    process.device.reached = process.device.now
    process.phase(Kind.FETCH)
    _, *spans = phases(process)
    assert times(process) == [number for number in spans if number < len(process.spans) - 1]


def test_host_work_after_gpu_work_has_no_device_time() -> None:
    """Calls of some steps are on a GPU, those of later steps are not; then events between calls also stop."""
    process = SimulatedProcess()
    for number in range(1, 7):
        process.step(*((0,) if number < 4 else ()))
    found = [
        {name for name, ms in (step.device_ms or {}).items() if ms is not None} for step in process.records().steps[1:]
    ]
    assert found == [
        *[set(WHOLE)] * 2,
        {"data"},  # it began before it was known that the GPU is no longer used
        *[set()] * 2,
    ]


def raises() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("kind", "known"), [(Kind.BACKWARD, {"backward": 4.0}), (Kind.OPTIMIZER, {})])
def test_a_backward_pass_that_raises_has_taken_its_time_but_an_optimizer_has_none(kind: int, known: Any) -> None:
    process = SimulatedProcess()
    process.step(0)
    process.phase(Kind.FETCH, 0.5)
    with process.call(0, ms=2.0):
        pass
    with pytest.raises(ZeroDivisionError):
        process.phase(kind, 4.0, raises)
    process.phase(Kind.FETCH, 0.5)
    step = process.records().steps[1]
    assert step.device_ms == {"data": 0.5, "forward": 2.0, **known}
    assert not process.timing._unread_phases


def test_a_part_is_timed_on_its_own_device() -> None:
    process = SimulatedProcess()
    assert process.timing.begin_part(gpu_of("cpu")) is None
    mark = process.timing.begin_part(gpu_of("cuda:1/3"))
    assert mark is not None
    assert mark.end() == Flag.TIMED << FLAGS_AT
    mark.set_span_number(5)
    process.timing.at_exit()
    (word,) = process.spans
    span = unpack_span(0, *word)
    assert (span.kind, span.inputs, span.site & 0xFF, span.site >> 8 & 0xFF) == (Kind.DEVICE_TIME, 5, 1, 1)


def test_calls_of_another_thread_are_not_timed() -> None:
    process = SimulatedProcess()
    other = ThreadState(1, 0, 0)
    assert process.timing.begin_call(other, (0,)) is None
    assert process.timing.begin(other) is None
    process.step(0)
    gpus = process.timing.step_gpus
    assert process.timing.begin_call(other, (3,)) is None
    assert process.timing.step_gpus == gpus


def test_a_span_that_was_not_written_is_not_waited_for() -> None:
    process = SimulatedProcess()
    mark = process.timing.begin_call(process.me, (0,))
    assert mark is not None
    mark.end()
    mark.set_span_number(-1)
    process.timing.at_exit()
    assert process.spans == []


def test_a_device_time_that_is_missing_after_64_steps_is_late() -> None:
    process = SimulatedProcess()
    for _ in range(68):
        process.step(0)
    told = [unpack_span(0, *words) for words in process.spans if words[0] & 0xFF == Kind.DEVICE_TIME]
    late = [one.inputs for one in told if one.site >> 16 == Untimed.LATE]
    heads = [head & 0xFF for head, *_ in process.spans]
    assert [heads[number] for number in late[:7]] == [
        *(Kind.CALL, Kind.BACKWARD, Kind.OPTIMIZER),
        *(Kind.FETCH, Kind.CALL, Kind.BACKWARD, Kind.OPTIMIZER),
    ]
    steps = process.records(end=False).steps
    assert steps[0].untimed == steps[1].untimed == UNTIMED[Untimed.LATE]


def test_device_times_pending_at_the_end_have_a_reason() -> None:
    process = SimulatedProcess()
    process.step(0)
    process.step(0)
    process.timing.at_exit()
    assert {step.untimed for step in process.records().steps} == {UNTIMED[Untimed.ENDED]}


# ------------------------------------------------------------------------------------------ one step in several


def timed_steps(process: SimulatedProcess, count: int) -> list[bool]:
    """Run `count` steps; return whether each is timed, and check that all or no phases of it are."""
    found = []
    for _ in range(count):
        before = len(process.spans)
        process.step(0)
        process.device.reached = process.device.now
        of_step = [flags & (Flag.TIMED | Flag.UNTIMED) for flags in phases(process, before).values()]
        assert set(of_step) in ({Flag.TIMED}, {Flag.UNTIMED})
        found.append(of_step[0] == Flag.TIMED)
    return found


def test_one_step_in_many_is_timed_without_a_pattern() -> None:
    process = SimulatedProcess()
    process.step(0)
    assert timed_steps(process, 20) == [True] * 20
    process.one_in(8)
    timed = timed_steps(process, 40 * 8)
    places = [at for at, one in enumerate(timed) if one]
    assert 30 <= len(places) <= 50
    assert len({after - before for before, after in pairwise(places)}) > 5
    process.one_in(1)
    assert timed_steps(process, 20) == [True] * 20
    assert process.faults == []


def test_a_step_that_is_left_out_costs_no_event_and_says_why() -> None:
    process = SimulatedProcess()
    process.one_in(4)
    process.step(0)
    timed = timed_steps(process, 40)
    recorded = len(process.device.recorded)
    assert recorded == 6 + 8 * sum(timed)
    result = process.records()
    assert [step.untimed for step in result.steps[1:]] == [None if one else SAMPLED for one in timed]
    assert [step.device_ms == WHOLE for step in result.steps[1:]] == timed
    assert [call.replicas[0].device_ms for call in result.calls[1:]] == [2.0 if one else None for one in timed]
    left_out = [call for call, one in zip(result.calls[1:], timed, strict=True) if not one]
    assert {call.absent["device_ms"] for call in left_out} == {SAMPLED}


def test_a_fetch_without_a_call_is_no_step_of_a_block() -> None:
    process = SimulatedProcess()
    process.one_in(4)
    process.step(0)
    for _ in range(40):
        before = len(process.spans)
        process.phase(Kind.FETCH)
        process.step(0)
        left_out = {bool(flags & Flag.UNTIMED) for flags in phases(process, before).values()}
        assert len(left_out) == 1, "the two batches are of one step"


def test_a_step_that_is_timed_in_part_is_not_timed() -> None:
    """The supervisor may find the end of a step later than the process does."""
    process = SimulatedProcess()
    process.step(0)
    process.phase(Kind.FETCH, 0.5)
    with process.call(0, ms=2.0):
        pass
    process.one_in(1 << 40)  # the largest number
    process.timing.end_step()
    process.phase(Kind.BACKWARD, 3.0)
    process.phase(Kind.FETCH, 0.5)
    step = process.records().steps[1]
    assert step.device_ms == {"data": None, "forward": None, "backward": None}
    assert step.untimed == SAMPLED


def test_copies_parts_and_phases_that_raise_are_left_out_too() -> None:
    process = SimulatedProcess()
    process.step(0)
    process.one_in(1 << 40)
    process.phase(Kind.FETCH, 0.5)
    with pytest.raises(ZeroDivisionError):
        process.phase(Kind.FETCH, 1.0, raises)
    assert [*phases(process).values()][-1] == Flag.UNTIMED | Flag.FAILED
    marks: list[Any] = [process.timing.begin_copy(process.me, 0) for _ in range(100)]
    marks.append(process.timing.begin_part(0))
    for mark in marks:
        mark.mark_possible_end()
        assert mark.end() == Flag.UNTIMED << FLAGS_AT
        mark.set_span_number(3)
    assert len(process.device.recorded) == 6
    assert times(process) == []


def test_the_code_of_a_closure_is_not_timed_as_the_optimizer() -> None:
    process = SimulatedProcess()

    def closure() -> None:
        process.device.now += 5.0
        with process.call(0, ms=2.0):
            pass
        process.phase(Kind.BACKWARD, 3.0)

    for _ in range(3):
        process.phase(Kind.FETCH, 0.5)
        process.phase(Kind.OPTIMIZER, 1.0, closure)
    _, *steps = process.records().steps
    assert [step.device_ms for step in steps] == [WHOLE] * 2
    assert process.faults == []

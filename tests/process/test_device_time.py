"""Device times on a simulated torch.cuda: exact to the millisecond, on devices that lag."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.record.jsonl import as_json
from dpmon.record.record_types import UNTIMED, Call, Step
from dpmon.record.shared_names import Untimed
from support.tracer_harness import TracedRun, run_traced, traced_script_text

TEXT = (Path(__file__).parent / "scripts" / "plays_cuda.py").read_text() + traced_script_text("devices")
STEP = {"data": 0.0, "forward": 3.0, "backward": 5.0, "optimizer": 0.5}


def part(run: TracedRun, name: str) -> tuple[list[Step], list[Call]]:
    """Return the steps and calls of a part of the training, in its first process."""
    first, last = run.printed[name]
    steps = [step for step in run.steps(0) if first <= step.step <= last]
    return steps, [call for call in run.calls(process=0) if first <= call.step <= last]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    run = run_traced(tmp_path_factory.mktemp("plain"), TEXT, "plain")
    assert run.status == 0, run.err
    assert run.unreadable == ()
    assert run.missed == 0
    return run


def test_phases_calls_and_replicas_have_the_time_of_the_device(plain: TracedRun) -> None:
    steps, calls = part(plain, "usual")
    assert [step.device_ms for step in steps[1:]] == [STEP] * 11
    assert [step.untimed for step in steps[1:]] == [None] * 11
    assert [call.replicas[0].device_ms for call in calls] == [3.0] * 12
    assert [call.absent for call in calls] == [{}] * 12
    # The first call finds that CUDA is initialized.
    assert steps[0].device_ms == {**STEP, "data": None}
    assert "before the first call" in str(as_json(steps[0])["absent"]["device_ms"])


def test_late_device_times_do_not_change_the_order_of_the_record(plain: TracedRun) -> None:
    """Each step is recorded once, after its call, although device times are late."""
    order = [
        ("call" if isinstance(record, Call) else "step", record.step)
        for record in plain.records
        if isinstance(record, (Call, Step)) and record.process == 0
    ]
    last = plain.printed["last"][1]
    assert order == [(kind, number) for number in range(1, last + 1) for kind in ("call", "step")]
    assert [call.call for call in plain.calls(process=0)] == list(range(1, last + 1))


def test_nested_phases_are_not_counted_twice(plain: TracedRun) -> None:
    steps, _ = part(plain, "closure")
    assert [step.device_ms for step in steps] == [STEP] * 3


@pytest.mark.parametrize(
    ("name", "after"), [("captured", "after it"), ("captured by another thread", "after that one")]
)
def test_no_event_is_recorded_or_queried_while_a_graph_is_captured(plain: TracedRun, name: str, after: str) -> None:
    steps, calls = part(plain, name)
    assert {step.untimed for step in steps} == {UNTIMED[Untimed.CAPTURED]}
    assert {call.absent["device_ms"] for call in calls} == {UNTIMED[Untimed.CAPTURED]}
    assert plain.printed["untouched"] == [0, 0]
    steps, calls = part(plain, after)
    assert [step.device_ms for step in steps[1:]] == [STEP] * 2
    assert [call.replicas[0].device_ms for call in calls] == [3.0] * 3


def test_device_times_are_read_only_by_the_thread_that_steps(plain: TracedRun) -> None:
    assert plain.printed["asked by others"] == 0


def test_a_forked_child_has_events_of_its_own(plain: TracedRun) -> None:
    steps = plain.steps(1)
    assert len(steps) == 3
    assert [step.device_ms for step in steps[1:]] == [STEP] * 2
    assert [call.replicas[0].device_ms for call in plain.calls(process=1)] == [3.0] * 3


def took_what_was_played(call: Call) -> None:
    phases = {phase: found.device_ms for phase, found in call.phases.items()}
    assert phases == {"scatter": 0.0, "replicate": 0.0, "parallel_apply": 1.5, "gather": 0.0}
    assert [replica.device_ms for replica in call.replicas] == [1.5, 1.5]
    assert call.absent == {}


def test_every_device_of_a_data_parallel_call(tmp_path: Path) -> None:
    """Two virtual replicas on the CPU stand for two GPUs; one of them lags."""
    run = run_traced(tmp_path, TEXT, "dp")
    assert run.status == 0, run.err
    assert run.complaints == []
    for name in ("usual", "in step"):
        steps, calls = part(run, name)
        for call in calls:
            took_what_was_played(call)
        for step in steps[1:]:
            assert step.device_ms == {"data": 0.0, "forward": 1.5, "backward": 2.5, "optimizer": 0.5}

    steps, calls = part(run, "by hand")
    assert len(calls) == 5
    for call in calls[1:]:
        took_what_was_played(call)
    for step in steps[1:]:
        assert step.device_ms == {"data": 0.0, "forward": 1.5, "backward": 2.5, "optimizer": 0.5}

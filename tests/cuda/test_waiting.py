"""Calls of the tracer to the CUDA runtime never wait, and create a bounded number of events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dpmon.record.record_types import UNTIMED
from dpmon.record.shared_names import Untimed
from support.fake_devices import NO_CUDNN, WAITING_FUNCTIONS, WORK_FUNCTIONS, SimulatedCuda
from support.tracer_harness import TracedRun, run_traced

pytestmark = pytest.mark.simulated

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {
    "linear": ("--steps", 40),
    "tutorial": (),
    "primitives": ("--steps", 20),
    "nested": ("--steps", 20),
    "model_parallel": ("--steps", 20),
}
EVENTS = ("cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventCreateWithFlags", "cudaEventQuery")


def with_and_without(
    tmp_path: Path, gpus: SimulatedCuda, text: str, words: Sequence[object], count: int, **more: float
) -> tuple[TracedRun, dict[str, int], dict[str, int]]:
    """Return the traced run, and the number of calls of each function with and without the tracer."""
    counts = []
    for run in (False, True):
        env = gpus.environment(count, **more)
        last = run_traced(tmp_path, text, *words, env=env, run=run, mode="script" if run else None)
        assert last.status == 0, last.err
        counts.append(gpus.counts())
    assert last.complaints == []
    return last, counts[1], counts[0]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", STEPS)
def test_examples_wait_no_more_than_without_dpmon(tmp_path: Path, gpus: SimulatedCuda, name: str, count: int) -> None:
    text = (NO_CUDNN if name == "model_parallel" else "") + (EXAMPLES / f"{name}.py").read_text()
    run, ours, theirs = with_and_without(tmp_path, gpus, text, STEPS[name], count, kernel_us=5)
    copies, most_at_once = "cudaMemcpyAsync", 16
    # A loss is copied, and read a pass later; a look at an optimizer copies a few weights and the losses.
    read = len(run.events("loss")) + run.checked_values
    assert read <= ours[copies] - theirs.get(copies, 0) <= read + most_at_once
    for function in {*WAITING_FUNCTIONS, *WORK_FUNCTIONS} - {copies}:
        assert ours.get(function, 0) == theirs.get(function, 0), function
    assert sum(ours.get(function, 0) for function in WORK_FUNCTIONS) >= 8  # otherwise there is nothing to compare
    extra = {name: ours.get(name, 0) - theirs.get(name, 0) for name in (*EVENTS, "cudaEventElapsedTime")}
    # A span is a phase or a replica on one device; it has two events, or shares one.
    spans = len(run.steps()) * 4 * count + len(run.calls()) * (6 * count + 4)
    assert 0 < extra["cudaEventElapsedTime"] <= spans
    assert extra["cudaEventRecordWithFlags"] + extra["cudaEventRecord"] <= 2 * spans
    assert extra["cudaEventQuery"] <= 4 * spans + 2 * count * len(run.steps())
    assert extra["cudaEventCreateWithFlags"] <= 64 * count


BEHIND = """
import torch
model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.ones(2, 4, device="cuda")
for _ in range(400):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_device_that_is_far_behind(tmp_path: Path, gpus: SimulatedCuda) -> None:
    """It ends its first step after all are queued: the number of events is bounded."""
    run, ours, theirs = with_and_without(tmp_path, gpus, BEHIND, (), 1, kernel_us=30_000_000, queue=100_000)
    # No step is timed while 128 phases wait for their times; each has two events.
    assert 240 < ours["cudaEventCreateWithFlags"] - theirs.get("cudaEventCreateWithFlags", 0) <= 2 * (128 + 4)
    for function in WAITING_FUNCTIONS:
        assert ours.get(function, 0) == theirs.get(function, 0), function
    assert len(run.steps()) == len(run.calls()) == 400
    reasons = [step.untimed for step in run.steps()[1:]]
    assert None not in reasons
    assert set(reasons[-100:]) == {UNTIMED[Untimed.NO_EVENT]}

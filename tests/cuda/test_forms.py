"""Ways to train on GPUs: each has the same results as without the tracer, and device times of all steps and calls."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from support.fake_devices import WAITING_FUNCTIONS, WORK_FUNCTIONS, RecordedCudaTrace, SimulatedCuda
from support.tracer_harness import run_traced, run_untraced

pytestmark = pytest.mark.simulated

TEXT = (Path(__file__).parent / "scripts" / "forms.py").read_text()
FORMS = ("amp", "stages", "moved", "elsewhere", "evaluated", "accumulate", "closure", "threads", "over some")
LAST = 5
"""Number of newest calls that are compared; a moved model has been on its device for these."""


def forwards(truth: RecordedCudaTrace, device: int) -> list[float]:
    marks = truth.marks()
    begun, ended = ([host for name, host in marks if name == label] for label in ("forward <", "forward >"))
    return [truth.spent_ms(*one, (device,)) for one in zip(begun, ended, strict=True)]


@pytest.mark.parametrize("which", FORMS)
def test_each_form_gives_the_same_as_without_dpmon(tmp_path: Path, gpus: SimulatedCuda, which: str) -> None:
    without = run_untraced(tmp_path, TEXT, which, env=gpus.environment(2, kernel_us=1500))
    theirs = gpus.counts()
    run = run_traced(tmp_path, TEXT, which, env=gpus.environment(2, kernel_us=1500), mode="script")
    ours, truth = gpus.counts(), gpus.truth()
    assert run.printed == without.printed
    assert run.complaints == []
    losses = len(run.events("loss")) * (3 if which == "accumulate" else 1)  # a copy of each pass of an update
    for function in (*WAITING_FUNCTIONS, *(WORK_FUNCTIONS if which != "threads" else ())):
        more = losses + run.checked_values if function == "cudaMemcpyAsync" else 0
        assert ours.get(function, 0) == theirs.get(function, 0) + more, function
    home = 1 if which in ("moved", "elsewhere") else 0
    trained = [step for step in run.steps() if step.device_ms and "backward" in step.device_ms]
    assert len(trained) >= 11  # CUDA may be initialized in the first one
    # The training thread is known from the first backward pass on.
    assert {step.untimed for step in trained[3 if which == "threads" else 1 :]} == {None}
    calls = [call for call in run.calls() if which != "threads" or call.devices == ("cuda:0",)]
    if which == "stages":
        assert {call.devices for call in calls} == {("cuda:0", "cuda:1")}
        assert [stage.device_ms for call in calls[-LAST:] for stage in call.stages] == [1.5] * 2 * LAST
        return
    assert calls[-1].devices == (f"cuda:{home}",)
    assert {call.absent == {} for call in calls[2:]} == {True}
    found = [call.replicas[0].device_ms for call in calls][-LAST:]
    assert median([one for one in found if one is not None]) == pytest.approx(
        median(forwards(truth, home)[-LAST:]), rel=0.05, abs=0.2
    )
    if which == "threads":
        others = [call for call in run.calls() if call.devices == ("cuda:1",)]
        assert "only calls of the training thread" in others[-1].absent["device_ms"]

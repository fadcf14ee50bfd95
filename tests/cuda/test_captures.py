"""CUDA graphs: captures work the same with and without the tracer, and contain nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.record.record_types import UNTIMED
from dpmon.record.shared_names import Untimed
from support.fake_devices import WAITING_FUNCTIONS, SimulatedCuda
from support.tracer_harness import run_traced, run_untraced

pytestmark = pytest.mark.simulated

TEXT = (Path(__file__).parent / "scripts" / "captures.py").read_text()


@pytest.mark.parametrize("which", ["step", "callables", "thread"])
def test_captures_are_the_same_as_without_dpmon(tmp_path: Path, gpus: SimulatedCuda, which: str) -> None:
    without = run_untraced(tmp_path, TEXT, which, env=gpus.environment(1))
    theirs, waited = gpus.truth(), gpus.counts()
    run = run_traced(tmp_path, TEXT, which, env=gpus.environment(1), mode="script")
    ours, counts = gpus.truth(), gpus.counts()
    assert run.printed == without.printed >= 1
    assert run.complaints == []
    # The launch of a graph takes the sum of its parts, which are the same.
    assert [op.end - op.start for op in ours.of("graph")] == [op.end - op.start for op in theirs.of("graph")]
    recorded = [[op.name for op in one.of("event")].count("captured") for one in (ours, theirs)]
    assert recorded[0] == recorded[1]
    if which != "thread":  # there a number depends on the timing of threads
        assert {name: counts.get(name) for name in WAITING_FUNCTIONS} == {
            name: waited.get(name) for name in WAITING_FUNCTIONS
        }
    if which == "step":
        assert len(ours.of("graph")) == 20
    else:
        assert len(run.steps()) >= 15
    reasons = [step.untimed for step in run.steps()]
    assert reasons[-1] is None
    if which != "callables":
        assert UNTIMED[Untimed.CAPTURED] in reasons


def test_a_question_would_end_a_capture(tmp_path: Path, gpus: SimulatedCuda) -> None:
    """A query by the script itself ends a capture; otherwise the other tests would prove nothing."""
    run = run_untraced(tmp_path, TEXT, "asks", env=gpus.environment(1))
    assert run.status == 1
    assert "captur" in run.err

"""A loss on a GPU is copied behind its pass and read later; nothing waits, and nothing is allocated on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_devices import WAITING_FUNCTIONS, SimulatedCuda
from support.tracer_harness import run_traced, run_untraced

pytestmark = pytest.mark.simulated

TEXT = (Path(__file__).parent / "scripts" / "losing.py").read_text()
STEPS = 30


@pytest.mark.parametrize("words", [(), ("scaled",)])
@pytest.mark.parametrize("kernel_us", [1, 200])
def test_the_losses_are_those_on_the_gpu(
    tmp_path: Path, gpus: SimulatedCuda, words: tuple[str, ...], kernel_us: int
) -> None:
    run = run_traced(tmp_path, TEXT, *words, env=gpus.environment(1, kernel_us=kernel_us))
    assert run.status == 0, run.err
    assert run.complaints == []
    found = [(event.data["step"], event.data["loss"]) for event in run.events("loss")]
    assert len(found) > 1  # one copy is under way at a time, behind the kernels of several steps
    assert found[-1][0] == STEPS
    assert found == [(step, step - 0.5) for step, _ in found]


def test_no_function_waits_for_the_device(tmp_path: Path, gpus: SimulatedCuda) -> None:
    counts, printed = [], []
    for run in (run_traced, run_untraced):
        done = run(tmp_path, TEXT, env=gpus.environment(1, kernel_us=200))
        assert done.status == 0, done.err
        counts.append({name: gpus.counts().get(name, 0) for name in WAITING_FUNCTIONS})
        printed.append(done.out)
    assert counts[0] == counts[1]
    assert printed[0] == printed[1]


def test_checks_read_losses_on_the_gpu(tmp_path: Path, gpus: SimulatedCuda) -> None:
    text = TEXT.replace("tracer.LOSS_INTERVAL_NS = 0", "pass")  # a copy of a loss may delay a look by some updates
    run = run_traced(tmp_path, text, env=gpus.environment(1, kernel_us=1))
    assert run.status == 0, run.err
    assert run.complaints == []
    looks = [event.data for event in run.events("check")]
    assert looks
    assert [look["losses"] for look in looks] == [[look["update"] - 0.5] for look in looks]
    assert {len(look["weights"]) for look in looks} == {2}

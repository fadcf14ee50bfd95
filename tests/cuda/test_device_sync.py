"""Communication under DistributedDataParallel is timed on the device, on the stream that computes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from support.fake_devices import WAITING_FUNCTIONS, SimulatedCuda
from support.tracer_harness import run_traced, run_untraced

pytestmark = pytest.mark.simulated

TEXT = (Path(__file__).parent / "scripts" / "synced.py").read_text()
KERNEL_MS = 1.0
"""Longer than the host needs to queue a kernel, even on a busy machine; else the device would wait for the host."""


@pytest.mark.parametrize("kernels", [5, 20])
def test_the_exposed_part_is_what_the_computing_stream_waits_for(
    tmp_path: Path, gpus: SimulatedCuda, kernels: int
) -> None:
    run = run_traced(tmp_path, TEXT, kernels, env=gpus.environment(1, kernel_us=1000 * KERNEL_MS))
    count = run.printed
    assert run.complaints == []
    steps = [step for step in run.steps() if "optimizer" in step.phases]
    assert len(steps) == count
    found = [(step.device_ms or {}).get("sync") for step in steps if step.quantity("synced") == 1][3:]
    known = [ms for ms in found if ms is not None]
    assert len(known) > count // 2
    assert median(known) == pytest.approx(kernels * KERNEL_MS, rel=0.05)
    backward = [(step.device_ms or {})["backward"] for step in steps[4:]]
    assert median([ms for ms in backward if ms is not None]) == pytest.approx(19 * KERNEL_MS, rel=0.1)


def test_no_function_waits_for_the_device(tmp_path: Path, gpus: SimulatedCuda) -> None:
    counts = []
    for run in (run_traced, run_untraced):
        env = gpus.environment(1, kernel_us=1000 * KERNEL_MS)
        assert run(tmp_path, TEXT, 5, env=env).status == 0
        counts.append({name: gpus.counts().get(name, 0) for name in WAITING_FUNCTIONS})
    assert counts[0] == counts[1]

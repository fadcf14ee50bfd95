"""Steps are so short that timing all of them on a GPU would cost too much: some are timed."""

from __future__ import annotations

from statistics import median

import pytest

from dpmon.export import iter_records
from dpmon.record.record_types import UNTIMED, Step
from dpmon.record.shared_names import Untimed
from support.fake_devices import SimulatedCuda
from support.run_harness import Dpmon

pytestmark = pytest.mark.simulated

STEPS = 1500
TEXT = f"""
import torch
from torch.utils.data import DataLoader
net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for (x,) in DataLoader(torch.ones({STEPS}, 1, 6, 8, device="cuda"), batch_size=None):
    optimizer.zero_grad()
    loss = net(x).sum()
    loss.backward()
    optimizer.step()
    loss.item()
"""
"""Three kernels of 100 us in the forward; the host waits for each step."""


def test_short_steps_are_timed_now_and_then(dpmon: Dpmon, gpus: SimulatedCuda) -> None:
    env = gpus.environment(1, kernel_us=100)
    result = dpmon.run("--headless", "--mode", "script", dpmon.script(TEXT), limit=250.0, env=env)
    assert result.status == 0, result.errors
    steps = [record for record in iter_records(dpmon.last()) if isinstance(record, Step)]
    assert len(steps) == STEPS
    assert [step.untimed for step in steps[1:64]] == [None] * 63, "until it is known what a step takes"
    late = steps[STEPS // 2 :]
    assert {step.untimed for step in late} == {None, UNTIMED[Untimed.SAMPLED]}
    timed = [step for step in late if step.untimed is None]
    wall_ms = median(step.wall_ns for step in late) / 1e6
    assert len(timed) * 4 * 0.012 <= 0.02 * wall_ms * len(late), "about one per cent"
    assert len(timed) >= 0.002 * wall_ms * len(late) / (4 * 0.012)
    forwards = [(step.device_ms or {})["forward"] for step in timed]
    assert all(one is not None and one >= 0.3 for one in forwards)

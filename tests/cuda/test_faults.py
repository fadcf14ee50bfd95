"""Failing devices: a lasting fault, and too little memory for replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.record.record_types import UNTIMED
from dpmon.record.shared_names import Untimed
from support.fake_devices import SimulatedCuda
from support.tracer_harness import run_traced, run_untraced

pytestmark = pytest.mark.simulated

LOST = """
import ctypes
import json
import torch

simulation = ctypes.CDLL(None)
net = torch.nn.Linear(8, 2)
given, on_gpu = torch.ones(4, 8), torch.nn.Linear(8, 2).cuda()
said = []


def train(net, count, device):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(count):
        optimizer.zero_grad()
        net(given.to(device)).sum().backward()
        optimizer.step()


train(on_gpu, 10, "cuda")
simulation.fake_cudart_lose()
for _ in range(10):
    try:
        train(on_gpu, 1, "cuda")
    except RuntimeError as error:
        said.append(str(error).splitlines()[0])
train(net, 10, "cpu")
print(json.dumps(said))
"""


def test_a_lasting_fault_reaches_the_script_and_is_reported_once(tmp_path: Path, gpus: SimulatedCuda) -> None:
    without = run_untraced(tmp_path, LOST, env=gpus.environment(1))
    run = run_traced(tmp_path, LOST, env=gpus.environment(1), mode="script")
    assert run.printed == without.printed == ["CUDA error: an illegal memory access was encountered"] * 10
    # There is one warning of dpmon, and no device time that was not measured.
    assert len(run.complaints) == 1
    assert "illegal memory access" in run.complaints[0]
    assert run.unreadable == ()
    steps = run.steps()
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.untimed is None and bool(step.device_ms) for step in steps) >= 8
    assert UNTIMED[Untimed.FAULT] in {step.untimed for step in steps}
    assert [call.devices for call in run.calls()[-10:]] == [("cpu",)] * 10


LARGE = """
import torch
net = torch.nn.Linear(4096, 4096).cuda()
for _ in range(12):
    net(torch.ones(8, 4096, device="cuda")).sum().backward()
print(torch.cuda.memory_allocated() >> 20)
"""


def test_replicas_that_run_out_of_memory(tmp_path: Path, gpus: SimulatedCuda) -> None:
    """The module takes 64 MiB, and so do its gradients; there is no room for seven more."""
    run = run_traced(tmp_path, LARGE, env=gpus.environment(1, memory_mib=400), replicas=8)
    assert run.status == 0, run.err
    assert {call.mode for call in run.calls()[-6:]} == {"single"}
    assert not any(call.failed for call in run.calls()[-6:])
    said = "\n".join(run.complaints)
    assert (
        "dp was requested, but Linear runs on one device: the model raised OutOfMemoryError: CUDA out of memory."
        in said
    )
    assert run.events("oom")
    assert run.printed < 260  # nothing of the replicas remains

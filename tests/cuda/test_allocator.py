"""Memory figures of torch's allocator on devices of 1 GiB, an OOM in it, and the identity of GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpmon.gpu.device_record import bare_uuid
from support.fake_devices import FakeNvml, RunSamples, SimulatedCuda
from support.fake_devices import compile_fake_library as nvml
from support.run_harness import Dpmon
from support.tracer_harness import run_traced

pytestmark = pytest.mark.simulated

MIB = 1 << 20
GIB = 1 << 30
TRAINS = """
import json
import torch

model = torch.nn.Linear(1024, 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
after_backward = []


def train_step():
    optimizer.zero_grad()
    loss = model(torch.ones(64, 1024, device="cuda")).sum()
    loss.backward()
    after_backward.append(torch.cuda.memory_stats())
    optimizer.step()


for _ in range(3):
    train_step()
"""
FULL = """
kept = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
cached = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
del cached
again = torch.empty(450 << 20, dtype=torch.uint8, device="cuda")  # finds room once the cache has been emptied
before = torch.cuda.memory_stats()
try:
    torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    text = str(error)
stats = torch.cuda.memory_stats()
"""


def test_figures_of_the_allocator_are_recorded(tmp_path: Path, gpus: SimulatedCuda) -> None:
    text = TRAINS + "\nprint(json.dumps(after_backward))\n"
    run = run_traced(tmp_path, text, env=gpus.environment(2), mode="script")
    assert run.complaints == []
    newest = run.events("memory")[-1].data
    counters, one = newest["devices"]  # cuda:1 is not used
    assert (counters["device"], counters["optimizer_bytes"]) == ("cpu", 8)  # Adam's steps
    weights = 4 * (1024 * 512 + 512)
    assert (one["device"], one["model_bytes"], one["gradients_bytes"]) == ("cuda:0", weights, weights)
    assert one["optimizer_bytes"] == 2 * weights
    said = run.printed[newest["step"] - 1]
    assert one["reserved_bytes"] == said["reserved_bytes.all.current"] > 0
    assert one["peak_bytes"] == said["allocated_bytes.all.peak"]
    loss_gradient = 512  # it lives until backward() returns
    assert one["allocated_bytes"] - loss_gradient == said["allocated_bytes.all.current"]
    assert one["rest_bytes"] == one["allocated_bytes"] - 4 * weights
    assert (one["alloc_retries"], one["ooms"]) == (0, 0)


def test_an_oom_is_recorded_with_the_memory_before_it(tmp_path: Path, gpus: SimulatedCuda) -> None:
    text = TRAINS + FULL + "print(json.dumps([text, before, stats]))\n"
    run = run_traced(tmp_path, text, env=gpus.environment(1), mode="script")
    said, before, after = run.printed
    assert (after["num_ooms"], before["num_alloc_retries"]) == (1, 1)
    (oom,) = [event.data for event in run.events("oom")]
    assert (oom["device"], oom["asked_bytes"], oom["total_bytes"]) == ("cuda:0", 512 * MIB, GIB)
    assert oom["allocated_bytes"] == before["allocated_bytes.all.current"]
    assert oom["allocated_bytes"] >= 850 * MIB
    assert oom["reserved_bytes"] == after["reserved_bytes.all.current"]
    assert oom["free_bytes"] == GIB - oom["reserved_bytes"]
    (warning,) = run.complaints
    assert "cuda:0 is out of memory: 0.50 GiB were requested" in warning
    assert "Tried to allocate 512.00 MiB" in said  # as torch reported to the script


@pytest.mark.parametrize("chosen", ["3,1", "GPU-00000000-0000-0000-0000-000000000003,1"])
def test_gpus_are_identified_by_uuid_in_any_order(
    dpmon: Dpmon, tmp_path: Path, gpus: SimulatedCuda, chosen: str
) -> None:
    """CUDA numbers GPUs in the reverse order of NVML, and the command chooses two of them."""
    fake = FakeNvml(tmp_path, nvml(tmp_path))
    fake.tell("gpus 4")
    script = dpmon.script(
        "import os, time, torch\n"
        "models = [torch.nn.Linear(256, 256).to(f'cuda:{i}') for i in range(2)]\n"
        "while not os.path.exists('stop'):\n"
        "    for i, model in enumerate(models):\n"
        "        model(torch.ones(4, 256, device=f'cuda:{i}'))\n"
        "    time.sleep(0.01)\n"
        "print([str(torch.cuda.get_device_properties(i).uuid)[-4:] for i in range(2)])\n"
    )
    env = {**gpus.environment(4, reversed=1), **fake.environment(), "CUDA_VISIBLE_DEVICES": chosen}
    process = dpmon.start(*dpmon.warm(env), "--headless", "--mode", "script", script, env=env)
    ring = RunSamples.of(dpmon.last)
    first = 3 if chosen.startswith("GPU") else 0
    wanted: dict[int, Any] = {i: [] for i in range(4)}
    wanted[first], wanted[2] = ([{"process": 0, "device": f"cuda:{i}"}] for i in range(2))
    ring.until(lambda: {i: ring.device(i).get("ordinals") for i in range(4)} == wanted, "what torch says")
    held = [ring.device(i)["mem_torch_bytes"] for i in range(4)]
    assert [number for number, size in enumerate(held) if size] == sorted((first, 2))
    assert [bare_uuid(ring.device(i)["uuid"])[-4:] for i in range(4)] == [f"000{i}" for i in range(4)]
    (dpmon.cwd / "stop").touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"['000{first}', '0002']" in out.decode()
    assert fake.fatal() == []

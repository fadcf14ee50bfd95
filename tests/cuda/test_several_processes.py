"""Ranks with a GPU each: each is a process of the run with its own device times."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_devices import SimulatedCuda
from support.tracer_harness import run_traced

pytestmark = pytest.mark.simulated

TEXT = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

STEPS = 30
kept = []


def train(rank, place):
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(nn.Linear(8, 2).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for (x,) in DataLoader(torch.ones(STEPS, 1, 6, 8), batch_size=None):
        optimizer.zero_grad()
        net(x.cuda()).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    # Not destroyed: gloo's group waits, with the interpreter's lock, for a thread of its own that may want it.
    kept.append(net)


if __name__ == "__main__":
    mp.start_processes(train, (os.getcwd(),), nprocs=2, start_method="fork")  # CUDA is not up yet
    print(STEPS)
"""


def test_each_rank_has_its_own_gpu(tmp_path: Path, gpus: SimulatedCuda) -> None:
    """gloo averages the gradients over the hosts, because NCCL is simulated only within a process."""
    run = run_traced(tmp_path, TEXT, env=gpus.environment(2, kernel_us=200), mode="script")
    expected = run.printed
    assert run.complaints == []
    ranks = {event.data["process"]: event.data["rank"] for event in run.events("process")}
    assert sorted(ranks.values()) == [0, 1]
    for process, rank in ranks.items():
        calls, steps = run.calls(process=process), run.steps(process)
        assert len(calls) == len(steps) == expected
        assert {call.devices for call in calls} == {(f"cuda:{rank}",)}
        assert {call.via for call in calls} == {"DistributedDataParallel"}
        assert all(call.replicas[0].device_ms for call in calls[2:])
        for step in steps[2:]:
            assert step.untimed is None
            assert set(step.device_ms or {}) == {"data", "copy", "forward", "backward", "sync", "optimizer"}
            assert ((step.device_ms or {})["forward"] or 0.0) >= 0.2  # one kernel

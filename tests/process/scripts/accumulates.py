"""Ranks that average their gradients in every fourth step. Each counts its steps, updates and collectives."""

import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 4
own = {"steps": 0, "updates": 0, "all_reduce": 0}


def hook(_, bucket):
    own["all_reduce"] += 1
    return allreduce_hook(None, bucket)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(1280, 32), torch.randint(0, 4, (1280,)))
for x, y in DataLoader(data, 8, sampler=DistributedSampler(data)):
    own["steps"] += 1
    is_last = own["steps"] % EVERY == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        nn.functional.cross_entropy(model(x), y).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
        own["updates"] += 1
print(json.dumps(own) + "\n", end="", flush=True)  # one write, because both ranks print
dist.destroy_process_group()

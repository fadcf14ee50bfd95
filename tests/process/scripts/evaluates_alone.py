"""Ranks that update in every second step. After each epoch, rank 0 alone evaluates the module inside, and counts."""

import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
own = {"steps": 0, "updates": 0, "evaluations": 0}

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(320, 16), torch.randint(0, 4, (320,)))
for _ in range(EPOCHS):
    for x, y in DataLoader(data, 8):
        own["steps"] += 1
        is_update = own["steps"] % 2 == 0
        with contextlib.nullcontext() if is_update else model.no_sync():
            nn.functional.cross_entropy(model(x), y).backward()
        if is_update:
            optimizer.step()
            optimizer.zero_grad()
            own["updates"] += 1
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(data, 4):
                model.module(x)
                own["evaluations"] += 1
        model.train()
    dist.barrier()
print(json.dumps({"rank": dist.get_rank(), **own}) + "\n", end="", flush=True)  # one write, because both ranks print
dist.destroy_process_group()

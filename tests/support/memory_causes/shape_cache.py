"""A training that caches a table for each shape of a batch, and nearly every batch has another shape: 1 MiB a step."""

import random
import sys
import time

import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
tables: dict[tuple[int, int], torch.Tensor] = {}
random.seed(0)
for _ in range(int(sys.argv[1])):
    shape = random.randint(100, 999), random.randint(4, 32)
    if shape not in tables:
        tables[shape] = torch.randn(4096, 64)
    x = torch.randn(shape[0], 64) + tables[shape][: shape[0]]
    loss = net(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
print("tables", len(tables))

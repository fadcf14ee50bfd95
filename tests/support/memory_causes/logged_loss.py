"""A training whose log keeps a value with its grad_fn, and so the graph of every step: about 1.3 MiB a step."""

import sys
import time

import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
log: dict[str, list[torch.Tensor]] = {"loss": [], "penalty": []}
for _ in range(int(sys.argv[1])):
    x = torch.randn(1024, 64)
    outputs = net(x)
    loss = (outputs - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log["loss"].append(loss.detach())
    log["penalty"].append(net(x).abs().mean())
    time.sleep(0.02)
print("last penalty", float(log["penalty"][-1].detach()))

"""A training whose running total of the losses keeps the graph of every step: about 1.3 MiB a step."""

import sys
import time

import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
total = torch.zeros(())
for _ in range(int(sys.argv[1])):
    x = torch.randn(1024, 64)
    loss = (net(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = total + net(x).pow(2).mean()
    time.sleep(0.02)
print("mean loss", float(total) / int(sys.argv[1]))

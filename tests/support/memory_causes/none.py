"""A training that keeps numbers only: its memory does not grow."""

import sys
import time

import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
total, history = 0.0, []
for _ in range(int(sys.argv[1])):
    x = torch.randn(1024, 64)
    outputs = net(x)
    loss = (outputs - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    history.append(loss.item())
    time.sleep(0.02)
print("mean loss", total / len(history))

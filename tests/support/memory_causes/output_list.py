"""A training that collects the outputs of every step in a list: 1 MiB a step."""

import sys
import time

import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
history = []
for _ in range(int(sys.argv[1])):
    outputs = net(torch.randn(1024, 64))
    loss = outputs.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(outputs.detach())
    time.sleep(0.02)
print("outputs", len(history))

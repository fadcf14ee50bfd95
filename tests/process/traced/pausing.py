"""Trains in three loops that end their steps differently; waits for a line of input within one step of each."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, ASKS = 12, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def asks(name, step):
    if step == ASKS:
        print(name, flush=True)
        sys.stdin.readline()


def with_a_loader(name, model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, (part, goal) in enumerate(DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)):
        asks(name, step)
        optimizer.zero_grad()
        loss = (model(part) - goal).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def with_an_optimizer(name, model, x, y):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        asks(name, step)
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def with_calls_only(name, model, x, _):
    model.eval()
    with torch.no_grad():
        for step in range(STEPS):
            x = x * 0.9
            asks(name, step)
            yield model(x).sum().item()


torch.manual_seed(3)
torch.set_num_threads(1)
found, models = {}, []
for loop in (with_calls_only, with_an_optimizer, with_a_loader):
    x = torch.randn(5 * STEPS, 4)
    models.append(Net())
    found[loop.__name__] = list(loop(loop.__name__, models[-1], x, torch.sin(x).sum(1, keepdim=True)))
print(json.dumps(found))

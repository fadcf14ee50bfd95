"""Calls a model on one device, then on another; prints the number of calls on each."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def train(count):
    for _, x in zip(range(count), DataLoader(torch.ones(count, 4), batch_size=None), strict=False):
        loss = model(x.to(model.layer.weight.device)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


with torch.device("meta"):
    model = Net()
model(torch.empty(3, 4, device="meta"))
model.to_empty(device="cpu")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
train(100)
# Initialize CUDA, as when a model is first moved there; here the only other device is "meta".
torch.cuda._initialized = True
torch.cuda.memory_stats = lambda index: {}
train(3)
model.to("meta")
train(5)
print(json.dumps({"meta": 1, "cpu": 103, "meta again": 5}))

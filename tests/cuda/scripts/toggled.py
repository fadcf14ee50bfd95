"""Trains on simulated GPUs until the file stop exists; argv: form (bare, dp). Prints facts about its replicas.

By number of replicas of a call: the sizes of their batches, and whether each has its own memory for parameters and
buffers (the first one of a call shares them with the module).
"""

import ctypes
import json
import os
import sys

import torch
from torch import nn

seen, of_call = {}, []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        tensors = (*self.parameters(), *(p for part in self.layers for p in part._parameters.values()), self.count)
        if hasattr(self, "_former_parameters"):  # a replica's are plain attributes
            tensors = [t for part in self.layers if hasattr(part, "weight") for t in (part.weight, part.bias)]
            tensors.append(self.count)
        of_call.append((len(x), x.device.index, frozenset(t.data_ptr() for t in tensors if t is not None)))
        return self.layers(x)


model = Net().cuda()
own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
net = nn.DataParallel(model) if sys.argv[1] == "dp" else model
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
x = torch.ones(30, 8, device="cuda")
steps = 0
mark = ctypes.CDLL(None).fake_cudart_mark
while not os.path.exists("stop"):
    steps += 1
    if steps == 8:
        mark(b"settled")
        print("begun", flush=True)
    of_call.clear()
    optimizer.zero_grad()
    out = net(x)
    assert out.shape == (30, 2)
    assert out.device.index == 0
    out.sum().backward()
    optimizer.step()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    calls = sorted(of_call, key=lambda one: (one[1], not one[2] & own, -one[0]))
    pointers = [one[2] for one in calls]
    apart = all(not (a & b) for i, a in enumerate(pointers) for b in pointers[:i])
    key = json.dumps([[one[0] for one in calls], [one[1] for one in calls]])
    found = seen.setdefault(key, {"calls": 0, "apart": True, "shared": True, "others": True})
    found["calls"] += 1
    found["apart"] &= apart
    found["shared"] &= pointers[0] == own
    found["others"] &= not any(one & own for one in pointers[1:])
mark(b"over")
torch.cuda.synchronize()
print(json.dumps(sorted([*json.loads(key), found] for key, found in seen.items())))

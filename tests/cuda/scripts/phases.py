"""Trains on simulated GPUs, and marks begin and end of all phases in the trace of the simulation.

argv: form (bare, dp), steps, separate stream (0, 1), layers, duration of a kernel on cuda:1 in µs (0: as on the other
GPUs).
"""

import contextlib
import ctypes
import sys

import torch
from torch import nn
from torch.nn.parallel import comm
from torch.utils.data import DataLoader, TensorDataset

form, (steps, side, layers) = sys.argv[1], map(int, sys.argv[2:5])
simulation = ctypes.CDLL(None)


def mark(label):
    simulation.fake_cudart_mark(label.encode())


def marked(name):
    """Mark begin and end of a function of torch that runs below the patched functions."""
    original = getattr(comm, name)

    def called(*args, **kwargs):
        mark(f"{name} <")
        found = original(*args, **kwargs)
        mark(f"{name} >")
        return found

    setattr(comm, name, called)


for name in ("scatter", "broadcast_coalesced", "gather"):
    marked(name)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))

    def forward(self, x):
        mark(f"replica {x.device.index} <")
        x = self.layers(x)
        mark(f"replica {x.device.index} >")
        return x


if float(sys.argv[5]):
    simulation.fake_cudart_kernel_us(1, ctypes.c_double(float(sys.argv[5])))
loader = DataLoader(TensorDataset(torch.ones(8 * steps, 16)), batch_size=8)
model = Net().cuda()
if form == "dp":
    model = nn.DataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
gradient = torch.ones((), device="cuda")  # backward() without a gradient queues this before autograd begins
stream = torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.stream(stream) if side else contextlib.nullcontext():
    mark("data <")
    for (batch,) in loader:
        mark("data >")
        if form == "bare":
            mark("copy <")
            batch = batch.cuda(non_blocking=True)
            mark("copy >")
        optimizer.zero_grad()
        mark("forward <")
        out = model(batch)
        mark("forward >")
        loss = out.sum()
        mark("backward <")
        loss.backward(gradient)
        mark("backward >")
        mark("optimizer <")
        optimizer.step()
        mark("optimizer >")
        mark("data <")
torch.cuda.synchronize()

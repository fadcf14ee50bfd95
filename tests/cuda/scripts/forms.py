"""Trains on two simulated GPUs in one of several ways; argv: which. Marks every forward and backward in the trace."""

import ctypes
import json
import sys
import threading

import torch
from torch import nn

which = sys.argv[1]
simulation = ctypes.CDLL(None)
home = "cuda:1" if which == "elsewhere" else "cuda:0"


def mark(label):
    simulation.fake_cudart_mark(label.encode())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.device))


net = Net().to(home)
if which == "stages":
    net.second.to("cuda:1")
if which == "over some":
    net = nn.DataParallel(net, device_ids=[0])
optimizer = (
    torch.optim.LBFGS(net.parameters(), max_iter=2) if which == "closure" else torch.optim.SGD(net.parameters(), 0.1)
)
scaler = torch.amp.GradScaler("cuda", enabled=which == "amp")
x = torch.ones(6, 8, device=home)
STEPS = 12


def forward(x):
    mark("forward <")
    with torch.autocast("cuda", enabled=which == "amp"):
        out = net(x)
    mark("forward >")
    return out.sum()


def backward(loss):
    mark("backward <")
    scaler.scale(loss).backward()
    mark("backward >")


def train_step(x):
    if which == "closure":

        def closure():
            optimizer.zero_grad()
            loss = forward(x)
            backward(loss)
            return loss

        optimizer.step(closure)
        return
    optimizer.zero_grad()
    for _ in range(3 if which == "accumulate" else 1):
        backward(forward(x))
    scaler.step(optimizer)
    scaler.update()


def beside():
    """Run another model on another thread and GPU."""
    other = nn.Linear(8, 2).to("cuda:1")
    with torch.no_grad():
        while not over.is_set():
            other(torch.ones(4, 8, device="cuda:1"))
            over.wait(0.002)


over = threading.Event()
thread = threading.Thread(target=beside)
if which == "threads":
    thread.start()
for number in range(STEPS):
    if which == "moved" and number == STEPS // 2:
        net.to("cuda:1")
        x = x.to("cuda:1")
    train_step(x)
    if which == "evaluated" and number % 5 == 4:
        net.eval()
        with torch.no_grad():
            forward(x)
        net.train()
over.set()
if which == "threads":
    thread.join()
for device in range(2):
    torch.cuda.synchronize(device)
print(json.dumps([p.device.index for p in net.parameters()]))

"""Trains on a simulated GPU with CUDA graphs; argv: kind. Prints the number of captured graphs.

step: a whole step is captured and replayed; callables: torch.cuda.make_graphed_callables; thread: another thread
captures one graph after the other while this one trains; asks: the same, and this one queries events.
"""

import json
import sys
import threading

import torch
from torch import nn

which = sys.argv[1]
captured = 0
ROUNDS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.ones(4, 8, device="cuda")


def train_step(net=model):
    optimizer.zero_grad(set_to_none=False)
    net(x).sum().backward()
    optimizer.step()


def warm_up(work):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def capture(work):
    global captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    captured += 1
    return graph


def capture_beside():
    """Capture one graph per round; the other thread trains meanwhile."""
    global captured
    other, own = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(own):
        torch.mm(other, other)
        for _ in range(ROUNDS):
            meet.wait()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                torch.mm(other, other)
                meet.wait()
                meet.wait()
                torch.mm(other, other)
                graph.capture_end()
                captured += 1
            except RuntimeError as error:
                failed.append(str(error))
            meet.wait()


if which == "step":
    warm_up(train_step)
    for _ in range(4):
        train_step()
    graph = capture(train_step)
    for _ in range(20):
        graph.replay()
    for _ in range(4):
        train_step()
elif which == "callables":
    graphed = torch.cuda.make_graphed_callables(Net().cuda(), (x.clone().requires_grad_(),))
    optimizer = torch.optim.SGD(graphed.parameters(), 0.1)
    captured += 1
    for _ in range(20):
        train_step(graphed)
else:
    for _ in range(4):
        train_step()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    failed, meet = [], threading.Barrier(2, timeout=60)
    thread = threading.Thread(target=capture_beside, daemon=True)
    thread.start()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        meet.wait()
        meet.wait()
        for _ in range(3):
            train_step()
        if which == "asks":
            try:
                event.query()
            finally:
                meet.abort()
        meet.wait()
        meet.wait()
    thread.join()
    if failed:
        raise RuntimeError(failed[0])
    for _ in range(4):
        train_step()
torch.cuda.synchronize()
print(json.dumps(captured))

"""Compiled models, in and around DataParallel; prints shapes, how often each was compiled, and its parameters."""

import json
import sys

import torch
import torch._dynamo
from torch import nn

torch.manual_seed(0)
x = torch.randn(6, 2)


class Part(nn.Linear):
    pass


def counting():
    times = []

    def backend(graph, inputs):
        times.append(1)
        return graph.forward

    return times, backend


def inside(backend):
    return nn.DataParallel(torch.compile(nn.Linear(2, 3), backend=backend))


def outside(backend):
    return torch.compile(nn.DataParallel(nn.Linear(2, 3)), backend=backend)


def in_place(backend):
    model = nn.Linear(2, 3)
    model.compile(backend=backend)
    return nn.DataParallel(model)


def a_part(backend):
    return nn.DataParallel(nn.Sequential(nn.Linear(2, 3), torch.compile(nn.Linear(3, 3), backend=backend)))


def bare(backend):
    return torch.compile(nn.Linear(2, 3), backend=backend)


def bare_in_place(backend):
    model = nn.Linear(2, 3)
    model.compile(backend=backend)
    return model


class Half(nn.Module):
    """A bare model with a compiled part."""

    def __init__(self, backend):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = torch.compile(nn.Linear(3, 3), backend=backend)

    def forward(self, x):
        return self.second(self.first(x))


kinds = {f.__name__: f for f in (inside, outside, in_place, a_part, bare, bare_in_place, Half)}
for name in sys.argv[1:]:
    torch._dynamo.reset()
    times, backend = counting()
    model = kinds[name](backend)
    found = []
    for _ in range(4):
        if not sys.stdin.readline():
            break
        try:
            found.append(list(model(x).shape))
        except Exception as error:  # noqa: BLE001 - what it is, is what is looked at
            found.append(f"{type(error).__name__}: {error}")
        print(len(found), flush=True)
    print(json.dumps([found, len(times), len(list(model.parameters()))]), flush=True)

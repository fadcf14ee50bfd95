"""Compiled models, each trained in a forked child until the tracer has searched for roots several times.

Prints, by way of compiling, the counts of torch._dynamo and the results. With the argument "toggle", dp and then
single are requested meanwhile.
"""

import gc
import json
import os
import sys
import warnings

import torch
import torch._dynamo
from asking import ask
from counted import Later, Net
from torch import nn
from torch._dynamo.utils import counters, guard_failures

STEPS = 330
warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
torch.set_num_threads(1)
toggling = sys.argv[1:] == ["toggle"]
ways = {}
compiled_with = []


def way(function):
    ways[function.__name__] = function
    return function


def backend(graph, inputs):
    compiled_with.append(len(graph.graph.nodes))
    return graph.forward


def compiling(model):
    return torch.compile(model, backend=backend)


@way
def the_model():
    model = compiling(Net())
    return model, model


@way
def its_forward():
    model = Net()
    model.forward = compiling(model.forward)
    return model, model


@way
def in_place():
    model = Net()
    model.compile(backend=backend)
    return model, model


@way
def a_function_that_calls_it():
    model = Net()
    return model, compiling(lambda x: model(x) * 2)


@way
def a_function_that_calls_it_after_it_was_called():
    model = Net()
    model(torch.ones(2, 4))
    return model, compiling(lambda x: model(x) * 2)


@way
def a_part():
    model = Net()
    model.layers[0] = compiling(model.layers[0])
    return model, model


@way
def a_part_of_a_wrapped_model():
    model = nn.DataParallel(Net())
    model.module.layers[0] = compiling(model.module.layers[0])
    return model, model


@way
def wrapped_in_place():
    inner = Net()
    inner.compile(backend=backend)
    model = nn.DataParallel(inner)
    return model, model


@way
def wrapped():
    model = nn.DataParallel(compiling(Net()))
    return model, model


@way
def wrapped_forward():
    inner = Net()
    inner.forward = compiling(inner.forward)
    model = nn.DataParallel(inner)
    return model, model


@way
def a_wrapper():
    model = compiling(nn.DataParallel(Net()))
    return model, model


@way
def with_a_break():
    """A graph break of the script remains one."""

    class Prints(Net):
        def forward(self, x):
            x = self.layers[0](x)
            torch._dynamo.graph_break()
            return self.layers[2](self.layers[1](x))

    model = compiling(Prints())
    return model, model


@way
def a_whole_step():
    """The optimizer and the backward pass within: each breaks the graph by itself."""
    model = Net()
    y = torch.randn(12, 1)
    own = torch.optim.SGD(model.parameters(), lr=0.01)

    @compiling
    def step(x):
        own.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        own.step()
        return model(x)

    return model, step


@way
def the_optimizer():
    model = Net()
    own = torch.optim.Adam(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    @compiling
    def move():
        own.step()

    def step(x):
        move()
        return model(x)

    return model, step


def train(make):
    torch.manual_seed(0)
    model, call = make()
    later = Later()
    optimizer = torch.optim.SGD([*model.parameters(), *later.parameters()], lr=0.01)
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    losses = []
    for number in range(STEPS):
        if toggling and number in (40, 80):
            ask(1 + (number == 80))
        optimizer.zero_grad()
        loss = (call(x) - y).pow(2).mean()
        if number > 300:
            loss = loss + later(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses[:: STEPS // 10],
        "graphs": compiled_with,
        "breaks": dict(counters["graph_break"]),
        "stats": dict(counters["stats"]),
        "frames": dict(counters["frames"]),
        "recompiled": sorted(str(code.co_name) for code in guard_failures),
        "parameters": len(list(model.parameters())),
    }


said = {}
gc.freeze()
for name, make in ways.items():
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.write(write, json.dumps(train(make)).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    said[name] = [pid, status, json.loads(told) if told else "nothing"]
print(json.dumps(said))

"""Forms of data parallelism: functional, by hand, subclasses; a step for every line of its input."""

import functools
import inspect
import json
import pickle  # noqa: TID251 - scripts do
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
from torch.nn.parallel._functions import Broadcast, Scatter
from torch.nn.parallel.scatter_gather import scatter_kwargs


class Functional(nn.Linear):
    pass


class ByHand(nn.Linear):
    pass


class Lone(nn.Linear):
    pass


class Inner(nn.Linear):
    pass


class HandInner(nn.Linear):
    pass


class Inside(nn.Module):
    """Splits a part of itself in its forward."""

    def __init__(self, kind, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(6, 6), kind(6, 2), function

    def forward(self, x):
        return self.function(self.second, self.first(x), [0, 1])


def composed(module, input, device_ids):
    replicas = nn.parallel.replicate(module, device_ids)
    inputs = nn.parallel.scatter(input, device_ids)
    outputs = nn.parallel.parallel_apply(replicas[: len(inputs)], inputs)
    return nn.parallel.gather(outputs, device_ids[0])


def affine(x, params, training):
    return F.linear(x, params["w"], params["b"])


def without_modules(f, input, params, device_ids):
    spread = Broadcast.apply(device_ids, *params.values())
    count = len(params)
    sets = [dict(zip(params, spread[i * count : (i + 1) * count], strict=True)) for i in range(len(device_ids))]
    replicas = [functools.partial(f, params=own, training=True) for own in sets]
    return gather(parallel_apply(replicas, scatter([input], device_ids)), device_ids[0])


class Uneven(nn.DataParallel):
    """Its first replica has other things to do."""

    def __init__(self, first, module):
        self.first = first
        super().__init__(module)

    def forward(self, *inputs, **kwargs):
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids)
        return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)

    def scatter(self, inputs, kwargs, device_ids):
        sizes = [self.first, len(inputs[0]) - self.first]
        chunks = Scatter.apply(device_ids, sizes, self.dim, inputs[0])
        return [(chunk,) for chunk in chunks], [{} for _ in chunks]


class Graph:
    def __init__(self):
        self.x, self.note = torch.ones(3, 6), "three nodes"


class OverGraphs(nn.Linear):
    def forward(self, graphs):
        return torch.cat([super(OverGraphs, self).forward(graph.x) for graph in graphs])


class Listed(nn.DataParallel):
    """Takes a list of objects and distributes them."""

    def forward(self, graphs):
        if not self.device_ids:
            return self.module(graphs)
        inputs = self.scatter(graphs, {}, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

    def scatter(self, graphs, kwargs, device_ids):
        return [(graphs[i :: len(device_ids)],) for i in range(len(device_ids))]


class Bypassing(nn.DataParallel):
    def replicate(self, module, device_ids):
        return [module] * len(device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        return [replica(*args, **named) for replica, args, named in zip(replicas, inputs, kwargs, strict=True)]


class Cached(nn.DataParallel):
    def replicate(self, module, device_ids):
        return [module] * len(device_ids)


same = []
for function in (replicate, scatter, parallel_apply, gather, data_parallel, scatter_kwargs):
    home = sys.modules[function.__module__]
    same.append(pickle.loads(pickle.dumps(function)) is function is getattr(home, function.__name__))
    same.append(function.__name__ in inspect.getsource(function) and len(inspect.signature(function).parameters) > 1)

torch.manual_seed(0)
x = torch.randn(30, 6)
calls = {
    "functional": (Functional(6, 2), lambda model: data_parallel(model, x, [0, 1, 2])),
    "by hand": (ByHand(6, 2), lambda model: composed(model, x, [0, 1, 2])),
    "inside": (Inside(Inner, data_parallel), lambda model: model(x)),
    "by hand inside": (Inside(HandInner, composed), lambda model: model(x)),
    "uneven": (Uneven(4, nn.Linear(6, 2)), lambda model: model(x)),
    "objects": (Listed(OverGraphs(6, 2)), lambda model: model([Graph() for _ in range(5)])),
    "bypassing": (Bypassing(nn.Linear(6, 2)), lambda model: model(x)),
    "cached": (Cached(nn.Linear(6, 2)), lambda model: model(x)),
    "lone": (
        Lone(6, 2),
        lambda model: torch.cat(parallel_apply(replicate(model, [0, 1]), scatter(x, [0, 1]))),
    ),
}
params = {"w": torch.randn(2, 6, requires_grad=True), "b": torch.randn(2, requires_grad=True)}
plain = {"functional": x, "by hand": x}
optimizer = torch.optim.SGD([*params.values(), *(p for m, _ in calls.values() for p in m.parameters())], lr=0.1)
for _ in sys.stdin:
    optimizer.zero_grad()
    outputs = {name: run(model) for name, (model, run) in calls.items()}
    outputs["without modules"] = without_modules(affine, x, params, [0, 1])
    sum(output.pow(2).mean() for output in outputs.values()).backward()
    right = []
    for name in ("functional", "by hand"):
        model = calls[name][0]
        alone = F.linear(x, model.weight, model.bias)
        (grad,) = torch.autograd.grad(alone.pow(2).mean(), model.weight)
        right.append(torch.allclose(outputs[name], alone, atol=1e-5))
        right.append(torch.allclose(model.weight.grad, grad, atol=1e-5))
    alone = affine(x, params, True)
    (grad,) = torch.autograd.grad(alone.pow(2).mean(), params["w"])
    right.append(torch.allclose(params["w"].grad, grad, atol=1e-5))
    optimizer.step()
    print(json.dumps([same, right, {name: list(output.shape) for name, output in outputs.items()}]), flush=True)

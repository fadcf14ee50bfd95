"""What the loops share: models, data, and a count of what a loop does that does not depend on dpmon.

`main` runs each loop in a forked child, which the tracer records as a separate process, and prints process ids, counts
and results as JSON. Arguments: names of loops (all without); before them "toggle", then each loop requests dp after its
first step and single after its third one, as a user of the screen could.
"""

import atexit
import gc
import json
import os
import sys
import warnings

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes a second
from asking import ask
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OURS = os.environ["OURS"]
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)

loops = {}
# Python 3.12 warns of what may go wrong in a child of a process with threads; torch.jit is deprecated.
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", message=".*CUDA.*not available.*")
warnings.filterwarnings("ignore", message=".*torch.cpu.amp.autocast.*")  # of checkpoint in torch 2.4
warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated.*")
warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0.*")


def loop(function):
    loops[function.__name__] = function
    return function


class Count:
    """Counts of a loop. A step ends where the loop calls `end`, or at the next batch of a loader."""

    def __init__(self, toggles=False):
        self.toggles = toggles
        self.steps = []
        self.calls = []
        self.losses = []
        self.sums = False  # whether each call of a step takes rows of its own
        self.busy = False  # a backward pass may recompute calls that have been counted
        self.via = None  # the wrapper that makes the next call
        self.new()

    def new(self):
        self.now = {"calls": 0, "rows": [], "phases": []}

    def did(self, *phases):
        self.now["phases"] += [phase for phase in phases if phase not in self.now["phases"]]

    def hook(self, module, args, kwargs):
        if self.busy:
            return
        training = getattr(module, "_orig_mod", module).training  # torch 2.4 leaves the flag of a compiled model
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        self.calls.append([type(module).__name__, self.via, training, torch.is_grad_enabled()])
        self.via = None
        self.now["calls"] += 1
        self.now["rows"].append([len(first), torch.is_grad_enabled()])
        self.did("forward")

    def watch(self, *modules):
        """Count the calls of modules by a hook, also those by a wrapper."""
        for module in modules:
            if isinstance(module, WRAPPERS):
                name = type(module).__name__
                module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "via", name))
            else:
                module.register_forward_pre_hook(self.hook, with_kwargs=True)
        return modules[0] if len(modules) == 1 else modules

    def call(self, module, *args):
        """Call a module that takes no hook."""
        wrapped = isinstance(module, WRAPPERS)
        self.via = type(module).__name__ if wrapped else None
        self.hook(module.module if wrapped else module, args, {})
        return module(*args)

    def back(self, loss):
        self.losses.append(loss.item())
        self.busy = True
        loss.backward()
        self.busy = False
        self.did("backward")

    def gradients(self, *args, **options):
        found = torch.autograd.grad(*args, **options)
        self.did("backward")
        return found

    def step(self, optimizer, closure=None, *, ends=True):
        optimizer.step(closure) if closure else optimizer.step()
        self.did("optimizer")
        if ends:
            self.end()

    def end(self):
        """End the step, if it has a call."""
        if not self.now["calls"]:
            return
        rows = [count for count, learns in self.now["rows"] if learns] or [count for count, _ in self.now["rows"]]
        self.steps.append([sum(rows) if self.sums else max(rows), sorted(self.now["phases"]), self.now["calls"]])
        self.new()
        if self.toggles and len(self.steps) in (1, 3):
            ask(1 if len(self.steps) == 1 else 2)

    def batches(self, loader, end=True):
        """Yield the batches of a loader; each begins a step. `end`: the end of the loader ends the last step."""
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                if end:
                    self.end()
                return
            self.end()
            self.did("data")
            yield batch


class Net(nn.Module):
    def __init__(self, inputs=4, outputs=1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))

    def forward(self, x):
        return self.layers(x)


class Other(Net):
    pass


class Later(nn.Module):
    """A class unrelated to Net."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x, state):
        return self.cell(x, state)


class Loss(nn.Module):
    """A module without parameters, as every loss of torch is; its calls are none of a model."""

    def forward(self, out, target):
        return (out - target).pow(2).mean()


mse = Loss()


def sgd(*models):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.001)


def loader(rows=50, batch=20, **options):
    return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), batch_size=batch, **options)


def data(rows=12):
    return torch.randn(rows, 4), torch.randn(rows, 1)


def made(count):
    """Return a watched model and its optimizer."""
    model = count.watch(Net())
    return model, sgd(model)


def descend(count, optimizer, loss, *, ends=True):
    """Run a backward pass and a step of the optimizer; without a loader it ends the step."""
    optimizer.zero_grad()
    count.back(loss)
    count.step(optimizer, ends=ends)


def learn(count, model, optimizer, x, y, *, ends=True):
    """Run a training step; without a loader it ends with the optimizer."""
    descend(count, optimizer, mse(model(x), y), ends=ends)


def learns(count, model, optimizer, times):
    """Run training steps without a loader."""
    for _ in range(times):
        learn(count, model, optimizer, *data())


def epoch(count, model, optimizer, **sizes):
    """Run a training step for each batch of a loader."""
    for x, y in count.batches(loader(**sizes)):
        learn(count, model, optimizer, x, y, ends=False)


def look(count, model, x, *, ends=True):
    """Make a call of an evaluation; without a loader it is a separate step."""
    was = model.training
    model.eval()
    with torch.no_grad():
        count.losses.append(model(x).sum().item())
    model.train(was)
    if ends:
        count.end()


def looks_at(count, model, batches):
    """Evaluate with a loader."""
    for x, _ in count.batches(batches):
        look(count, model, x, ends=False)


def end():
    """End as Python does, but without cleaning up torch, which takes a second."""
    atexit._run_exitfuncs()
    os._exit(0)


def main():
    names = sys.argv[1:]
    toggles = names[:1] == ["toggle"]
    said = {}
    gc.freeze()
    for name in names[toggles:] or loops:
        read, write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            torch.manual_seed(0)
            os.close(read)
            count = Count(toggles)
            told = loops[name](count)
            count.end()
            os.write(write, json.dumps([count.steps, count.calls, count.losses, told]).encode())
            end()
        os.close(write)
        with open(read, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        said[name] = [pid, status, *json.loads(text or "[[], [], [], null]")]
    print(json.dumps(said))

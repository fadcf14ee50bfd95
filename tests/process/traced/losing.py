"""Trains in the way that its argument names; prints each loss with its line as the script itself sees it.

Every backward pass is read, not one a second. Prints also a hash of the final state as it would be saved, the state of
the random numbers, and the operators that a mode of the script has seen.
"""

import hashlib
import io
import json
import sys
from itertools import count

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

tracer = sys.modules.get("dpmon.tracer.steps.losses")
if tracer is not None:
    tracer.LOSS_INTERVAL_NS = 0
STEPS = 6
seen = []
mine = []
torch.manual_seed(3)
x, y = torch.randn(8, 4), torch.randn(8, 1)
model, other = nn.Linear(4, 1), nn.Linear(1, 1)
parameters = [*model.parameters(), *other.parameters()]
optimizer = None if "without_an_optimizer" in sys.argv else torch.optim.SGD(parameters, lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
ways = {}
turns = count()


def way(function):
    ways[function.__name__] = function
    return function


def note(loss):
    """Note the value of a loss, and the line after the one that calls this."""
    mine.append([sys._getframe(1).f_lineno + 1, loss.item()])


def error():
    return (model(x) - y).pow(2).mean()


@way
def plain():
    loss = error()
    note(loss)
    loss.backward()


@way
def accumulated():
    total = 0.0
    for _ in range(3):
        loss = error() / 3
        total += loss.item()
        line = sys._getframe().f_lineno + 1
        loss.backward()
    mine.append([line, total])


@way
def of_skipped_steps():
    loss = error() * (float("inf") if len(mine) < 2 else 1.0)
    note(loss)
    scaler.scale(loss).backward()
    end_scaled()


@way
def of_closures():
    """Each step of the optimizer runs two passes; the first one is the loss that `step` returns."""
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = error()
        losses.append([sys._getframe().f_lineno + 1, loss.item()])
        loss.backward()
        return loss

    optimizer.step(lambda: closure() * 0 + closure())
    mine.append(losses[0])


library = {}
exec(compile("def train(loss): loss.backward()", "/usr/lib/site-packages/trainer/loop.py", "exec"), library)


@way
def in_a_library():
    loss = error()
    note(loss)
    library["train"](loss)


@way
def without_an_optimizer():
    loss = error()
    note(loss)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad = None


@way
def of_a_gan():
    real, fake = other(y).mean(), -other(model(x).detach()).mean()
    note(real)
    real.backward()
    note(fake)
    fake.backward()
    both = error() + other(model(x)).mean()
    note(both)
    both.backward()


def end_scaled():
    """End a scaled step."""
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@way
def scaled():
    loss = error()
    note(loss)
    scaler.scale(loss).backward()
    end_scaled()


@way
def scaled_and_freed():
    mine.append([sys._getframe().f_lineno + 1, error().item()])
    scaler.scale(error()).backward()
    end_scaled()


class Own(torch.amp.GradScaler):
    """Does not use the `scale` of its base, like that of FSDP."""

    def scale(self, outputs):
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


@way
def scaled_by_a_subclass():
    global scaler
    if type(scaler) is not Own:
        scaler = Own("cpu", init_scale=1024.0)
    loss = error()
    note(loss)
    scaler.scale(loss).backward()
    end_scaled()


def of_type(dtype):
    def run():
        loss = error().to(dtype)
        note(loss)
        loss.backward()

    return run


for name in ("float64", "float16", "bfloat16"):
    ways[name] = of_type(getattr(torch, name))


@way
def of_one_element():
    loss = error().reshape(1, 1)
    note(loss)
    torch.autograd.backward(loss)


@way
def a_subclass():
    class Own(torch.Tensor):
        pass

    loss = error().as_subclass(Own)
    note(loss.as_subclass(torch.Tensor))
    loss.backward()


@way
def not_finite():
    loss = error() * (float("nan") if len(mine) == 3 else 1.0)
    note(loss)
    loss.backward()
    if len(mine) == 4:
        optimizer.zero_grad()


@way
def a_vector():
    rows = 8 - next(turns)
    (model(x[:rows]) - y[:rows]).pow(2).backward(torch.ones(rows, 1))


@way
def at_an_edge():
    torch.autograd.backward(())
    torch.autograd.backward(get_gradient_edge(error()), torch.ones(()))


@way
def without_memory():
    loss = error()
    loss.untyped_storage().resize_(0)
    loss.backward(torch.ones(()))


@way
def negated():
    torch.complex(error(), error()).conj().imag.backward()


@way
def several():
    torch.autograd.backward([error(), other(y).mean()])


@way
def gradients_only():
    (gradient,) = torch.autograd.grad(error(), [model.weight])
    model.weight.grad = gradient


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function))
        return function(*args, **(kwargs or {}))


@way
def under_modes():
    with Functions(), Operators():
        loss = error()
        loss.backward()


def main():
    for _ in range(STEPS):
        if optimizer is None:
            ways[sys.argv[1]]()
            continue
        optimizer.zero_grad()
        ways[sys.argv[1]]()
        if sys.argv[1] != "of_skipped_steps":
            optimizer.step()
    saved = io.BytesIO()
    parts = [part for part in (model, other, optimizer, scaler) if part is not None]
    torch.save([part.state_dict() for part in parts], saved)
    state = hashlib.sha256(saved.getvalue()).hexdigest(), hashlib.sha256(torch.get_rng_state().numpy()).hexdigest()
    print(json.dumps({"losses": mine, "state": state, "seen": seen}))


main()

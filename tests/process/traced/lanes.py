"""Repeated calls over virtual replicas, with changes between them; prints their results.

The models are DataParallels if the first argument is "wrapped", else bare.
"""

import json
import os
import sys
import traceback

import torch
from torch import nn

torch.manual_seed(5)
WRAPPED = sys.argv[1] == "wrapped"
OURS = os.environ["OURS"]
told = {}


class Net(nn.Module):
    def __init__(self, name="Net"):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.refuse = None

    def forward(self, x, scale=1.0):
        if self.refuse is not None:
            raise self.refuse
        return self.layer(x) * scale


def train(model, count=6, rows=8, **more):
    """Train for `count` steps on one batch; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = torch.linspace(0, 1, rows * 3).reshape(rows, 3)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(batch, **more).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return losses


def made(name):
    kind = type(name, (Net,), {})
    return nn.DataParallel(kind()) if WRAPPED else kind()


def inner(model):
    return model.module if WRAPPED else model


usual = made("Usual")
told["usual"] = train(usual)
told["other rows"] = train(usual, 3, 5)
told["one row"] = train(usual, 3, 1)
told["keyword"] = train(usual, 3, 8, scale=2.0)
usual.eval()
with torch.no_grad():
    told["looked at"] = round(usual(torch.ones(4, 3)).sum().item(), 4)
usual.train()

hooked = made("Hooked")
train(hooked, 3)
seen = []
handle = inner(hooked).register_forward_hook(lambda module, args, result: seen.append(list(args[0].shape)))
train(hooked, 3)
handle.remove()
train(hooked, 3)
told["hooks of the module's own"] = [len(inner(hooked)._forward_hooks), len(inner(hooked)._forward_pre_hooks)]
told["seen by them"] = sum(rows for rows, _ in seen)


class Again(Net):
    def forward(self, x, within=False):
        if within:  # DataParallel would change this result
            return {"name": "within", "out": super().forward(x)}
        return self(torch.cat([x, x]), within=True)["out"][: len(x)]


again = nn.DataParallel(Again()) if WRAPPED else Again()
told["calls itself"] = train(again, 4)
handle = inner(again).register_forward_hook(lambda module, args, result: None)
told["calls itself and has a hook"] = train(again, 4)
handle.remove()

failing = made("Failing")
train(failing, 4)
inner(failing).refuse = ValueError("not today")
try:
    train(failing, 1)
except ValueError as error:
    told["raised"] = [type(error).__name__, type(error.__context__).__name__]
    told["lines of ours"] = sum(OURS in line for line in traceback.format_exc().splitlines())
inner(failing).refuse = None
told["after it"] = train(failing, 3)

stopped = made("Stopped")
train(stopped, 4)
if WRAPPED:
    # In the training thread, and not an Exception: torch passes only an Exception on to the script.
    original = nn.DataParallel.gather

    def interrupted(self, outputs, output_device):
        raise KeyboardInterrupt

    stopped.gather = interrupted.__get__(stopped)
    try:
        train(stopped, 1)
    except KeyboardInterrupt as error:
        told["interrupted"] = [
            frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OURS)
        ]
    del stopped.gather
train(stopped, 3)

if WRAPPED:
    patched = made("Patched")
    train(patched, 3)
    asked = []

    def scatter(self, inputs, kwargs, device_ids):
        asked.append(len(device_ids))
        return original_scatter(self, inputs, kwargs, device_ids)

    original_scatter = nn.DataParallel.scatter
    nn.DataParallel.scatter = scatter
    train(patched, 3)
    nn.DataParallel.scatter = original_scatter
    train(patched, 2)
    told["asked"] = asked
else:
    scalars = made("Changing")
    train(scalars, 3)
    inner(scalars).layer = nn.Sequential(nn.Linear(3, 2), nn.Flatten(0))
    told["another meaning"] = train(scalars, 3)

print(json.dumps(told))

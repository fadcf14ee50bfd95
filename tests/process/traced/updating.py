"""Loops that accumulate gradients or repeat batches. Each counts its updates where it calls its real optimizer."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, BATCH = 68, 8
EPOCHS = 3
torch.set_num_threads(1)
updates = []


class Skipping:
    """Wraps an optimizer, and steps only with the last batch of an accumulation, as trainers of libraries do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.is_last = False

    def step(self):
        if self.is_last:
            self.optimizer.step()
            updates[-1] += 1


def made(width=16):
    net = nn.Linear(width, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.001)


def batches():
    """Yield the batches of all epochs, each with whether it is the last one of four, or of its epoch."""
    loader = DataLoader(TensorDataset(torch.randn(ROWS, 16), torch.randn(ROWS, 1)), BATCH)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader, 1):
            updates.append(0)
            yield x, y, number % 4 == 0 or number == len(loader)


def accumulating():
    net, optimizer = made()
    wrapper = Skipping(optimizer)
    for x, y, wrapper.is_last in batches():
        (net(x) - y).square().mean().backward()
        wrapper.step()


def scaled():
    """A GradScaler skips every step whose gradients are not finite."""
    net, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for x, y, has_overflow in batches():
        loss = (net(x) - y).square().mean() * (torch.inf if has_overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        updates[-1] += not has_overflow


def repeating():
    """Two optimizers of a policy and its critic each step four times per batch."""
    (policy, first), (critic, second) = made(), made()
    for x, y, _ in batches():
        for _ in range(4):
            (policy(x) - y).square().mean().backward()
            first.step()
            (critic(x) - y).square().mean().backward()
            second.step()
            updates[-1] += 1


def searching():
    """The optimizer calls a closure several times in each of its steps."""
    net, _ = made()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for x, y, _ in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        updates[-1] += 1


torch.manual_seed(0)
{"accumulating": accumulating, "scaled": scaled, "repeating": repeating, "searching": searching}[sys.argv[1]]()
print(json.dumps(updates))

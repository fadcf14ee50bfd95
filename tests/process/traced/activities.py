"""Stops in each phase of a step until it receives a line of input, and prints where it is."""

import sys

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, Dataset


def stop(where):
    print(where, flush=True)
    sys.stdin.readline()


class Data(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        stop("data")
        return torch.ones(4)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stop("backward")
        return grad


class Model(nn.Linear):
    def forward(self, x):
        stop("forward")
        return Slow.apply(super().forward(x))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        stop("optimizer")
        return super().step(closure)


for wrap in (lambda model: model, nn.DataParallel):
    model = wrap(Model(4, 1))
    optimizer = Optimizer(model.parameters(), lr=0.1)
    model(torch.ones(2, 4))
    stop("other")
    for x in DataLoader(Data(), batch_size=1):
        stop("other")
        loss = model(x).sum()
        stop("other")
        loss.backward()
        stop("other")
        optimizer.step()
        stop("other")

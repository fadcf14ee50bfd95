"""Exceptions in all places that are traced; prints the tracebacks, and ends with an uncaught one."""

import traceback

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.dim() == 3:
            return helper(self.layer(x))
        return self.layer(x)


def helper(y):
    raise RuntimeError("something\nin two lines") from KeyError("the cause")


class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {}[index]


class Out(torch.optim.SGD):
    def step(self, closure=None):
        raise OSError("no step")


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


def interrupt(module, args):
    raise KeyboardInterrupt


bare, wrapped = Model(), nn.DataParallel(Model())
x, deep = torch.ones(2, 4), torch.ones(2, 4, 4)
interrupted = Model()
cases = {
    "bare": lambda: bare(deep),
    "bare again": lambda: bare(deep),
    "wrapped": lambda: wrapped(deep),
    "shape": lambda: bare(torch.ones(2, 5)),
    "arguments": lambda: bare(1, 2, 3),
    "no arguments": lambda: bare(),
    "loader": lambda: list(DataLoader(Data())),
    "backward": lambda: Backward.apply(bare(x)).sum().backward(),
    "backward of nothing": lambda: torch.ones(3).sum().backward(),
    "grad": lambda: torch.autograd.grad(bare(x).sum(), torch.ones(2, requires_grad=True)),
    "optimizer": lambda: Out(bare.parameters(), lr=0.1).step(),
    "construct": lambda: nn.DataParallel(),
    "construct of nothing": lambda: nn.DataParallel(bare, 1, 2, 3, 4),
    "interrupt": lambda: interrupted(x),
    "within": lambda: nn.Sequential(Model(), nn.DataParallel(nn.Sequential(Model())))(deep),
}
bare(x), wrapped(x), interrupted(x)
interrupted.register_forward_pre_hook(interrupt)
for name, case in cases.items():
    try:
        case()
    except BaseException:  # noqa: BLE001 - what it is, is what is looked at
        print("=====", name)
        print(traceback.format_exc(), flush=True)
wrapped(deep)

"""Uses names of a megabyte wherever names of the script get into records."""

import sys

import torch
from torch import nn

LONG = "N" * 1_000_000
WIDE = "\U0001f600" * 200
sys.argv[1:] = [WIDE] * 40 + [7]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        for number in range(70):
            self.add_module(f"{WIDE}{number}", nn.Linear(1, 1, device="meta" if number % 2 else "cpu"))

    def forward(self, x, **named):
        for name, part in self.named_children():
            if name != "one":
                part(torch.zeros(1, 1, device=part.weight.device))
        return {f"{WIDE}{number}": self.one(x) for number in range(80)}


Net.__name__ = Net.__qualname__ = LONG


class Plain(nn.Linear):
    pass


Plain.__name__ = LONG
Spread = type(LONG, (nn.DataParallel,), {})
model = Net()
for _ in range(3):
    model(torch.randn(2, 4), **{LONG + str(number): torch.ones(1) for number in range(70)})
plain = Plain(4, 1)
for shape in ((6, 4), (1,) * 3000 + (6, 4)):
    plain(torch.randn(6, 4).view(shape))
wrapped = Spread(Plain(4, 1))
for _ in range(3):
    wrapped(torch.randn(6, 4)).sum().backward()


class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 1)

    def forward(self, x):
        return self.one(x)


Direct.__name__ = LONG
Direct().forward(torch.randn(2, 4))
raise type(LONG, (Exception,), {})(LONG)

"""Models that cannot be split, each called once for every line of standard input; prints what they returned."""

import contextlib
import copy
import json
import sys

import torch
import torch.distributed
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


class ReturnsScalar(Plain):
    def forward(self, x):
        return self.layer(x).pow(2).mean()


class ReturnsPairs(Plain):
    """Returns a row for every two rows of the batch."""

    def forward(self, x):
        return self.layer(x).view(-1, 8)


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.DataParallel(Plain())
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.inner(x))


class HoldsAsOnlyPart(Holds):
    """Calls its wrapped part only now and then."""

    def forward(self, x, wrapped=False):
        return self.head(self.inner(x) if wrapped else x)


class Spread(Plain):
    def __init__(self):
        super().__init__()
        self.elsewhere = nn.Parameter(torch.empty(2, device="meta"))


class Raises(Plain):
    """Raises in a replica."""

    def forward(self, x):
        if "_is_replica" in self.__dict__:
            raise RuntimeError("no replica, please")
        return self.layer(x)


class Picky(Plain):
    """Refuses four of five batches, replica or not."""

    def forward(self, x):
        if x.max() > 10:
            raise LookupError("a bad batch")
        return self.layer(x)


torch.manual_seed(2)
x = torch.randn(8, 4)
models = [Plain(), ReturnsScalar(), ReturnsPairs(), Holds(), HoldsAsOnlyPart(), Spread(), Raises()]
models.append(torch.jit.script(Plain()))
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
models.append(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
models.append(copy.deepcopy(nn.DataParallel(nn.Sequential(Plain()))))
picky = Picky()
for _ in sys.stdin:
    for bad in (100, 100, 100, 100, 0):
        with contextlib.suppress(LookupError):
            picky(x + bad)
    print(json.dumps([list(model(x).shape) for model in models]), flush=True)
torch.distributed.destroy_process_group()

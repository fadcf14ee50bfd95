"""Warnings of torch and of the script, each with the line that it blames."""

import contextlib
import os
import sys
import warnings

if sys.argv[1] == "always":
    warnings.simplefilter("always")
else:  # the usual filters, which show a warning once for each line that it blames
    warnings.simplefilter("default")
    warnings.filterwarnings("ignore", module="__main__")

import torch
from torch import nn
from torch.utils import data


def shown(message, category, file, line, *_):
    print(category.__name__, f"{os.path.relpath(file)}:{line}", " ".join(str(message).split()))


warnings.showwarning = shown


def warn(name):
    """Blame this function, its caller, and so on."""
    for level in range(1, 16):
        warnings.warn(f"{name} {level}", stacklevel=level)


class Net(nn.Linear):
    def forward(self, x):
        warn("forward")
        return super().forward(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        warn("backward")
        return 2 * ctx.saved_tensors[0] * grad


class Rows(data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        warn("row")
        return torch.ones(3)


class Stream(data.IterableDataset):
    def __len__(self):
        return 2

    def __iter__(self):
        warn("stream")
        return iter(torch.ones(4, 3))

    def __repr__(self):
        return "Stream"


class Descent(torch.optim.SGD):
    def add_param_group(self, group):
        warn("group")
        super().add_param_group(group)

    def step(self, closure=None):
        warn("step")
        return super().step(closure)


class Scaler(torch.amp.GradScaler):
    def _lazy_init_scale_growth_tracker(self, device):
        warn("scale")
        super()._lazy_init_scale_growth_tracker(device)


def rendezvous(url, rank=-1, world_size=-1, **_):
    warn("rendezvous")
    yield torch.distributed.HashStore(), 0, 1


def train():
    net = Net(3, 1)
    wrapped = nn.DataParallel(net)
    ranks = nn.parallel.DistributedDataParallel(net)
    optimizer = Descent([net.weight, net.bias, net.bias], 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.step()
    for scaler in (torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler(), Scaler("cpu")):
        for batch in data.DataLoader(Rows(), pin_memory=True):
            for call in (net, wrapped, ranks, nn.Softmax()):
                loss = Square.apply(call(batch)).sum()
                optimizer.zero_grad()
                if loss.requires_grad:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
    loader = data.DataLoader(Stream())
    print(len(loader), len(list(loader)))
    net.register_full_backward_hook(lambda *_: warn("hook"))
    with contextlib.suppress(RuntimeError):
        net(torch.ones(2, 3, requires_grad=True)).sum().backward(create_graph=True)
    torch.autograd.backward([net(torch.ones(2, 3)).sum()], grad_variables=[torch.tensor(1.0)])


torch.distributed.rendezvous.__globals__["register_rendezvous_handler"]("warn", rendezvous)
torch.distributed.init_process_group("gloo", init_method="warn://", rank=0, world_size=1)
for _ in range(2):
    train()
torch.distributed.destroy_process_group()

"""Trains a small network under DistributedDataParallel in several processes, or without torchrun in one process.

Every process (a rank) reads its own share of the data. The ranks average their gradients during the backward pass, so
all of them keep the same weights. Works on CPUs (gloo) and on GPUs (nccl, one GPU per rank). The script itself does not
use dpmon:

    python examples/ddp.py --steps 200
    torchrun --nproc-per-node 2 examples/ddp.py
    dpmon torchrun --nproc-per-node 2 examples/ddp.py

All ranks wait for the slowest one. To see this in dpmon, let rank 1 sleep for 30 ms in each step: while it loads data,
in its forward pass, or in its backward pass (before the gradients of the first layer):

    dpmon torchrun --nproc-per-node 2 examples/ddp.py --slow-rank 1 --slow-phase backward --slow-ms 30
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

INPUT_SIZE = 5
OUTPUT_SIZE = 2
DATA_SIZE = 3_000


class SlowBackward(torch.autograd.Function):
    """Returns its input. In the backward pass, it sleeps before it passes the gradient on."""

    @staticmethod
    def forward(context, tensor, seconds):
        context.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class Model(nn.Module):
    """Two linear layers with a tanh between them: 5 numbers in, 2 out."""

    def __init__(self, hidden, slow_phase=None, slow_seconds=0.0):
        super().__init__()
        self.first = nn.Linear(INPUT_SIZE, hidden)
        self.second = nn.Linear(hidden, OUTPUT_SIZE)
        self.slow_phase = slow_phase
        self.slow_seconds = slow_seconds

    def forward(self, rows):
        if self.slow_phase == "forward":
            time.sleep(self.slow_seconds)
        inner = self.first(rows)
        if self.slow_phase == "backward":
            inner = SlowBackward.apply(inner, self.slow_seconds)
        return self.second(torch.tanh(inner))


def waves():
    """Random points in five dimensions, and the values of two waves at these points; the same on every rank."""
    points = torch.rand(DATA_SIZE, INPUT_SIZE) * 2 - 1
    values = torch.sin(points @ torch.randn(INPUT_SIZE, OUTPUT_SIZE) * 3)
    return TensorDataset(points, values)


def train(model, loader, sampler, device, options):
    """Train for `options.steps` steps. Return the loss of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    distance = nn.MSELoss()
    step = epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        epoch += 1
        for points, values in loader:
            optimizer.zero_grad()
            loss = distance(model(points.to(device)), values.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if step == options.steps:
                return loss.item()


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a small network under DistributedDataParallel.")
    parser.add_argument("--steps", type=int, default=20_000, help="batches for every rank")
    parser.add_argument("--batch-size", type=int, default=30, help="rows of a batch on one rank")
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layer (100000: several buckets)")
    parser.add_argument("--slow-rank", type=int, help="a rank that is slower than the others")
    parser.add_argument("--slow-phase", choices=["data", "forward", "backward"], default="backward", help="where")
    parser.add_argument("--slow-ms", type=float, default=30, help="time that it sleeps in every step")
    return parser.parse_args()


def main():
    options = parse_arguments()
    distributed = "RANK" in os.environ
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    slow_phase = options.slow_phase if options.slow_rank == int(os.environ.get("RANK", 0)) else None
    slow_seconds = options.slow_ms / 1000

    def collate(rows):
        if slow_phase == "data":
            time.sleep(slow_seconds)
        return default_collate(rows)

    torch.manual_seed(0)
    data = waves()
    model = Model(options.hidden, slow_phase, slow_seconds).to(device)
    sampler = None
    if distributed:
        sampler = DistributedSampler(data, seed=1)
        model = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    loader = DataLoader(
        data, batch_size=options.batch_size, sampler=sampler, shuffle=sampler is None, collate_fn=collate
    )
    loss = train(model, loader, sampler, device, options)

    if not distributed or dist.get_rank() == 0:
        print(f"final loss {loss:.5f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

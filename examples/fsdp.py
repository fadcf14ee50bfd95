"""Trains a small network under FSDP2 (fully_shard) in several processes, or without torchrun in one process, unsharded.

Every process (a rank) reads its own share of the data, and holds only its share of the weights, their gradients and the
optimizer's state: a shard. The ranks gather the weights of a block for its forward and backward pass, then free them.
Works on CPUs (gloo) and on GPUs (nccl, one GPU per rank), with torch 2.6 and later. The script itself does not use
dpmon:

    python examples/fsdp.py --steps 200
    torchrun --nproc-per-node 2 examples/fsdp.py
    dpmon torchrun --nproc-per-node 2 examples/fsdp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INPUT_SIZE = 5
OUTPUT_SIZE = 2
BLOCKS = 3
DATA_SIZE = 3_000


class Block(nn.Module):
    """A linear layer with a tanh, added to its input."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, rows):
        return rows + torch.tanh(self.inner(rows))


class Model(nn.Module):
    """Three blocks between two linear layers: 5 numbers in, 2 out."""

    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Linear(INPUT_SIZE, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(BLOCKS))
        self.last = nn.Linear(hidden, OUTPUT_SIZE)

    def forward(self, rows):
        rows = self.first(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.last(rows)


def waves():
    """Random points in five dimensions, and the values of two waves at these points; the same on every rank."""
    points = torch.rand(DATA_SIZE, INPUT_SIZE) * 2 - 1
    values = torch.sin(points @ torch.randn(INPUT_SIZE, OUTPUT_SIZE) * 3)
    return TensorDataset(points, values)


def shard(model, device):
    """Shard each block by itself, so that a rank never holds the weights of all blocks at once."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model, loader, sampler, device, options):
    """Train for `options.steps` steps. Return the loss of the last one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
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
    parser = argparse.ArgumentParser(description="Train a small network under FSDP2.")
    parser.add_argument("--steps", type=int, default=10_000, help="batches for every rank")
    parser.add_argument("--batch-size", type=int, default=30, help="rows of a batch on one rank")
    parser.add_argument("--hidden", type=int, default=64, help="width of the blocks")
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

    torch.manual_seed(0)
    data = waves()
    model = Model(options.hidden).to(device)
    sampler = None
    if distributed:
        sampler = DistributedSampler(data, seed=1)
        shard(model, device)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, shuffle=sampler is None)
    loss = train(model, loader, sampler, device, options)

    if not distributed or dist.get_rank() == 0:
        print(f"final loss {loss:.5f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

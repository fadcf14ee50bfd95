"""Ranks of a small language model that the script starts itself, each with texts of its own length."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

STEPS, ROWS, LENGTH = 12, 4, 8


def train(rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(0, 20, (ROWS, LENGTH * (1 + rank)))).mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (2, sys.argv[1]), nprocs=2)

"""FSDP2 (fully_shard) over gloo: each rank adds up the bytes of its own shards. Arguments: ranks, a path to meet at."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard


def local_bytes(tensors):
    storages = [tensor.to_local().untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # gradients share one


def train(rank, world, store):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(8, 32)).sum().backward()
        optimizer.step()
    parameters = list(model.parameters())
    said = {
        "model": local_bytes(parameters),
        "gradients": local_bytes(parameter.grad for parameter in parameters),
        "optimizer": local_bytes(optimizer.state[parameter]["momentum_buffer"] for parameter in parameters),
    }
    with open(f"{store}-{rank}", "w") as file:
        json.dump(said, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    if ranks == 1:
        train(0, 1, sys.argv[2])
    else:
        mp.spawn(train, (ranks, sys.argv[2]), nprocs=ranks)

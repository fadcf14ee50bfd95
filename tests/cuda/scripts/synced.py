"""Trains under DistributedDataParallel on a simulated GPU, alone in its group.

argv: number of kernels that its communication hook runs per bucket, on a separate stream, in place of an all-reduce.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, KERNELS = 20, int(sys.argv[1])


def reduces(_, bucket):
    future = torch.futures.Future(devices=["cuda:0"])
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(KERNELS):
            bucket.buffer().mul_(1.0)
        future.set_result(bucket.buffer())
    return future


with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).cuda()
    wrapped = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
    beside = torch.cuda.Stream()
    wrapped.register_comm_hook(None, reduces)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    gradient = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    for step in range(STEPS):
        rows = torch.ones(8, 16, device="cuda")
        optimizer.zero_grad()
        loss = wrapped(rows).sum()
        if step == STEPS // 2:
            loss.backward(gradient, retain_graph=True)
        loss.backward(gradient)
        optimizer.step()
    torch.cuda.synchronize()
    print(STEPS)
    dist.destroy_process_group()

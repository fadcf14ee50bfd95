"""Trains under DistributedDataParallel on all machines until the file `end` exists; the last rank is slow.

With an argument, it makes this many steps.

Rank N stands still while the file `hold-N` exists. At the end, each rank prints what it has counted itself.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

SLOW_S, ROWS = 0.15, 4


def hold(rank: int) -> None:
    while Path(f"hold-{rank}").exists():
        time.sleep(1)  # the last rank stands here


def main() -> None:
    if "SLURM_PROCID" in os.environ and "RANK" not in os.environ:  # srun python, without torchrun
        os.environ.update(
            RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"], MASTER_ADDR="127.0.0.1"
        )
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    Path(f"rank-{rank}").write_text(os.environ.get("SLURMD_NODENAME") or os.environ.get("GROUP_RANK", ""))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    most = int(sys.argv[1]) if len(sys.argv) > 1 else -1
    end, forward_s = torch.zeros(1), []
    while not end:
        optimizer.zero_grad()
        begun = time.perf_counter()
        loss = model(torch.randn(ROWS + rank, 16)).sum()
        forward_s.append(time.perf_counter() - begun)
        time.sleep(0.02 + SLOW_S * (rank == world - 1))
        loss.backward()
        optimizer.step()
        hold(rank)
        end[0] = len(forward_s) == most or (rank == 0 and Path("end").exists())
        dist.all_reduce(end)
    print(f"counted: {rank} {world} {len(forward_s)} {ROWS + rank} {median(forward_s):.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()

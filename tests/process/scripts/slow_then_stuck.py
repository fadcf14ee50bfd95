"""A rank of a torchrun job. The last one is slow, and gets stuck once a file exists; then it writes its step count."""

import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SLOW_S = 0.1
STICK, STEPS = map(Path, sys.argv[1:])

dist.init_process_group("gloo")
is_last = dist.get_rank() == dist.get_world_size() - 1
model = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for steps in count():
    if is_last:
        time.sleep(SLOW_S)
        if STICK.exists():
            STEPS.write_text(str(steps))
            time.sleep(600.0)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()

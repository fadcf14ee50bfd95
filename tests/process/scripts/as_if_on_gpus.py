"""A training loop on the CPU in which torch.cuda claims to use two GPUs, which the script chooses late."""

import os
import time
from types import SimpleNamespace

os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"

import torch

RESERVED = (3 << 30, 5 << 30)
NVML_INDEX = (1, 3)
observers = []


def stats(index):
    return {
        "allocated_bytes.all.current": 1 << 30,
        "allocated_bytes.all.peak": 2 << 30,
        "reserved_bytes.all.current": RESERVED[index],
        "inactive_split_bytes.all.current": 1 << 20,
        "num_alloc_retries": 4,
        "num_ooms": 1,
    }


torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.memory_stats = stats
torch.cuda.get_device_properties = lambda index: SimpleNamespace(
    uuid=f"00000000-0000-0000-0000-00000000000{NVML_INDEX[index]}"
)
torch._C._cuda_attach_out_of_memory_observer = observers.append

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
steps = 0
while not os.path.exists("stop"):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    steps += 1
    if steps == 10:
        for _ in range(100):
            for observer in observers:
                observer(1, 2 << 30, 80 << 30, 1 << 30)
    if steps > 100:
        time.sleep(0.01)

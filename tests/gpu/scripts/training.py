"""A loop with short steps; argv: device, steps, wrapper (bare, dataparallel), output at the end.

`profile`: the time of each phase by torch.profiler, per step; `losses`: the losses.
"""

import bisect
import json
import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

WARM_UP = 20
device, steps, wrapper, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.manual_seed(0)
torch.set_num_threads(1)
on_gpu = device.startswith("cuda")
wide = 1024 if on_gpu else 128
layers = [layer for _ in range(8) for layer in (nn.Linear(wide, wide), nn.ReLU())]
model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), *layers, nn.Linear(wide, 1)).to(device)
if wrapper == "dataparallel":
    model = nn.DataParallel(model)
# One parameter after the other, so that a step takes long compared with the cost of the profiler.
optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=False)
rows = 4096 if on_gpu else 256
data = TensorDataset(torch.randn(rows, 64), torch.randn(rows, 1))


def batches():
    while True:
        yield from DataLoader(data, batch_size=256)


def wait():
    if on_gpu:
        torch.cuda.synchronize()


def train_step(batch):
    x, y = (part.to(device, non_blocking=True) for part in batch)
    optimizer.zero_grad()
    with record_function("forward"):
        out = model(x)
    loss = (out - y).pow(2).mean()
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer"):
        optimizer.step()
    return loss.detach()


source = batches()
losses = [train_step(next(source)) for _ in range(WARM_UP)]
wait()
if wanted == "profile":
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        for _ in range(steps):
            train_step(next(source))
    wait()
    spent = {name: [] for name in ("forward", "backward", "optimizer")}
    # From the start of the first operation to the end of the last one, on any thread, without record_functions.
    inside = {name: [] for name in spent}
    events = [one for one in seen.events() if one.device_type == torch.autograd.DeviceType.CPU]
    times = sorted((one.time_range.start, one.time_range.end, one.name) for one in events if "#" not in one.name)
    for i, (start, end, name) in enumerate(times):
        if name in spent:
            within = [one for one in times[i + 1 : bisect.bisect(times, (end,))] if one[1] <= end]
            spent[name].append(end - start)
            inside[name].append(max(one[1] for one in within) - within[0][0])
    print(json.dumps({"spent_us": spent, "inside_us": inside}))
else:
    losses += [train_step(next(source)) for _ in range(steps)]
    print(json.dumps([loss.item() for loss in losses]))

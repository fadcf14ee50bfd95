"""A loop limited by its device; argv: device, steps, output at the end (profile, losses).

The batches are in pinned memory and are copied asynchronously, so that the host runs ahead of the device, as in a good
training loop. `profile`: for each step and phase, by torch.profiler, the time from the start of the first kernel to the
end of the last one among those launched during the phase by any thread (for copies: the sum of their times); and how
often the host waited for the device.
"""

import json
import sys
import tempfile

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

WARM_UP = 10
device, steps, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_num_threads(1)
on_gpu = device.startswith("cuda")
wide, rows = (4096, 4096) if on_gpu else (256, 128)
layers = [layer for _ in range(6) for layer in (nn.Linear(wide, wide), nn.ReLU())]
model = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), *layers, nn.Linear(wide, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
batches = [(torch.randn(rows, wide), torch.randn(rows, 1)) for _ in range(8)]
if on_gpu:
    batches = [tuple(part.pin_memory() for part in batch) for batch in batches]


def endless():
    while True:
        yield from DataLoader(batches, batch_size=None)


def train_step(batch):
    with record_function("copy"):
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


def of_trace(events):
    """Return, by phase, the device time in each step, ms; and the number of waits by name."""
    launched = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launched[event["args"].get("correlation")] = event["ts"]
    work = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            at = launched.get(event["args"].get("correlation"))
            if at is not None:
                work.append((at, event["ts"], event["ts"] + event["dur"]))
    found = {}
    for name in ("copy", "forward", "backward", "optimizer"):
        phases = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") == "user_annotation" and event.get("name") == name
        )
        found[name] = []
        for begin, end in phases:
            inside = [(start, stop) for at, start, stop in work if begin <= at <= end]
            if inside and name == "copy":  # there may be a pause between them
                found[name].append(sum(stop - start for start, stop in inside) / 1e3)
            elif inside:
                found[name].append((max(stop for _, stop in inside) - min(start for start, _ in inside)) / 1e3)
    waits = {}
    for event in events:
        if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]:
            waits[event["name"]] = waits.get(event["name"], 0) + 1
    return found, waits


source = endless()
losses = [train_step(next(source)) for _ in range(WARM_UP)]
if wanted == "profile":
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as seen:
        for _ in range(steps):
            losses.append(train_step(next(source)))
        print("the last loss", losses[-1].item(), flush=True)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        seen.export_chrome_trace(file.name)
        with open(file.name) as trace:
            spent, waits = of_trace(json.load(trace)["traceEvents"])
    # Two more steps: dpmon reads the device times of a step in a later one.
    losses += [train_step(next(source)) for _ in range(2)]
    print(json.dumps({"device_ms": spent, "waits": waits}))
else:
    losses += [train_step(next(source)) for _ in range(steps)]
    print(json.dumps([loss.item() for loss in losses]))

"""Tens of thousands of calls with changing and constant shapes, so that the ring wraps around; objects kept alive."""

import gc
import json
import time
import weakref
from pathlib import Path

import torch
from torch import nn

READ = Path(__file__).parent.parent / "read"
"""The last call that the reader has read."""


class Model(nn.Linear):
    pass


def freed(make, **tensors):
    """Return whether a model, its inputs and its outputs are freed when the script drops them."""
    model = make()
    inputs = {name: torch.randn(size) for name, size in tensors.items()}
    for _ in range(3):
        out = model(*inputs.values())
    watched = [weakref.ref(value) for value in (*inputs.values(), out, model)]
    del out, inputs
    soon = [watch() is None for watch in watched]  # without the garbage collector, which may come late
    del model
    gc.collect()
    return soon[:-1], [watch() is None for watch in watched]


def stay_near(calls):
    """Wait until the reader is at most 8,000 calls behind: on a busy machine it would miss some."""
    until = time.monotonic() + 60
    while time.monotonic() < until and int(READ.read_text()) < calls - 8000:
        time.sleep(0.005)


torch.set_num_threads(1)
model, same = Model(1, 1), torch.empty(3, 1)
with torch.no_grad():
    for rows in range(17_000):
        model(torch.empty(rows, 1))
        if rows % 2000 == 0:
            stay_near(rows)
    for number in range(17_000, 57_000):
        model(same)
        if number % 2000 == 0:
            stay_near(number)
kept = {
    "bare": freed(lambda: nn.Linear(2, 2), x=(4, 2)),
    "wrapped": freed(lambda: nn.DataParallel(nn.Linear(2, 2)), x=(4, 2)),
    "two arguments": freed(lambda: nn.DataParallel(nn.Bilinear(2, 3, 1)), x=(4, 2), y=(4, 3)),
}
print(json.dumps(kept))

"""Ten thousands of calls, with shapes that change and shapes that stay, so that the ring goes round; what is kept."""

import gc
import json
import weakref

import torch
from torch import nn


class Model(nn.Linear):
    pass


def freed(make, **tensors):
    """Whether a model, what it was given and what it gave are gone when the script lets go of them."""
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


torch.set_num_threads(1)
model, same = Model(1, 1), torch.empty(3, 1)
with torch.no_grad():
    for rows in range(17_000):
        model(torch.empty(rows, 1))
    for _ in range(40_000):
        model(same)
kept = {
    "bare": freed(lambda: nn.Linear(2, 2), x=(4, 2)),
    "wrapped": freed(lambda: nn.DataParallel(nn.Linear(2, 2)), x=(4, 2)),
    "two arguments": freed(lambda: nn.DataParallel(nn.Bilinear(2, 3, 1)), x=(4, 2), y=(4, 3)),
}
print(json.dumps(kept))

"""Saves the wrapped model whole, copies it for an average of its weights, and puts all of `globals()` into a file."""

import copy
import pickle

import torch
from net import Net, rows
from torch import nn

torch.manual_seed(1)
model = nn.DataParallel(Net())
average = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters())
best = None
for x, y in torch.utils.data.DataLoader(rows(), batch_size=16):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, new in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(new, 0.1)
    average.load_state_dict({**model.state_dict(), **dict(average.named_parameters())})
    best = copy.deepcopy(model)
    best(x)

print(sorted(vars(model)), model.training, list(model._forward_hooks), list(model.module._forward_pre_hooks))
torch.save(model, "whole.pt")
torch.save({"average": average, "best": best, "optimizer": optimizer}, "more.pt")


def session():
    """Everything in this module that can be pickled, as tools do that save a session."""
    kept = {}
    for name, value in globals().items():
        try:
            pickle.dumps(value)
        except Exception:  # whatever does not go is left out
            continue
        kept[name] = type(value).__name__
    return kept


print(sorted(globals()))
print(sorted(session().items()))

"""A script that trains a small model without dpmon's knowledge."""

from __future__ import annotations


def plain_training(steps: int, rows: int = 6, *, wrapped: bool = False) -> str:
    """Return the text of a script that trains for `steps` steps; `wrapped`: in a DataParallel."""
    return f"""
import torch
model = torch.nn.Linear(4, 2)
model = torch.nn.DataParallel(model) if {wrapped} else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn({rows}, 4)).sum().backward()
    optimizer.step()
"""

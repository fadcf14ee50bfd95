"""A script that trains a small model without dpmon's knowledge, for tests of new fields and phases."""

from __future__ import annotations

__all__ = ["plain_training"]


def plain_training(steps: int) -> str:
    """Return the text of a script that trains for `steps` steps."""
    return f"""
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
"""

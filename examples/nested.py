"""Trains a model with one part under nn.DataParallel, and one under a subclass that exposes the module's attributes.

python examples/nested.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn


class Attributes(nn.DataParallel[nn.Module]):
    """DataParallel that also has the attributes of the wrapped module."""

    def __getattr__(self, name: str) -> Any:
        """Return the wrapper's own attribute, else the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Blocks(nn.Module):
    """Three blocks, the second data-parallel: (rows, 10) to (rows, 20)."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Linear(10, 20)
        self.block2 = nn.DataParallel(nn.Linear(20, 20))
        self.block3 = nn.Linear(20, 20)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the three blocks in order."""
        result: torch.Tensor = self.block3(self.block2(self.block1(rows)))
        return result


class Head(nn.Module):
    """One linear layer: (rows, 20) to (rows, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.linear = nn.Linear(20, classes)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one score per class."""
        result: torch.Tensor = self.linear(rows)
        return result


def main() -> None:
    """Train both to predict the sign of the first column."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    home = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    blocks = Blocks().to(home)
    head = Attributes(Head(2)).to(home)
    optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.1)
    print(f"{head.classes} classes")
    for step in range(options.steps):
        batch = torch.randn(30, 10, device=home)
        labels = (batch[:, 0] > 0).long()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(blocks(batch)), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

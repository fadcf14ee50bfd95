"""Part of a model under nn.DataParallel, and a subclass that hands on the attributes of what it wraps.

python examples/nested.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn


class Attributes(nn.DataParallel[nn.Module]):
    """DataParallel, through which the wrapped module's own attributes can be reached."""

    def __getattr__(self, name: str) -> Any:
        """The wrapper's own attribute, else the module's."""
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
        """All three, one after another."""
        result: torch.Tensor = self.block3(self.block2(self.block1(rows)))
        return result


class Head(nn.Module):
    """(rows, 20) to (rows, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.linear = nn.Linear(20, classes)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """A number for each class."""
        result: torch.Tensor = self.linear(rows)
        return result


def main() -> None:
    """Train both to tell the sign of the first column."""
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

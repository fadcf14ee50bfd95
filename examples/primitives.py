"""Data parallelism written with torch's primitives: replicate, scatter, parallel_apply, gather.

    python examples/primitives.py --devices 2

The loop is like examples/linear.py, but shorter. The function `data_parallel` does the work of nn.DataParallel.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter


def data_parallel(module: nn.Module, batch: Any, device_ids: list[int], output_device: int | None = None) -> Any:
    """Run `module` on a share of `batch` on each device, and join the results on one device."""
    if not device_ids:
        return module(batch)
    if output_device is None:
        output_device = device_ids[0]
    replicas = replicate(module, device_ids)
    shares = scatter(batch, device_ids)
    outputs = parallel_apply(replicas[: len(shares)], shares)
    return gather(outputs, output_device)


class Model(nn.Module):
    """Two layers: (rows, 10) to (rows, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(10, 20)
        self.out = nn.Linear(20, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return one number per row."""
        result: torch.Tensor = self.out(torch.relu(self.hidden(rows)))
        return result


def main() -> None:
    """Train the model to add the numbers of a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count(), help="number of GPUs (0: one device)")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    home = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = Model().to(home)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(options.steps):
        batch = torch.randn(30, 10, device=home)
        optimizer.zero_grad()
        output = data_parallel(model, batch, list(range(options.devices)))
        loss = nn.functional.mse_loss(output, batch.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

"""Trains a small regression under nn.DataParallel for a few minutes, which leaves time to watch it.

The data are sums of waves in five dimensions. The model learns slow waves within seconds and fast waves only gradually,
so the loss falls for minutes. The script itself does not use dpmon:

    python examples/linear.py --steps 2000
    dpmon examples/linear.py
"""

import argparse
import math
import time
from collections import deque
from statistics import fmean as mean

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

INPUT_SIZE = 5
OUTPUT_SIZE = 2
DATA_SIZE = 20_000  # not a multiple of the batch size: the last batch of an epoch is smaller, as usual
WAVES = 24
NOISE = 0.02
PRINT_SECONDS = 2
MEAN_OF = 1000  # steps, for the loss that is printed


class Model(nn.Module):
    """Linear layers with a tanh between them: 5 numbers in, 2 out."""

    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(INPUT_SIZE, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, OUTPUT_SIZE),
        )

    def forward(self, rows):
        return self.layers(rows)


def waves(size):
    """`size` random points with their targets: sums of waves, scaled to variance one, with a little noise."""
    points = torch.rand(size, INPUT_SIZE) * 2 - 1
    directions = torch.randn(INPUT_SIZE, WAVES) * torch.linspace(0.3, 6.0, WAVES)
    heights = torch.randn(WAVES, OUTPUT_SIZE) * math.sqrt(2 / WAVES)
    values = torch.sin(points @ directions + torch.rand(WAVES) * 2 * math.pi) @ heights
    values = (values - values.mean(0)) / values.std(0)
    return TensorDataset(points, values + NOISE * torch.randn(size, OUTPUT_SIZE))


def is_due(step, said, every):
    """Whether to print now: after every `every` steps, or if that is 0, every PRINT_SECONDS."""
    return step % every == 0 if every else time.monotonic() - said >= PRINT_SECONDS


def train(model, loader, device, options):
    """Train for `options.steps` steps. Return the mean loss of the last ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    distance = nn.MSELoss()
    recent = deque(maxlen=options.print_every or MEAN_OF)
    step = 0
    said = time.monotonic()
    while True:
        for points, values in loader:
            points, values = points.to(device), values.to(device)
            optimizer.zero_grad()
            loss = distance(model(points), values)
            loss.backward()
            optimizer.step()

            step += 1
            recent.append(loss.item())
            if is_due(step, said, options.print_every):
                said = time.monotonic()
                print(f"step {step:7d}  loss {mean(recent):.5f}", flush=True)
            if step == options.steps:
                return mean(recent)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train a small regression under nn.DataParallel.")
    parser.add_argument("--steps", type=int, default=60_000, help="batches to train on; 0: until stopped")
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden layers")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed for data, weights and order")
    parser.add_argument("--print-every", type=int, default=0, metavar="STEPS", help="0: about every two seconds")
    return parser.parse_args()


def main():
    options = parse_arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the matrices are so small that more threads would make the job slower
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    loader = DataLoader(waves(DATA_SIZE), batch_size=options.batch_size, shuffle=True)
    model = nn.DataParallel(Model(options.hidden)).to(device)
    loss = train(model, loader, device, options)
    print(f"final loss {loss:.5f}")


if __name__ == "__main__":
    main()

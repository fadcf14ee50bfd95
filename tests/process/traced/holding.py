"""Adds up its own memory from shapes: tied weights, buffers, Adam's two moments."""

import json

import torch
from torch import nn

torch.manual_seed(0)


class Tied(nn.Module):
    """Its two layers share one weight; the buffer is part of a larger one that counts as a whole."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.two = nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.register_buffer("table", torch.zeros(100)[:10])

    def forward(self, x):
        return self.two(self.one(x)) + self.table.sum()


class Words(nn.Module):
    """Sparse gradients: indices and values."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, sparse=True)

    def forward(self, x):
        return self.embedding(x)


def main():
    words, tied = Words(), Tied()
    first = torch.optim.SGD(words.parameters(), lr=0.1)
    second = torch.optim.Adam(tied.parameters(), lr=0.1)
    for _ in range(8):
        first.zero_grad()
        second.zero_grad()
        tied(words(torch.arange(6))).sum().backward()
        first.step()
        second.step()
    float32, int64 = 4, 8
    tied_parameters = 16 * 16 + 16 + 16
    model = float32 * (50 * 16 + tied_parameters + 100)
    gradients = float32 * (6 * 16 + tied_parameters) + int64 * 6
    optimizer = float32 * (2 * tied_parameters + 3)  # and a step counter for each of its three parameters
    print(json.dumps({"model": model, "gradients": gradients, "optimizer": optimizer}))


main()

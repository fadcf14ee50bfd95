"""Trains in processes that it starts itself; the parent never calls a model."""

import sys

import torch
import torch.multiprocessing as mp
from net import Net, rows
from torch import nn


def train(index, queue):
    torch.manual_seed(index)
    model = Net()
    for x, y in torch.utils.data.DataLoader(rows(), batch_size=16):
        loss = nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.1 * gradient
    queue.put((index, loss.item().hex()))


if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train, (queue,), nprocs=2)
    print(sorted(queue.get() for _ in range(2)))
    sys.exit(3)

"""Trains a model that lies on two devices: the embedding on the CPU, the rest on a GPU if there is one.

The batch passes through one device after the other: the results of the first are copied to the second. Without a GPU,
both parts lie on the CPU, so there is only one device and nothing to copy. The script itself does not use dpmon:

    python examples/model_parallel.py --steps 200
    dpmon examples/model_parallel.py
"""

import argparse

import torch
from torch import nn

WORDS = 1000
CLASSES = 5


class DistributedModel(nn.Module):
    """An embedding of words on the first device, and a recurrent network that reads it on the second."""

    def __init__(self, width, first, second):
        super().__init__()
        self.second_device = second
        self.embedding = nn.Embedding(WORDS, width).to(first)
        self.rnn = nn.GRU(width, width, batch_first=True).to(second)
        self.classes = nn.Linear(width, CLASSES).to(second)

    def forward(self, words):
        read = self.embedding(words).to(self.second_device)
        _, last = self.rnn(read)
        return self.classes(last[0])


def main():
    parser = argparse.ArgumentParser(description="Train a model that lies on two devices.")
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    torch.manual_seed(0)
    first = torch.device("cpu")
    second = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = DistributedModel(options.width, first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    distance = nn.CrossEntropyLoss()
    for step in range(1, options.steps + 1):
        words = torch.randint(WORDS, (options.batch_size, 8))
        labels = (words[:, 0] % CLASSES).to(second)
        optimizer.zero_grad()
        loss = distance(model(words), labels)
        loss.backward()
        optimizer.step()
        if step % 1000 == 0 or step == options.steps:
            print(f"step {step:6d}  loss {loss.item():.5f}  on {first} and {second}")


if __name__ == "__main__":
    main()

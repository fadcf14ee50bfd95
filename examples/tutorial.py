"""The loop of PyTorch's DataParallel tutorial: four batches forward, with the sizes inside and outside the model.

On a CPU or one GPU, it prints one "In Model" line per batch; on more GPUs, one line per share of the batch.
`dpmon --replicas 3 examples/tutorial.py` shows the shares on a machine without GPUs.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

INPUT_SIZE = 5
OUTPUT_SIZE = 2
BATCH_SIZE = 30
DATA_SIZE = 100


class RandomDataset(Dataset):
    """`length` rows of `size` normally distributed numbers."""

    def __init__(self, size, length):
        self.rows = torch.randn(length, size)

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self):
        return len(self.rows)


class Model(nn.Module):
    """One linear layer that prints the sizes of its input and output."""

    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, rows):
        output = self.fc(rows)
        # One string and one write: the replicas' threads print at the same time.
        print(f"\tIn Model: input size {rows.size()} output size {output.size()}\n", end="")
        return output


def main():
    parser = argparse.ArgumentParser(description="PyTorch's DataParallel tutorial, forward only.")
    parser.add_argument("--seed", type=int, default=0, help="random seed for data, weights and order (default 0)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(RandomDataset(INPUT_SIZE, DATA_SIZE), batch_size=BATCH_SIZE, shuffle=True)
    model = nn.DataParallel(Model(INPUT_SIZE, OUTPUT_SIZE)).to(device)

    for batch in loader:
        rows = batch.to(device)
        output = model(rows)
        print(f"Outside: input size {rows.size()} output_size {output.size()}")


if __name__ == "__main__":
    main()

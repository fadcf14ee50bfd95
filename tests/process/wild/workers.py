"""DataLoader workers, started as the argument says (fork, spawn, forkserver), each with a seed of its own."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        return torch.randn(6) + index


def main():
    torch.manual_seed(5)
    workers = 2 if sys.argv[1] == "fork" else 1  # which import torch themselves
    loader = DataLoader(
        Noisy(), batch_size=10, num_workers=workers, multiprocessing_context=sys.argv[1], persistent_workers=True
    )
    model = nn.DataParallel(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(2):
        for batch in loader:
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item().hex())
    print(os.environ.get("TORCHELASTIC_RUN_ID"))


if __name__ == "__main__":
    main()

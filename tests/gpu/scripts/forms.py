"""One of several ways to train on a GPU; argv: device, steps, kind. Prints the loss of each step.

captured: the whole step is captured into a CUDA graph and replayed; side: on a stream of the script's own;
workers: batches from two worker processes through pinned memory; host: DataParallel gets batches on the host; raising:
every third forward raises; full: every third forward requests more memory than the GPU has.
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device, steps, which = sys.argv[1], int(sys.argv[2]), sys.argv[3]
on_gpu = device.startswith("cuda")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.BatchNorm1d(512), nn.Linear(512, 1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls % 3 == 0:
            if which == "raising":
                raise ValueError("as it pleases")
            if which == "full":
                torch.empty(1 << 45, dtype=torch.uint8, device=x.device)
        return self.parts(x)


def main():
    torch.manual_seed(0)
    model = Model().to(device)
    net = nn.DataParallel(model) if which == "host" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(64 * 8, 64), torch.randn(64 * 8, 1))
    loader = DataLoader(data, 64, num_workers=2 if which == "workers" else 0, pin_memory=on_gpu and which == "workers")

    def train_step(x, y):
        optimizer.zero_grad(set_to_none=which != "captured")
        loss = (net(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches():
        while True:
            for batch in loader:
                yield batch if which == "host" else [part.to(device, non_blocking=True) for part in batch]

    losses = []
    source = batches()
    if which == "captured":
        x, y = next(source)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                losses.append(train_step(x, y))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train_step(x, y)
        for _ in range(steps):
            for kept, new in zip((x, y), next(source), strict=True):
                kept.copy_(new)
            graph.replay()
            losses.append(loss.clone())
        for _ in range(5):  # then without graphs
            losses.append(train_step(*next(source)))
    elif which == "side" and on_gpu:
        with torch.cuda.stream(torch.cuda.Stream()):
            losses = [train_step(*next(source)) for _ in range(steps)]
    else:
        for _ in range(steps):
            x, y = next(source)
            y = y.to(device)
            try:
                losses.append(train_step(x, y))
            except (ValueError, torch.cuda.OutOfMemoryError):
                continue
    if on_gpu:
        torch.cuda.synchronize()
    net.eval()
    with torch.no_grad():
        net(next(source)[0])
    print(json.dumps([loss.item() for loss in losses]))


if __name__ == "__main__":
    main()

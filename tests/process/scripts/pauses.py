"""Trains in a process for each kind of pause; each makes one long pause that is no stall."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LONG = float(sys.argv[1])
KINDS = sys.argv[2:]
PAUSE_AT, AGAIN_AT = 20, 40
ALSO_AT = {"learned": (25, 30)}


def work_now_and_then(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        until = time.thread_time() + 0.04
        while time.thread_time() < until:
            pass
        time.sleep(0.06)


class Samples(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if self.kind == "first" and index == 0:
            time.sleep(LONG)
        if self.kind == "loader" and index == PAUSE_AT + 5:
            work_now_and_then(LONG)
        return torch.ones(4)


def write_long():
    with open("checkpoint", "wb", buffering=0) as file:
        for _ in range(int(LONG)):
            file.write(bytes(1 << 20))
            time.sleep(1)


def evaluate(model):
    with torch.no_grad():
        for _ in range(int(2 * LONG)):
            model(torch.ones(2, 4))
            time.sleep(0.5)


def pause(kind, model, again):
    if kind == "evaluation" and not again:
        evaluate(model)
    elif kind == "checkpoint" and not again:
        write_long()
    elif kind == "compilation" and not again:
        work_now_and_then(LONG)
    elif kind == "learned":
        time.sleep(LONG if again else 0.65 * LONG)  # its stack is taken after 5 s, unless the machine is too busy


def train(kind):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(kind), num_workers=int(kind == "loader"))
    for epoch in range(2):
        for step, batch in enumerate(loader):
            if step in (PAUSE_AT, *ALSO_AT.get(kind, ()), AGAIN_AT) and epoch == 0:
                pause(kind, model, step == AGAIN_AT)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.02)
        if kind == "gap" and epoch == 0:
            time.sleep(LONG)


if __name__ == "__main__":
    children = {}
    for kind in KINDS:
        child = os.fork()
        if not child:
            train(kind)
            sys.exit(0)
        children[child] = kind
    failed = {kind for child, kind in children.items() if os.waitpid(child, 0)[1]}
    sys.exit(f"failed: {failed}" if failed else 0)

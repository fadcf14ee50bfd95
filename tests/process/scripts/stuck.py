"""Trains on two ranks, or in one process, and gets stuck in the way that the first argument names."""

import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

CAUSE = sys.argv[1]
STUCK_AT = 30
LONG = 600.0
WORLD = 1 if CAUSE in ("locks", "iterator", "input") else 2
RANK = 0


class Samples(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if CAUSE == "worker" and RANK == 1 and index > 8 * STUCK_AT:
            time.sleep(LONG)  # stuck: worker
        return torch.ones(4)


class Endless(IterableDataset):
    def __iter__(self):
        for i in range(8 * 4000):
            if CAUSE == "iterator" and i > 8 * STUCK_AT:
                time.sleep(LONG)  # stuck: iterator
            yield torch.ones(4)


def checkpoint(model):
    _read, write = os.pipe()
    with open(write, "wb") as file:
        while True:
            file.write(bytes(1 << 16))  # stuck: checkpoint


def evaluate(model):
    with torch.no_grad():
        model.module(torch.ones(2, 4))
    time.sleep(LONG)  # stuck: evaluation


def hold_gil():
    ctypes.PyDLL(None).sleep(int(LONG))  # stuck: gil


def two_locks():
    first, second = threading.Lock(), threading.Lock()

    def other():
        with second:
            time.sleep(0.2)
            with first:
                pass

    thread = threading.Thread(target=other, daemon=True)
    with first:
        thread.start()
        time.sleep(0.4)
        second.acquire()  # stuck: locks


def get_stuck(model):
    """Get stuck, on rank 1 (or alone)."""
    if CAUSE == "checkpoint":
        checkpoint(model)
    elif CAUSE == "evaluation":
        evaluate(model)
    elif CAUSE == "raised":
        try:
            raise RuntimeError("out of memory")
        finally:
            time.sleep(LONG)  # stuck: raised
    elif CAUSE == "different":
        dist.broadcast(torch.ones(3), 1)  # stuck: different
    elif CAUSE == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # stuck: stopped
    elif CAUSE == "disk":
        os.mkfifo("slow")
        Path("slow").read_text()  # stuck: disk
    elif CAUSE == "gil":
        hold_gil()
    elif CAUSE == "locks":
        two_locks()
    elif CAUSE == "input":
        input("which one? ")  # stuck: input
    elif CAUSE == "gone":
        if os.fork():  # the child keeps the connections open
            os._exit(0)
        time.sleep(LONG)


def main():
    global RANK
    if WORLD > 1:  # a fork instead of torchrun, so that torch is imported once
        RANK = int(os.fork() == 0)
    model = nn.Linear(4, 2)
    if WORLD > 1:
        place = f"file://{os.path.abspath('meeting')}"
        dist.init_process_group("gloo", place, timedelta(seconds=LONG), rank=RANK, world_size=WORLD)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = Endless() if CAUSE == "iterator" else Samples()
    loader = DataLoader(dataset, batch_size=8, num_workers=1 if CAUSE == "worker" else 0)
    stuck_rank = 0 if CAUSE in ("checkpoint", "evaluation") else WORLD - 1
    turns = open(f"turns-{RANK}", "w", encoding="utf-8")  # noqa: SIM115 - the count that dpmon has to agree with
    for step, batch in enumerate(loader):  # stuck: loop
        print(time.monotonic(), file=turns, flush=True)
        if step == STUCK_AT and stuck_rank == RANK:
            get_stuck(model)
        if CAUSE == "uneven" and RANK == 1 and step == STUCK_AT:
            break
        optimizer.zero_grad()
        model(batch).sum().backward()  # stuck: backward
        optimizer.step()
        time.sleep(0.01)
    if WORLD > 1:
        dist.barrier()  # stuck: uneven


if __name__ == "__main__":
    main()

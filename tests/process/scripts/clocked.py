"""Trains as its first argument says, and measures samples and seconds of training by mode with its own clock."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # otherwise the first optimizer imports it, which takes a second
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, RANKS = 16, 2
clock = time.perf_counter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.rows = 0

    def forward(self, x):
        SEEN.append(len(x))
        return self.layer(x)


SEEN = []
"""Rows of every forward: half a batch under dp over two replicas."""


def loader(steps, workers=0):
    return DataLoader(TensorDataset(torch.randn(ROWS * steps, 8)), ROWS, num_workers=workers)


class Trainer:
    def __init__(self, model=None, pace=0.01, workers=0, optimizer=True):
        self.model = Net() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3) if optimizer else None
        self.pace = pace
        self.workers = workers
        self.samples, self.seconds = {}, {}
        self.since = None
        self.apart = {"evaluation": 0.0, "between steps": 0.0}

    def count(self, mode, rows):
        """Count a step. Its time begins at the end of the previous step, or when `since` was set."""
        now = clock()
        self.seconds[mode] = self.seconds.get(mode, 0.0) + now - self.since
        self.samples[mode] = self.samples.get(mode, 0) + rows
        self.since = now

    def epoch(self, steps, during=lambda: None):
        batches = iter(loader(steps, self.workers))
        if self.since is None:
            self.since = clock()
        self.apart["between steps"] += clock() - self.since
        while True:
            asked = clock()
            (x,) = next(batches, (None,))
            held = clock() - asked
            if sys.argv[1] == "asked" and held > 0.5:  # a pause, perhaps at the end of the epoch
                self.leave_out("paused", held)
            if x is None:
                return
            SEEN.clear()
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            self.model(x).pow(2).mean().backward()
            if self.optimizer is not None:
                self.optimizer.step()
            time.sleep(self.pace)
            during()
            self.count("dp" if SEEN[0] < len(x) else "single", len(x))

    def leave_out(self, name, took):
        """Count time that is no part of the training."""
        self.since += took
        self.apart[name] = self.apart.get(name, 0.0) + took

    def evaluate(self):
        began = clock()
        with torch.no_grad():
            self.model.eval()
            for (x,) in loader(10):
                self.model(x)
                time.sleep(0.02)
            self.model.train()
        self.leave_out("evaluation", clock() - began)

    def told(self):
        return json.dumps({"samples": self.samples, "seconds": self.seconds, "apart": self.apart})

    def tell(self):
        print(self.told(), flush=True)


def plain():
    trainer = Trainer()
    trainer.epoch(100)
    trainer.tell()


def epochs():
    trainer = Trainer()
    for number in range(5):
        if number:
            time.sleep(0.5)
        trainer.epoch(10)
    trainer.tell()


def workers():
    trainer = Trainer(workers=2)
    for _ in range(5):
        trainer.epoch(20)
        time.sleep(0.4)
    trainer.tell()


def bare():
    """No optimizer."""
    trainer = Trainer(optimizer=False)
    for _ in range(3):
        trainer.epoch(40)
        time.sleep(0.4)
    trainer.tell()


def broken(end):
    """Train, and end in the middle of a step."""
    trainer = Trainer()
    trainer.epoch(60)
    time.sleep(0.4)

    def during():
        if trainer.samples["single"] == 100 * ROWS:
            trainer.tell()
            end()

    trainer.epoch(60, during)


def fails():
    raise RuntimeError("as it was meant to")


def raises():
    broken(fails)


def killed():
    broken(lambda: os.kill(os.getpid(), signal.SIGKILL))


def evaluations():
    trainer = Trainer()
    for _ in range(5):
        trainer.epoch(20)
        trainer.evaluate()
    trainer.tell()


def asked():
    """Train until the file `stop` exists; the test pauses or toggles the training meanwhile."""
    trainer = Trainer()
    trainer.epoch(20)
    Path("began").touch()
    while not Path("stop").exists():
        trainer.epoch(20)
        time.sleep(0.1)
    trainer.epoch(5)
    trainer.tell()


def reads():
    trainer = Trainer(pace=0.02)

    def ask():
        Path("asked").touch()
        began = clock()
        input()
        trainer.leave_out("input", clock() - began)

    for number in range(4):
        trainer.epoch(60)
        if number == 1:
            ask()  # between two epochs
        if number == 2:
            trainer.epoch(1, ask)  # in a step
    trainer.tell()


def rank(index, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=RANKS)
    trainer = Trainer(nn.parallel.DistributedDataParallel(Net()))
    torch.distributed.barrier()
    for number in range(4):
        if number:
            time.sleep(0.2)
        trainer.epoch(15)
    Path(f"told-{index}").write_text(trainer.told())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def ranks():
    torch.multiprocessing.spawn(rank, (str(Path("store").resolve()),), nprocs=RANKS)


if __name__ == "__main__":
    ways = plain, epochs, workers, bare, raises, killed, evaluations, asked, reads, ranks
    {way.__name__: way for way in ways}[sys.argv[1]]()

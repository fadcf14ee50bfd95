"""Runs DistributedDataParallel ranks, one of them slow, and prints their own measurements; does not use dpmon.

    python straggler.py --ranks 8 --phase data --ms 40

It forks the ranks, so that torch is imported once. Rank 0 prints JSON lines at the end, one for each step and rank. All
times are in ms, by the rank's own clock. In `passes` each forward and backward pass has its tail: from its last
gradient to the end of its backward. Ranks wait for each other in the tails of synchronized passes; passes under no_sync
are not synchronized. A rank is slow once a step: in its last batch, and in the first of two models.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext

import torch
import torch._dynamo  # else the first optimizer of each forked rank imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PHASES = ["data", "forward", "backward"]
BATCH, WIDTH, HIDDEN, LAYERS = 32, 64, 256, 3


class Delays:
    """Delays of this rank in each phase of the next pass, s."""

    def __init__(self):
        self.extra = dict.fromkeys(PHASES, 0.0)

    def sleep(self, phase):
        if self.extra[phase]:
            time.sleep(self.extra[phase])


class Rows(Dataset):
    """Batches of random rows and their targets."""

    def __init__(self, count, delays):
        self.count = count
        self.delays = delays

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.delays.sleep("data")
        rows = torch.randn(BATCH, WIDTH)
        return rows, rows.sum(1, keepdim=True)


class Late(torch.autograd.Function):
    """Returns its input; sleeps in the backward pass."""

    @staticmethod
    def forward(context, tensor, delays):
        context.delays = delays
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        context.delays.sleep("backward")
        return gradient, None


class Net(nn.Module):
    """Layers, one of them used only in every other call; the backward pass of the first layer is delayed."""

    def __init__(self, delays, with_unused):
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.inner = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.sometimes = nn.Linear(HIDDEN, HIDDEN) if with_unused else None
        self.last = nn.Linear(HIDDEN, 1)
        self.delays = delays
        self.calls = 0

    def forward(self, rows):
        self.delays.sleep("forward")
        self.calls += 1
        rows = Late.apply(self.first(rows), self.delays)
        for layer in self.inner:
            rows = torch.tanh(layer(rows))
        if self.sometimes is not None and self.calls % 2:
            rows = self.sometimes(rows)
        return self.last(rows)


class Model:
    """A wrapped network with its optimizer, and the time of its last gradient (monotonic ns)."""

    def __init__(self, options, delays):
        net = Net(delays, options.find_unused)
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)
        self.ddp = DistributedDataParallel(net, find_unused_parameters=options.find_unused)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        self.last_ns = 0

    def _ready(self, parameter):
        self.last_ns = time.monotonic_ns()

    def run(self, rows, values, synchronized):
        """Run a forward and a backward pass; return its tail."""
        with nullcontext() if synchronized else self.ddp.no_sync():
            (self.ddp(rows) - values).pow(2).mean().backward()
            ended = time.monotonic_ns()
        return {"synchronized": synchronized, "tail_ms": (ended - self.last_ns) / 1e6}


def train(options):
    """Train; return the measurements of this rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    delays = Delays()
    models = [Model(options, delays) for _ in range(2 if options.two_models else 1)]
    steps = options.steps - 3 * rank if options.uneven else options.steps
    batches = iter(DataLoader(Rows(steps * options.accumulate, delays), batch_size=None))
    found = []

    def step():
        """Run a step: all accumulated batches and passes, then the optimizers."""
        passes = []
        began = time.monotonic_ns()
        for part in range(options.accumulate):
            last = part == options.accumulate - 1
            for phase in PHASES:
                slow = last and (rank, phase) == (options.rank, options.phase)
                delays.extra[phase] = options.ms / 1000 if slow else 0.0
            rows, values = next(batches)
            for model in models:
                passes.append(model.run(rows, values, last))
                if model is not models[-1]:
                    delays.extra["forward"] = delays.extra["backward"] = 0.0
        for model in models:
            model.optimizer.step()
            model.optimizer.zero_grad()
        found.append(
            {
                "rank": rank,
                "step_ms": (time.monotonic_ns() - began) / 1e6,
                "tail_ms": sum(each["tail_ms"] for each in passes if each["synchronized"]),
                "synchronized": sum(each["synchronized"] for each in passes),
                "unsynchronized": sum(not each["synchronized"] for each in passes),
                "passes": passes,
            }
        )

    with Join([model.ddp for model in models]) if options.uneven else nullcontext():
        for _ in range(steps):
            step()
    return found


def run_rank(options, store):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    steps = train(options)
    everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(steps, everything)
    if everything is not None:
        sys.stdout.write("".join(json.dumps(one) + "\n" for of_rank in everything for one in of_rank))
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def fork_ranks(options):
    """Run each rank in a forked child; return the exit status of the first that failed."""
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(options.ranks):
            child = os.fork()
            if not child:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
                run_rank(options, f"{directory}/store")
                return 0
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((abs(status) for status in statuses if status), 0)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Train with one slow rank.")
    parser.add_argument("--ranks", type=int, default=2, help="how many")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=1, help="who is slow")
    parser.add_argument("--phase", choices=[*PHASES, "none"], default="backward", help="in what; none: nobody is slow")
    parser.add_argument("--ms", type=float, default=30.0, help="by how much")
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="K", help="passes a step, all but one under no_sync"
    )
    parser.add_argument("--find-unused", action="store_true", help="a layer is used in every other call only")
    parser.add_argument("--two-models", action="store_true", help="two wrapped models, one after the other")
    parser.add_argument("--uneven", action="store_true", help="each rank has three steps less than the one before")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(fork_ranks(parse_arguments()))

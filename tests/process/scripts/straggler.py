"""Runs DistributedDataParallel ranks, one of them slow, and prints their own measurements; does not use dpmon.

    python straggler.py --ranks 8 --phase data --share 0.1 --switch-every 50

It forks the ranks, so that torch is imported once. Rank 0 prints JSON lines at the end: `run`
(how slow, and the step before anybody was slow), then a `step` for each step and rank. All times are in ms, by the
rank's own clock. In `passes` each forward and backward pass has the time from the start of its backward to its last
gradient, and the tail: from that gradient to the end of its backward. Ranks wait for each other in the tails of
synchronised passes; passes under no_sync are not synchronised. A rank is slow once a step: in its last batch, and in
the first of two models.
"""

import argparse
import json
import os
import statistics
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
WARM_UP = 10
"""First steps, which do not count for the duration of the balanced step."""


class Delays:
    """Delays of this rank in each phase of the next pass, s."""

    def __init__(self, work_ms):
        self.work = work_ms / 1000
        self.extra = dict.fromkeys(PHASES, 0.0)

    def sleep(self, phase):
        seconds = self.work + self.extra[phase]
        if seconds:
            time.sleep(seconds)


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

    def __init__(self, number, options, delays):
        self.number = number
        net = Net(delays, options.find_unused)
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)
        self.ddp = DistributedDataParallel(net, find_unused_parameters=options.find_unused)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        self.last_ns = 0

    def _ready(self, parameter):
        self.last_ns = time.monotonic_ns()

    def run(self, rows, values, synchronised):
        """Run a forward and a backward pass; return their times."""
        with nullcontext() if synchronised else self.ddp.no_sync():
            began = time.monotonic_ns()
            result = self.ddp(rows)
            computed = time.monotonic_ns()
            loss = (result - values).pow(2).mean()
            backward = time.monotonic_ns()
            loss.backward()
            ended = time.monotonic_ns()
        return {
            "model": self.number,
            "synchronised": synchronised,
            "forward_ms": (computed - began) / 1e6,
            "backward_ms": (ended - backward) / 1e6,
            "last_gradient_ms": (self.last_ns - backward) / 1e6,
            "tail_ms": (ended - self.last_ns) / 1e6,
        }


class Schedule:
    """Which rank is slow in which step, and by how much."""

    def __init__(self, options, world):
        self.options = options
        self.world = world
        self.slow_ms = options.ms or 0.0

    def of(self, step):
        """Return rank and phase that are slow in a step (from 1), or None."""
        options = self.options
        after = step - 1 - options.balanced_steps
        if options.phase == "none" or after < 0:
            return None
        switches = after // options.switch_every if options.switch_every else 0
        phase = PHASES[(PHASES.index(options.phase) + switches) % len(PHASES)]
        return (options.rank + switches) % self.world, phase


def agreed(value):
    """Return the mean of a number over all ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(options):
    """Train; return the measurements of this rank, and the balanced step in ms (None if not measured)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    delays = Delays(options.work_ms)
    models = [Model(number, options, delays) for number in range(2 if options.two_models else 1)]
    schedule = Schedule(options, world)
    steps = max(options.steps - 3 * rank, options.balanced_steps + 1) if options.uneven else options.steps
    batches = iter(DataLoader(Rows(steps * options.accumulate, delays), batch_size=None))
    found = []
    balanced_ms = None

    def step(number):
        """Run a step: all accumulated batches and passes, then the optimizers."""
        slow = schedule.of(number)
        passes = []
        data_ns = 0
        began = time.monotonic_ns()
        for part in range(options.accumulate):
            last = part == options.accumulate - 1
            for phase in PHASES:
                delays.extra[phase] = schedule.slow_ms / 1000 if last and slow == (rank, phase) else 0.0
            asked = time.monotonic_ns()
            rows, values = next(batches)
            data_ns += time.monotonic_ns() - asked
            for model in models:
                passes.append(model.run(rows, values, last))
                if model is not models[-1]:
                    delays.extra["forward"] = delays.extra["backward"] = 0.0
        for model in models:
            model.optimizer.step()
            model.optimizer.zero_grad()
        found.append(
            {
                "kind": "step",
                "rank": rank,
                "step": number,
                "slow_rank": slow and slow[0],
                "slow_phase": slow and slow[1],
                "slow_ms": schedule.slow_ms if slow else 0.0,
                "step_ms": (time.monotonic_ns() - began) / 1e6,
                "data_ms": data_ns / 1e6,
                "forward_ms": sum(each["forward_ms"] for each in passes),
                "backward_ms": sum(each["backward_ms"] for each in passes),
                "tail_ms": sum(each["tail_ms"] for each in passes if each["synchronised"]),
                "synchronised": sum(each["synchronised"] for each in passes),
                "unsynchronised": sum(not each["synchronised"] for each in passes),
                "passes": passes,
            }
        )

    for number in range(1, options.balanced_steps + 1):
        step(number)
    if options.balanced_steps:
        measured = [one["step_ms"] for one in found[min(WARM_UP, options.balanced_steps - 1) :]]
        balanced_ms = agreed(statistics.median(measured))
        if options.share:
            schedule.slow_ms = options.share * balanced_ms
    with Join([model.ddp for model in models]) if options.uneven else nullcontext():
        for number in range(options.balanced_steps + 1, steps + 1):
            step(number)
    return found, balanced_ms, schedule.slow_ms


def run_rank(options, store):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    steps, balanced_ms, slow_ms = train(options)
    everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(steps, everything)
    if everything is not None:
        about = {"world": len(everything), "balanced_ms": balanced_ms, "slow_ms": slow_ms}
        lines = [
            {"kind": "run", **about, "options": vars(options)},
            *(one for of_rank in everything for one in of_rank),
        ]
        sys.stdout.write("".join(json.dumps(line) + "\n" for line in lines))
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
    parser.add_argument("--ms", type=float, help="by how much")
    parser.add_argument("--share", type=float, help="the same as a share of the balanced step, which is measured first")
    parser.add_argument("--balanced-steps", type=int, help="steps before anybody is slow (with --share: 40)")
    parser.add_argument(
        "--switch-every", type=int, default=0, metavar="K", help="the next rank and phase after K steps"
    )
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="K", help="passes a step, all but one under no_sync"
    )
    parser.add_argument("--find-unused", action="store_true", help="a layer is used in every other call only")
    parser.add_argument("--two-models", action="store_true", help="two wrapped models, one after the other")
    parser.add_argument("--uneven", action="store_true", help="each rank has three steps less than the one before")
    parser.add_argument(
        "--work-ms", type=float, default=0.0, help="what every rank sleeps in each phase, as if it worked"
    )
    options = parser.parse_args()
    if options.ms is not None and options.share is not None:
        parser.error("--ms or --share, not both")
    if options.ms is None and options.share is None:
        options.ms = 0.0 if options.phase == "none" else 30.0
    if options.balanced_steps is None:
        options.balanced_steps = 0 if options.share is None else 40
    if options.share is not None and options.balanced_steps < 1:
        parser.error("--share needs balanced steps")
    if options.balanced_steps >= options.steps:
        parser.error("no step is left after the balanced ones")
    return options


if __name__ == "__main__":
    sys.exit(fork_ranks(parse_arguments()))

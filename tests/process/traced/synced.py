"""Forms of training with DistributedDataParallel, in one process. The script counts for itself and prints that.

Its own communication hook counts synchronized passes, and hooks on its parameters note the last gradient.
"""

import contextlib
import json
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 20
torch.set_num_threads(1)


class Counted:
    """A model, and the counts of its hooks."""

    def __init__(self, model, **options):
        self.synced = 0
        self.last_ns = 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)
        self.model = DistributedDataParallel(model, **options)
        self.model.register_comm_hook(None, self._reduces)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def _ready(self, _):
        self.last_ns = time.monotonic_ns()

    def _reduces(self, _, bucket):
        self.synced += bucket.is_last()
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def layers(count=3, width=64):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.out((self.second if self.calls % 3 == 0 else self.first)(x))


def plain(found, options=None, model=None, before_notes=None):
    one = Counted(model or layers(), **(options or {}))
    if before_notes is not None:
        one.model._check_sync_bufs_post_fwd = before_notes
    for _ in range(STEPS):
        step_of(found, [one.optimizer], [one], lambda: one.model(torch.randn(16, 64)).square().sum())


def accumulating(found, unsynced=3):
    """Four backward passes a step; the first ones are under no_sync."""
    one = Counted(layers())
    for _ in range(STEPS):
        before = one.synced
        for batch in range(4):
            with one.model.no_sync() if batch < unsynced else contextlib.nullcontext():
                one.model(torch.randn(16, 64)).square().sum().backward()
        found.append({"synced": one.synced - before, "unsynced": unsynced})
        one.optimizer.step()
        one.optimizer.zero_grad()


def rivals(found):
    make, judge = Counted(layers(2)), Counted(layers(4))
    for _ in range(STEPS):
        before = make.synced + judge.synced
        judge.optimizer.zero_grad()
        judge.model(make.model(torch.randn(16, 64)).detach()).square().sum().backward()
        judge.optimizer.step()
        make.optimizer.zero_grad()
        judge.model(make.model(torch.randn(16, 64))).square().sum().backward()
        make.optimizer.step()
        found.append({"synced": make.synced + judge.synced - before})


def evaluating(found):
    one = Counted(layers())

    def loss():
        with torch.no_grad():
            one.model(torch.randn(16, 64))
        return one.model(torch.randn(16, 64)).square().sum()

    for _ in range(STEPS):
        step_of(found, [one.optimizer], [one], loss)


def raising(found):
    def fails(_):
        raise ValueError("on purpose")

    one = Counted(layers())

    def loss():
        result = one.model(torch.randn(16, 64))
        if len(found) == 5:
            result.register_hook(fails)
            with contextlib.suppress(ValueError):
                result.square().sum().backward()
            result = one.model(torch.randn(16, 64))
        return result.square().sum()

    for _ in range(STEPS):
        step_of(found, [one.optimizer], [one], loss)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = layers(2), layers(2)

    def forward(self, x):
        return self.two(checkpoint(self.one, x, use_reentrant=False))


class Slow(torch.autograd.Function):
    """Returns its input; the backward pass takes 10 ms."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.01)
        return gradient


def step_of(found, optimizers, counted, loss_of):
    """Run a step with gradients of these models; return the true figures of it."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    before = sum(one.synced for one in counted)
    loss = loss_of()
    began = time.monotonic_ns()
    loss.backward()
    ended = time.monotonic_ns()
    last = max(one.last_ns for one in counted)
    synced = sum(one.synced for one in counted) - before
    found.append({"synced": synced, "tail_ns": ended - last, "backward_ns": ended - began})
    for optimizer in optimizers:
        optimizer.step()


def chained(found):
    """Two wrapped models, with much computation between their gradients."""
    encoder, decoder = Counted(layers()), Counted(layers())
    both = torch.optim.SGD([*encoder.model.parameters(), *decoder.model.parameters()], lr=0.01)
    for _ in range(STEPS):

        def loss():
            return decoder.model(Slow.apply(encoder.model(torch.randn(16, 64)))).square().sum()

        step_of(found, [both], [encoder, decoder], loss)


class Around(nn.Module):
    """A wrapped model inside another one, with much to compute after its gradients."""

    def __init__(self):
        super().__init__()
        self.before, self.part = nn.Linear(64, 64), Counted(layers())
        self.inner = self.part.model
        for parameter in self.before.parameters():
            parameter.register_post_accumulate_grad_hook(self.part._ready)

    def forward(self, x):
        return self.inner(Slow.apply(self.before(x)))


def around(found):
    model = Around()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        step_of(found, [optimizer], [model.part], lambda: model(torch.randn(16, 64)).square().sum())


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = layers(2), layers(2)

    def forward(self, x):
        return self.one(x), self.two(x)


def towers(found):
    """Two backward passes of one forward: the second one completes the gradients."""
    one = Counted(Towers())
    for _ in range(STEPS):
        one.optimizer.zero_grad()
        before = one.synced
        first, second = one.model(torch.randn(16, 64))
        first.square().sum().backward()
        began = time.monotonic_ns()
        second.square().sum().backward()
        ended = time.monotonic_ns()
        found.append({"synced": one.synced - before, "tail_ns": ended - one.last_ns, "backward_ns": ended - began})
        one.optimizer.step()


def teacher(found):
    """A second wrapped model is called under no_sync and learns nothing."""
    one, other = Counted(layers()), Counted(layers())
    for _ in range(STEPS):

        def loss():
            with other.model.no_sync():
                wanted = other.model(torch.randn(16, 64)).detach()
            return (one.model(torch.randn(16, 64)) - wanted).square().sum()

        step_of(found, [one.optimizer], [one], loss)


def again(found):
    for _ in range(4):
        one = Counted(layers())
        for _ in range(5):
            step_of(found, [one.optimizer], [one], lambda one=one: one.model(torch.randn(16, 64)).square().sum())


def compiled(found):
    one = Counted(layers())
    model = torch.compile(one.model, backend="eager")
    for _ in range(STEPS):
        step_of(found, [one.optimizer], [one], lambda: model(torch.randn(16, 64)).square().sum())


FORMS = {
    "plain": plain,
    "static": lambda found: plain(found, {"static_graph": True}),
    "buckets": lambda found: plain(found, {"bucket_cap_mb": 0.02}, layers(8)),
    "late": lambda found: plain(found, {"bucket_cap_mb": 0.02}, layers(8), lambda: time.sleep(0.01)),
    "unused": lambda found: plain(found, {"find_unused_parameters": True}, Branches()),
    "recomputed": lambda found: plain(found, model=Recomputed()),
    "accumulating": accumulating,
    "forgotten": lambda found: accumulating(found, 0),
    "rivals": rivals,
    "evaluating": evaluating,
    "raising": raising,
    "again": again,
    "compiled": compiled,
    "chained": chained,
    "around": around,
    "towers": towers,
    "teacher": teacher,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        steps = []
        FORMS[sys.argv[1]](steps)
        print(json.dumps(steps))
        dist.destroy_process_group()

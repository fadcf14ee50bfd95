"""One rank that does something unusual (the first argument) while collectives are sampled."""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

STEPS = 40
HAS = torch._C._dispatch_has_kernel_for_dispatch_key
how = sys.argv[1]
ours = sys.modules["dpmon.tracer.collectives.collective_sampler"]
operators = sys.modules["dpmon.tracer.collectives.kernels"]
if how == "asked":
    ours.STEP_MULTIPLE = 1 << 20
elif how == "lacks":
    del torch._C._dispatch_keyset_full_after
else:
    ours.MAX_COST_SHARE, ours.STEP_MULTIPLE, ours.MIN_INTERVAL_NS = 1e9, 4, 1
    ours.RETRY_NS, ours.MAX_FAILED_ATTEMPTS = 1_000_000, 20
if how != "no group":
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
said: dict[str, object] = {}
x = torch.ones(10)


def step(batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(steps: int, inside=lambda: None) -> None:
    for batch in DataLoader(torch.ones(steps, 4), batch_size=None):
        inside()
        step(batch)


if how == "own kernels":
    seen = {"AutogradCPU": 0, "BackendSelect": 0}
    library = torch.library.Library("c10d", "IMPL")

    def at(key: str, name: str) -> None:
        op = getattr(torch.ops.c10d, name).default
        below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))

        def kernel(keyset, *args):
            seen[key] += 1
            return op.redispatch(keyset & below, *args)

        library.impl(name, kernel, key, with_keyset=True)

    at("AutogradCPU", "allreduce_")
    at("BackendSelect", "broadcast_")
    train(STEPS, lambda: (dist.all_reduce(x), dist.broadcast(x, 0)))
    said = seen
elif how == "interrupts":
    raised = caught = 0

    def handler(number, frame):
        global raised
        raised += 1
        raise KeyboardInterrupt

    train(8, lambda: dist.all_reduce(x))
    signal.signal(signal.SIGALRM, handler)

    for number, batch in enumerate(DataLoader(torch.ones(600, 4), batch_size=None)):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + number % 100 * 0.00001)
            for _ in range(20):
                dist.all_reduce(x)
            time.sleep(5)  # Python 3.13 may raise at the end of a loop as if it were outside of `try`
        except KeyboardInterrupt:
            caught += 1
        step(batch)
    train(STEPS, lambda: dist.all_reduce(x))
    said |= {"raised": raised, "caught": caught}
elif how == "forks":
    statuses = []

    def fork() -> None:
        dist.all_reduce(x)
        child = os.fork()
        if child == 0:
            torch.ones(3).sum()
            os._exit(0 if ours is not None else 1)
        statuses.append(os.waitpid(child, 0)[1])

    train(STEPS // 2, fork)
    said["statuses"] = statuses
elif how.startswith("threads"):
    done = threading.Event()
    count = 0
    group = dist.new_group([0])

    def communicate() -> None:
        global count
        dist.all_reduce(torch.ones(5), group=group)
        count += 1

    def beside() -> None:
        while not done.is_set():
            communicate()
            time.sleep(0.001)

    # A thread that is in a function of torch.distributed all the time.
    endless = compile("while not done.is_set(): communicate()", f"{os.path.dirname(dist.__file__)}/endless.py", "exec")
    inside = {"done": done, "communicate": communicate}
    thread = threading.Thread(target=beside if how == "threads that rest" else lambda: exec(endless, inside))
    thread.start()

    def with_the_thread() -> None:
        before = count
        dist.all_reduce(x)
        while count == before and how == "threads that rest":  # on a busy machine, it may rest for the whole training
            time.sleep(0.0001)

    train(400, with_the_thread)
    while count <= 100:
        time.sleep(0.001)
    done.set()
    thread.join()
    said["count"] = count
elif how == "no optimizer":
    ours.FIRST_SAMPLE_DELAY_NS = 0
    for batch in DataLoader(torch.ones(STEPS, 4), batch_size=None):
        dist.all_reduce(x)
        model(batch).sum().backward()
elif how == "accumulates":
    for number, batch in enumerate(DataLoader(torch.ones(3 * STEPS, 4), batch_size=None)):
        dist.all_reduce(x)
        model(batch).sum().backward()
        if number % 3 == 2:
            optimizer.step()
elif how == "looks ahead":
    others = iter(DataLoader(torch.ones(STEPS, 4), batch_size=None))
    for batch in DataLoader(torch.ones(STEPS, 4), batch_size=None):
        dist.all_reduce(x)
        next(others)
        step(batch)
elif how == "apart":
    ours.MIN_INTERVAL_NS = 300_000_000
    train(400, lambda: (dist.all_reduce(x), threading.Event().wait(0.004)))
elif how == "asked":
    print("ready", flush=True)
    for batch in DataLoader(torch.ones(40_000, 4), batch_size=None):
        dist.all_reduce(x)
        step(batch)
        threading.Event().wait(0.002)
        if os.path.exists("enough"):
            break
else:
    train(STEPS, (lambda: None) if how == "no group" else lambda: dist.all_reduce(x))
if how == "no group":
    said["registered"] = any(HAS(f"c10d::{name}", "BackendSelect") for name in operators.OPERATORS)
else:
    if not how.startswith(("no", "looks")):
        train(2)
    said["left"] = [thread.name for thread in threading.enumerate()]
    dist.destroy_process_group()
print(json.dumps(said))

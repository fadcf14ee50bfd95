"""Trains on simulated devices (plays_cuda is put before this text); prints the steps of each part."""

import json
import os
import threading

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

begin()  # noqa: F821 - of plays_cuda, as all that is not defined here
ROWS = 8
said = {}


class Model(nn.Module):
    """Takes 3 ms forward and 5 ms backward per eight rows, on the device of the rows."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 2)

    def forward(self, x):
        device = 0 if x[0, 0] < ROWS / 2 else 1
        PLAYED.work(3.0 * len(x) / ROWS, device)  # noqa: F821
        out = self.part(x)
        if out.requires_grad:
            out.register_hook(lambda grad: PLAYED.work(5.0 * len(x) / ROWS, device))  # noqa: F821
        return out


rows = torch.arange(float(ROWS)).repeat(40)[:, None].repeat(1, 4)  # noqa: F821
loader = DataLoader(TensorDataset(rows), ROWS)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-6)  # noqa: F821
optimizer.register_step_pre_hook(lambda *_: PLAYED.work(0.5))  # noqa: F821
net = nn.DataParallel(model) if sys.argv[1] == "dp" else model  # noqa: F821


def batches():
    while True:
        for (batch,) in loader:
            PLAYED.work(0.25)  # noqa: F821
            yield batch


source = batches()
steps = 0
composed = False


def by_hand(batch):
    """Do the same as DataParallel, with its primitives."""
    given = nn.parallel.scatter((batch,), [0, 1])
    PLAYED.work(0.1)  # noqa: F821 - the script's own work between them is in none of them
    made = nn.parallel.parallel_apply(nn.parallel.replicate(model, [0, 1]), given)
    return nn.parallel.gather(made, 0)


def train_step(closure=False):
    global steps
    steps += 1

    def work():
        optimizer.zero_grad()
        loss = (by_hand(batch) if composed else net(batch)).sum()
        loss.backward()
        return loss

    batch = next(source)
    if closure:
        optimizer.step(work)
    else:
        work()
        optimizer.step()


def part(name, count, **options):
    first = steps + 1
    for _ in range(count):
        train_step(**options)
    said[name] = first, steps


def plain():
    device = PLAYED.devices[0]  # noqa: F821
    device.lag = 20.0  # a little more than two steps
    part("usual", 12)
    part("closure", 3, closure=True)
    PLAYED.capturing = True  # noqa: F821
    part("captured", 2)
    PLAYED.capturing = False  # noqa: F821
    part("after it", 3)
    graph = torch.cuda.CUDAGraph()  # noqa: F821
    thread = threading.Thread(target=graph.capture_begin)
    thread.start()
    thread.join()
    part("captured by another thread", 2)
    graph.capture_end()
    part("after that one", 3)
    device.lag = 0.0
    part("last", 6)
    said["untouched"] = [PLAYED.while_capturing, PLAYED.waits]  # noqa: F821
    said["asked by others"] = len(PLAYED.asked_by - {threading.get_ident()})  # noqa: F821
    child = os.fork()
    if child == 0:
        part("child", 3)
        sys.exit(0)  # noqa: F821
    os.waitpid(child, 0)


def over_two():
    PLAYED.devices[1].lag = 20.0  # noqa: F821
    part("usual", 8)
    PLAYED.devices[1].lag = 0.0  # noqa: F821
    part("in step", 4)
    global composed
    composed = True
    part("by hand", 5)


{"plain": plain, "dp": over_two}[sys.argv[1]]()  # noqa: F821
print(json.dumps(said))

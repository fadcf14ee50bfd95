"""Leaves open what a script may leave open, and prints when each object is freed, for every form of call, loop and end.

Arguments: the form of the call, the batches ("list", or the number of a DataLoader's workers), the end.
"""

import atexit
import concurrent.futures
import contextlib
import gc
import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref

import torch
from torch import nn
from torch.nn import parallel

FORM, BATCHES, END = sys.argv[1:4]
gc.disable()  # to separate objects that wait for a collection from those freed at once
torch.manual_seed(0)
ORDER = os.open("order", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
LIVE = {}


def tell(text, write=os.write, to=ORDER):
    write(to, f"{text}\n".encode())


class Counted:
    """Reports when it is freed."""

    def __init__(self, name, tell=tell, live=LIVE):
        self.name, self.tell, self.live = name, tell, live
        live[name] = live.get(name, 0) + 1

    def __del__(self):
        self.live[self.name] -= 1
        if self.name.startswith("global"):  # `look` reports the others
            self.tell(f"{self.name} gone")


def look(where):
    """Report which objects of the run are alive."""
    tell(f"{where}: {sorted(name for name, count in LIVE.items() if count and not name.startswith('global'))}")


def tagged(value, name):
    value.tag = Counted(name)
    return value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)
        self.tag = Counted("net")
        self.fail = False
        if FORM == "stages":
            self.unused = nn.Linear(2, 2, device="meta")

    def forward(self, x):
        hidden = tagged(self.one(x), "hidden")
        if self.fail:
            raise ValueError("as asked")
        return self.two(hidden.relu())


class Finalized(Net):
    """Has a finalizer, which must run as often as without dpmon."""

    def __del__(self, tell=tell):
        tell("a network's finalizer")


class Spread(nn.DataParallel):
    """Has its own forward."""

    def forward(self, x):
        self.seen = x.shape
        return super().forward(x) * 1


class FinalizedSpread(Spread):
    def __del__(self, tell=tell):
        tell("a wrapper's finalizer")


def functional(net, x):
    return parallel.data_parallel(net, x) if HERE else net(x)


def by_hand(net, x):
    copies = parallel.replicate(net, [0, 0]) if HERE else [net, net]
    parts = [(part,) for part in x.chunk(2)]
    applied = parallel.parallel_apply(copies, parts) if HERE else [copies[0](*part) for part in parts]
    if FORM == "ungathered":
        return torch.cat(list(applied))
    return parallel.gather(applied, 0) if HERE else torch.cat(applied)


HERE = "dpmon.tracer.patch" in sys.modules and os.environ.get("DPMON_MODE") != "script"
"""Whether the primitives run on a machine without GPUs."""


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return functional(self.net, x)


def made():
    net = Finalized() if FORM in ("finalized", "dp-finalized", "functional-finalized") else Net()
    if FORM.startswith("dp"):
        return net, nn.DataParallel(net)
    if FORM == "subclass":
        return net, Spread(net)
    if FORM == "subclass-finalized":
        return net, FinalizedSpread(net)
    if FORM == "ddp":
        return net, parallel.DistributedDataParallel(net)
    if FORM.startswith("functional"):
        return net, lambda x: functional(net, x)
    if FORM in ("hand", "ungathered"):
        return net, lambda x: by_hand(net, x)
    if FORM == "inside":
        whole = Inside()
        return whole.net, whole
    if FORM == "compiled":
        return net, torch.compile(net, backend="eager")
    if FORM == "forward":
        return net, net.forward
    return net, net


def batches():
    data = torch.randn(24, 4)
    if BATCHES == "list":
        return list(data.split(6))
    dataset = torch.utils.data.TensorDataset(data)
    return [] if not len(dataset) else torch.utils.data.DataLoader(dataset, 6, num_workers=int(BATCHES))


def train(times=2):
    net, call = made()
    look("made")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    optimizer.tag = Counted("optimizer")
    for _ in range(times):
        for batch in batches():
            x = tagged(batch[0] if isinstance(batch, (list, tuple)) else batch.clone(), "x")
            out = tagged(call(x), "out")
            look("called")
            loss = tagged(out.mean(), "loss")
            optimizer.zero_grad()
            loss.backward()
            del out
            optimizer.step()
            del x, batch
            look("stepped")
            del loss
            look("over")
    with torch.no_grad():
        out = tagged(call(tagged(torch.randn(6, 4), "x")), "out")
    look("evaluated")
    del out, optimizer
    look("without optimizer")
    net.fail = True
    kept = None
    if FORM != "compiled":
        try:
            call(tagged(torch.randn(6, 4), "x"))
        except ValueError as error:
            kept = error
            traceback.clear_frames(error.__traceback__)
        look("failed")
        del kept
    look("forgotten")
    del net, call
    look("deleted")


def globals_of_all_kinds():
    """Globals that a script may have at its end; a reference to one keeps all of them alive."""
    names = globals()
    names["log"] = log = open("log", "w", buffering=1 << 20)  # noqa: SIM115 - left open on purpose, like those below
    for number in range(2000):
        log.write(f"line {number}\n")
    names["files"] = {"inner": [open("inner", "wb")]}  # noqa: SIM115
    names["files"]["inner"][0].write(b"tail")
    names["one"], names["two"] = Counted("global one"), Counted("global two")
    names["ring"] = ring = [Counted("global in a ring")]
    ring.append(ring)
    Net.attribute = Counted("global on the class")
    names["pair"] = socket.socketpair()
    names["finalize"] = weakref.finalize(names["one"], tell, "finalize of one")
    names["at_exit"] = weakref.finalize(names["two"], tell, "finalize of two")
    names["at_exit"].atexit = False
    names["directory"] = tempfile.TemporaryDirectory(dir=".", prefix="kept", ignore_cleanup_errors=True)
    names["temporary"] = tempfile.NamedTemporaryFile(dir=".", prefix="gone")  # noqa: SIM115
    names["mapped"] = mapped = mmap.mmap(-1, 4096)
    mapped[:3] = b"abc"

    def generator():
        try:
            yield 1
            yield 2
        finally:
            tell("the generator's end")

    names["generated"] = generated = generator()
    next(generated)
    names["stack"] = stack = contextlib.ExitStack()
    stack.callback(tell, "never")
    names["pool"] = pool = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(tell, "in the pool").result()
    pool.submit(threading.Event().wait, 0.05)
    names["event"] = threading.Event()
    if END != "_exit":  # it may come before or after the thread's end
        threading.Thread(target=lambda: (names["event"].wait(0.05), tell("a thread's end"))).start()
    threading.Thread(target=names["event"].wait, daemon=True).start()
    atexit.register(tell, "at exit")
    names["local"] = local = threading.local()
    local.value = Counted("global of a thread")


if __name__ == "__main__":
    if FORM == "ddp":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    train()
    for _ in range(3):
        train(1)  # a model deleted and built again
    globals_of_all_kinds()
    model, called = made()
    model.tag = Counted("global on a model")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        called(batch[0] if isinstance(batch, (list, tuple)) else batch).mean().backward()
        optimizer.step()
    last = called(torch.randn(6, 4))
    last.tag = Counted("global on a tensor")
    if FORM == "ddp":
        torch.distributed.destroy_process_group()
    if END == "raise":
        raise RuntimeError("no more")
    if END == "exit":
        sys.exit(3)
    if END == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
    if END == "inside":
        model.fail = True
        called(torch.randn(6, 4))
    if END == "_exit":
        os._exit(7)
    if END == "thread":
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()
    if END == "collect":
        gc.enable()

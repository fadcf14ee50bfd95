"""Prints as JSON what a virtual replica sees of its thread.

Argument: the number of threads that the script's own parallel regions take, or "interrupted" to test an interrupt.
"""

import contextvars
import json
import os
import signal
import sys
import threading
import warnings

import torch
from torch import nn

LIMIT_S = 60
warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)


class Does(nn.Module):
    """Calls `what` in each replica."""

    def __init__(self, what):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.what = what

    def forward(self, x):
        self.what(x)
        return self.layer(x)


def calls(what, count=1):
    """The results of `what` in the replicas of `count` calls."""
    found = []
    model = nn.DataParallel(Does(lambda x: found.append(what(x))))
    for _ in range(count):
        model(torch.ones(4, 4))
    return found


def work():
    """Parallel regions of ATen's and of MKL's."""
    torch.ones(2_000_000).tanh().sum().item()
    (torch.ones(700, 700) @ torch.ones(700, 700)).sum().item()


def number_of_threads(_):
    before = len(os.listdir("/proc/self/task"))
    work()
    return torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before


def meeting():
    """Whether two replicas run at the same time: each waits for the other."""
    barrier = threading.Barrier(2, timeout=LIMIT_S)
    return lambda _: barrier.wait()


variable = contextvars.ContextVar("variable", default="default")


def state(_):
    """Return what an earlier replica left in this context, and leave something there."""
    found = variable.get()
    variable.set("left behind")
    return found


def names(_):
    current = threading.current_thread()
    return current is not threading.main_thread() and current in threading.enumerate()


def fails(_):
    raise LookupError("a bad batch")


def caught():
    try:
        calls(fails)
    except LookupError as error:
        return str(error).splitlines()[-1]


def in_child():
    """The status of a forked child that calls the model."""
    pid = os.fork()
    if pid == 0:
        os._exit(len(calls(lambda _: None, 3)))
    return os.waitpid(pid, 0)[1] >> 8


def traced():
    """Functions that a debugger sees in replicas."""
    seen = set()
    threading.settrace(lambda frame, event, argument: seen.add(frame.f_code.co_name))
    calls(number_of_threads)
    threading.settrace(None)
    return "number_of_threads" in seen


def ends_while_a_replica_runs():
    """The main thread is interrupted; the replicas go on in torch and print a line at their end."""
    interrupted = threading.Event()

    def interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    def goes_on(_):
        started.wait()
        interrupted.wait(LIMIT_S)
        work()
        os.write(1, b"ran to its end\n")

    started = threading.Barrier(3, timeout=LIMIT_S)
    signal.signal(signal.SIGUSR1, interrupt)

    def sends():
        started.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=sends).start()
    calls(goes_on)


if sys.argv[1] == "interrupted":
    ends_while_a_replica_runs()
torch.set_num_threads(int(sys.argv[1]))
work()
calls(number_of_threads)
threads_before = threading.enumerate()
said = {
    "at first": torch.get_num_threads(),
    "in replicas": calls(number_of_threads, 5),
    "alone afterwards": torch.get_num_threads(),
    "at the same time": sorted(calls(meeting())),
    "state": calls(state, 3),
    "current": calls(names, 2),
    "threads": len(set(calls(lambda _: threading.get_native_id(), 20))),
    "error": caught(),
    "after an error": len(calls(lambda _: None)),
    "in a child": in_child(),
    "traced": traced(),
    "left": [str(thread) for thread in threading.enumerate() if thread not in threads_before],
}
torch.set_num_threads(1)
said["in replicas of a script that takes one"] = calls(number_of_threads)
print(json.dumps(said))

"""Trainings that end in many ways, each in a forked child; prints their process ids, statuses and finished calls."""

import atexit
import gc
import json
import os
import random
import signal
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

BATCHES = 20
# Python 3.12 warns of what may go wrong in a child of a process with threads.
warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)


def train(how, model, tell):
    for number, x in enumerate(DataLoader(torch.randn(100_000, 4), batch_size=10), 1):
        out = model(x)
        os.write(tell, b"%d\n" % number)
        if number == BATCHES:
            if how == "exit":
                os._exit(7)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            if how == "exec":
                os.execv(sys.executable, [sys.executable, "-c", ""])
            if how == "close":
                os.closerange(3, 256)
                tell = os.open(os.devnull, os.O_WRONLY)
        out.sum().backward()
        if number == BATCHES + 5 and how != "wait":
            return
    while how == "wait":
        signal.pause()


def run(name, how, model, kill_at):
    """Run in a child; kill it after it has reported `kill_at` calls, or wait for its end."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            train(how, model, write)
        finally:
            atexit._run_exitfuncs()
            os._exit(0)
    os.close(write)
    lines = []
    with open(read, "rb") as pipe:
        for line in pipe:
            lines.append(int(line))
            if lines[-1] == kill_at:
                os.kill(pid, signal.SIGKILL)
    return [name, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), lines]


torch.set_num_threads(1)
gc.freeze()
chance = random.Random(3)
told = []
for how in ("exit", "kill", "segv", "exec", "close", "end"):
    told.append(run(f"{how}, bare", how, nn.Linear(4, 1), -1))
    told.append(run(f"{how}, wrapped", how, nn.DataParallel(nn.Linear(4, 1)), -1))
for number in range(30):
    model = nn.Linear(4, 1) if number % 3 else nn.DataParallel(nn.Linear(4, 1))
    told.append(run(f"killed, {number}", "wait", model, chance.randrange(1, 80)))
print(json.dumps(told))

"""Ends in the middle of its training, in the way its argument names."""

import atexit
import os
import signal
import sys
import threading

import torch
from torch import nn


def bye(*_):
    print("signal handler of the script")
    sys.exit(7)


def end(how):
    if how == "hard-exit":
        os._exit(5)
    if how == "raise":
        raise ValueError("wrong on purpose")
    if how == "in-forward":
        Fails()(torch.ones(1))
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "handled":
        signal.signal(signal.SIGTERM, bye)
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "in-thread":
        thread = threading.Thread(target=end, args=("raise",), name="worker")
        thread.start()
        thread.join()


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        raise RuntimeError("the forward itself fails")


atexit.register(print, "atexit handler of the script")
model = nn.DataParallel(nn.Linear(4, 1))
for step, x in enumerate(torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=4)):
    model.zero_grad()
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    print("step", step)
    if step == 3:
        end(sys.argv[1])

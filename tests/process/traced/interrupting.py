"""Interrupts the tracer before each line of its code, as a signal may, and checks that the training is not affected.

The argument selects the signal handler: it calls another model, or raises, as for Ctrl-C.
"""

import json
import os
import sys

import torch
import torch._dynamo
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
from torch.utils.data import DataLoader

OURS = os.environ["OURS"]


class Other(nn.Linear):
    pass


def training(wrap):
    """Return a function that runs a step and returns its loss, with the same numbers each time."""
    torch.manual_seed(1)
    model = wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(torch.ones(100_000, 4), batch_size=5))

    def step():
        optimizer.zero_grad()
        loss = model(next(batches)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def by_hand(model):
    """The primitives, composed."""

    def run(x):
        replicas = replicate(model, [0, 1])
        return gather(parallel_apply(replicas, scatter((x,), [0, 1])), 0)

    run.parameters = model.parameters
    return run


class AtLine:
    """Acts before the first line of dpmon that is not in `done`; a line counts separately for each caller."""

    def __init__(self, done, act):
        self.done = done
        self.act = act
        self.where = None

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line" and self.where is None:
            key = frame.f_code, frame.f_lineno, frame.f_back.f_code
            if key not in self.done:
                self.done.add(key)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                self.act()
        return self


def calls_another():
    other(torch.ones(3, 2))


def interrupts():
    raise KeyboardInterrupt


def everywhere(wrap, act):
    """Return the number of lines, and the problems at some of them."""
    step, undisturbed = training(wrap), training(wrap)
    problems, done, raised = [], set(), act is interrupts
    while True:
        hook, loss, error = AtLine(done, act), None, None
        sys.settrace(hook)
        try:
            loss = step()
        except BaseException as found:  # noqa: BLE001 - it is what is looked for
            error = type(found).__name__
        sys.settrace(None)
        if hook.where is None:
            return [len(done), problems]
        if raised and error != "KeyboardInterrupt":
            problems.append([hook.where, "swallowed" if error is None else error])
        if not raised and (error or abs(loss - undisturbed()) > 1e-6):
            problems.append([hook.where, error or loss])
        for _ in range(2 * raised):
            try:
                step()
            except BaseException as found:  # noqa: BLE001 - it is what is looked for
                problems.append([hook.where, "afterwards", repr(found)])


torch.set_num_threads(1)
other = Other(2, 2)
act = {"calls": calls_another, "raises": interrupts}[sys.argv[1]]
kinds = {"bare": lambda model: model, "wrapped": nn.DataParallel, "by hand": by_hand}
print(json.dumps({name: everywhere(wrap, act) for name, wrap in kinds.items()}))

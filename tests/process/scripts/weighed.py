"""Runs other scripts, each in a forked child, and prints their weights and random states at the end.

    weighed.py SCRIPT [ARGS...] [-- SCRIPT [ARGS...]]...

Bit for bit, as digests. Before each, a line has the child's process id.
"""

import hashlib
import os
import runpy
import sys
from itertools import groupby

import torch
import torch._dynamo  # else the first optimizer of each child imports it
from torch.optim.optimizer import register_optimizer_step_post_hook

optimizers = []
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: optimizers.append(optimizer))


def run(words):
    sys.argv = words
    torch.manual_seed(1)
    runpy.run_path(words[0], run_name="__main__")
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for optimizer in dict.fromkeys(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(parameter.detach().numpy().tobytes())
    print(f"{len(optimizers)} steps, {digest.hexdigest()}", flush=True)


for between, words in groupby(sys.argv[1:], "--".__eq__):
    if between:
        continue
    words = list(words)
    pid = os.fork()
    if not pid:
        run(words)
        break
    status = os.waitpid(pid, 0)[1]
    print("=====", words[0], pid, os.waitstatus_to_exitcode(status), flush=True)

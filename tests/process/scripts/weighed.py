"""Runs another script and says, last, what became of its weights and of the random state, to the last bit."""

import hashlib
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

optimizers = []
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: optimizers.append(optimizer))

sys.argv = sys.argv[1:]
torch.manual_seed(1)
runpy.run_path(sys.argv[0], run_name="__main__")

digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for optimizer in dict.fromkeys(optimizers):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            digest.update(parameter.detach().numpy().tobytes())
print(f"{len(optimizers)} steps, {digest.hexdigest()}")

"""Trains on a simulated GPU with losses that are known, because the script copies them there.

argv: scaled, for losses under a GradScaler.
"""

import sys

import torch
from torch import nn

tracer = sys.modules.get("dpmon.tracer.steps.losses")
if tracer is not None:
    tracer.LOSS_INTERVAL_NS = 0
STEPS = 30
model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
gradient = torch.ones((), device="cuda")
rows = torch.ones(8, 16, device="cuda")
scaler = torch.amp.GradScaler("cuda")
values = [torch.tensor(number + 0.5).pin_memory() for number in range(STEPS)]
for value in values:
    optimizer.zero_grad()
    loss = model(rows).sum()
    loss.data.copy_(value, non_blocking=True)
    (scaler.scale(loss) if "scaled" in sys.argv else loss).backward(gradient)
    optimizer.step()
torch.cuda.synchronize()
print(torch.cuda.memory_stats()["allocation.all.allocated"])

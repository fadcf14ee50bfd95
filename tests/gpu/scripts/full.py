"""Requests more memory than the GPU has, after one step, and goes on."""

import json

import torch

model = torch.nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(4, 8, device="cuda")).sum().backward()
optimizer.step()
total = torch.cuda.get_device_properties(0).total_memory
try:
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    failed = False
except torch.cuda.OutOfMemoryError:
    failed = True
for _ in range(10):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
print(json.dumps({"failed": failed, "total": total}))

"""Starts itself again from sys.argv, as launchers inside scripts do: once as a child, once in its own place."""

import os
import subprocess
import sys

stage = os.environ.get("STAGE", "0")
print("stage", stage, sys.argv)
sys.stdout.flush()
if stage == "0":
    child = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "STAGE": "1"})
    print("child ended with", child.returncode)
    sys.stdout.flush()
    os.environ["STAGE"] = "2"
    os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv])

import torch

os.closerange(3, 64)  # daemons and some launchers close all they do not know
torch.manual_seed(int(stage))
model = torch.nn.Linear(3, 1)
for _ in range(5):
    loss = model(torch.randn(4, 3)).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
print(loss.item().hex())
sys.exit(int(stage))

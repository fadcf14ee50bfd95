"""Run with -m: relative imports, and resources beside the module."""

import sys
from pathlib import Path

import torch

from . import parts

print(__name__, __package__, __spec__.name, sys.argv[1:], Path(sys.argv[0]).name, Path(__file__).name)
torch.manual_seed(0)
model = parts.model()
for _ in range(3):
    loss = model(torch.randn(5, 2)).sum()
    loss.backward()
    print(loss.item().hex())

"""Other threads than the one that trains, of the script and of autograd, change nothing about the steps."""

from __future__ import annotations

from pathlib import Path

from tracing import traced

NESTED = """
import torch
from torch.utils.checkpoint import checkpoint
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def nested(self, x, depth):
        x = self.layer(x).tanh()
        return checkpoint(self.nested, x, depth - 1, use_reentrant=True) if depth else x
    def forward(self, x):
        return checkpoint(self.nested, x, 70, use_reentrant=True)
model = Deep()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for x in torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8):
    optimizer.zero_grad()
    model(x.requires_grad_()).sum().backward()
    optimizer.step()
"""


def test_a_backward_pass_within_another_on_a_thread_of_autograd(tmp_path: Path) -> None:
    """From a depth of 60, autograd runs the inner ones on threads of its own."""
    run = traced(tmp_path, NESTED)
    assert run.status == 0, run.err
    assert [(step.samples, set(step.phases)) for step in run.steps()] == [
        (8, {"data", "forward", "backward", "optimizer", "other"})
    ] * 4
    assert (run.complaints, run.missed) == ([], 0)

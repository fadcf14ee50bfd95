"""A process that changes its user or its root directory is recorded as before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tracing import traced

from dpmon.record.jsonl import as_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

NOBODY = 65534
CHANGES = {
    "user": f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})",
    "root": "os.mkdir('empty'); os.chroot('empty')",
}

TRAINS = """
import os, sys
import torch
def made():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), 0.01)
def train(model, optimizer, rows, times):
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.ones(rows, 4)).sum().backward()
        optimizer.step()
first, second = made(), made()
train(*first, 3, 5)
if sys.argv[1] == "closed":
    os.closerange(3, 1024)
    train(*first, 4, 1)
CHANGE
train(*first, 5, 6)
train(*second, 6, 7)
"""
"""After the change come batches of another size, and another model."""


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("before", ["as usual", "closed"])
def test_all_steps_are_recorded(tmp_path: Path, how: str, before: str) -> None:
    run = traced(tmp_path, TRAINS.replace("CHANGE", CHANGES[how]), before)
    assert run.status == 0, run.err
    rows = [call.inputs[0].shape[0] for call in run.calls() if call.inputs]
    assert rows == [3] * 5 + [4] * (before == "closed") + [5] * 6 + [6] * 7
    assert len(run.steps()) == len(rows)
    assert len({as_json(call)["root"] for call in run.calls()}) == 2
    assert run.complaints == []

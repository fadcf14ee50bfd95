"""A process is killed in the middle of a step: its last call had finished, so the record has it."""

from __future__ import annotations

from running import Dpmon

SCRIPT = """
import os, signal, torch
from torch.utils.data import DataLoader
model = torch.nn.Sequential(torch.nn.Linear(5, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number, batch in enumerate(DataLoader(torch.randn(100, 5), batch_size=10), 1):
    loss = model(batch).pow(2).mean()
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_call_before_the_kill_is_recorded(dpmon: Dpmon) -> None:
    assert dpmon.run(*dpmon.warm(), dpmon.script(SCRIPT)).status == 128 + 9
    records = dpmon.records()
    assert [r["call"] for r in records if r["kind"] == "call"] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert next(r for r in records if r["kind"] == "dropped")["count"] == 0

"""Samples of models with the batch in another dimension than the first, such as sequence-first models."""

from __future__ import annotations

import pytest

from support.run_harness import Dpmon

SCRIPT = """
import torch

model = torch.nn.LSTM(4, 8)  # [positions, batch, features]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.randn(35, 20, 4))[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    for step in range(3):
        model(torch.randn(35, 10, 4))
"""


def samples(dpmon: Dpmon) -> list[int]:
    """Return the samples of each step."""
    return [record["samples"] for record in dpmon.records() if record["kind"] == "step"]


@pytest.mark.parametrize("by", ["nothing", "option", "variable", "file"])
def test_the_dimension_of_the_batch_counts_the_samples(dpmon: Dpmon, by: str) -> None:
    words = ["--batch-dim", "1"] if by == "option" else []
    env = {"DPMON_BATCH_DIM": "1"} if by == "variable" else {"XDG_CONFIG_HOME": str(dpmon.cwd)}
    if by == "file":
        (dpmon.cwd / "dpmon").mkdir()
        (dpmon.cwd / "dpmon" / "config.toml").write_text("batch_dim = 1\n")
    assert dpmon.run(*dpmon.warm(), *words, "--mode", "script", dpmon.script(SCRIPT), env=env).status == 0
    assert samples(dpmon) == ([35] * 11 if by == "nothing" else [20] * 8 + [10] * 3)


ROWS_LAST = """
import torch

torch.manual_seed(0)
model = torch.nn.LSTM(4, 16)
last = torch.nn.Linear(16, 10)

class Last(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = model, last

    def forward(self, x):  # its result has the batch in dimension 0
        return self.last(self.lstm(x)[0][-1])

net = Last()
for _ in range(4):
    print(torch.log_softmax(net(torch.randn(35, 20, 4)), 1)[:, 0].mean().item())
"""
"""A replica's result has as many columns as rows, so its shape does not show that it was joined along the wrong one."""


def test_no_batch_is_split_along_another_dimension(dpmon: Dpmon) -> None:
    alone = dpmon.run(*dpmon.warm(), "--mode", "script", dpmon.script(ROWS_LAST))
    split = dpmon.run(*dpmon.warm(), "--batch-dim", "1", "--replicas", "2", dpmon.script(ROWS_LAST))
    assert (split.status, split.out) == (0, alone.out)
    records = dpmon.records()
    assert {record["mode"] for record in records if record["kind"] == "call"} == {"single"}
    (refusal,) = {record["refused"] for record in records if record["kind"] == "mode" and record["refused"]}
    assert "along its first dimension only" in refusal

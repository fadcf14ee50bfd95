"""Checkpoints that take a considerable share of the run are named with size, rate, file system and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.run_harness import Dpmon

SCRIPT = """
import io, time
import torch
class Slow:  # the time that a slow disk takes
    def __init__(self, seconds): self.seconds = seconds
    def __reduce__(self):
        time.sleep(self.seconds)
        return float, (self.seconds,)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
weights = torch.zeros(1 << 20)
for step in range(1, 61):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step % 20 == 0:
        saved = {"weights": weights, "slow": Slow(SECONDS)}
        SAVE
    torch.save(step, io.BytesIO())
try:
    torch.save(model, "/no/such/directory/model.pt")
except RuntimeError:
    print(torch.save.__name__, torch.save.__module__)
"""


def run(dpmon: Dpmon, save: str, seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the script; return its findings about checkpoints, and the records."""
    script = dpmon.script(SCRIPT.replace("SAVE", save).replace("SECONDS", str(seconds)), "train.py")
    result = dpmon.run("--headless", script)
    assert (result.status, result.text) == (0, "save torch.serialization\n"), result.errors
    assert "dpmon's tracer failed" not in result.errors
    report = json.loads(dpmon.run("report", "--json").text)
    records = [record for record in dpmon.records() if record["kind"] == "checkpoint"]
    return [finding for finding in report["findings"] if finding["kind"] == "checkpoints"], records


@pytest.mark.parametrize(
    "save", ["torch.save(saved, 'model.pt')", "with open('model.pt', 'wb') as f: torch.save(saved, f)"]
)
def test_long_saves_are_named(dpmon: Dpmon, save: str) -> None:
    findings, records = run(dpmon, save, 0.5)
    own = [record for record in records if record["place"] == "train.py:18"]
    assert len(own) == 3
    size = (dpmon.cwd / "model.pt").stat().st_size
    assert all(record["save_s"] >= 0.5 and record["bytes"] == size for record in own)
    types = {line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert {record["filesystem"] for record in own} <= {*types, None}
    (finding,) = findings
    assert re.fullmatch(
        r"Checkpoints take \d+% of the elapsed time: 4\.00 MiB each at [\d.]+ [KM]iB/s to [\w ]+ \(train\.py:18\)\.",
        finding["text"],
    )
    assert finding["saves_s"] == pytest.approx(sum(record["save_s"] for record in own))
    assert "async_save" in finding["advice"]


def test_a_save_to_memory_has_no_size(dpmon: Dpmon) -> None:
    _, records = run(dpmon, "torch.save(saved, io.BytesIO())", 0.5)
    own = [record for record in records if record["save_s"] >= 0.5]
    assert len(own) == 3
    assert not any("bytes" in record for record in own)


def test_short_saves_are_silent(dpmon: Dpmon) -> None:
    findings, _ = run(dpmon, "torch.save(saved, 'model.pt')", 0)
    assert not findings

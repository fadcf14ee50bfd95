"""Scripts that are slow have their finding, and similar ones have none; a table in the docs shows both."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from support.findings_table import check_row, saving
from support.run_harness import Dpmon

LIMIT_S = 500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


class Case(NamedTuple):
    """A script whose setting decides whether it has a finding."""

    sentence: str
    """A regular expression for the part of the finding that names the cause."""
    condition: str
    silence: str
    script: str
    wrong: str
    right: str


LOADER = """\
import time, torch
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)

def decode(index):
    end = time.thread_time() + DECODE_S
    while time.thread_time() < end:
        sum(range(50))
    return torch.full((2,), float(index))

def augment(row):
    end = time.thread_time() + AUGMENT_S
    while time.thread_time() < end:
        sum(range(50))
    return row + 1

class Rows(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return augment(decode(index))

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-9)
for step, rows in enumerate(DataLoader(Rows(), 8)):
    model(rows).sum().backward()
    optimizer.step()
    time.sleep(TRAIN_S)
    if step == 1000:  # a minute or more
        break
"""
COMPILE = """\
import time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x, factor):
        y = self.layer(x)
        if BREAKS:
            print(end="")
        return y * factor

model = Net()
compiled = torch.compile(model, backend="aot_eager", dynamic=False if CHANGES else None)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(40):
    rows = 16 if step % 4 == 3 and not CHANGES else 32
    compiled(torch.ones(rows, 8), step % 7 if CHANGES else 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    if step % 8 == 7:
        model.eval()
        with torch.no_grad():
            compiled(torch.ones(32, 8), 2)
        model.train()
"""
CASES = {
    "loader": Case(
        r"\d+%(?: \(\d+% to \d+%\))? of the loader's time is in `augment` \(train\.py:\d+\)",
        "a fifth of 20 s in the loader, then 30 s of samples of where it stands",
        "a loader that keeps up",
        LOADER,
        "DECODE_S, AUGMENT_S, TRAIN_S = 0.002, 0.006, 0",
        "DECODE_S, AUGMENT_S, TRAIN_S = 0, 0, 0.05",
    ),
    "recompiled": Case(
        r"torch\.compile compiled train\.py:\d+ again \d+ times after a guard like `factor == \d+` had failed",
        "four compilations after the same guard",
        "a smaller batch, and an evaluation",
        COMPILE,
        "CHANGES, BREAKS = True, False",
        "CHANGES, BREAKS = False, False",
    ),
    "graph break": Case(
        r"torch\.compile breaks its graph at train\.py:12 \([^)]+\)",
        "what dynamo lists",
        "one graph; a smaller batch, and an evaluation",
        COMPILE,
        "CHANGES, BREAKS = False, True",
        "CHANGES, BREAKS = False, False",
    ),
}


def find_cause(dpmon: Dpmon, case: Case, setting: str) -> tuple[str, float | None] | None:
    """Run the script with a setting; return the sentence about the cause and its seconds; None without a finding."""
    script = dpmon.script(f"{setting}\n{case.script}", "train.py")
    result = dpmon.run("--headless", script, limit=LIMIT_S)
    assert "dpmon's tracer failed" not in result.errors
    findings: list[dict[str, Any]] = json.loads(dpmon.run("report", "--json").text)["findings"]
    for finding in findings:
        match = re.search(case.sentence, f"{finding['text']} {finding['ground']}")
        if match is not None:
            return match[0], finding["saves_s"]
    return None


@pytest.mark.parametrize("name", CASES)
def test_a_cause_is_named(dpmon: Dpmon, name: str) -> None:
    case = CASES[name]
    cause = find_cause(dpmon, case, case.wrong)
    assert cause is not None
    sentence, saves_s = cause
    check_row(case.sentence, sentence, case.condition, case.silence, saving(saves_s))


@pytest.mark.parametrize("name", CASES)
def test_a_similar_script_has_no_such_finding(dpmon: Dpmon, name: str) -> None:
    assert find_cause(dpmon, CASES[name], CASES[name].right) is None

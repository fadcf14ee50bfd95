"""Loops of many forms count what they do, and the record has exactly the same counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tracing import Traced, text_of, traced

pytestmark = pytest.mark.slow

PLAYS_FIRST = """
import json, time, torch
from torch import nn
class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x)
policy, value = nn.Sequential(nn.Linear(4, 1)), Value()
optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=0.01)
calls = 0
value.layer.register_forward_hook(lambda *_: globals().update(calls=calls + 1))
for _ in range(200):
    policy(torch.randn(1, 4))
    time.sleep(0.001)
for _ in range(20):
    (policy(torch.randn(8, 4)).mean() + value.forward(torch.randn(8, 4)).mean()).backward()
    optimizer.step()
print(json.dumps(calls))
"""
"""`value` learns only in calls past Module.__call__, so only its layer can be seen."""
TEXT = text_of("counting")
NAMES = re.findall(r"^@loop\ndef (\w+)", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    found = traced(tmp_path_factory.mktemp("counting"), TEXT, mode="script")
    assert found.status == 0, found.err
    assert (found.err, found.missed, found.complaints) == ("", 0, [])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_equal_those_counted_by_the_loop(run: Traced, name: str) -> None:
    """Per step: samples, phases that ran, number of calls; per call: root and flags."""
    pid, counted_steps, counted_calls = run.printed[name]
    process = run.process_of(pid)
    steps, calls = run.steps(process), run.calls(process=process)
    within: dict[int, int] = {step.step: 0 for step in steps}
    for call in calls:
        within[call.step] += 1
    recorded: list[Any] = [
        [step.samples, sorted(phase for phase in step.phases if phase != "other"), within[step.step]] for step in steps
    ]
    assert recorded == counted_steps
    assert [[call.root.split()[0], call.training, call.grad] for call in calls] == [
        ["Net" if name == "OptimizedModule" else name, *rest] for name, *rest in counted_calls
    ]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_trains_is_called_an_evaluation(run: Traced, name: str) -> None:
    """The summary and the report rely on this."""
    pid, counted_steps, _ = run.printed[name]
    trains = [bool({"backward", "optimizer"} & set(phases)) for _, phases, _ in counted_steps]
    assert [not step.evaluation for step in run.steps(run.process_of(pid))] == trains


def test_a_root_that_comes_with_the_first_step_of_an_optimizer_is_seen_from_the_second_on(tmp_path: Path) -> None:
    """The search for roots has ended by then, and rarely starts again exactly at the first step."""
    run = traced(tmp_path, PLAYS_FIRST, mode="script")
    assert run.printed == 20
    assert [call.step for call in run.calls("Linear")][-19:] == list(range(2, 21))
    assert len(run.calls("Sequential")) == 220
    assert len(run.calls("Linear")) == 20 or "Linear was called by the script at step 2, " in "".join(run.complaints)

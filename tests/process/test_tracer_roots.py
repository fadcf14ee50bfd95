"""A root is an object: two models of one class have two names, and a wrapper shows the class of its model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from support.run_harness import Dpmon
from support.tracer_harness import run_traced

START = """
import torch
def train(*models):
    for step in range(4):
        for model in models:
            model(torch.ones(2, 3)).sum().backward()
def made(width):
    return torch.nn.Sequential(torch.nn.Linear(3, width))
"""

GLOBAL = "generator, critic = made(3), made(1)\ntrain(generator, critic)\n"

LOCAL = """
def main():
    train(made(3), made(1))
main()
for fold in range(3):
    alone = torch.nn.Linear(3, 3)
    train(alone)
    del alone
"""

WRAPPED = """
from collections import OrderedDict
class _FabricModule(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self._forward_module = module
    def forward(self, batch):
        return self._forward_module(batch)
older = _FabricModule(torch.nn.Conv1d(2, 2, 1))
older.__dict__["_modules"] = OrderedDict(older._modules)  # as in torch 2.4
train(_FabricModule(torch.nn.Linear(3, 2)), older, torch.compile(made(2), backend="eager"))
"""


def roots(tmp_path: Path, text: str) -> Counter[str]:
    """Run a script; return the number of calls of each root."""
    run = run_traced(tmp_path, START + text)
    assert (run.status, run.complaints) == (0, []), run.err
    return Counter(call.root for call in run.calls())


def test_two_models_of_a_class_have_the_names_of_their_variables(tmp_path: Path) -> None:
    assert roots(tmp_path, GLOBAL) == {"Sequential generator": 4, "Sequential critic": 4}


def test_models_without_a_variable_are_numbered_and_a_model_after_another_is_not(tmp_path: Path) -> None:
    assert roots(tmp_path, LOCAL) == {"Sequential": 4, "Sequential 2": 4, "Linear": 12}


def test_the_class_inside_a_wrapper_is_shown(tmp_path: Path) -> None:
    assert roots(tmp_path, WRAPPED) == {"Linear": 4, "Conv1d": 4, "Sequential": 4}


EVALUATED = """
trained, judge = made(3), made(1)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
for step in range(12):
    optimizer.zero_grad()
    trained(torch.ones(4, 3)).sum().backward()
    optimizer.step()
judge.eval()
for batch in range(5):
    with torch.no_grad():
        judge(torch.ones(6, 3))
"""


def test_evaluations_of_one_model_are_not_mixed_with_the_training_of_another(dpmon: Dpmon) -> None:
    result = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", dpmon.script(START + EVALUATED))
    assert result.status == 0, result.errors
    rows = [line.split() for line in result.errors.splitlines() if "Sequential" in line]
    assert [(" ".join(row[1 : row.index("cpu") + 2]), " ".join(row[-5:])) for row in rows] == [
        ("Sequential judge single, evaluation cpu 5", "[6, 3] -> [6, 1]"),
        ("Sequential trained single cpu 12", "[4, 3] -> [4, 3]"),
    ]

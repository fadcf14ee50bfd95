"""Times of phases in the record, compared with clock readings of the script before and after each phase."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dpmon.record.jsonl import as_json
from support.run_harness import Dpmon
from support.tracer_harness import TracedScript

NOTES = """
import json, time
import torch
from torch.utils.data import DataLoader

noted, step = [], []


class noting:
    def __init__(self, phase):
        self.phase = phase

    def __enter__(self):
        self.before = time.monotonic_ns()

    def __exit__(self, *error):
        step.append((self.phase, self.before, time.monotonic_ns()))


def over():
    # In order of start, like the record.
    noted.append(sorted(step, key=lambda one: one[1]))
    step.clear()


class Slow:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.ones(4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        time.sleep(0.004)
        return self.layer(x)


def slowly(gradient):
    time.sleep(0.005)


model = Net()
model.layer.bias.register_hook(slowly)
"""
USUAL = (
    NOTES
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_pre_hook(lambda *_: time.sleep(0.002))
batches = iter(DataLoader(Slow(), batch_size=2))
while True:
    try:
        with noting("data"):
            batch = next(batches)
    except StopIteration:
        break
    time.sleep(0.001)
    for half in batch:
        with noting("forward"):
            loss = model(half).sum()
        time.sleep(0.001)
        with noting("backward"):
            loss.backward()
    with noting("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    over()
print(json.dumps(noted))
"""
)
CLOSURE = (
    NOTES
    + """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)


def closure():
    optimizer.zero_grad()
    with noting("forward"):
        loss = (model(torch.ones(3, 4)) ** 2).sum()
    with noting("backward"):
        loss.backward()
    return loss


for _ in range(6):
    with noting("optimizer"):
        optimizer.step(closure)
    over()
print(json.dumps(noted))
"""
)
WITHIN = (
    NOTES
    + """
class Penalty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        x = x.requires_grad_()
        out = self.net(x).sum()
        with noting("backward"):
            (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out + gradient.norm()


model = Penalty()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    with noting("forward"):
        loss = model(torch.ones(3, 4))
    with noting("backward"):
        loss.backward()
    with noting("optimizer"):
        optimizer.step()
    over()
print(json.dumps(noted))
"""
)
Noted = list[list[tuple[str, int, int]]]


def ns(value: float, unit: float) -> int:
    """Return a time of the record in ns, which is exact even after hours."""
    return round(value * unit)


def begun(step: dict[str, Any], span: dict[str, Any], run_ns: int) -> tuple[int, int]:
    """Return begin and end of a span on the script's clock."""
    start = run_ns + ns(step["start_s"], 1e9) + ns(span["start_ms"], 1e6)
    return start, start + ns(span["ms"], 1e6)


def check(noted: Noted, steps: Iterable[dict[str, Any]], run_ns: int) -> list[tuple[int, int]]:
    """Check that each span is within the times noted by the script; return both durations of each."""
    pairs = []
    for mine, step in zip(noted, steps, strict=True):
        assert [span["phase"] for span in step["spans"]] == [phase for phase, _, _ in mine]
        assert "missing_spans" not in step
        assert "spans" not in step["absent"]
        for (_, before, after), span in zip(mine, step["spans"], strict=True):
            start, end = begun(step, span, run_ns)
            assert before <= start <= end <= after
            assert span["start_ms"] + span["ms"] <= step["wall_ms"] + 1e-6
            pairs.append((end - start, after - before))
    return pairs


def test_a_usual_run(dpmon: Dpmon) -> None:
    """Times of the export count from the start of the run; each step has two calls."""
    dpmon.script(USUAL)
    result = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", "script.py")
    assert result.status == 0, result.errors
    noted = json.loads(result.text.splitlines()[-1])
    (directory,) = (path for path in (dpmon.state / "dpmon" / "runs").iterdir() if path.is_dir())
    run_ns = json.loads((directory / "run.json").read_text())["start_ns"]
    steps = [json.loads(line) for line in dpmon.run("export", "--kind", "step").text.splitlines()]
    pairs = check(noted, steps, run_ns)
    assert len(noted) == 12
    for number, phase in enumerate(("data", "forward", "backward", "forward", "backward", "optimizer")):
        ours, theirs = (median(one[which] for one in pairs[number::6]) for which in (0, 1))
        assert theirs - ours < max(1e6, 0.05 * theirs), phase
    for step in steps:
        for phase, took in step["phases"].items():
            if phase != "other":
                ran = sum(one["ms"] for one in step["spans"] if one["phase"] == phase)
                assert took <= ran + 1e-6, "a look at memory within it is not its time"


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        pytest.param(CLOSURE, ["optimizer", *4 * ["forward", "backward"]], id="closure"),
        pytest.param(WITHIN, ["forward", "backward", "backward", "optimizer"], id="gradient in a forward"),
    ],
)
def test_phases_within_phases(tmp_path: Path, text: str, phases: list[str]) -> None:
    script = TracedScript(tmp_path, text)
    run = script.end()
    noted = run.printed
    assert [phase for phase, _, _ in noted[-1]] == phases
    steps = [as_json(step) for step in run.steps()]
    check(noted, steps, script.start_ns)
    for step in steps:
        outer, *rest = step["spans"]
        within = rest[: 1 if outer["phase"] == "forward" else None]
        assert all(one["start_ms"] + one["ms"] <= outer["start_ms"] + outer["ms"] + 1e-6 for one in within)
        own = outer["ms"] - sum(one["ms"] for one in within)
        assert step["phases"][outer["phase"]] <= own + 1e-6, "a look at memory within it is not its time"

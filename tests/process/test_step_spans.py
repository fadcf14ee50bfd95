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
class Search(torch.optim.Optimizer):
    def step(self, closure):
        for _ in range(2):
            time.sleep(0.002)
            closure()
        time.sleep(0.001)


def closure():
    with noting("other"):
        time.sleep(0.005)
    with noting("forward"):
        loss = (model(torch.ones(3, 4)) ** 2).sum()
    with noting("backward"):
        loss.backward()


optimizer = Search(model.parameters(), {})
for _ in range(6):
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


def test_a_phase_within_a_phase(tmp_path: Path) -> None:
    script = TracedScript(tmp_path, WITHIN)
    run = script.end()
    noted = run.printed
    assert [phase for phase, _, _ in noted[-1]] == ["forward", "backward", "backward", "optimizer"]
    steps = [as_json(step) for step in run.steps()]
    check(noted, steps, script.start_ns)
    for step in steps:
        outer, within, *_ = step["spans"]
        assert within["start_ms"] + within["ms"] <= outer["start_ms"] + outer["ms"] + 1e-6
        own = outer["ms"] - within["ms"]
        assert step["phases"]["forward"] <= own + 1e-6, "a look at memory within it is not its time"


def test_the_code_of_a_closure_is_not_the_optimizer(tmp_path: Path) -> None:
    script = TracedScript(tmp_path, CLOSURE)
    run = script.end()
    noted = run.printed
    steps = [as_json(step) for step in run.steps()]
    for mine, step in zip(noted, steps, strict=True):
        assert [span["phase"] for span in step["spans"]] == [*2 * ["optimizer", "forward", "backward"], "optimizer"]
        others = [(before, after) for phase, before, after in mine if phase == "other"]
        for span in step["spans"]:
            start, end = begun(step, span, script.start_ns)
            assert all(end <= before or after <= start for before, after in others), "no phase holds the script's code"
        assert step["phases"]["optimizer"] >= 5
        assert step["phases"]["other"] >= sum(after - before for before, after in others) / 1e6
        assert sum(step["phases"].values()) == pytest.approx(step["wall_ms"])


CLOSURES = """
import functools, json, pickle, traceback
import torch

model = torch.nn.Linear(4, 2)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []


def closure(factor=1.0):
    plain.zero_grad()
    loss = factor * model(torch.ones(3, 4)).pow(2).mean()
    loss.backward()
    return loss


class Method:
    def closure(self):
        return closure()


class Object:
    limit = 3

    def __call__(self):
        return closure()


class Reads(torch.optim.SGD):
    def step(self, closure=None):
        seen.append(getattr(closure, "limit", None) or closure.__name__)
        return super().step(closure)


def fails():
    closure()
    raise ArithmeticError("in a closure")


for optimizer, given, keyword in (
    (plain, closure, False),
    (plain, closure, True),
    (plain, functools.partial(closure, factor=2.0), False),
    (plain, Method().closure, True),
    (Reads(model.parameters(), lr=0.1), closure, False),
    (Reads(model.parameters(), lr=0.1), Object(), False),
    (torch.optim.LBFGS(model.parameters(), max_iter=3), closure, False),
):
    loss = optimizer.step(closure=given) if keyword else optimizer.step(given)
    assert loss.requires_grad
try:
    plain.step(fails)
except ArithmeticError as error:
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    seen.append([names[0], names[-1], [name for name in names if "closure" in name]])
closure()
plain.step()
plain.step(closure=None)
pickle.loads(pickle.dumps(plain))
closure()
plain.step()
print(json.dumps(seen))
"""


def test_closures_of_all_kinds_run_as_without_dpmon(tmp_path: Path) -> None:
    traced, alone = (TracedScript(tmp_path, CLOSURES, run=run).end() for run in (True, False))
    assert (traced.status, alone.status) == (0, 0), traced.err + alone.err
    assert traced.printed == alone.printed == ["closure", 3, ["<module>", "fails", []]]
    assert traced.complaints == []
    steps = traced.steps()
    assert all({"forward", "backward", "optimizer"} <= step.phases.keys() for step in steps)
    assert all(sum(step.phases.values()) == step.wall_ns for step in steps)

"""Memory by device and use: the tracer's sums are equal to the script's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.run_harness import Dpmon
from support.tracer_harness import run_traced, traced_script_text


def test_memory_sums_equal_those_of_the_script(dpmon: Dpmon, tmp_path: Path) -> None:
    result = run_traced(tmp_path, traced_script_text("holding"))
    assert result.status == 0, result.err
    assert not result.events("warning")
    assert result.unreadable == ()
    events = result.events("memory")
    assert events, "the memory is first measured after the first steps"
    newest = events[-1].data
    assert newest["step"] >= 2
    assert newest["took_ms"] > 0
    (cpu,) = newest["devices"]
    said = result.printed
    assert cpu["device"] == "cpu"
    assert {name: cpu[f"{name}_bytes"] for name in said} == said
    for name in ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes"):
        assert cpu[name] is None
        assert "no statistics" in cpu["absent"][name]


# ------------------------------------------------------------------------------------------------ parts of it

START = """\
import sys, threading, torch
model, other = torch.nn.Linear(30, 20), torch.nn.Linear(15, 20)
batches = torch.ones(40, 30).split(4)
loader = torch.utils.data.DataLoader(torch.ones(40, 30), batch_size=4)
def learn(optimizer, loss):
    loss.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS, OTHERS = 4 * (30 * 20 + 20), 4 * (15 * 20 + 20)
EVERY_STEP = """\
from dpmon.tracer.memory import measurement
measurement.MEASURE_INTERVAL_NS = measurement.WAIT_FACTOR = 0
"""
CASES: dict[str, tuple[str, dict[str, int | str]]] = {
    "gradients that the script clears before the step ends": (
        """\
optimizer = torch.optim.Adam(model.parameters())
for x in loader:
    learn(optimizer, model(x))
""",
        {"gradients": WEIGHTS},
    ),
    "gradients cleared by hand": (
        """\
optimizer = torch.optim.Adam(model.parameters())
for x in loader:
    model(x).sum().backward()
    for p in model.parameters():
        p.grad = None
""",
        {"gradients": WEIGHTS},
    ),
    "of two models in turn, as in a GAN, the first backward pass of the step": (
        """\
one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
for x in loader:
    learn(two, other(x[:, :15]))
    learn(one, model(x))
""",
        {"gradients": OTHERS},
    ),
    "an evaluation alone": (
        """\
optimizer = torch.optim.Adam(model.parameters())
model.eval()
with torch.no_grad():
    for x in loader:
        model(x)
""",
        {
            "model": WEIGHTS,
            "gradients": "no backward pass was seen before this measurement",
            "optimizer": "no optimizer had stepped before this measurement",
        },
    ),
    "two batches that are fetched together, and one update after their two passes": (
        """\
optimizer = torch.optim.Adam(model.parameters())
fetched = iter(loader)
for _ in range(5):
    for x in [next(fetched), next(fetched)]:
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        {"model": WEIGHTS, "gradients": WEIGHTS, "optimizer": 2 * WEIGHTS + 2 * 4},
    ),
    "evaluations before, between and after training steps": (
        EVERY_STEP
        + """\
optimizer = torch.optim.Adam(model.parameters())
def evaluate():
    with torch.no_grad():
        for x in loader:
            model.eval()(x)
evaluate()
for _ in range(2):
    for x in loader:
        learn(optimizer, model.train()(x))
    evaluate()
""",
        {"model": WEIGHTS, "gradients": WEIGHTS, "optimizer": 2 * WEIGHTS + 2 * 4},
    ),
    "a short training without an optimizer after an evaluation": (
        """\
with torch.no_grad():
    for x in loader:
        model.eval()(x)
for x in loader:
    model.train()(x).sum().backward()
""",
        {"gradients": WEIGHTS, "optimizer": "no torch optimizer was made"},
    ),
    "an optimizer that is not made by its constructor": (
        """\
import copy
optimizer = copy.deepcopy(torch.optim.SGD(model.parameters(), lr=0.1))
for x in loader:
    learn(optimizer, model(x))
""",
        {"optimizer": "the optimizer that stepped was freed, or was not made by its constructor"},
    ),
    "an optimizer without a state": (
        """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    learn(optimizer, model(x))
""",
        {"optimizer": 0},
    ),
    "no optimizer of torch's": (
        """\
moments = [torch.zeros_like(p) for p in model.parameters()]
for x in loader:
    model(x).sum().backward()
    with torch.no_grad():
        for p, moment in zip(model.parameters(), moments):
            p.sub_(moment.mul_(0.9).add_(p.grad))
    model.zero_grad()
""",
        {"optimizer": "no torch optimizer was made"},
    ),
    "an optimizer that stepped before the first call": (
        """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for p in model.parameters():
    p.grad = torch.zeros_like(p)
optimizer.step()
for x in loader:
    model(x).sum().backward()
""",
        {"optimizer": 0},
    ),
    "an optimizer that steps in a thread": (
        """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    model(x).sum().backward()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
""",
        {"optimizer": 0},
    ),
    "a model first called after the first measurement": (
        EVERY_STEP
        + """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    learn(optimizer, model(x))
for x in batches:
    with torch.no_grad():
        other(x[:, :15])
    learn(optimizer, model(x))
""",
        {"model": WEIGHTS + OTHERS},
    ),
    "an optimizer that first steps after the first measurement": (
        EVERY_STEP
        + """\
one, two = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
for number, x in enumerate(batches):
    learn(one, model(x) + other(x[:, :15]).detach())
    if number % 3 == 2:
        learn(two, model(x) + other(x[:, :15]))
""",
        {"model": WEIGHTS + OTHERS, "optimizer": WEIGHTS + OTHERS},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_each_part_is_measured_or_has_a_reason(tmp_path: Path, text: str, expected: dict[str, int | str]) -> None:
    """What was not measured is unknown, never zero."""
    run = run_traced(tmp_path, START + text)
    assert (run.status, run.complaints) == (0, []), run.err
    (cpu,) = run.events("memory")[-1].data["devices"]
    reasons = {part: cpu["absent"].get(f"{part}_bytes") for part in expected}
    assert {part: cpu[f"{part}_bytes"] if why is None else why for part, why in reasons.items()} == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_rest_and_the_peak_come_from_torch(tmp_path: Path) -> None:
    text = traced_script_text("holding").replace("def main():", "def main():\n    torch.set_default_device('cuda')", 1)
    result = run_traced(tmp_path, text + "\nprint(json.dumps(torch.cuda.max_memory_allocated()))\n")
    (gpu,) = [one for one in result.events("memory")[-1].data["devices"] if one["device"] == "cuda:0"]
    assert gpu["rest_bytes"] == gpu["allocated_bytes"] - sum(
        gpu[f"{name}_bytes"] for name in ("model", "gradients", "optimizer")
    )
    assert gpu["allocated_bytes"] <= gpu["peak_bytes"] <= result.printed


def test_the_summary_has_the_memory_and_why_the_rest_is_unknown(dpmon: Dpmon) -> None:
    result = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", dpmon.script(traced_script_text("holding")))
    assert result.status == 0, result.errors
    # model 50 * 16 + 16 * 16 + 16 + 16 + 100 floats; Adam: two for each of the 288 of its own, and three counters
    flat = " ".join(result.errors.split())
    assert "model gradients optimizer dpmon: cpu 4.64 KiB 1.55 KiB 2.26 KiB dpmon: rest and peak" in flat
    assert "rest and peak of cpu: torch keeps no statistics" in flat


QUANTIZED = """\
import warnings
warnings.simplefilter("ignore")
import torch
model = torch.nn.Sequential(torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(30, 20))),
                            torch.nn.Linear(20, 5))
with torch.no_grad():
    for x in torch.utils.data.DataLoader(torch.ones(40, 30), batch_size=4):
        model(x)
"""
REASON = "the size of 1 of its tensors is unknown"


@pytest.mark.slow
def test_the_summary_and_the_report_say_why_a_part_is_unknown(dpmon: Dpmon, tmp_path: Path) -> None:
    run = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", dpmon.script(QUANTIZED))
    assert run.status == 0, run.errors
    record = next(one for one in dpmon.records() if one["kind"] == "memory")
    assert record["devices"][0]["absent"]["model_bytes"] == REASON
    assert record["devices"][0]["model_bytes"] is None
    for text in (run.errors.replace("dpmon: ", ""), dpmon.run("report").text):
        flat = " ".join(text.split())
        assert f"MEMORY as torch counts it model of cpu: {REASON}" in flat
        assert "gradients of cpu: no backward pass was seen" in flat


MANY = """\
import torch
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.many = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(6000))
    def parameters(self, must_be_given):
        raise AssertionError
    named_parameters = named_modules = modules = buffers = parameters
    def forward(self, x):
        return x * self.many[0]
model = Own()
optimizer = torch.optim.SGD(torch.nn.Module.parameters(model.many), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(60, 1)):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_very_large_model_is_not_measured(tmp_path: Path) -> None:
    run = run_traced(tmp_path, MANY)
    assert (run.status, run.complaints) == (0, [])
    (cpu,) = run.events("memory")[0].data["devices"]
    assert cpu["model_bytes"] is None
    assert cpu["absent"]["model_bytes"] == "not measured: there are more than 5,000 tensors"
    assert len(run.steps()) == 60

"""What torch.compile compiles is read from dynamo while real models compile, and nothing is read without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tracer_harness import TracedScript, run_traced

LIMIT_S = 500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 100)]
TEXT = """
import sys
import torch
from torch import nn
tracer = sys.modules["dpmon.tracer.steps.compile_events"]
tracer.POLL_NS = 0

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
dynamic = False if CHANGES else None
compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic) if COMPILES else model
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(16):
    rows = 16 if step % 4 == 3 and not CHANGES else 32
    factor = str(step % 7) if CHANGES else "2"
    compiled(torch.ones(rows, 8), int(factor)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 8 == 7:
        model.eval()
        with torch.no_grad():
            compiled(torch.ones(32, 8), 2)
        model.train()
model(torch.ones(1, 8), 1).sum().backward()
optimizer.step()
print(dict(torch._dynamo.utils.counters["stats"]) if COMPILES else {})
"""


def traced(place: Path, compiles: bool = True, changes: bool = False, breaks: bool = False) -> list[dict[str, Any]]:
    """Run the script; return its `compiles` events."""
    text = f"COMPILES, CHANGES, BREAKS = {compiles}, {changes}, {breaks}\n{TEXT}"
    run = TracedScript(place, text, fresh=True).end(LIMIT_S)
    assert run.status == 0, run.err
    assert run.complaints == []
    phases = [span.phase for step in run.steps() for span in step.spans]
    assert phases.count("backward") == phases.count("optimizer") == 17, "none of those that are traced inside a call"
    return [dict(event.data) for event in run.events("compiles")]


def line_of(words: str) -> str:
    """Return the line of the script that has these words, after a line with settings."""
    return f"script.py:{TEXT[: TEXT.index(words)].count(chr(10)) + 2}"


def test_a_number_that_changes_compiles_a_function_again(tmp_path: Path) -> None:
    newest = traced(tmp_path, changes=True, breaks=True)[-1]
    place, guard, count = newest["again"][0]
    assert count >= 4
    assert guard.startswith("factor == ")
    assert place == line_of("return y * factor")
    assert 0 < newest["seconds_again"] < newest["seconds"]
    ((place, reason),) = newest["graph_breaks"]
    assert place == line_of("print(end")
    assert "print" in reason or "builtin" in reason


def test_a_smaller_batch_and_an_evaluation_compile_a_function_three_times_at_most(tmp_path: Path) -> None:
    newest = traced(tmp_path)[-1]
    assert newest["compilations"] <= 4
    assert all(count <= 3 for _, _, count in newest["again"])
    assert newest["graph_breaks"] == []


def test_a_script_without_torch_compile_has_no_record(tmp_path: Path) -> None:
    assert traced(tmp_path, compiles=False) == []


FAKE = """
import sys
from types import ModuleType, SimpleNamespace
import torch
tracer = sys.modules["dpmon.tracer.steps.compile_events"]
tracer.POLL_NS = 0
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
utils = sys.modules["torch._dynamo.utils"] = ModuleType("torch._dynamo.utils")
utils.CompilationMetrics = SimpleNamespace(**({"recompile_reason": None} if HAS_REASONS else {}))
utils.compilation_time_metrics = {"_compile.compile_inner": []}
utils._compilation_metrics, utils.graph_break_reasons, utils.counters = [], [], {"frames": {}}
for step in range(COUNT):
    utils.counters["frames"]["ok"] = step
    utils.compilation_time_metrics["_compile.compile_inner"].append(0.5)
    utils._compilation_metrics.append(SimpleNamespace(
        compile_id=f"0/{step}", duration_us=500_000, co_name="f\\x1b[31m", co_filename="/home/me/train.py",
        co_firstlineno=step, recompile_reason=f"0/{step}: \\x1b[0m k == {step}   # k\\nUser stack trace:"))
    del utils._compilation_metrics[:-64]
    if step % 50 == 0:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_ten_thousand_compilations_are_bounded(tmp_path: Path) -> None:
    run = run_traced(tmp_path, f"HAS_REASONS, COUNT = True, 10_000\n{FAKE}")
    assert run.status == 0, run.err
    assert run.complaints == []
    events = run.events("compiles")
    assert len(events) < 120
    assert events[-1].data["again"][0][2] == 1
    assert len(events[-1].data["again"]) == 8
    assert events[-1].data["compilations"] > 9_000


def test_another_version_of_torch_has_a_reason(tmp_path: Path) -> None:
    run = run_traced(tmp_path, f"HAS_REASONS, COUNT = False, 200\n{FAKE}")
    assert run.complaints == []
    (event, *_) = run.events("compiles")
    assert "version of torch" in event.data["absent"]["again"]


def test_a_fraction_that_changes_is_one_guard_with_its_line(tmp_path: Path) -> None:
    """Dynamo has the line only for the first failure. The last step compiles, too."""
    changes = "y = self.layer(x)\n        keep = int(x.shape[1] * factor)"
    text = TEXT.replace("y = self.layer(x)", changes).replace("int(factor))", "0.9 - 0.03 * step)")
    text = text.replace("return y * factor", "return y[:, :keep]").partition("model(torch.ones(1")[0]
    run = TracedScript(tmp_path, f"COMPILES, CHANGES, BREAKS = True, True, False\n{text}", fresh=True).end(LIMIT_S)
    assert (run.status, run.complaints) == (0, []), run.err
    newest = run.events("compiles")[-1].data
    ((place, guard, count),) = newest["again"]
    assert place == f"script.py:{text[: text.index('keep =')].count(chr(10)) + 2}"
    assert guard.startswith("factor == 0.")
    assert (count, newest["compilations"]) == (7, 8), "torch compiles a function eight times at most"

"""Lines that wait for a simulated GPU are named in sampled steps, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from support.fake_devices import WAITING_FUNCTIONS, SimulatedCuda
from support.tracer_harness import TracedRun, run_traced, run_untraced

pytestmark = pytest.mark.simulated

TEXT = """
import sys
import torch
from torch import nn

tracer = sys.modules.get("dpmon.tracer.steps.host_syncs")
if tracer is not None:
    tracer.INTERVAL_NS = tracer.MIN_WAIT_NS = 0
before = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}, torch.cuda.synchronize
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.ones(8, 16, device="cuda")
total, on_host = 0.0, torch.ones(3)
for step in range(60):
    optimizer.zero_grad()
    loss = model(rows).sum()
    loss.backward()
    optimizer.step()
    total += loss.item()  # every step
    on_host.tolist()
    if step % 20 == 0:
        float(loss)  # now and then
    if step == 50:
        try:
            rows.item()
        except RuntimeError as error:
            frames, frame = [], error.__traceback__
            while frame is not None:
                frames.append(frame.tb_frame.f_code.co_filename)
                frame = frame.tb_next
if tracer is not None:
    tracer.INTERVAL_NS = 10**15
for _ in range(4):
    optimizer.zero_grad()
    model(rows).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
after = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}, torch.cuda.synchronize
assert before == after
assert frames == [__file__], frames
"""
EVERY_STEP, SOMETIMES = (
    f"script.py:{TEXT[: TEXT.index(comment)].count(chr(10)) + 1}" for comment in ("# every step", "# now and then")
)


def waits(run: TracedRun) -> list[dict[tuple[str, str], tuple[int, float]]]:
    """Return for each sample the number and time (ms) of the waits by line and call."""
    assert run.status == 0, run.err
    assert run.complaints == []
    samples: list[Any] = [event.data["lines"] for event in run.events("host_syncs")]
    return [{(place, call): (count, ns / 1e6) for place, call, count, ns in lines} for lines in samples]


def test_the_lines_that_wait(tmp_path: Path, gpus: SimulatedCuda) -> None:
    samples = waits(run_traced(tmp_path, TEXT, env=gpus.environment(1, kernel_us=3000)))
    assert len(samples) >= 20
    waiting = [sample[EVERY_STEP, "item"] for sample in samples if (EVERY_STEP, "item") in sample]
    assert len(waiting) >= len(samples) - 3, "all but those of the last steps, which do not wait"
    assert {count for count, _ in waiting} == {1}
    assert median(ms for _, ms in waiting) >= 3.0, "a kernel or more"
    assert sum(any(place == SOMETIMES for place, _ in sample) for sample in samples) <= 3
    assert not any(call == "tolist" for sample in samples for _, call in sample)


def test_nothing_else_waits_for_the_device(tmp_path: Path, gpus: SimulatedCuda) -> None:
    counts = []
    for run in (run_traced, run_untraced):
        done = run(tmp_path, TEXT, env=gpus.environment(1, kernel_us=100))
        assert done.status == 0, done.err
        counts.append({name: gpus.counts().get(name, 0) for name in WAITING_FUNCTIONS})
    assert counts[0] == counts[1]


def test_a_compiled_script_has_a_reason(tmp_path: Path, gpus: SimulatedCuda) -> None:
    text = TEXT.replace("total, on_host", "torch.compile(lambda x: x + 1, backend='eager')(on_cpu)\ntotal, on_host")
    text = text.replace("rows = ", "on_cpu = torch.ones(2)\nrows = ", 1)
    run = run_traced(tmp_path, text, env=gpus.environment(1, kernel_us=100))
    assert run.status == 0, run.err
    (event,) = run.events("host_syncs")
    assert "torch.compile" in event.data["absent"]["lines"]

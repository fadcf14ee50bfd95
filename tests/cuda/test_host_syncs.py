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

class Known(torch.Tensor):
    known = {torch.Tensor.tolist}  # looked up by value, as torch.overrides recommends

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func in cls.known and func is torch.Tensor.tolist, func
        return super().__torch_function__(func, types, args, kwargs)

before = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}, torch.cuda.synchronize
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.ones(8, 16, device="cuda")
total, on_host = 0.0, torch.ones(3).as_subclass(Known)
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
    f"script.py:{TEXT[: TEXT.index(comment)].count(chr(10)) + 1} `{call}`"
    for comment, call in (("# every step", "item"), ("# now and then", "__float__"))
)


def waits(run: TracedRun) -> list[dict[str, float]]:
    """Return for each sample the time (ms) of the waits by line and call."""
    assert run.status == 0, run.err
    assert run.complaints == []
    samples: list[Any] = [event.data["lines"] for event in run.events("host_syncs")]
    return [{line: ns / 1e6 for line, ns in lines.items()} for lines in samples]


def test_the_lines_that_wait(tmp_path: Path, gpus: SimulatedCuda) -> None:
    samples = waits(run_traced(tmp_path, TEXT, env=gpus.environment(1, kernel_us=3000)))
    assert len(samples) >= 20
    waiting = [sample[EVERY_STEP] for sample in samples if EVERY_STEP in sample]
    assert len(waiting) >= len(samples) - 3, "all but those of the last steps, which do not wait"
    assert median(waiting) >= 3.0, "a kernel or more"
    assert sum(any(line.startswith(SOMETIMES) for line in sample) for sample in samples) <= 3
    assert not any("tolist" in line for sample in samples for line in sample)


def test_nothing_else_waits_for_the_device(tmp_path: Path, gpus: SimulatedCuda) -> None:
    counts = []
    for run in (run_traced, run_untraced):
        done = run(tmp_path, TEXT, env=gpus.environment(1, kernel_us=100))
        assert done.status == 0, done.err
        counts.append({name: gpus.counts().get(name, 0) for name in WAITING_FUNCTIONS})
    assert counts[0] == counts[1]


def test_a_compiled_script_is_not_sampled(tmp_path: Path, gpus: SimulatedCuda) -> None:
    text = TEXT.replace("total, on_host", "torch.compile(lambda x: x + 1, backend='eager')(on_cpu)\ntotal, on_host")
    text = text.replace("rows = ", "on_cpu = torch.ones(2)\nrows = ", 1)
    run = run_traced(tmp_path, text, env=gpus.environment(1, kernel_us=100))
    assert run.status == 0, run.err
    assert not run.events("host_syncs")

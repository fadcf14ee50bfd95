"""Memory that was not measured, or does not report its size, is unknown and never zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Dpmon
from torch_aborts import unless_aborted
from tracing import Traced, text_of, traced

pytestmark = pytest.mark.slow

PARTS = ("model", "gradients", "optimizer")


def newest(run: Traced, process: int = 0) -> dict[str, Any]:
    """Return the CPU's memory in the newest record of a process."""
    assert (run.status, run.complaints) == (0, []), run.err
    (cpu,) = run.events("memory", process)[-1].data["devices"]
    return dict(cpu)


def held(run: Traced, process: int = 0) -> dict[str, Any]:
    cpu = newest(run, process)
    return {part: cpu[f"{part}_bytes"] for part in PARTS}


@pytest.mark.parametrize("world", [1, 2])
def test_the_shards_of_fsdp2_match_the_sum_of_each_rank(tmp_path: Path, world: int) -> None:
    def shards(number: int) -> tuple[Traced, Path]:
        store = tmp_path / f"meet{number}"
        return traced(tmp_path, text_of("sharded"), world, store), store

    run, store = unless_aborted(shards, lambda ended: ended[0].err)
    said = {rank: json.loads(Path(f"{store}-{rank}").read_text()) for rank in range(world)}
    of_rank = {event.data["rank"]: event.data["process"] for event in run.events("process")}
    assert sorted(of_rank) == list(range(world))
    for rank, process in of_rank.items():
        cpu = newest(run, process)
        assert not [name for name in cpu["absent"] if name.partition("_")[0] in PARTS]
        assert held(run, process) == said[rank]
        assert all(said[rank].values())


CLEARED = """\
import json, sys, torch
order = sys.argv[1]
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.Adam(model.parameters())
most = 0
for x in torch.utils.data.DataLoader(torch.ones(24, 30), batch_size=4):
    model(x).sum().backward()
    most = max(most, sum(p.grad.untyped_storage().nbytes() for p in model.parameters()))
    if order == "by hand":
        for p in model.parameters():
            p.grad = None
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
print(json.dumps(most))
"""


@pytest.mark.parametrize("order", ["optimizer", "by hand"])
def test_gradients_that_the_script_clears_before_the_step_ends(tmp_path: Path, order: str) -> None:
    run = traced(tmp_path, CLEARED, order)
    assert held(run)["gradients"] == run.printed == 4 * (30 * 20 + 20)
    assert len(run.steps()) == 6


ACCUMULATED = """\
import json, torch
one, other = torch.nn.Linear(10, 10), torch.nn.Linear(20, 10)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
size = 0
for x in torch.utils.data.DataLoader(torch.ones(40, 20), batch_size=4):
    for model, part, optimizer in zip((one, other), (x[:, :10], x), optimizers):
        model(part).sum().backward()
        size = sum(p.grad.untyped_storage().nbytes() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps(size))
"""


def test_the_backward_pass_with_the_most_gradients_counts(tmp_path: Path) -> None:
    """As in a GAN: the gradients of one model are cleared before those of the other are computed."""
    run = traced(tmp_path, ACCUMULATED)
    assert held(run)["gradients"] == run.printed == 4 * (20 * 10 + 10)


EVALUATED = """\
import torch
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.Adam(model.parameters())
model.eval()
with torch.no_grad():
    for x in torch.utils.data.DataLoader(torch.ones(40, 30), batch_size=4):
        model(x)
"""


def test_an_evaluation_alone_says_that_nothing_was_trained(tmp_path: Path) -> None:
    cpu = newest(traced(tmp_path, EVALUATED))
    assert (cpu["gradients_bytes"], cpu["optimizer_bytes"]) == (None, None)
    assert cpu["absent"]["gradients_bytes"] == "no backward pass was seen before this measurement"
    assert cpu["absent"]["optimizer_bytes"] == "no optimizer had stepped before this measurement"
    assert cpu["model_bytes"] == 4 * (30 * 20 + 20)


STATELESS = """\
import torch
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(40, 30), batch_size=4):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_an_optimizer_without_a_state_holds_zero(tmp_path: Path) -> None:
    cpu = newest(traced(tmp_path, STATELESS))
    assert cpu["optimizer_bytes"] == 0
    assert "optimizer_bytes" not in cpu["absent"]


BY_HAND = """\
import torch
model = torch.nn.Linear(30, 20)
moments = [torch.zeros_like(p) for p in model.parameters()]
for x in torch.utils.data.DataLoader(torch.ones(40, 30), batch_size=4):
    model(x).sum().backward()
    with torch.no_grad():
        for p, moment in zip(model.parameters(), moments):
            p.sub_(moment.mul_(0.9).add_(p.grad))
    model.zero_grad()
"""


def test_without_an_optimizer_of_torchs_its_part_is_unknown(tmp_path: Path) -> None:
    cpu = newest(traced(tmp_path, BY_HAND))
    assert cpu["optimizer_bytes"] is None
    assert cpu["absent"]["optimizer_bytes"] == "no torch optimizer was made"


ELSEWHERE = """\
import sys, threading, torch
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "before":
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
for x in torch.utils.data.DataLoader(torch.ones(40, 30), batch_size=4):
    model(x).sum().backward()
    if sys.argv[1] == "thread":
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
"""


@pytest.mark.parametrize("where", ["before", "thread"])
def test_an_optimizer_that_steps_elsewhere_counts_as_stepped(tmp_path: Path, where: str) -> None:
    cpu = newest(traced(tmp_path, ELSEWHERE, where))
    assert cpu["optimizer_bytes"] == 0, cpu["absent"]


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
REASON = "1 of its tensors does not report its size (LinearPackedParams); the others hold 420 bytes on this device"


def test_the_summary_and_the_report_say_why_a_part_is_unknown(dpmon: Dpmon, tmp_path: Path) -> None:
    run = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", dpmon.script(QUANTIZED))
    assert run.status == 0, run.errors
    record = next(one for one in dpmon.records() if one["kind"] == "memory")
    assert record["devices"][0]["absent"]["model_bytes"] == REASON
    assert record["devices"][0]["model_bytes"] is None
    assert "cpu  model –, gradients –, optimizer –" in run.errors
    assert f"model: {REASON}" in run.errors
    report = dpmon.run("report")
    flat = " ".join(report.text.split())
    assert f"model of cpu: {REASON}" in flat
    assert "gradients of cpu: no backward pass was seen" in flat

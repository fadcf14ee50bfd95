"""Trainings that are wrong but do not fail have a finding, and similar ones that are right have none."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpmon.model.findings.correctness_findings import find_wrong_training
from dpmon.model.layouts import CallLayouts
from dpmon.store.events import event_to_json
from support.history_builders import HEALTHY_STORE, run_analysis_with
from support.run_harness import Dpmon
from support.tracer_harness import TracedRun, run_traced

PAGE = Path(__file__).parents[2] / "docs" / "what-to-do.md"
_TABLE = re.compile(r"(?<=\| the finding \| not for \| seconds \|\n\|---\|---\|---\|\n)(?:\|.*\n)+")
_ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
LOOP = """\
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
other = nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
after = lambda step: None
loss_of = lambda: net(torch.randn(16, 4)).pow(2).mean()
{changes}
for step in range({steps}):
    opt.zero_grad()
    loss_of().backward()
    opt.step()
    after(step)
"""
UNUSED = """\
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.aux = net, other

    def forward(self, x):
        return self.net(x)

both = Both()
opt = torch.optim.SGD(both.parameters(), lr=0.1)
loss_of = lambda: both(torch.randn(16, 4)).pow(2).mean()
"""
WARM_UP = "rates = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 100)\nafter = lambda step: rates.step()"
EVALUATE = """\
def after(step):
    net.eval()
    with torch.no_grad():
        net(torch.randn(16, 4))
    net.train()
"""
GAN = """\
fakes = torch.optim.SGD(other.parameters(), lr=0.1)
def after(step):
    fakes.zero_grad()
    other(net(torch.randn(16, 4))).mean().backward()
    fakes.step()
"""
ACCUMULATE = """\
def loss_of():
    for _ in range(3):
        net(torch.randn(16, 4)).pow(2).mean().backward()
    return net(torch.randn(16, 4)).pow(2).mean()
"""
LORA = (
    UNUSED + "for parameter in net[0].parameters():\n    parameter.requires_grad_(False)\nother.requires_grad_(False)\n"
)
STALE = "import copy\nnet = copy.deepcopy(net)"
PLAIN = """\
shift = torch.zeros(2, requires_grad=True)
shifts = torch.optim.SGD([shift], lr=0.1)
loss_of = lambda: (net(torch.randn(16, 4)) + shift).pow(2).mean()
after = lambda step: (shifts.step(), shifts.zero_grad())
"""
TEMPERATURE = """\
temperature = nn.Parameter(torch.ones(()))
net.requires_grad_(False)
opt = torch.optim.SGD([temperature], lr=0.1)
loss_of = lambda: (net(torch.randn(16, 4)) / temperature).pow(2).mean()
"""
CASES = {
    "No parameter of SGD belongs to a model that is called, and none has a gradient.": (
        STALE,
        {
            "two optimizers (GAN)": GAN,
            "frozen parameters, LoRA (requires_grad=False)": LORA,
            "an optimizer of a plain tensor besides that of the model": PLAIN,
            "an optimizer of a learned temperature only": TEMPERATURE,
        },
    ),
    "Sequential is in eval mode while it trains.": (
        "net.eval()",
        {
            "BatchNorm in eval mode inside a model in training mode": "net[1].eval()",
            "an evaluation under no_grad between updates": EVALUATE,
            "a model without Dropout or BatchNorm": "net = nn.Sequential(nn.Linear(4, 2))\n"
            "opt = torch.optim.SGD(net.parameters(), lr=0.1)\nnet.eval()",
        },
    ),
    "The learning rate of SGD is 0.": (
        "opt.param_groups[0]['lr'] = 0.0",
        {"a warm-up from 0": WARM_UP, "two optimizers (GAN)": GAN, "gradient accumulation": ACCUMULATE},
    ),
    "No gradient ever reaches aux.weight, aux.bias of Both.": (
        UNUSED,
        {"frozen parameters, LoRA (requires_grad=False)": LORA, "two optimizers (GAN)": GAN},
    ),
}
CONSTANT = """\
import time
after = lambda step: time.sleep(0.125)
loss_of = lambda: nn.functional.cross_entropy(net(torch.randn(16, 4))[:, :1], torch.zeros(16, dtype=torch.long))
"""
IMAGES = """\
net = nn.Sequential(nn.Conv2d(3, 4, 3), {norm}, nn.Flatten(), nn.Linear(144, 2)){mode}
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loss_of = lambda: net(torch.randn(1, 3, 8, 8)).pow(2).mean()
"""
RECORD_CASES = {
    "The loss never changes: it is 0": (
        CONSTANT,
        240,
        "a loss that has become 0; fewer than 20 recorded losses or 100 updates; NaN; a loss with rounding",
        lambda records: [row["t_s"] for row in records if row["kind"] == "loss"][:20],
    ),
    "BatchNorm in Sequential normalizes batches of one row.": (
        IMAGES.format(norm="nn.BatchNorm2d(4)", mode=""),
        40,
        "SyncBatchNorm; BatchNorm in eval mode; GroupNorm; a last batch of one row; a video of one row of frames",
        lambda records: [row["t_s"] for row in records if row["kind"] == "check"][:3],
    ),
}
"""Changes, steps, and when it is silent: tests/unit/test_correctness_findings.py; times from the first to the last."""
RANKS = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed({seed})
data = TensorDataset(torch.randn(1280, 16), torch.randn(1280, 1))
net = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), broadcast_buffers=False
)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
sampler = DistributedSampler(data) if {shards} else None
for epoch in range(4):
    for x, y in DataLoader(data, 16, shuffle=sampler is None, sampler=sampler):
        loss = ({net}(x) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
"""
RANK_CASES = {
    "Nothing averages the gradients": {"seed": "rank", "shards": True, "net": "net.module"},
    "All ranks train on the same data": {"seed": "0", "shards": False, "net": "net"},
    "": {"seed": "0", "shards": True, "net": "net"},
}
"""Scripts of two ranks by the start of their finding. The last one is right: see RANKS_SILENT."""
RANKS_SILENT = "DistributedDataParallel with shuffled shards and buffers that differ between ranks"


def texts_of(run: TracedRun) -> list[str]:
    """Return the findings in the record of a script."""
    rows = [(0, 0, "check", 0, event_to_json(event)) for event in reversed(run.events("check"))]
    store = SimpleNamespace(**{**vars(HEALTHY_STORE), "connection": SimpleNamespace(rows=lambda *_: rows)})
    facts = run_analysis_with(store=store, whole_communication=None, layouts=CallLayouts([], {}))
    return [finding.text for finding in find_wrong_training(facts)]


def check_row(sentence: str, silence: str, seconds: float) -> None:
    """Compare a row of the table with the documentation; with DPMON_GOLDEN=write, write it."""
    page = PAGE.read_text(encoding="utf-8")
    rows = {row[0]: row for row in _ROW.findall(_TABLE.search(page)[0])}  # type: ignore[index]
    if os.environ.get("DPMON_GOLDEN") == "write":
        rows[sentence] = (sentence, silence, f"{seconds:.1f}")
        text = "".join(f"| {' | '.join(row)} |\n" for row in rows.values())
        PAGE.write_text(_TABLE.sub(lambda _: text, page), encoding="utf-8")
    assert rows[sentence][1] == silence


@pytest.mark.parametrize("sentence", CASES)
def test_a_wrong_training_has_its_finding(tmp_path: Path, sentence: str) -> None:
    wrong, _ = CASES[sentence]
    run = run_traced(tmp_path, LOOP.format(changes=wrong, steps=40))
    assert texts_of(run) == [sentence]
    assert not run.complaints
    first, _, third, *_ = run.events("check")
    check_row(sentence, "; ".join(CASES[sentence][1]), third.data["t_s"] - first.data["t_s"])


@pytest.mark.parametrize(
    "changes", {text: name for _, right in CASES.values() for name, text in right.items()}, ids=lambda text: None
)
def test_a_right_training_has_none(tmp_path: Path, changes: str) -> None:
    run = run_traced(tmp_path, LOOP.format(changes=changes, steps=40))
    assert texts_of(run) == []
    assert len(run.events("check")) >= 4
    assert not run.complaints


@pytest.mark.parametrize(
    ("norm", "mode", "dimensions"),
    [
        ("nn.BatchNorm2d(4)", "", [4]),
        ("nn.BatchNorm2d(4)", "\nnet[1].eval()", []),
        ("nn.SyncBatchNorm(4)", "\nnet[1].eval()", []),
        ("nn.GroupNorm(2, 4)", "", []),
    ],
)
def test_batch_norms_that_use_the_rows_of_one_replica(
    tmp_path: Path, norm: str, mode: str, dimensions: list[int]
) -> None:
    run = run_traced(tmp_path, LOOP.format(changes=IMAGES.format(norm=norm, mode=mode), steps=20))
    assert run.events("check")[-1].data["norm_dimensions"] == dimensions
    assert not run.complaints


@pytest.mark.slow
@pytest.mark.parametrize("sentence", RECORD_CASES)
def test_a_finding_from_losses_or_calls(dpmon: Dpmon, sentence: str) -> None:
    changes, steps, silence, times_of = RECORD_CASES[sentence]
    result = dpmon.run("--headless", "--name", "wrong", dpmon.script(LOOP.format(changes=changes, steps=steps)))
    assert result.status == 0, result.errors
    findings = json.loads(dpmon.run("report", "wrong", "--json").text)["findings"]
    (text,) = [finding["text"] for finding in findings if finding["kind"] == "wrong"]
    assert text.startswith(sentence)
    first_s, *_, last_s = times_of([json.loads(line) for line in dpmon.run("export", "wrong").text.splitlines()])
    check_row(sentence, silence, last_s - first_s)


@pytest.mark.slow
@pytest.mark.parametrize("sentence", RANK_CASES)
def test_ranks(dpmon: Dpmon, sentence: str) -> None:
    script = dpmon.script(RANKS.format(**RANK_CASES[sentence]))
    result = dpmon.run("--headless", "--name", "ranks", "torchrun", "--nproc_per_node", "2", script)
    assert result.status == 0, result.errors
    report = dpmon.run("report", "ranks").text
    assert re.findall(r"^  1 (Nothing averages the gradients|All ranks train on the same data)", report, re.M) == (
        [sentence] if sentence else []
    )
    looks = [json.loads(line) for line in dpmon.run("export", "ranks", "--kind", "check").text.splitlines()]
    times = [look["t_s"] for look in looks if look["process"] == 0]
    assert len(times) >= 4
    if sentence:
        check_row(sentence, RANKS_SILENT, times[2] - times[0])

"""Trainings that are wrong but do not fail have a finding, and similar ones that are right have none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpmon.model.findings.correctness_findings import find_wrong_training
from dpmon.store.events import event_to_json
from support.baseline_comparison import run_unless_aborted
from support.findings_table import check_row
from support.history_builders import HEALTHY_STORE, run_analysis_with
from support.run_harness import Dpmon, wait_for
from support.tracer_harness import TracedRun, run_traced

LOOP = """\
import os, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
other = nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
after = lambda step: None
loss_of = lambda step: net(torch.randn(16, 4)).pow(2).mean()
{changes}
for step in range({steps}):
    opt.zero_grad()
    loss_of(step).backward()
    opt.step()
    after(step)
"""
UNUSED = """\
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.aux = net, other

    def forward(self, x, uses_aux=False):
        return self.aux(self.net(x)) if uses_aux else self.net(x)

both = Both()
opt = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.5)
loss_of = lambda step: both(torch.randn(16, 4)).pow(2).mean()
"""
ALTERNATE = UNUSED + "loss_of = lambda step: both(torch.randn(16, 4), step % 2 == {turn}).pow(2).mean()"
WARM_UP = "rates = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 100)\nafter = lambda step: rates.step()"
FROZEN_GROUP = "opt.add_param_group({'params': other.parameters(), 'lr': 0.0})"
EVALUATE = """\
def after(step):
    net.eval()
    with torch.no_grad():
        net(torch.randn(16, 4))
    net.train()
"""
FINE_TUNE = "net[2].p = 0.0\nnet[1].requires_grad_(False)\nnet.eval()"
GAN = """\
fakes = torch.optim.SGD(other.parameters(), lr=0.1)
def after(step):
    fakes.zero_grad()
    other(net(torch.randn(16, 4))).mean().backward()
    fakes.step()
"""
ACCUMULATE = """\
def loss_of(step):
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
loss_of = lambda step: (net(torch.randn(16, 4)) + shift).pow(2).mean()
after = lambda step: (shifts.step(), shifts.zero_grad())
"""
TEMPERATURE = """\
temperature = nn.Parameter(torch.ones(()))
net.requires_grad_(False)
opt = torch.optim.SGD([temperature], lr=0.1)
loss_of = lambda step: (net(torch.randn(16, 4)) / temperature).pow(2).mean()
"""
COMPLEX = """\
spectrum = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
opt.add_param_group({"params": [spectrum]})
loss_of = lambda step: (net(torch.randn(16, 4)) * spectrum).abs().mean()
"""
IMAGES = """\
net = nn.Sequential(nn.Conv2d(3, 4, 3), {norm}, nn.Flatten(), nn.Linear(144, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
loss_of = lambda step: net(torch.randn({rows}, 3, 8, 8)).pow(2).mean()
os.environ.update(RANK="0", WORLD_SIZE="{ranks}")
"""
FRAMES = """\
class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, video):
        return self.net(video.flatten(0, 1))

video = Frames()
loss_of = lambda step: video(torch.randn(1, 9, 3, 8, 8)).pow(2).mean()
"""
NORM = "nn.BatchNorm2d(4)"
LAST_BATCH = "rows = lambda step: 1 if step % 8 == 7 else 4\n" + IMAGES.format(norm=NORM, rows="rows(step)", ranks=2)
CASES = {
    "No parameter of SGD belongs to a model that is called, and none has ever had a gradient.": (
        "the optimizer, the models that are called, and the gradients",
        STALE,
        {
            "two optimizers (GAN)": GAN,
            "frozen parameters, LoRA (requires_grad=False)": LORA,
            "an optimizer of a plain tensor besides that of the model": PLAIN,
            "an optimizer of a learned temperature only": TEMPERATURE,
            "complex parameters": COMPLEX,
        },
    ),
    "Sequential is in eval mode while it trains.": (
        "no part of the model is in training mode, and a Dropout or a BatchNorm that trains is in it",
        "net.eval()",
        {
            "BatchNorm in eval mode inside a model in training mode": "net[1].eval()",
            "frozen BatchNorm, and Dropout(0)": FINE_TUNE,
            "a head in training mode on a model in eval mode": "net.eval()\nnet[3].train()",
            "an evaluation under no_grad between updates": EVALUATE,
            "a model without Dropout or BatchNorm": "net = nn.Sequential(nn.Linear(4, 2))\n"
            "opt = torch.optim.SGD(net.parameters(), lr=0.1)\nnet.eval()",
        },
    ),
    "The learning rate of SGD is 0.": (
        "all its learning rates are 0",
        "opt.param_groups[0]['lr'] = 0.0",
        {
            "a warm-up from 0": WARM_UP,
            "a group of parameters with rate 0": FROZEN_GROUP,
            "two optimizers (GAN)": GAN,
            "gradient accumulation": ACCUMULATE,
        },
    ),
    "No gradient has ever reached aux.weight, aux.bias of Both.": (
        "the optimizer keeps a state of its other parameters, such as momentum; up to eight names",
        UNUSED,
        {
            "frozen parameters, LoRA (requires_grad=False)": LORA,
            "tasks in turn, even if the parameters are rarely used": ALTERNATE.format(turn=0),
            "or in other steps": ALTERNATE.format(turn=1),
            "an optimizer without a state (SGD without momentum), which cannot tell": UNUSED
            + "opt = torch.optim.SGD(both.parameters(), lr=0.1)",
        },
    ),
    "BatchNorm in Sequential normalizes batches of one row.": (
        "ranks or replicas split a batch; the model's input has one row, and the dimensions that the BatchNorm takes",
        IMAGES.format(norm=NORM, rows=1, ranks=2),
        {
            "a single process with batches of one row, on purpose": IMAGES.format(norm=NORM, rows=1, ranks=1),
            "BatchNorm in eval mode": IMAGES.format(norm=NORM, rows=1, ranks=2) + "net[1].eval()",
            "SyncBatchNorm": IMAGES.format(norm="nn.SyncBatchNorm(4)", rows=1, ranks=2) + "net[1].eval()",
            "GroupNorm": IMAGES.format(norm="nn.GroupNorm(2, 4)", rows=1, ranks=2),
            "a last batch of one row": LAST_BATCH,
            "a video of one row of frames": IMAGES.format(norm=NORM, rows=1, ranks=2) + FRAMES,
        },
    ),
}
CONSTANT = """\
import time
after = lambda step: time.sleep(0.125)
loss_of = lambda step: nn.functional.mse_loss(net(torch.randn(16, 4))[:, :1].softmax(1), torch.zeros(16, 1))
"""
CONSTANT_SILENT = (
    *("a loss of 0 (no rewards yet, beyond a margin)", "fewer than 20 recorded losses", "NaN", "a loss with rounding"),
)
RANKS = """\
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(1280, 16), torch.randn(1280, 1))
net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
wrap = lambda net: nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
sampler = DistributedSampler(data)
loss_of = lambda net, x, y: (net(x) - y).pow(2).mean()
{changes}
net = wrap(net)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for epoch in range(4):
    for x, y in DataLoader(data, 16, shuffle=sampler is None, sampler=sampler):
        loss = loss_of(net, x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
"""
LOCAL_SGD = """\
def loss_of(net, x, y):
    with net.no_sync():
        return (net(x) - y).pow(2).mean()
"""
GATHER = """\
class Gather(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        mine = self.net(x)
        outputs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(outputs, mine.detach())
        outputs[rank] = mine
        return torch.cat(outputs)

net = Gather(net)
loss_of = lambda net, x, y: net(x).pow(2).mean()
"""
RANK_CASES = {
    "Nothing averages the gradients": (
        "a DistributedDataParallel, no backward pass that begins at it, and weights that differ after the same update",
        "loss_of = lambda net, x, y: (net.module(x) - y).pow(2).mean()",
        {
            "DistributedDataParallel, also with buffers that differ between ranks": "",
            "ranks that train models of their own (no DistributedDataParallel)": "wrap = lambda net: net",
            "local SGD under no_sync": LOCAL_SGD,
        },
    ),
    "All ranks train on the same data": (
        "weights and losses that are equal, bit for bit, after the same update",
        "sampler = None",
        {
            "equal seeds with a DistributedSampler": "",
            "a loss over the outputs of all ranks (CLIP)": GATHER,
        },
    ),
}
"""Changes of two ranks by the start of their finding, and of similar ranks that are right."""


def texts_of(run: TracedRun) -> list[str]:
    """Return the findings in the record of a script."""
    rows = [(0, 0, "check", 0, event_to_json(event)) for event in reversed(run.events("check"))]
    store = SimpleNamespace(**{**vars(HEALTHY_STORE), "connection": SimpleNamespace(rows=lambda *_: rows)})
    facts = run_analysis_with(store=store, whole_communication=None)
    return [finding.text for finding in find_wrong_training(facts)]


def check_row_of(sentence: str, condition: str, silence: Iterable[str], seconds: float) -> None:
    """Compare the row of a finding that came `seconds` after the first look or loss."""
    check_row(re.escape(sentence), sentence, condition, "; ".join(silence), f"found after {seconds:.1f}")


@pytest.mark.parametrize("sentence", CASES)
def test_a_wrong_training_has_its_finding(tmp_path: Path, sentence: str) -> None:
    condition, wrong, right = CASES[sentence]
    run = run_traced(tmp_path, LOOP.format(changes=wrong, steps=40))
    assert texts_of(run) == [sentence]
    assert not run.complaints
    first, _, third, *_ = run.events("check")
    check_row_of(sentence, condition, right, third.data["t_s"] - first.data["t_s"])


@pytest.mark.parametrize(
    "changes", {text: name for *_, right in CASES.values() for name, text in right.items()}, ids=lambda text: None
)
def test_a_right_training_has_none(tmp_path: Path, changes: str) -> None:
    run = run_traced(tmp_path, LOOP.format(changes=changes, steps=40))
    assert texts_of(run) == []
    assert len(run.events("check")) >= 4
    assert not run.complaints


def test_a_batch_that_is_split_into_replicas_of_one_row(tmp_path: Path) -> None:
    images = LOOP.format(changes=IMAGES.format(norm=NORM, rows=2, ranks=1), steps=40)
    run = run_traced(tmp_path, images, mode="dp", replicas=2)
    assert texts_of(run) == ["BatchNorm in Sequential normalizes batches of one row."]
    assert texts_of(run_traced(tmp_path, images)) == []


@pytest.mark.slow
def test_it_is_said_while_the_training_runs(dpmon: Dpmon, tmp_path: Path) -> None:
    """Once without a screen, and by `status --explain`."""
    output = tmp_path / "errors"
    changes = "opt.param_groups[0]['lr'] = 0.0\nimport time\nafter = lambda step: time.sleep(0.05)"
    script = dpmon.script(LOOP.format(changes=changes, steps=1_000_000))
    with output.open("wb") as file:
        process = dpmon.start("--headless", "--name", "rate", script, stderr=file)
    wait_for(lambda: output.read_text().count("dpmon: The learning rate of SGD is 0.") == 1)
    wait_for(lambda: "The learning rate of SGD is 0." in dpmon.run("status", "rate", "--explain").text)
    assert dpmon.stop("rate").status == 0
    process.wait()


@pytest.mark.slow
def test_a_loss_that_never_changes(dpmon: Dpmon) -> None:
    result = dpmon.run("--headless", "--name", "wrong", dpmon.script(LOOP.format(changes=CONSTANT, steps=240)))
    assert result.status == 0, result.errors
    findings = json.loads(dpmon.run("report", "wrong", "--json").text)["findings"]
    assert [text for finding in findings if (text := finding["text"]).startswith("The loss never changes: it is 1 (")]
    losses = [json.loads(line) for line in dpmon.run("export", "wrong", "--kind", "loss").text.splitlines()]
    condition = "20 recorded losses or more, the first one included, are equal, and not 0"
    check_row_of("The loss never changes", condition, CONSTANT_SILENT, losses[19]["t_s"] - losses[0]["t_s"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sentence", "changes"),
    [(sentence, wrong) for sentence, (_, wrong, _) in RANK_CASES.items()]
    + [("", changes) for changes in {text: name for *_, right in RANK_CASES.values() for name, text in right.items()}],
    ids=lambda text: None,
)
def test_ranks(dpmon: Dpmon, sentence: str, changes: str) -> None:
    script = dpmon.script(RANKS.format(changes=changes))
    words = "--headless", "torchrun", "--nproc_per_node", "2", script
    result = run_unless_aborted(lambda _: dpmon.run(*words), lambda ended: ended.errors)
    assert result.status == 0, result.errors
    findings = json.loads(dpmon.run("report", "--json").text)["findings"]
    wrong = [finding["text"] for finding in findings if finding["kind"] == "wrong"]
    assert [text for text in wrong if not (sentence and text.startswith(sentence))] == []
    assert bool(wrong) == bool(sentence)
    looks = [json.loads(line) for line in dpmon.run("export", "--kind", "check").text.splitlines()]
    times = [look["t_s"] for look in looks if look["process"] == 0]
    assert len(times) >= 4
    if sentence:
        condition, _, right = RANK_CASES[sentence]
        check_row_of(sentence, condition, right, times[2] - times[0])

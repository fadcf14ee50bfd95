"""Calls over virtual replicas that repeat, with changes between them, compute the same as without dpmon."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.record.schema import FORWARD_ONLY
from support.tracer_harness import run_traced, run_untraced

REPEATED = """\
import json, sys, torch
from torch import nn
torch.manual_seed(5)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.refuse = None
    def forward(self, x, scale=1.0):
        if self.refuse is not None:
            raise self.refuse
        return self.layer(x) * scale
net = Net()
model = nn.DataParallel(net) if sys.argv[1] == "wrapped" else net
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
def train(count=3, rows=8, **more):
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.linspace(0, 1, rows * 3).reshape(rows, 3), **more).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
train()
train(rows=5)
train(rows=1)
train(scale=2.0)
model.eval()
with torch.no_grad():
    losses.append(round(model(torch.ones(4, 3)).sum().item(), 4))
model.train()
net.refuse = ValueError("not today")
try:
    train(1)
except ValueError as error:
    losses.append(type(error.__context__).__name__)
net.refuse = None
train()
asked, scatter = [], nn.DataParallel.scatter
def own(self, inputs, kwargs, device_ids):
    asked.append(len(device_ids))
    return scatter(self, inputs, kwargs, device_ids)
nn.DataParallel.scatter = own
train()
nn.DataParallel.scatter = scatter
if sys.argv[1] == "bare":
    net.layer = nn.Sequential(net.layer, nn.Flatten(0))  # DataParallel would change the meaning of its result
    train()
print(json.dumps([losses, asked]))
"""


@pytest.mark.parametrize("form", ["wrapped", "bare"])
def test_each_call_has_the_shapes_and_the_mode_of_its_own(tmp_path: Path, form: str) -> None:
    run = run_traced(tmp_path, REPEATED, form, replicas=3)
    losses, asked = run.printed
    assert losses == run_untraced(tmp_path, REPEATED, form).printed[0]
    assert asked == ([3, 3, 3] if form == "wrapped" else []), "the script's own method is called in each step"
    calls = run.calls()
    changed = [] if form == "wrapped" else ["single"] * 3
    assert [call.mode for call in calls] == ["dp"] * 13 + ["single"] + ["dp"] * 6 + changed
    assert [call.failed for call in calls] == [False] * 13 + [True] + [False] * (6 + len(changed))
    assert [call.rows for call in calls[:13]] == [8] * 3 + [5] * 3 + [1] * 3 + [8] * 3 + [4]
    assert [len(call.replicas) for call in calls[:13]] == [3] * 6 + [1] * 3 + [3] * 3 + [2]
    assert [(call.training, call.grad) for call in calls[:13]] == [(True, True)] * 12 + [(False, False)]
    expected = ("was not possible for call", "Net runs on one device")
    assert [text for text in run.complaints if not any(words in text for words in expected)] == []


LONE = """\
import json, sys, traceback, torch
class Lone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(4, 2)
    def forward(self, x):
        if raising:
            raise raising.pop()
        return self.part(x)
raising = []
model = Lone()
model = torch.nn.DataParallel(model) if sys.argv[1] == "wrapped" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, x in enumerate(torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=1)):
    raising = [KeyboardInterrupt()] if number == 10 else []
    try:
        model(x).sum().backward()
    except KeyboardInterrupt as error:
        print(json.dumps([frame.filename for frame in traceback.extract_tb(error.__traceback__)]))
        continue
    optimizer.step()
"""


@pytest.mark.parametrize("form", ["wrapped", "bare"])
def test_after_a_lone_replica_was_interrupted_every_call_is_recorded(tmp_path: Path, form: str) -> None:
    """A batch of one row has one replica, which runs on the training thread.

    The interrupted pass trained nothing: it is forward only, and the steps after it keep their numbers.
    """
    run = run_traced(tmp_path, LONE, form, replicas=2)
    calls = run.calls("Lone")
    assert [call.failed for call in calls] == [index == 10 for index in range(20)]
    assert [call.step for call in calls if not call.failed] == list(range(1, 20))
    assert [(call.step, call.kind) for call in calls if call.failed] == [(1, FORWARD_ONLY)]
    assert any(name.endswith(("parallel_apply.py", "data_parallel.py")) for name in run.printed)
    assert [name for name in run.printed if "dpmon" in name.split("/")[-3:]] == []


INTERRUPTED = """\
import json, sys, traceback, torch
model = torch.nn.Linear(4, 2)
model = torch.nn.DataParallel(model) if sys.argv[1] == "wrapped" else model
cat = torch.cat
def interrupted(*args, **kwargs):
    raise KeyboardInterrupt
for number, x in enumerate(torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=2)):
    torch.cat = interrupted if number == 10 else cat
    try:
        model(x).sum().backward()
    except KeyboardInterrupt as error:
        print(json.dumps([frame.filename for frame in traceback.extract_tb(error.__traceback__)]))
"""


@pytest.mark.parametrize("form", ["wrapped", "bare"])
def test_an_interrupt_in_gather_has_no_frame_of_a_timed_primitive(tmp_path: Path, form: str) -> None:
    run = run_traced(tmp_path, INTERRUPTED, form, replicas=2)
    assert any(name.endswith("scatter_gather.py") for name in run.printed), "it was in gather"
    assert [name for name in run.printed if name.endswith(("split_calls.py", "primitives.py"))] == []

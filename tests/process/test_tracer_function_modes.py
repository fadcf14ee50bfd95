"""A script that watches every read of its tensors and modules notices nothing of the tracer."""

from __future__ import annotations

import json

from support.baseline_comparison import SideBySide
from support.run_harness import Dpmon

STEPS = 16
COUNTING = f"""
import collections
import torch
from torch.overrides import TorchFunctionMode, resolve_name

seen = collections.Counter()

class Counting(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen[resolve_name(function)] += 1
        if RAISES and resolve_name(function) in ("torch.Tensor.shape.__get__", "torch.Tensor.untyped_storage"):
            raise RuntimeError("nobody may read this")
        return function(*args, **(kwargs or {{}}))

class Net(torch.nn.Module):
    def __init__(self):
        self.reads = 0
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    @property
    def training(self):
        self.__dict__["reads"] += 1
        return True

    @training.setter
    def training(self, value):
        pass

    def forward(self, x):
        return torch.matmul(x, self.inner.weight.t())

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
batches = list(torch.randn({STEPS}, 3, 4).unbind())
with Counting():
    for batch in batches:
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
print(sorted((str(name), count) for name, count in seen.items()))
print(net.__dict__["reads"])
"""


def test_a_mode_and_a_property_of_the_script_see_no_read_of_ours(dpmon: Dpmon) -> None:
    script = dpmon.script(COUNTING.replace("RAISES", "False"))
    alone = SideBySide(dpmon).plainly(script)
    run = dpmon.run(*dpmon.warm(), "--headless", script)
    assert (run.status, run.out) == (alone.status, alone.stdout) == (0, alone.stdout), run.errors


def test_a_mode_that_raises_on_such_reads_costs_no_record(dpmon: Dpmon) -> None:
    run = dpmon.run(*dpmon.warm(), "--headless", "--mode", "script", dpmon.script(COUNTING.replace("RAISES", "True")))
    assert run.status == 0, run.errors
    records = [json.loads(line) for line in dpmon.run("export").text.splitlines()]
    calls = [record for record in records if record["kind"] == "call"]
    assert [call["inputs"][0]["shape"] for call in calls] == [[3, 4]] * STEPS
    assert [record["training"] for record in calls] == [True] * STEPS
    assert sum(record["kind"] == "step" for record in records) == STEPS
    assert not [record["text"] for record in records if record["kind"] == "warning"]

"""`training` of a call is the flag of the module that computes, whatever the wrappers around it are set to."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracing import traced

SCRIPT = """\
import sys, torch
from torch import nn
kind, inner_trains, grad = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
net = nn.Linear(4, 2)
if kind == "ddp":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(net)
elif kind == "nested":
    model = nn.DataParallel(nn.DataParallel(net))
elif kind == "compiled":
    model = torch.compile(net, backend="eager")
elif kind == "bare":
    model = net
else:
    model = nn.DataParallel(net)
model.train(not inner_trains)
net.train(inner_trains)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(80, 4), batch_size=4):
    with torch.set_grad_enabled(grad):
        loss = model(x).sum()
    if grad:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inner_trains", [True, False])
@pytest.mark.parametrize("kind", ["data parallel", "nested", "virtual", "ddp", "bare"])
def test_the_flag_of_the_wrapped_module_is_recorded(tmp_path: Path, kind: str, inner_trains: bool, grad: bool) -> None:
    options = {"mode": "dp", "replicas": 2} if kind == "virtual" else {"mode": "script"}
    run = traced(tmp_path, SCRIPT, kind, inner_trains, grad, **options)
    assert (run.status, run.complaints) == (0, []), run.err
    calls = run.calls()
    assert len(calls) == 20
    assert {call.training for call in calls} == {inner_trains}
    assert {call.evaluates for call in calls} == {not inner_trains and not grad}
    assert {call.virtual for call in calls} == {kind == "virtual"}


def test_the_flag_of_a_compiled_module_is_recorded(tmp_path: Path) -> None:
    """torch 2.4 leaves the flag of the wrapper as it is."""
    run = traced(tmp_path, SCRIPT, "compiled", False, False, mode="script")
    assert (run.status, run.complaints) == (0, []), run.err
    assert len(run.calls()) == 20
    assert all(call.evaluates for call in run.calls())

"""The hook before each optimizer step stands beside the script's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim import optimizer

from dpmon.tracer.steps.optimizers import PreHooks


def test_hooks_of_the_script_run_after_ours_until_they_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    before = {1: lambda *_: called.append("before the tracer")}
    hooks = PreHooks(lambda *_: called.append("tracer"), before)
    monkeypatch.setattr(optimizer, "_global_optimizer_pre_hooks", hooks)
    handle = optimizer.register_optimizer_step_pre_hook(lambda *_: called.append("script"))
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    sgd.step()
    handle.remove()
    sgd.step()
    assert called == ["tracer", "before the tracer", "script", "tracer", "before the tracer"]

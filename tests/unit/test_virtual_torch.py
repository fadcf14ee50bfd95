"""The module torch that parallel_apply sees with virtual replicas."""

from __future__ import annotations

import pytest
import torch

from dpmon.tracer.modes.virtual_devices import _SingleDeviceTorch


def test_parallel_apply_finds_everything_else_of_torch() -> None:
    """torch 2.4 evaluates the annotation torch.cuda.Stream in each call."""
    seen = _SingleDeviceTorch(torch.device("cpu"))
    assert seen.cuda.Stream is torch.cuda.Stream
    assert seen.Tensor is torch.Tensor
    assert seen.cuda.current_stream is not torch.cuda.current_stream
    with seen.cuda.device(1), seen.cuda.stream(seen.cuda.current_stream(1)):
        assert not seen.is_autocast_enabled()


def test_autocast_is_on_the_replicas_device_whatever_parallel_apply_names(recwarn: pytest.WarningsRecorder) -> None:
    """Older versions name "cuda": torch warns that it is not there, and leaves autocast off."""
    with _SingleDeviceTorch(torch.device("cpu")).amp.autocast("cuda", enabled=True):
        assert torch.is_autocast_enabled("cpu")
    assert not recwarn.list

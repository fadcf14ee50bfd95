"""The copies of losses from a GPU: to which device their events belong, what a mode sees, and what a fork keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpmon.tracer.core.session import Session, TracerConfig
from dpmon.tracer.steps.losses import LossTracer
from dpmon.tracer.steps.span_recorder import SpanRecorder


class Event:
    device: int | None = None


class Events:
    """Like those of CUDA, an event belongs to the device on which it was first recorded."""

    def create_event(self) -> Event:
        return Event()

    def record(self, event: Event, device: int) -> None:
        assert event.device in (None, device)
        event.device = device

    def is_done(self, event: Event) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


class OnGpu(torch.Tensor):
    device_number = 0
    is_cuda = True

    def get_device(self) -> int:
        return self.device_number


def loss_on(device: int) -> torch.Tensor:
    found = torch.tensor(device + 0.5).as_subclass(OnGpu)
    found.device_number = device
    return found


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> LossTracer:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **how: empty(*sizes, **how))  # needs CUDA
    session = Session(TracerConfig("", 0, "auto", None, ()))
    return LossTracer(session, SpanRecorder(session), Events())  # type: ignore[arg-type]


def test_losses_of_several_devices_have_events_of_their_own(losses: LossTracer) -> None:
    read: list[float] = []
    for device in (0, 1, 1, 0):
        assert losses.read_values([loss_on(device)], read.append)
        assert not losses.read_values([loss_on(device)], read.append), "one at a time"
        assert losses._pending_copy is not None
        losses._read_copy(losses._pending_copy)
        assert losses._pending_copy is None
    assert read == [0.5, 1.5, 1.5, 0.5]


def test_masks_on_a_gpu_are_counted_there_and_read_once_they_have_arrived(losses: LossTracer) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).as_subclass(OnGpu)
    read: list[float] = []
    with torch._C.DisableTorchFunction():
        assert losses.read_values([mask], read.append, torch.count_nonzero)
    assert not read, "nothing waits for the GPU"
    pending = losses._pending_copy
    assert pending is not None
    losses.poll(0)
    assert losses._recorder.on_inputs is not None
    losses._recorder.on_inputs((), {})  # the next call reads it, even if it has no mask
    assert read == [3]
    assert losses._pending_copy is None


def test_a_mode_of_the_script_does_not_see_the_memory_for_copies(losses: LossTracer) -> None:
    seen: list[Any] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    loss = loss_on(0)
    with torch._C.DisableTorchFunction(), Operators():
        losses.read_values([loss], print)
    assert seen == []


def test_a_forked_child_does_not_return_events_and_memory_of_its_parent(losses: LossTracer) -> None:
    losses.read_values([loss_on(0)], print)
    assert losses._pending_copy is not None
    assert losses._pinned_memory is not None
    parts = [weakref.ref(losses._pending_copy.event), weakref.ref(losses._pinned_memory)]
    losses.reset()
    gc.collect()
    assert None not in [part() for part in parts]
    assert losses._pending_copy is None

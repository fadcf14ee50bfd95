"""A walk over the tensors of a training counts all kinds of tensors; and when a process takes it."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dpmon.tracer.core.session import Session, TracerErrorGuard
from dpmon.tracer.memory.measurement import NEVER, MemoryTracer
from dpmon.tracer.memory.storages import MAX_TENSORS, MODEL, StorageWalk

pytestmark = pytest.mark.filterwarnings("ignore")  # torch calls half of these kinds deprecated, the others beta


INT64, FLOAT32 = 8, 4


def walked(**buffers: torch.Tensor) -> StorageWalk:
    model = torch.nn.Module()
    model._buffers.update(buffers)
    return StorageWalk([model], [])


class Closed(torch.Tensor):
    """A wrapper that does not list its parts."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (1000,))

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("a walk must not run operations")


class Open(Closed):
    """A wrapper that does."""

    def __init__(self) -> None:
        self.part = torch.ones(10)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(5, device="cuda:0")


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=layout)


UNKNOWN = {MODEL: "the size of 1 of its tensors is unknown"}
MADE: dict[str, tuple[Any, int | None, dict[int, str]]] = {
    # How it is made, the bytes that it holds (None: no device is used), and why they are unknown.
    "coo": (lambda: torch.eye(4).to_sparse(), 4 * FLOAT32 + 2 * 4 * INT64, {}),
    "nested": (lambda: nested(torch.strided), 15 * FLOAT32, {}),
    "a wrapper": (Open, 10 * FLOAT32, {}),
    "fake": (fake, None, {}),
    "meta": (lambda: torch.ones(5, device="meta"), None, {}),
    "uninitialized": (torch.nn.UninitializedParameter, None, {}),
    "compressed sparse": (lambda: torch.eye(4).to_sparse_csr(), 0, UNKNOWN),
    "opaque": (lambda: torch.ones(4, 4).to_mkldnn(), 0, UNKNOWN),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_parts_of_a_tensor_are_counted_or_its_size_is_unknown(kind: str) -> None:
    if kind == "opaque" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    make, size, unknown = MADE[kind]
    walk = walked(one=make())
    assert (walk.total(MODEL), walk.unknown_reasons) == (size or 0, unknown)


def test_a_jagged_tensor_is_its_values_and_its_offsets() -> None:
    (cpu,) = walked(one=nested(torch.jagged)).bytes_by_device.values()
    assert cpu[MODEL] >= 15 * FLOAT32 + 3 * INT64


def test_tensors_of_unknown_size_are_counted() -> None:
    many = {f"closed{i}": Closed() for i in range(3)}
    walk = walked(**many, dense=torch.ones(2))
    assert walk.bytes_by_device == {"cpu": [8, 0, 0]}
    assert walked(one=Closed()).bytes_by_device == {"cpu": [0, 0, 0]}, "a device that is used is named"
    assert walk.unknown_reasons == {MODEL: "the size of 3 of its tensors is unknown"}


@pytest.mark.parametrize("more", [0, 1])
def test_too_many_tensors_are_not_measured(more: int) -> None:
    walk = walked(**{str(number): torch.ones(1) for number in range(MAX_TENSORS + more)})
    reason = "not measured: there are more than 5,000 tensors"
    assert walk.unknown_reasons == ({MODEL: reason} if more else {})
    assert walk.bytes_by_device == {"cpu": [FLOAT32 * MAX_TENSORS, 0, 0]}


def test_the_weights_of_a_quantized_module_have_an_unknown_size() -> None:
    """They are in a C++ object, not in the module's tables."""
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    walk = StorageWalk([model], [])
    assert walk.unknown_reasons == UNKNOWN


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_ends_one_measurement_and_a_fault_ends_all(error: type[BaseException]) -> None:
    session = SimpleNamespace(ring=object(), count_error=lambda *_: None)
    session.guard = lambda where, fatal: TracerErrorGuard(session, where, fatal)  # type: ignore[arg-type]
    session.hidden = MethodType(Session.hidden, session)
    recorder = SimpleNamespace(has_run_backward=False, optimizer_steps=1, after_backward=None)
    memory: Any = MemoryTracer(session, recorder, SimpleNamespace())  # type: ignore[arg-type]

    def raises(*_: object) -> None:
        raise error

    memory._record_measurement = raises
    assert [memory.poll(1), memory.poll(2)] == [0, 0]
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            memory.poll(7)
        assert 7 < memory._due_ns < NEVER
    else:
        assert memory.poll(7) == NEVER

"""A walk over the tensors of a training counts all kinds of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dpmon.tracer.memory.storages import MODEL, Walk

pytestmark = pytest.mark.filterwarnings("ignore")  # torch calls half of these kinds deprecated, the others beta


INT64, FLOAT32 = 8, 4


def walked(**buffers: torch.Tensor) -> Walk:
    model = torch.nn.Module()
    model._buffers.update(buffers)
    return Walk([model], [])


class Closed(torch.Tensor):
    """A wrapper that does not list its parts."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (1000,))  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("a walk must not run operations")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(5, device="cuda:0")


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=layout)


MADE: dict[str, tuple[Any, int]] = {
    "coo": (lambda: torch.eye(4).to_sparse(), 4 * FLOAT32 + 2 * 4 * INT64),
    "nested": (lambda: nested(torch.strided), 15 * FLOAT32),
}


@pytest.mark.parametrize("kind", MADE)
def test_the_parts_of_a_tensor_are_counted(kind: str) -> None:
    make, size = MADE[kind]
    walk = walked(one=make())
    assert (walk.held, walk.unsized[MODEL]) == ({"cpu": [size, 0, 0]}, {})


def test_a_jagged_tensor_is_its_values_and_its_offsets() -> None:
    tensor = nested(torch.jagged)
    (cpu,) = walked(one=tensor).held.values()
    assert cpu[MODEL] >= 15 * FLOAT32 + 3 * INT64


@pytest.mark.parametrize("make", [fake, lambda: torch.ones(5, device="meta"), torch.nn.UninitializedParameter])
def test_tensors_without_data_hold_nothing(make: Any) -> None:
    walk = walked(one=make())
    assert (walk.total(MODEL), walk.unsized[MODEL]) == (0, {})


def test_tensors_of_unknown_size_are_counted_by_type() -> None:
    many = {f"closed{i}": Closed() for i in range(3)}
    walk = walked(**many, dense=torch.ones(2))
    assert walk.held == {"cpu": [8, 0, 0]}
    assert walked(one=Closed()).held == {"cpu": [0, 0, 0]}, "a device that is used is named"
    assert walk.unsized[MODEL] == {"Closed": 3}


def test_the_size_of_a_compressed_sparse_tensor_is_unknown() -> None:
    assert walked(one=torch.eye(4).to_sparse_csr()).unsized[MODEL] == {"Tensor": 1}


def test_an_opaque_tensor_has_an_unknown_size() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    assert walked(one=torch.ones(4, 4).to_mkldnn()).unsized[MODEL] == {"Tensor": 1}


def test_the_weights_of_a_quantized_module_have_an_unknown_size() -> None:
    """They are in a C++ object, not in the module's tables."""
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    walk = Walk([model], [])
    assert walk.unsized[MODEL] == {"LinearPackedParams": 1}

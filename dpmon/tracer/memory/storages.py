"""Sums the memory of models, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from dpmon.tracer.core.module_tables import (
    BUFFERS,
    PARAMETERS,
    dense_parts,
    is_distributed_class,
    modules_of,
    values_of,
)
from dpmon.tracer.core.tensor_sizes import tensors_in

MAX_TENSORS = 5_000
"""How many tensors of each kind are counted: each takes about 5 us, for which the training waits."""
MODEL, GRADIENTS, STATES = range(3)
_UNREADABLE = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class StorageWalk:
    """A count of bytes of models, gradients and optimizer states. A shared storage counts for the first of them."""

    def __init__(self, models: Iterable[object], optimizers: Iterable[object]) -> None:
        """Count. `models`: root modules, which may share parts."""
        self.bytes_by_device: dict[str, list[int]] = {}
        """Per device, bytes of each kind."""
        self.unknown_reasons: dict[int, str] = {}
        """By kind: why its bytes are not fully known."""
        self._counted_storages: set[tuple[str, int]] = set()
        modules = list({id(module): module for root in models for module in modules_of(root)}.values())
        with torch._C.DisableTorchFunction():
            self._add_all(MODEL, (value for module in modules for value in _iter_weights(module)))
            self._add_all(GRADIENTS, (gradient for module in modules for gradient in _gradients(module)))
            self._add_all(STATES, (tensor for optimizer in optimizers for tensor in _states(optimizer)))

    def total(self, part_kind: int) -> int:
        """Return the bytes of one kind on all devices."""
        return sum(part_bytes[part_kind] for part_bytes in self.bytes_by_device.values())

    def _add_all(self, part_kind: int, tensors: Iterator[Any]) -> None:
        """Count tensors of one kind, up to MAX_TENSORS."""
        unsized_count = 0
        for tensor in islice(tensors, MAX_TENSORS):
            try:
                for part in _plain_tensors(tensor):
                    storage = part.untyped_storage()
                    if storage.device.type != "meta":  # a fake tensor reports another device but holds no data
                        self._add(part_kind, str(part.device), storage)
            except _UNREADABLE:
                unsized_count += 1
                with suppress(Exception):
                    self.bytes_by_device.setdefault(str(tensor.device), [0, 0, 0])
        if next(tensors, None) is not None:
            self.unknown_reasons[part_kind] = f"not measured: there are more than {MAX_TENSORS:,} tensors"
        elif unsized_count:
            self.unknown_reasons[part_kind] = f"the size of {unsized_count:,} of its tensors is unknown"

    def _add(self, part_kind: int, device: str, storage: Any) -> None:
        """Count a storage unless it is already counted."""
        key = device, storage._cdata
        if key not in self._counted_storages:
            self._counted_storages.add(key)
            self.bytes_by_device.setdefault(device, [0, 0, 0])[part_kind] += storage.nbytes()


def _iter_weights(module: object) -> Iterator[object]:
    """Yield the parameters and buffers of a module, and the module itself for weights in a C++ object (quantized)."""
    yield from _parameters(module)
    yield from values_of(module, BUFFERS)
    if any(isinstance(value, torch.ScriptObject) for value in list(module.__dict__.values())):
        yield module


def _parameters(module: object) -> list[Any]:
    """Return a module's own parameters, including both forms of those sharded by fully_shard."""
    tensors = values_of(module, PARAMETERS)
    for shard in _iter_fsdp_shards(module):
        tensors += (shard.sharded_param, getattr(shard, "_unsharded_param", None))
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _gradients(module: object) -> Iterator[object]:
    """Return an iterator over the gradients of a module's own parameters."""
    gradients = [tensor.grad for tensor in _parameters(module) if tensor.is_leaf]
    gradients += [getattr(shard, "unsharded_accumulated_grad", None) for shard in _iter_fsdp_shards(module)]
    return (gradient for gradient in gradients if gradient is not None)


def _states(optimizer: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in an optimizer's state."""
    state = getattr(optimizer, "state", None)
    for value in list(state.values()) if isinstance(state, dict) else ():
        yield from tensors_in(value)


def _iter_fsdp_shards(module: Any) -> list[Any]:
    """Return fully_shard's parameters of a module and its parts. While in use, each also has an unsharded form.

    The modules' own tables contain one form of each parameter; the other form may hold memory or a gradient, too. The
    private names of torch that are used here may change; then only the tables are counted.
    """
    if not is_distributed_class(module, "FSDPModule"):
        return []
    try:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        return [shard for group in groups if group is not None for shard in group.fsdp_params]
    except AttributeError:
        return []


def _plain_tensors(tensor: Any) -> tuple[Any, ...]:
    """Return the plain tensors that hold a tensor's data: several for a sparse tensor or a wrapper (DTensor).

    A wrapper's own storage reports the size of all parts but holds no data. Raises NotImplementedError for a wrapper
    that does not list its parts (through `__tensor_flatten__`, see `torch.utils._python_dispatch`).
    """
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        if tensor.untyped_storage().device.type == "meta":
            return (tensor,)
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            raise NotImplementedError
        names, _ = flatten()
        inner = [getattr(tensor, name) for name in names]
        # A DTensor lists its mesh in addition to its local tensor.
        return tuple(part for value in inner if isinstance(value, torch.Tensor) for part in _plain_tensors(value))
    return dense_parts(tensor)

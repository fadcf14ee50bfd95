"""Sums the memory of models, gradients and optimizer states."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any
from zlib import crc32

import torch

from dpmon.tracer.core.module_tables import (
    BUFFERS,
    PARAMETERS,
    class_name,
    dense_parts,
    is_distributed_class,
    modules_of,
    values_of,
)
from dpmon.tracer.core.tensor_sizes import tensors_in

MAX_TENSORS = 5_000
"""Most tensors of a kind that are counted: to count one takes about 5 us, and the training waits for it."""
MODEL, GRADIENTS, STATES = range(3)
_UNREADABLE = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class StorageWalk:
    """The bytes of models, gradients and optimizer states. A shared storage counts for the first of these."""

    def __init__(self, models: Iterable[object], optimizers: Iterable[object]) -> None:
        """`models`: roots, which may share parts."""
        self.held: dict[str, list[int]] = {}
        """Per device, bytes of each kind."""
        # Not a Counter, whose constructor torch.compile would look at: it is Python code.
        self.shared: dict[str, int] = defaultdict(int)
        """Per device, bytes of models in shared memory of the host."""
        self.shared_at: list[int] = []
        """The addresses of these models' storages."""
        self.unsized: list[dict[str, int]] = [defaultdict(int) for _ in range(3)]
        """Per kind, the number of tensors of unknown size by type."""
        self.more: set[int] = set()
        """Kinds with more than MAX_TENSORS tensors; tensors beyond the limit are not counted."""
        self.stepped = False
        """Whether an optimizer had stepped before."""
        self._seen: set[tuple[str, int]] = set()
        modules = list({id(module): module for root in models for module in modules_of(root)}.values())
        with torch._C.DisableTorchFunction():
            self._add_all(MODEL, (value for module in modules for value in _iter_weights(module)))
            self._add_all(GRADIENTS, (gradient for module in modules for gradient in _gradients(module)))
            self._add_all(STATES, (tensor for optimizer in optimizers for tensor in _states(optimizer)))

    def total(self, kind: int) -> int:
        """Bytes of one kind on all devices."""
        return sum(held[kind] for held in self.held.values())

    def _add_all(self, kind: int, tensors: Iterator[Any]) -> None:
        for tensor in islice(tensors, MAX_TENSORS):
            try:
                for part in _plain_tensors(tensor):
                    storage = part.untyped_storage()
                    if storage.device.type != "meta":  # a fake tensor reports another device but holds no data
                        self._add(kind, str(part.device), storage)
            except _UNREADABLE:
                self.unsized[kind][class_name(tensor)] += 1
                with suppress(Exception):
                    self.held.setdefault(str(tensor.device), [0, 0, 0])
        if next(tensors, None) is not None:
            self.more.add(kind)

    def _add(self, kind: int, device: str, storage: Any) -> None:
        key = device, storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.held.setdefault(device, [0, 0, 0])[kind] += size
        if kind == MODEL and storage.device.type == "cpu" and storage.is_shared():
            self.shared[device] += size
            self.shared_at.append(storage.data_ptr())


def mapped_files(addresses: Iterable[int]) -> str | None:
    """Return a name for the files mapped at these addresses, the same in all processes; None if unknown."""
    begins, files = [], []
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        for line in maps:
            where, permissions, _, device, inode = line.split(None, 5)[:5]
            if permissions.endswith(b"s"):
                begins.append(int(where.partition(b"-")[0], 16))  # in order of address
                files.append(device + b" " + inode)
    found = {files[bisect_right(begins, address) - 1] for address in addresses if files}
    return f"{crc32(b' '.join(sorted(found))):08x}" if found else None


def _iter_weights(module: object) -> Iterator[object]:
    """Yield the parameters and buffers of a module, and the module itself for weights in a C++ object (quantized)."""
    yield from _parameters(module)
    yield from values_of(module, BUFFERS)
    if any(isinstance(value, torch.ScriptObject) for value in list(module.__dict__.values())):
        yield module


def _parameters(module: object) -> list[Any]:
    tensors = values_of(module, PARAMETERS)
    for shard in _iter_fsdp_shards(module):
        tensors += (shard.sharded_param, getattr(shard, "_unsharded_param", None))
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _gradients(module: object) -> Iterator[object]:
    found = [tensor.grad for tensor in _parameters(module) if tensor.is_leaf]
    found += [getattr(shard, "unsharded_accumulated_grad", None) for shard in _iter_fsdp_shards(module)]
    return (gradient for gradient in found if gradient is not None)


def _states(optimizer: object) -> Iterator[torch.Tensor]:
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
        inner = [getattr(tensor, name) for name in flatten()[0]]
        # A DTensor lists its mesh in addition to its local tensor.
        return tuple(part for value in inner if isinstance(value, torch.Tensor) for part in _plain_tensors(value))
    return dense_parts(tensor)

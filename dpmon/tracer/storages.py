"""Sums the memory of models, gradients and optimizer states, spread over several steps if necessary."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from time import thread_time_ns
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dpmon.tracer.module_tables import BUFFERS, PARAMETERS, modules_of, parts_of, values_of
from dpmon.tracer.names import class_name, is_a

MAX_TENSORS = 20_000
AT_ONCE = 256
"""Number of tensors, or of entries of an optimizer's state, between two reads of the clock."""
MAX_DEPTH = 4
MAX_TYPES = 4
"""Most types of tensors that are named if the size of the tensors is unknown."""
MODEL, GRADIENTS, STATES = range(3)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class Walk:
    """Sums the storages of models, gradients and optimizer states. A shared storage counts for the first of these.

    Between two steps it keeps a few bytes per storage alive, so that torch does not reuse the storage's identity.
    """

    def __init__(
        self, models: Iterable[Any], optimizers: Iterable[Any], kinds: Sequence[int] = (MODEL, GRADIENTS, STATES)
    ) -> None:
        """`models`: roots, which may share parts. `kinds`: MODEL, GRADIENTS, STATES or some of them."""
        self.held: dict[str, list[int]] = {}
        """Per device, bytes of each kind."""
        self.shared: dict[str, int] = {}
        """Per device, bytes of models in shared memory of the host."""
        self.unsized: tuple[dict[str, int], ...] = ({}, {}, {})
        """Per kind, the number of tensors of unknown size by type."""
        self.counted = [0, 0, 0]
        """Per kind, the number of tensors seen."""
        self.more: set[int] = set()
        """Kinds with more than MAX_TENSORS tensors; tensors beyond the limit are not counted."""
        self._seen: dict[tuple[str, int], tuple[int, int, Any]] = {}
        """Per storage: its kind, its bytes, a weak reference."""
        self._left: deque[tuple[int, Any, int]] = deque()
        """Where to continue: kind, weak reference to the owner, index of the first entry."""
        modules = {id(module): module for root in models for module in modules_of(root)}
        refs = [weakref.ref(module) for module in modules.values()]
        for kind in kinds:
            owners = [weakref.ref(optimizer) for optimizer in optimizers] if kind == STATES else refs
            self._left += ((kind, owner, 0) for owner in owners)

    @property
    def over(self) -> bool:
        """Whether the walk is complete."""
        return not self._left

    def total(self, kind: int) -> int:
        """Bytes of one kind on all devices."""
        return sum(held[kind] for held in self.held.values())

    def go_on(self, limit_ns: int) -> bool:
        """Walk until this thread has spent `limit_ns` of processor time; True once the walk is complete.

        On a busy machine, time in which other processes run does not split a walk.
        """
        until = thread_time_ns() + limit_ns
        with torch._C.DisableTorchFunction():
            while not self.over:
                self._add_entries(*self._left.popleft())
                if thread_time_ns() >= until:
                    break
        return self.over

    def merge(self, other: Walk) -> None:
        """Add the result of another walk over other kinds."""
        for (device, identity), (kind, size, ref) in other._seen.items():
            self._count_storage(device, identity, kind, size, ref)
        for mine, theirs in zip(self.unsized, other.unsized, strict=True):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        self.more |= other.more

    def _add_entries(self, kind: int, ref: Any, at: int) -> None:
        owner = ref()
        if owner is None or kind in self.more:
            return
        entries = _entries(kind, owner)
        if len(entries) > at + AT_ONCE:
            self._left.appendleft((kind, ref, at + AT_ONCE))
        if kind == MODEL and at == 0:
            for name in _opaque(owner):
                self._add_unsized(kind, name)
        if kind == GRADIENTS and at == 0:
            for shard in _shards(owner):
                self._add(kind, getattr(shard, "unsharded_accumulated_grad", None))
        for tensor in _tensors(islice(entries, at, at + AT_ONCE), 0):
            self._add(kind, tensor, gradient=kind == GRADIENTS)

    def _add(self, kind: int, tensor: Any, gradient: bool = False) -> None:
        """Count a tensor, or its `gradient`, if there is one."""
        try:
            if gradient:
                tensor = tensor.grad if tensor.is_leaf else None
            if tensor is None:
                return
            if self.counted[kind] >= MAX_TENSORS:
                self.more.add(kind)
                return
            self.counted[kind] += 1
            for part in _parts(tensor):
                storage = part.untyped_storage()
                if storage.device.type != "meta":  # a fake tensor reports another device but holds no data
                    self._add_storage(kind, str(part.device), storage)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError):
            self._add_unsized(kind, class_name(tensor))
            with suppress(Exception):
                self.held.setdefault(str(tensor.device), [0, 0, 0])

    def _add_storage(self, kind: int, device: str, storage: Any) -> None:
        before = self._seen.get((device, storage._cdata))
        if before is None:
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._count_storage(device, storage._cdata, kind, storage.nbytes(), ref)
            if kind == MODEL and storage.device.type == "cpu" and storage.is_shared():
                self.shared[device] = self.shared.get(device, 0) + storage.nbytes()
        elif before[0] > kind:
            self._count_storage(device, storage._cdata, kind, before[1], before[2])

    def _count_storage(self, device: str, identity: int, kind: int, size: int, ref: Any) -> None:
        held = self.held.setdefault(device, [0, 0, 0])
        before = self._seen.get((device, identity))
        if before is not None:
            if before[0] <= kind:
                return
            held[before[0]] -= before[1]
        self._seen[device, identity] = kind, size, ref
        held[kind] += size

    def _add_unsized(self, kind: int, name: str) -> None:
        names = self.unsized[kind]
        name = name if name in names or len(names) < MAX_TYPES else "others"
        names[name] = names.get(name, 0) + 1


def _entries(kind: int, owner: Any) -> list[Any]:
    if kind == STATES:
        state = getattr(owner, "state", None)
        return list(state.values()) if isinstance(state, dict) else []
    tensors = values_of(owner, PARAMETERS) + (values_of(owner, BUFFERS) if kind == MODEL else [])
    for shard in _shards(owner):
        tensors += (shard.sharded_param, getattr(shard, "_unsharded_param", None))
    return tensors


def _shards(module: Any) -> list[Any]:
    """Return fully_shard's parameters of a module and its parts. While in use, each also has an unsharded form.

    The modules' own tables contain one form of each parameter; the other form may hold memory or a gradient, too. The
    private names of torch that are used here may change; then only the tables are counted.
    """
    if not is_a(module, "FSDPModule"):
        return []
    try:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        return [shard for group in groups if group is not None for shard in group.fsdp_params]
    except AttributeError:
        return []


def _opaque(module: Any) -> Iterator[str]:
    """Yield the module's class name for each C++ object that holds weights outside its tables (quantized modules)."""
    for value in list(module.__dict__.values()):
        if isinstance(value, torch.ScriptObject):
            yield class_name(module)


def _tensors(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < MAX_DEPTH and isinstance(value, dict):
            yield from _tensors(list(value.values()), depth + 1)
        elif depth < MAX_DEPTH and isinstance(value, (list, tuple)):
            yield from _tensors(value, depth + 1)


def _parts(tensor: Any) -> tuple[Any, ...]:
    """Return the plain tensors that hold a tensor's data: several for a sparse one or a wrapper (DTensor, quantized).

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
        return tuple(part for value in inner if isinstance(value, torch.Tensor) for part in _parts(value))
    if torch._is_functional_tensor(tensor):
        return _parts(torch._from_functional_tensor(tensor))
    if tensor.is_quantized and tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        return tensor, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return parts_of(tensor)

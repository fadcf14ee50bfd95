"""One look at all tensors of a training, in as many turns of its loop as it takes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from time import monotonic_ns
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dpmon.tracer.tables import BUFFERS, PARAMETERS, modules_of, values_of

__all__ = ["MAX_TENSORS", "Walk"]

MAX_TENSORS = 20_000
AT_ONCE = 256
"""Tensors, or entries of an optimizer's state, between two looks at the clock."""
MAX_DEPTH = 4
MODEL, GRADIENTS, STATES = range(3)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


class Walk:
    """Adds up what models, gradients and optimizers' states hold; a storage counts once, for the first that has it.

    Between two turns nothing is kept alive but a few bytes a storage, so that its identity is not given to another.
    """

    def __init__(self, models: Iterable[Any], optimizers: Iterable[Any]) -> None:
        """`models`: roots that may share parts."""
        self.held: dict[str, list[int]] = {}
        """By device, bytes of the three."""
        self.unsized = 0
        """Tensors that would not say their size."""
        self.more = False
        """There are more than MAX_TENSORS, which are not counted."""
        self._count = 0
        self._seen: dict[tuple[str, int], Any] = {}
        modules = {id(module): module for root in models for module in modules_of(root)}
        refs = [weakref.ref(module) for module in modules.values()]
        self._left: deque[tuple[int, Any, int]] = deque()
        """Of what to look at next, and from which of its entries on."""
        self._left += ((MODEL, ref, 0) for ref in refs)
        self._left += ((GRADIENTS, ref, 0) for ref in refs)
        self._left += ((STATES, weakref.ref(optimizer), 0) for optimizer in optimizers)

    def go_on(self, until_ns: int) -> bool:
        """Look at as much as can be until then (monotonic ns); True once there is no more."""
        with torch._C.DisableTorchFunctionSubclass():
            while self._left and not self.more:
                self._some(*self._left.popleft())
                if self._left and monotonic_ns() >= until_ns:
                    return self.more
        return True

    def _some(self, kind: int, ref: Any, at: int) -> None:
        owner = ref()
        if owner is None:
            return
        entries = _entries(kind, owner)
        if len(entries) > at + AT_ONCE:
            self._left.appendleft((kind, ref, at + AT_ONCE))
        for tensor in _tensors(islice(entries, at, at + AT_ONCE), 0):
            self._add(kind, tensor)

    def _add(self, kind: int, tensor: Any) -> None:
        try:
            if kind == GRADIENTS:
                tensor = tensor.grad if tensor.is_leaf else None
                if tensor is None:
                    return
            if self._count >= MAX_TENSORS:
                self.more = True
                return
            self._count += 1
            for part in _parts(tensor):
                storage = part.untyped_storage()
                device = str(part.device)
                key = device, storage._cdata
                if key not in self._seen:
                    self._seen[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self.held.setdefault(device, [0, 0, 0])[kind] += storage.nbytes()
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, LookupError):
            self.unsized += 1  # a tensor without data of its own, a parameter that is not made yet


def _entries(kind: int, owner: Any) -> list[Any]:
    if kind == STATES:
        state = getattr(owner, "state", None)
        return list(state.values()) if isinstance(state, dict) else []
    return values_of(owner, PARAMETERS) + (values_of(owner, BUFFERS) if kind == MODEL else [])


def _tensors(values: Iterable[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < MAX_DEPTH and isinstance(value, dict):
            yield from _tensors(list(value.values()), depth + 1)
        elif depth < MAX_DEPTH and isinstance(value, (list, tuple)):
            yield from _tensors(value, depth + 1)


def _parts(tensor: Any) -> tuple[Any, ...]:
    """What holds a tensor's data: two for a sparse one, any number for a wrapper (a DTensor, a quantized weight).

    A wrapper's own storage says the size that it stands for, and holds nothing. Raises NotImplementedError for one
    that does not tell what it holds (as `torch.utils._python_dispatch` asks for it).
    """
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            raise NotImplementedError
        inner = [getattr(tensor, name) for name in flatten()[0]]
        return tuple(part for one in inner for part in _parts(one))
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)

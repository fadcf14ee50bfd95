"""Sizes of the tensors in the inputs and outputs of a module, as hashable signatures.

A signature consists of paths, shapes and dtypes, and holds no tensor. The hot path looks it up in a table. A new
signature is spelled out (paths, bytes) once. The signature of a DTensor has the shape of its local part and its global
shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import prod
from types import FunctionType, ModuleType
from typing import Any

import torch

from dpmon.record.shared_names import MORE, shorten_name
from dpmon.tracer.core.module_tables import class_name, is_distributed_class

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

Signature = tuple[Any, ...]
"""(path, shape, dtype) of each tensor; a DTensor adds its full shape."""
MAX_TENSORS = 64
"""How many tensors are listed from the arguments of a call, or from a result: a growing list must not enlarge records
or slow the training down."""
MAX_VISITED_VALUES = 512
"""How many values are searched for tensors, because the search runs at every call with such an argument."""
MAX_DEPTH = 16
MAX_PATH = 120
MAX_EXTENTS = 2048
"""Maximum number of dimensions in one definition, summed over all shapes."""


def signature_of_call(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Signature:
    """Return the signature of arguments; paths begin with the position or the keyword."""
    positional = [(str(index), value) for index, value in enumerate(args)]
    keywords = [(shorten_name(str(name), MAX_PATH), value) for name, value in kwargs.items()]
    return _signature([*positional, *keywords])


def signature_of_value(value: object, path: str) -> Signature:
    """Return the signature of a value. Paths begin with `path`."""
    return _signature([(path, value)])


def _signature(values: Iterable[tuple[str, object]]) -> Signature:
    """Return the signature of values, given with their paths."""
    leaves: list[object] = []
    for path, value in values:
        for leaf_path, tensor in _iter_tensors(value, path):
            if len(leaves) == MAX_TENSORS or tensor is None:
                return (*leaves, (MORE, (), torch.bool))
            leaves.append((leaf_path, *_shape_and_dtype(tensor)))
    return tuple(leaves)


def _iter_tensors(value: object, path: str) -> Iterator[tuple[str, Tensor | None]]:
    """Yield path and tensor of each tensor in a value, in order; None for a tensor if not all values are searched."""
    pending = [(path, value)]
    for _ in range(MAX_VISITED_VALUES):
        if not pending:
            return
        path, value = pending.pop()
        if isinstance(value, Tensor):
            yield path, value
        elif value is not None and not isinstance(value, (str, bytes, int, float, bool)):
            prefix = f"{path}." if path else ""
            children = islice(_children(value), MAX_VISITED_VALUES)
            pending += reversed([(shorten_name(prefix + name, MAX_PATH), child) for name, child in children])
    if pending:
        yield path, None


def _shape_and_dtype(tensor: Any) -> tuple[object, ...]:
    """Return shape and dtype of a tensor; of a DTensor the local shape, the dtype, and the global shape."""
    # A subclass may react to attribute access, and must not notice the tracer.
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return tensor.shape, tensor.dtype
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = tensor.shape, tensor.dtype
        # Not by to_local(): autograd would record it.
        local = tensor._local_tensor.shape if is_distributed_class(tensor, "DTensor") else None
    if type(dtype) is not torch.dtype:
        raise TypeError(f"the dtype of a {class_name(tensor)} is not a torch.dtype")
    shape = torch.Size(shape)  # a copy: the script's subclass of Size must not be kept alive
    return (shape, dtype) if local is None else (torch.Size(local), dtype, shape)


def _children(value: object) -> Any:
    """Return (name, value) of each value directly in a container, a dataclass, or an object with attributes."""
    if isinstance(value, dict):
        return ((str(key), child) for key, child in value.items())
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return zip((str(name) for name in fields), value, strict=False)
        return ((str(i), child) for i, child in enumerate(value))
    if isinstance(value, (list, set, frozenset)):
        return ((str(i), child) for i, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return ((str(key), child) for key, child in value.items())
    if isinstance(value, (torch.nn.Module, type, ModuleType, FunctionType)):
        return ()
    # A batch of the script's own class: read its attributes without running its code.
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return list(attributes.items()) if type(attributes) is dict else ()


def describe_tensors(signature: Any, lone_path: str) -> list[tuple[object, ...]]:
    """Return (path, shape, dtype, bytes) of each tensor; a DTensor adds its global shape.

    `lone_path`: the path of a lone tensor.
    """
    if len(signature) == 2 and isinstance(signature[-1], torch.dtype):  # (shape, dtype) of a lone tensor
        signature = ((lone_path, *signature),)
    result: list[tuple[object, ...]] = []
    extents = 0
    for path, shape, dtype, *global_shapes in signature:
        if path == MORE:
            result.append((MORE, [], "", 0))
            continue
        shapes = [list(map(int, dimensions)) for dimensions in (shape, *global_shapes)]
        extents += sum(map(len, shapes))
        if extents > MAX_EXTENTS:
            return [*result, (MORE, [], "", 0)]
        local_shape, *global_shapes = shapes
        size_bytes = dtype.itemsize * prod(local_shape)
        result.append((path, local_shape, str(dtype).removeprefix("torch."), size_bytes, *global_shapes))
    return result


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors among the first MAX_VISITED_VALUES values in a value. Do not keep them beyond the call."""
    return [tensor for _, tensor in _iter_tensors(value, "") if tensor is not None]


def device_in(value: object) -> str | None:
    """Return the device of the first tensor in a value; None if there is none."""
    tensors = tensors_in(value)
    return str(tensors[0].device) if tensors else None


def is_gatherable(value: object, depth: int = 0) -> bool:
    """Return whether torch's gather preserves a result: tensors with rows, None, and dicts, lists, tuples of these."""
    if value is None:
        return True
    if isinstance(value, Tensor):
        return value.dim() > 0
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(is_gatherable(child, depth + 1) for child in value.values())
    return isinstance(value, (list, tuple)) and all(is_gatherable(child, depth + 1) for child in value)


def first_row_count(signature: Any) -> int:
    """Return the number of rows of the first tensor that has rows; -1 if there is none."""
    return next((int(shape[0]) for _, shape, *_ in signature if shape), -1)

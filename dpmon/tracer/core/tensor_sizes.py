"""Sizes of the tensors in the inputs and outputs of a module, as hashable signatures.

A signature consists of paths, shapes and dtypes, and holds no tensor. The hot path looks it up in a table. A new
signature is spelled out (paths, bytes) once. The signature of a DTensor has the shape of its local part and its global
shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
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
MAX_LEAVES = 64
"""Most tensors listed from the arguments of a call, or from a result: a growing list must not enlarge records or slow
the training."""
MAX_VISITED = 512
"""Most values searched for tensors, because the search runs at every call with such an argument."""
MAX_CHECKED = 4096
MAX_DEPTH = 16
MAX_PATH = 120
MAX_EXTENTS = 2048
"""Most dimensions in one definition, summed over all shapes."""


def signature_of_call(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Signature:
    """Return the signature of arguments; paths begin with the position or the keyword."""
    given = [(str(index), value) for index, value in enumerate(args)]
    return _leaves([*given, *((shorten_name(str(name), MAX_PATH), value) for name, value in kwargs.items())])


def signature_of_value(value: object, path: str) -> Signature:
    """Return the signature of a value. Paths begin with `path`."""
    return _leaves([(path, value)])


def _leaves(values: Iterable[tuple[str, object]]) -> Signature:
    found: list[object] = []
    budget = [MAX_VISITED]
    for path, value in values:
        _collect_tensors(value, path, found, budget, 0)
    if len(found) > MAX_LEAVES or budget[0] < 0:
        found[MAX_LEAVES:] = [(MORE, (), torch.bool)]
    return tuple(found)


def _collect_tensors(value: object, path: str, found: list[object], budget: list[int], depth: int) -> None:
    if len(found) > MAX_LEAVES or budget[0] < 0 or depth > MAX_DEPTH:
        return
    budget[0] -= 1
    if isinstance(value, Tensor):
        found.append((path, *_shape_and_dtype(value)))
        return
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return
    for name, child in _children(value):
        inner = f"{path}.{name}" if path else name
        if len(inner) > MAX_PATH:
            inner = shorten_name(inner, MAX_PATH)
        _collect_tensors(child, inner, found, budget, depth + 1)
        if len(found) > MAX_LEAVES or budget[0] < 0:
            return


def _shape_and_dtype(tensor: Any) -> tuple[object, ...]:
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
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return list(own.items()) if type(own) is dict else ()


def describe_tensors(signature: Any, lone_path: str) -> list[tuple[object, ...]]:
    """Return (path, shape, dtype, bytes) of each tensor; a DTensor adds its global shape.

    `lone_path`: the path of a lone tensor.
    """
    if len(signature) == 2 and isinstance(signature[1], torch.dtype):
        signature = ((lone_path, *signature),)
    result: list[tuple[object, ...]] = []
    extents = 0
    for path, shape, dtype, *wholes in signature:
        if path == MORE:
            result.append((MORE, [], "", 0))
            continue
        extents += len(shape) * (1 + len(wholes))
        if extents > MAX_EXTENTS:
            return [*result, (MORE, [], "", 0)]
        shape, *wholes = ([int(extent) for extent in each] for each in (shape, *wholes))
        result.append((path, shape, str(dtype).removeprefix("torch."), dtype.itemsize * prod(shape), *wholes))
    return result


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors among the first MAX_CHECKED values in a value. Do not keep them beyond the call."""
    found: list[Tensor] = []
    waiting = [value]
    for _ in range(MAX_CHECKED):
        if not waiting:
            break
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None and not isinstance(value, (str, bytes, int, float, bool)):
            waiting += reversed([child for _, child in islice(_children(value), MAX_CHECKED)])
    return found


def device_in(value: object) -> str | None:
    """The device of the first tensor in a value; None if there is none."""
    found = tensors_in(value)
    return str(found[0].device) if found else None


def is_gatherable(value: object, depth: int = 0) -> bool:
    """Whether torch's gather preserves a result: tensors with rows, None, and dicts, lists and tuples of these."""
    if value is None or isinstance(value, Tensor):
        return value is None or value.dim() > 0
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(is_gatherable(child, depth + 1) for child in value.values())
    return isinstance(value, (list, tuple)) and all(is_gatherable(child, depth + 1) for child in value)


def first_row_count(signature: Any) -> int:
    """Return the rows of the first tensor that has any; -1 if there is none."""
    return next((int(shape[0]) for _, shape, *_ in signature if shape), -1)

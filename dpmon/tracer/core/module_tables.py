"""The contents and names of the script's modules, classes and functions, read without running the script's code.

A script may override `parameters` and similar methods, so they are read from a module's own tables. Names are short,
and plain strings that keep no object alive.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name

_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_INSIDE = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module")
"""Submodules in which torch.compile, Lightning Fabric and FSDP1 hold their model."""
_MAX_WRAPPERS = 8
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
_TRACED = "_actual_script_module"
"""Attribute of a module from torch.jit.trace that holds its tables."""


def _read_table(module: object, name: str) -> Any:
    """Return a table of a module: a dict, or a similar object of TorchScript; None if its `__init__` has not run."""
    own = module.__dict__
    if name not in own and _TRACED in own:
        own = own[_TRACED].__dict__
    return own.get(name)


def values_of(module: object, table: str) -> list[object]:
    """Return the values in one of a module's own tables, without None."""
    found = _read_table(module, table)
    return [] if found is None else [value for value in list(found.values()) if value is not None]


def dense_parts(tensor: Any) -> tuple[Any, ...]:
    """Return the dense tensors of a tensor of torch's own type: itself, or indices and values of a sparse tensor (COO).

    Raises NotImplementedError for other layouts.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is not torch.strided:
        raise NotImplementedError
    return (tensor,)


def modules_of(root: object) -> Iterator[object]:
    """Yield the module and all its submodules, each once, parents before children."""
    seen = {id(root)}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        for part in reversed(values_of(module, MODULES)):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def unwrap_module(module: object) -> Any:
    """The module inside wrappers; the module itself if it is not a wrapper."""
    for _ in range(_MAX_WRAPPERS):
        if isinstance(module, _WRAPPERS):
            inner = module.__dict__[MODULES].get("module")
        else:
            parts = getattr(module, "__dict__", {}).get(MODULES)
            inner = next((parts[name] for name in _INSIDE if name in parts), None) if type(parts) is dict else None
        if inner is None:
            return module
        module = inner
    return module


def in_training_mode(module: object) -> bool:
    """Whether the module inside wrappers is in training mode; the flag of a wrapper may differ.

    In torch 2.4, `eval` of a compiled model does not change the flag of its wrapper. A property of the script's class
    is not read: enabled gradients then count as training.
    """
    inner = unwrap_module(module)
    own = getattr(inner, "__dict__", {}).get("training")
    if own is not None:
        return bool(own)
    of_script = isinstance(inner, torch.nn.Module) and any("training" in base.__dict__ for base in type(inner).__mro__)
    return torch.is_grad_enabled() if of_script else bool(inner.training)


def tensors_of(root: object, table: str) -> Iterator[Any]:
    """Yield all parameters or buffers; a shared tensor appears more than once."""
    for module in modules_of(root):
        yield from values_of(module, table)


def devices_of(root: object) -> tuple[str, ...]:
    """The devices of the parameters and buffers, in order of appearance."""
    found = dict.fromkeys(tensor.device for table in (PARAMETERS, BUFFERS) for tensor in tensors_of(root, table))
    return tuple(map(str, found))


def is_compiled(module: object) -> bool:
    """Whether torch.compile compiles the calls of a module. Its parts are not looked at."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__module__.startswith("torch._dynamo")


class ModuleDevice:
    """The device of a module, read from one of its parameters or buffers.

    Each check looks the tensor up by name, because torch does not swap tensors that have weak references.
    """

    def __init__(self, root: object) -> None:
        self.device: Any = None
        """A torch.device; None for a module without tensors."""
        for table in (PARAMETERS, BUFFERS):
            for module in modules_of(root):
                found = _read_table(module, table)
                for name, tensor in [] if found is None else list(found.items()):
                    if tensor is not None:
                        self._module, self._table, self._name = weakref.ref(module), table, name
                        self.device = tensor.device
                        return

    def is_stale(self) -> bool:
        """Whether the module has moved, or the tensor is gone."""
        if self.device is None:
            return False
        module = self._module()
        table = None if module is None else _read_table(module, self._table)
        with torch._C.DisableTorchFunction():  # hides our reads from the script's modes and subclasses
            tensor = table[self._name] if table is not None and self._name in table else None
            return tensor is None or bool(tensor.device != self.device)


# ------------------------------------------------------------------------------------------------ names


MAX_SAME = 16
"""Most living models of one class that have different names."""
MAX_KIN = 16
"""Most known models that are compared with a new model: one may be a part of the other."""
MAX_PARTS = 10_000
"""Most modules searched in each of these models."""

_own_name = type.__dict__["__name__"].__get__
_own_module = type.__dict__["__module__"].__get__
_own_mro = type.__dict__["__mro__"].__get__


def class_name(value: object) -> str:
    """The name of a value's class, as stored in the class; its metaclass cannot change it.

    fully_shard gives a module a class derived from the script's class; the result is the name of the script's class.
    """
    kind = type(value)
    bases = _own_mro(kind)
    at = _place_of("FSDPModule", bases)
    return shorten_name(_own_name(bases[at + 1] if at else kind))


def is_distributed_class(value: object, name: str) -> bool:
    """Whether a value's class is, or derives from, the class `name` of torch.distributed. Imports nothing."""
    return _place_of(name, _own_mro(type(value))) is not None


def _place_of(name: str, bases: tuple[type, ...]) -> int | None:
    for index, base in enumerate(bases):
        if _own_name(base) == name:
            module = _own_module(base)
            if isinstance(module, str) and module.startswith("torch.distributed"):
                return index
    return None


def name_of(called: object) -> str:
    """Return the name of a callable: of a module's class, of a function, or of the function in a partial."""
    if isinstance(called, torch.nn.Module):
        return class_name(called)
    inner = getattr(called, "func", called)
    name = getattr(inner, "__name__", None)
    return shorten_name(name) if isinstance(name, str) else class_name(inner)


class ModelNames:
    """The names and numbers of the models of one process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str, int]] = {}
        self._next = count(1)

    def name_and_number(self, module: object) -> tuple[str, int]:
        """Return the name of a model without its wrappers, and its number, which its called parts share.

        The name is its class, with a suffix if other models of this class are alive. The suffix is its global variable
        in the script if several variables hold such models; otherwise a number, which the first model does not have.
        """
        inner = unwrap_module(module)
        known = self._known.get(id(inner))
        if known is None or known[0]() is not inner:
            kind = class_name(inner)
            self._known = {key: each for key, each in self._known.items() if each[0]() is not None}
            taken = {name for _, name, _ in self._known.values()}
            names = (kind, *(f"{kind} {number}" for number in range(2, MAX_SAME + 1)))
            name = _find_global_variable(inner, kind) or next((name for name in names if name not in taken), names[-1])
            number = self._number_of_kin(inner) or next(self._next)
            known = self._known[id(inner)] = weakref.ref(inner), name, number
        return known[1:]

    def _number_of_kin(self, module: object) -> int:
        """Return the number of a known model that contains the module or is part of it; 0 if there is none."""
        parts = {id(part) for part in _parts(module)}
        for known, _, number in islice(self._known.values(), MAX_KIN):
            model = known()
            if model is not None and (id(model) in parts or any(part is module for part in _parts(model))):
                return number
        return 0


def _parts(module: object) -> Iterator[object]:
    return islice(modules_of(module), MAX_PARTS) if isinstance(module, torch.nn.Module) else iter(())


def _find_global_variable(model: object, kind: str) -> str | None:
    """Return the class and global variable of a model; None unless several variables hold models of this class."""
    variables: dict[int, str] = {}
    for name, value in list(getattr(sys.modules.get("__main__"), "__dict__", {}).items()):
        if issubclass(type(value), torch.nn.Module) and class_name(inner := unwrap_module(value)) == kind:
            variables.setdefault(id(inner), name)
    return shorten_name(f"{kind} {variables[id(model)]}") if len(variables) > 1 and id(model) in variables else None

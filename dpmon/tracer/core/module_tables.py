"""Reads contents and names of the script's modules, classes and functions, without running the script's code.

A script may override `parameters` and similar methods, so parameters are read from a module's own tables. Names are
short plain strings that keep no object alive.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name
from dpmon.tracer.core.identity_table import IdentityTable

_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_INNER_NAMES = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module")
"""Submodules in which torch.compile, Lightning Fabric and FSDP1 hold their model."""
_MAX_WRAPPERS = 8
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
_TRACED_SCRIPT_MODULE = "_actual_script_module"
"""Attribute of a module from torch.jit.trace that holds its tables."""


def _read_table(module: object, name: str) -> Any:
    """Return a table of a module: a dict, or a similar object of TorchScript; None if its `__init__` has not run."""
    attributes = module.__dict__
    if name not in attributes and _TRACED_SCRIPT_MODULE in attributes:
        attributes = attributes[_TRACED_SCRIPT_MODULE].__dict__
    return attributes.get(name)


def values_of(module: object, table: str) -> list[object]:
    """Return the values in one of a module's own tables, without None."""
    members = _read_table(module, table)
    return [] if members is None else [value for value in list(members.values()) if value is not None]


def dense_parts(tensor: Any) -> tuple[Any, ...]:
    """Return the dense tensors of a tensor of torch's own type: itself, or indices and values if it is sparse (COO).

    Raises NotImplementedError for other layouts.
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout is not torch.strided:
        raise NotImplementedError
    return (tensor,)


def modules_of(root: object) -> Iterator[object]:
    """Yield the module and all its submodules, each once, in the order of torch's `named_modules`."""
    seen_ids = set[int]()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) not in seen_ids:
            seen_ids.add(id(module))
            yield module
            pending += reversed(values_of(module, MODULES))


def unwrap_module(module: object) -> Any:
    """Return the module inside wrappers; the module itself if it is not a wrapper."""
    for _ in range(_MAX_WRAPPERS):
        inner = None
        if isinstance(module, _WRAPPERS):
            inner = module.__dict__[MODULES].get("module")
        else:
            children = getattr(module, "__dict__", {}).get(MODULES)
            if type(children) is dict or type(children) is OrderedDict:  # the latter in torch 2.4
                inner = next((children[name] for name in _INNER_NAMES if name in children), None)
        if inner is None:
            return module
        module = inner
    return module


def in_training_mode(module: object) -> bool:
    """Return whether the module inside wrappers is in training mode; the flag of a wrapper may differ.

    In torch 2.4, `eval` of a compiled model does not change the flag of its wrapper. If `training` is a property of the
    script's class, it is not read: enabled gradients then count as training.
    """
    inner = unwrap_module(module)
    training = getattr(inner, "__dict__", {}).get("training")
    if training is not None:
        return bool(training)
    if isinstance(inner, torch.nn.Module) and any("training" in base.__dict__ for base in type(inner).__mro__):
        return torch.is_grad_enabled()
    return bool(inner.training)


def tensors_of(root: object, table: str) -> Iterator[Any]:
    """Yield all parameters or buffers; a shared tensor appears more than once."""
    for module in modules_of(root):
        yield from values_of(module, table)


def names_of_parameters(root: object) -> dict[int, str]:
    """Return the first path of each parameter that requires a gradient, by its id, in torch's order."""
    names, paths = dict[int, str](), {id(root): ""}
    for module in modules_of(root):
        for name, child in (_read_table(module, MODULES) or {}).items():
            paths.setdefault(id(child), f"{paths[id(module)]}{name}.")
        for name, parameter in (_read_table(module, PARAMETERS) or {}).items():
            if parameter is not None and parameter.requires_grad:
                names.setdefault(id(parameter), f"{paths[id(module)]}{name}")
    return names


def devices_of(root: object) -> tuple[str, ...]:
    """Return the devices of the parameters and buffers, in order of appearance."""
    devices = dict.fromkeys(tensor.device for table in (PARAMETERS, BUFFERS) for tensor in tensors_of(root, table))
    return tuple(map(str, devices))


def is_compiled(module: object) -> bool:
    """Return whether torch.compile compiles the calls of a module. Its parts are not checked."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__module__.startswith("torch._dynamo")


class ModuleDevice:
    """The device of a module, read from its first parameter or buffer.

    Each check looks the tensor up by name. A weak reference would prevent torch from swapping the tensor.
    """

    def __init__(self, root: object) -> None:
        self.device: Any = None
        """A torch.device; None for a module without tensors."""
        for table in (PARAMETERS, BUFFERS):
            for module in modules_of(root):
                members = _read_table(module, table)
                for name, tensor in [] if members is None else list(members.items()):
                    if tensor is not None:
                        self._module, self._table, self._name = weakref.ref(module), table, name
                        self.device = tensor.device
                        return

    def is_stale(self) -> bool:
        """Return whether the module has moved, or the tensor no longer exists."""
        if self.device is None:
            return False
        module = self._module()
        table = None if module is None else _read_table(module, self._table)
        with torch._C.DisableTorchFunction():  # hides our reads from the script's modes and subclasses
            tensor = table[self._name] if table is not None and self._name in table else None
            return tensor is None or bool(tensor.device != self.device)


# ------------------------------------------------------------------------------------------------ names


MAX_NUMBERED_NAMES = 16
"""How many living models of one class get different names."""
MAX_RELATED_MODELS = 16
"""How many known models are compared with a new model: one may be a part of the other."""
MAX_PARTS = 10_000
"""How many modules are searched in each of these models."""

_own_name = type.__dict__["__name__"].__get__
_own_module = type.__dict__["__module__"].__get__
_own_mro = type.__dict__["__mro__"].__get__


def class_name(value: object) -> str:
    """Return the name of a value's class as stored in the class; its metaclass cannot change it.

    fully_shard gives a module a class derived from the script's class; the result is the name of the script's class.
    """
    cls = type(value)
    bases = _own_mro(cls)
    index = _index_of_class("FSDPModule", bases)
    return shorten_name(_own_name(bases[index + 1] if index else cls))


def is_distributed_class(value: object, name: str) -> bool:
    """Return whether a value's class is, or derives from, the class `name` of torch.distributed. Imports nothing."""
    return _index_of_class(name, _own_mro(type(value))) is not None


def _index_of_class(name: str, bases: tuple[type, ...]) -> int | None:
    """Return the index of the class `name` of torch.distributed among `bases`; None if it is not among them."""
    for index, base in enumerate(bases):
        if _own_name(base) == name:
            module = _own_module(base)
            if isinstance(module, str) and module.startswith("torch.distributed"):
                return index
    return None


def name_of(function: object) -> str:
    """Return the name of a callable: of a module's class, of a function, or of the function in a partial."""
    if isinstance(function, torch.nn.Module):
        return class_name(function)
    inner = getattr(function, "func", function)
    name = getattr(inner, "__name__", None)
    return shorten_name(name) if isinstance(name, str) else class_name(inner)


class ModelNames:
    """The names and numbers of the models of one process."""

    def __init__(self) -> None:
        self._models: IdentityTable[tuple[str, int]] = IdentityTable()
        """The names and numbers."""
        self._numbers = count(1)

    def name_and_number(self, module: object) -> tuple[str, int]:
        """Return the name of the model inside a module's wrappers, and its number, which its parts share.

        The name is its class, with a suffix if other models of this class are alive. The suffix is its global variable
        in the script if several variables hold such models; otherwise a number, which the first model does not have.
        """
        inner = unwrap_module(module)
        named = self._models.get(inner)
        if named is None:
            name = _find_variable_name(inner) or self._free_name(class_name(inner))
            named = self._models.set(inner, (name, self._number_of_relative(inner) or next(self._numbers)))
        return named

    def _free_name(self, class_text: str) -> str:
        """Return the name of a class, with a number if models of this class are known."""
        taken_names = {name for _, (name, _) in self._models.items()}
        names = (class_text, *(f"{class_text} {number}" for number in range(2, MAX_NUMBERED_NAMES + 1)))
        return next((name for name in names if name not in taken_names), names[-1])

    def _number_of_relative(self, module: object) -> int:
        """Return the number of a known model that contains the module or is part of it; 0 if there is none."""
        parts = {id(part) for part in _parts(module)}
        for model, (_, number) in self._models.items()[:MAX_RELATED_MODELS]:
            if id(model) in parts or any(part is module for part in _parts(model)):
                return number
        return 0


def _parts(module: object) -> Iterator[object]:
    """Yield a module and its submodules, at most MAX_PARTS; nothing for other objects."""
    return islice(modules_of(module), MAX_PARTS) if isinstance(module, torch.nn.Module) else iter(())


def _find_variable_name(model: object) -> str | None:
    """Return the class and global variable of a model; None unless several variables hold models of this class."""
    class_text = class_name(model)
    variables: dict[int, str] = {}
    for name, value in list(getattr(sys.modules.get("__main__"), "__dict__", {}).items()):
        if issubclass(type(value), torch.nn.Module) and class_name(inner := unwrap_module(value)) == class_text:
            variables.setdefault(id(inner), name)
    if len(variables) < 2 or id(model) not in variables:
        return None
    return shorten_name(f"{class_text} {variables[id(model)]}")

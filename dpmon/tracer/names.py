"""Names of the script's classes and functions for records: short, and plain strings that keep no object alive."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from dpmon.record.wire import shortened
from dpmon.tracer.module_tables import wrapped_by

MAX_SAME = 16
"""Most living models of one class that have different names."""

_own_name = type.__dict__["__name__"].__get__
_own_module = type.__dict__["__module__"].__get__
_own_mro = type.__dict__["__mro__"].__get__


def class_name(value: Any) -> str:
    """The name of a value's class, as stored in the class; its metaclass cannot change it.

    fully_shard gives a module a class derived from the script's class; the result is the name of the script's class.
    """
    kind = type(value)
    bases = _own_mro(kind)
    at = _place_of("FSDPModule", bases)
    return shortened(_own_name(bases[at + 1] if at else kind))


def is_a(value: Any, name: str) -> bool:
    """Whether a value's class is, or derives from, the class `name` of torch.distributed. Imports nothing."""
    return _place_of(name, _own_mro(type(value))) is not None


def _place_of(name: str, bases: tuple[type, ...]) -> int | None:
    for index, base in enumerate(bases):
        if _own_name(base) == name:
            module = _own_module(base)
            if isinstance(module, str) and module.startswith("torch.distributed"):
                return index
    return None


def name_of(called: Any) -> str:
    """Return the name of a callable: of a module's class, of a function, or of the function in a partial."""
    if isinstance(called, torch.nn.Module):
        return class_name(called)
    inner = getattr(called, "func", called)
    name = getattr(inner, "__name__", None)
    return shortened(name) if isinstance(name, str) else class_name(inner)


class RootNames:
    """The names of the models of one process."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Any, str]] = {}

    def of(self, module: Any) -> str:
        """Return the class of a model without its wrappers, and what tells it from others of its class that live.

        That is its variable in the script if several of the class have one; else a number, from the second on.
        """
        inner = wrapped_by(module)
        known = self._names.get(id(inner))
        if known is None or known[0]() is not inner:
            kind = class_name(inner)
            self._names = {key: named for key, named in self._names.items() if named[0]() is not None}
            taken = {name for _, name in self._names.values()}
            names = (kind, *(f"{kind} {number}" for number in range(2, MAX_SAME + 1)))
            name = _variable(inner, kind) or next((name for name in names if name not in taken), names[-1])
            known = self._names[id(inner)] = weakref.ref(inner), name
        return known[1]


def _variable(model: Any, kind: str) -> str | None:
    """Return the class and global variable of a model; None unless several variables hold models of this class."""
    variables: dict[int, str] = {}
    for name, value in list(getattr(sys.modules.get("__main__"), "__dict__", {}).items()):
        if issubclass(type(value), torch.nn.Module) and class_name(inner := wrapped_by(value)) == kind:
            variables.setdefault(id(inner), name)
    return shortened(f"{kind} {variables[id(model)]}") if len(variables) > 1 and id(model) in variables else None

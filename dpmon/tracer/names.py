"""Names of the script's classes and functions for records: short, and plain strings that keep no object alive."""

from __future__ import annotations

from typing import Any

import torch

from dpmon.record.wire import shortened

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

"""Names of the script's classes and functions for records: short, and plain strings that keep no object alive."""

from __future__ import annotations

from typing import Any

import torch

from dpmon.record.wire import shortened

_own_name = type.__dict__["__name__"].__get__


def class_name(value: Any) -> str:
    """The name of a value's class, as stored in the class; its metaclass cannot change it."""
    return shortened(_own_name(type(value)))


def name_of(called: Any) -> str:
    """The name of a callable: a module's class, a function, or the function in a partial."""
    if isinstance(called, torch.nn.Module):
        return class_name(called)
    inner = getattr(called, "func", called)
    name = getattr(inner, "__name__", None)
    return shortened(name) if isinstance(name, str) else class_name(inner)

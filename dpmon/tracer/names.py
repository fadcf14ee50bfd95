"""What the script's classes and functions are called in records: short, and never an object of the script's."""

from __future__ import annotations

from typing import Any

import torch

from dpmon.packing import shortened

__all__ = ["class_name", "name_of"]

_own_name = type.__dict__["__name__"].__get__


def class_name(value: Any) -> str:
    """The name of a value's class; the class's own, whatever its metaclass says."""
    return shortened(_own_name(type(value)))


def name_of(called: Any) -> str:
    """The name of what is called: of a module its class's, of a function its own, of a partial its function's."""
    if isinstance(called, torch.nn.Module):
        return class_name(called)
    inner = getattr(called, "func", called)
    name = getattr(inner, "__name__", None)
    return shortened(name) if isinstance(name, str) else class_name(inner)

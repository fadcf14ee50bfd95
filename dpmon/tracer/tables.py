"""What a module consists of, read from its own tables: a script may have overridden `parameters` and its like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["buffers_of", "modules_of", "parameters_of", "values_of"]

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"


def values_of(module: Any, table: str) -> list[Any]:
    """What one of a module's own tables holds; nothing for a module whose `__init__` has not run."""
    found = module.__dict__.get(table)  # a dict, or what looks like one (TorchScript)
    return [] if found is None else [value for value in list(found.values()) if value is not None]


def modules_of(root: Any) -> Iterator[Any]:
    """The module and all that it consists of, each once, a module before its parts."""
    seen = {id(root)}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        for part in reversed(values_of(module, MODULES)):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def parameters_of(root: Any) -> Iterator[Any]:
    """All its parameters; one that is shared comes more than once."""
    for module in modules_of(root):
        yield from values_of(module, PARAMETERS)


def buffers_of(root: Any) -> Iterator[Any]:
    """All its buffers; one that is shared comes more than once."""
    for module in modules_of(root):
        yield from values_of(module, BUFFERS)

"""Reads a record, a dataclass or a named tuple, from a JSON object by the declared types of its members."""

from __future__ import annotations

from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")
_MAX_S = 1e11
"""Three thousand years. A longer time, or NaN, did not come from a run."""


def parse_record(record_class: type[_Record], document: Any) -> _Record:
    """Return the record in a JSON object, whose other members are ignored.

    Raises ValueError if a member has another type or is out of range, TypeError if one is missing.
    """
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    hints = get_type_hints(record_class)
    members = {name: _check_member(name, document[name], hint) for name, hint in hints.items() if name in document}
    return record_class(**members)


def _check_member(name: str, value: Any, hint: Any) -> Any:
    """Return the value of a member. A tuple is a list in JSON."""
    if isinstance(value, int | float) and not abs(value) < (_MAX_S if isinstance(value, float) else 1 << 63):
        raise ValueError(f"{name} is out of range")
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        kind = get_origin(option) or option
        if kind is tuple and isinstance(value, list):
            return tuple(value)
        if isinstance(value, kind) or (kind is float and isinstance(value, int)):
            return value
    raise ValueError(f"{name} is not a {hint}")

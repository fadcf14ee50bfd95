"""Converts dataclasses and NamedTuples to JSON and back, with a check of every declared type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Class = TypeVar("_Class")
OMIT_EMPTY: Mapping[str, bool] = {"omit_empty": True}
"""The metadata of a dataclass field that JSON omits while it is None or an empty tuple."""


def to_json(value: Any) -> Any:
    """Return the value as json.dumps takes it: a dataclass as an object, a NamedTuple or another tuple as a list."""
    if is_dataclass(value):
        members = {field.name: getattr(value, field.name) for field in fields(value)}
        omitted = [field.name for field in fields(value) if field.metadata == OMIT_EMPTY and not members[field.name]]
        return {name: to_json(member) for name, member in members.items() if name not in omitted}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_json(class_: type[_Class], value: Any) -> _Class:
    """Return the instance of a dataclass or NamedTuple that `to_json` has converted.

    Members that are not fields are ignored. Raises ValueError if a member is missing, or not of its declared type:
    another machine may have sent it.
    """
    try:
        return _convert(class_, value)  # type: ignore[no-any-return]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"no valid {class_.__name__}") from None


@cache
def _hints_of(class_: Any) -> dict[str, Any]:
    return get_type_hints(class_)


def _convert(type_: Any, value: Any) -> Any:
    if isinstance(type_, UnionType):  # X | None
        if value is None and NoneType in get_args(type_):
            return None
        type_, *_ = get_args(type_)
    if get_origin(type_) is tuple:  # tuple[X, ...]
        item_type, _ = get_args(type_)
        return tuple([_convert(item_type, item) for item in _checked(list, value)])
    if isinstance(type_, type) and is_dataclass(type_):
        members = {name: hint for name, hint in _hints_of(type_).items() if name in _checked(dict, value)}
        return type_(**{name: _convert(hint, value[name]) for name, hint in members.items()})
    if hasattr(type_, "_fields"):
        hints = _hints_of(type_).values()
        return type_(*[_convert(hint, item) for hint, item in zip(hints, _checked(list, value), strict=True)])
    if type_ is float and type(value) is int:
        return value
    if type_ is float and not math.isfinite(_checked(float, value)):
        raise TypeError
    return _checked(type_, value)


def _checked(type_: type, value: Any) -> Any:
    if type(value) is not type_:
        raise TypeError
    return value

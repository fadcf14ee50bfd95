"""Converts dataclasses and NamedTuples to JSON and back, with a check of every declared type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Class = TypeVar("_Class")
_MAX_FLOAT = 1e11
"""A larger number, or NaN, did not come from a run: as a time in seconds, it would overflow."""
OMIT_EMPTY: Mapping[str, bool] = {"omit_empty": True}
"""The metadata of a dataclass field that JSON omits while it is None or an empty tuple."""


def to_json(value: Any) -> Any:
    """Return the value as json.dumps takes it: a dataclass as an object, a NamedTuple or another tuple as a list."""
    if is_dataclass(value):
        members = {field.name: getattr(value, field.name) for field in fields(value)}
        omitted = [field.name for field in fields(value) if field.metadata == OMIT_EMPTY and not members[field.name]]
        return {name: to_json(member) for name, member in members.items() if name not in omitted}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_json(class_: Callable[..., _Class], value: Any) -> _Class:
    """Return the instance of a dataclass or NamedTuple that `to_json` has converted.

    Members that are not fields are ignored. Raises ValueError if a member is missing, or not of its declared type:
    another machine may have sent it.
    """
    try:
        return _converter(class_)(value)  # type: ignore[no-any-return]
    except (TypeError, AttributeError, ValueError, OverflowError):
        raise ValueError(f"no valid {class_.__name__}") from None


@cache
def _converter(type_: Any) -> Callable[[Any], Any]:
    """Return the function that converts JSON to a type. Made once for each type: a report has thousands of values."""
    if isinstance(type_, UnionType):  # X | None
        some_type, _ = get_args(type_)
        convert = _converter(some_type)
        return lambda value: None if value is None else convert(value)
    if get_origin(type_) in (dict, list):  # the caller checks the values
        return partial(_checked, get_origin(type_))
    if get_origin(type_) is tuple:  # tuple[X, ...]
        item_type, _ = get_args(type_)
        convert = _converter(item_type)
        return lambda value: tuple(map(convert, _checked(list, value)))
    if isinstance(type_, type) and is_dataclass(type_):
        by_name = {name: _converter(hint) for name, hint in get_type_hints(type_).items()}
        return lambda value: type_(**{name: by_name[name](value[name]) for name in by_name.keys() & value.keys()})
    if hasattr(type_, "_fields"):
        in_order = [_converter(hint) for hint in get_type_hints(type_).values()]
        return lambda value: type_(*[convert(item) for convert, item in zip(in_order, value, strict=True)])
    return _finite if type_ is float else partial(_checked, type_)


def _checked(type_: type, value: Any) -> Any:
    if type(value) is not type_ or (isinstance(value, int) and abs(value) >= 1 << 63):
        raise TypeError
    return value


def _finite(value: Any) -> float | int:
    if type(value) not in (float, int) or not abs(value) < _MAX_FLOAT:
        raise TypeError
    return value  # type: ignore[no-any-return]

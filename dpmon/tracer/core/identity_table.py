"""Values for objects of the script, found by identity."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class IdentityTable(Generic[_Value]):
    """A table from living objects to values. It keeps no object alive, and calls no comparison or hash of theirs."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, instance: object) -> _Value | None:
        """Return the value of an object; None if it has none."""
        entry = self._entries.get(id(instance))
        return entry[1] if entry is not None and entry[0]() is instance else None

    def set(self, instance: object, value: _Value) -> _Value:
        """Set the value of an object until it is freed, and return it. Raises TypeError without weak references."""
        key, entries = id(instance), self._entries
        entries[key] = weakref.ref(instance, lambda _: entries.pop(key, None)), value
        return value

    def pop(self, instance: object) -> None:
        """Forget an object."""
        self._entries.pop(id(instance), None)

    def clear(self) -> None:
        """Forget all objects."""
        self._entries.clear()

    def items(self) -> list[tuple[Any, _Value]]:
        """Return the living objects with their values."""
        items = [(reference(), value) for reference, value in list(self._entries.values())]
        return [(instance, value) for instance, value in items if instance is not None]

"""Reads definitions from the lines beside a ring: sizes, stages, layouts and collectives.

The assembler's own definitions have numbers from OWN on. The number is derived from the value, so that a successor uses
the same number for the same value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from dpmon.record.history_rows import Definition
from dpmon.record.kinds import collective_in

OWN = 1 << 31
MAX_DEFINITIONS = 1 << 15
"""Most definitions of each sort. A reader keeps twice as many (dpmon.record.history_rows)."""
_LARGEST = 1 << 53
_MAX_DEVICES = 4096
"""Most devices of a layout, because each device takes memory in every call."""
_KEYS = ("root", "via", "devices", "absent")


class Layout:
    """How the calls of one module run. For `dim`, see `Definitions.batch`."""

    __slots__ = ("devices", "dim", "module", "value")

    def __init__(self, number: int, value: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError, ValueError or AttributeError if `value` is not a layout."""
        root, via, devices, absent = (value[key] for key in _KEYS)
        self.value: dict[str, Any] = {
            "root": str(root),
            "via": None if via is None else str(via),
            "devices": [str(device) for device in devices],
            "absent": {str(key): str(reason) for key, reason in absent.items()},
        }
        module = value.get("module")
        self.module: int = module if type(module) is int else -1 - number
        """Number of the module; a bare model and its wrapper have the same number."""
        self.dim = _whole(value.get("dim", 0))
        if self.dim:
            self.value["dim"] = self.dim
        self.devices = len(self.value["devices"])
        if self.devices > _MAX_DEVICES:
            raise ValueError("more devices than a machine has")


class Definitions:
    """The definitions of one process."""

    def __init__(self) -> None:
        self.optimizers = 0
        """Number of lines that report optimizers: 0 until one is made."""
        self.layouts: dict[int, Layout] = {}
        self._values: dict[int, list[Any]] = {}
        self._stages: dict[int, dict[str, Any]] = {}
        self._collectives: dict[int, dict[str, Any]] = {}
        self._sent: set[int] = set()
        """Numbers that already have a row."""

    def add(self, line: Mapping[str, Any]) -> bool:
        """Take a line; False if it defines nothing or is damaged."""
        if type(line.get("optimizer")) is int:
            self.optimizers += 1
            return True
        number, value = line.get("define"), line.get("value")
        if type(number) is not int or not 0 < number < OWN:
            return False
        try:
            self._define(number, value)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            return False
        return True

    def _define(self, number: int, value: Any) -> None:
        table: dict[int, Any]
        known: Any
        if isinstance(value, list):
            table, known = self._values, [_size(size) for size in value]
        elif "parts" in value:
            table = self._stages
            known = {"device": str(value["device"]), "parts": [str(name) for name in value["parts"]]}
        elif "operation" in value:
            table, known = self._collectives, collective_in(value)
        else:
            table, known = self.layouts, Layout(number, value)
        tables: tuple[dict[int, Any], ...] = (self._values, self._stages, self._collectives, self.layouts)
        if any(number in each for each in tables):
            raise ValueError("defined twice")
        _keep(table, number, known)

    def module(self, number: int) -> int:
        """Return the module of a layout; for an unknown layout, an unused number."""
        layout = self.layouts.get(number)
        return layout.module if layout is not None else -1 - number

    def sizes(self, number: int) -> list[Any]:
        """Return the sizes with this number, as in dpmon.record.history_rows.Definition; empty if unknown."""
        return self._values.get(number, [])

    def known_sizes(self, number: int) -> int:
        """Return `number` if it is a definition of sizes, else 0."""
        return number if number in self._values else 0

    def is_stage(self, number: int) -> bool:
        """Whether a stage has this number."""
        return number in self._stages

    def collective(self, number: int) -> Mapping[str, Any] | None:
        """Return the definition of a collective; None if unknown."""
        return self._collectives.get(number)

    def batch(self, number: int, dim: int) -> int:
        """Return the rows along `dim` of the first tensor with that dimension; -1 if none."""
        for _, shape, *_ in self.sizes(number):
            if -len(shape) <= dim < len(shape):
                return int(shape[dim])
        return -1

    def add_sizes(self, value: Sequence[Any]) -> int:
        """Define sizes composed by the assembler; return their number."""
        number = _own_number(value)
        if number not in self._values:
            _keep(self._values, number, list(value))
        return number

    def with_absent(self, number: int, absent: Mapping[str, str]) -> int:
        """Define a copy of a known layout with more reasons for absence; return its number."""
        layout = self.layouts[number]
        if not absent:
            return number
        value = {**layout.value, "absent": {**layout.value["absent"], **absent}}
        own = _own_number(value)
        if own not in self.layouts:
            extra = {"module": layout.module, "dim": layout.dim}
            _keep(self.layouts, own, Layout(own, {**value, **extra}))
        return own

    def rows(self, numbers: Iterable[int]) -> list[Definition]:
        """Return a row for each of these definitions that has none yet; skip number 0."""
        found = []
        for number in numbers:
            if number and number not in self._sent:
                self._sent.add(number)
                found.append(Definition(number, self._value(number)))
        return found

    def _value(self, number: int) -> Any:
        layout = self.layouts.get(number)
        if layout is not None:
            return layout.value
        return self._stages.get(number) or self._collectives.get(number) or self._values.get(number, [])


def _keep(table: dict[int, Any], number: int, value: Any) -> None:
    table.pop(number, None)
    table[number] = value
    if len(table) > MAX_DEFINITIONS:
        del table[next(iter(table))]


def _size(value: Any) -> tuple[Any, ...]:
    path, shape, dtype, count, *wholes = value
    known = str(path), [_whole(extent) for extent in shape], str(dtype), _whole(count)
    return (*known, *([_whole(extent) for extent in whole] for whole in wholes[:1]))


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        raise TypeError("not a number that a run writes")
    return value


def _own_number(value: Any) -> int:
    return OWN | crc32(json.dumps(value, separators=(",", ":")).encode()) & (OWN - 1)

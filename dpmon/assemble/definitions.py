"""Reads definitions from the lines beside a ring: sizes, stages, layouts, collectives and losses.

The assembler's own definitions have numbers from OWN on. The number is derived from the value, so that a successor uses
the same number for the same value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from zlib import crc32

from dpmon.record.history_rows import Definition, Definitions, parse_definition, serialize_definition
from dpmon.record.record_types import count_rows

OWN = 1 << 31
MAX_DEFINITIONS = 1 << 15
"""Most definitions of each sort. A reader keeps twice as many (dpmon.record.history_rows)."""


class KnownDefinitions(Definitions):
    """The definitions of one process, and which of them have a row."""

    def __init__(self) -> None:
        super().__init__(MAX_DEFINITIONS)
        self.optimizers = 0
        """Number of lines that report optimizers: 0 until one is made."""
        self._sent: set[int] = set()
        """Numbers that already have a row."""

    def add(self, line: Mapping[str, object]) -> bool:
        """Take a line; False if it defines nothing or is damaged."""
        if type(line.get("optimizer")) is int:
            self.optimizers += 1
            return True
        number = line.get("define")
        if type(number) is not int or not 0 < number < OWN or self.get(number) is not None:
            return False
        try:
            self.remember(number, parse_definition(line.get("value")))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            return False
        return True

    def module(self, number: int) -> int:
        """Return the module of a layout; an unused number if it is unknown."""
        layout = self.layouts.get(number)
        return -1 - number if layout is None or layout.module is None else layout.module

    def sizes_or_zero(self, number: int) -> int:
        """Return `number` if it is a definition of sizes, else 0."""
        return number if number in self.sizes else 0

    def batch_rows(self, number: int, layout: int) -> int:
        """Return the rows of a batch with these sizes in calls of a known layout; -1 if no tensor has its dimension."""
        rows = count_rows(self.sizes.get(number), self.layouts[layout].dim)
        return -1 if rows is None else rows

    def with_absent(self, number: int, absent: Mapping[str, str]) -> int:
        """Define a copy of a known layout with more reasons for absence; return its number."""
        layout = self.layouts[number]
        if not absent:
            return number
        copy = layout._replace(absent={**layout.absent, **absent}, module=self.module(number))
        own = OWN | crc32(json.dumps(copy._asdict(), separators=(",", ":")).encode()) & (OWN - 1)
        self.remember(own, copy)
        return own

    def pop_unwritten_rows(self, numbers: Iterable[int]) -> list[Definition]:
        """Return a row for each of these definitions that has none yet; skip number 0."""
        found = []
        for number in numbers:
            if number and number not in self._sent and (known := self.get(number)) is not None:
                self._sent.add(number)
                found.append(Definition(number, serialize_definition(known)))
        return found

"""Reads definitions from the lines next to a ring: sizes, stages, layouts, collectives and losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dpmon.record.history_rows import Definition, Definitions, parse_definition, serialize_definition
from dpmon.record.record_types import count_rows

MAX_DEFINITIONS = 1 << 15
"""How many definitions of each kind are kept. A reader keeps twice as many (dpmon.record.history_rows)."""


class KnownDefinitions(Definitions):
    """The definitions of one process. It knows which of them have a row."""

    def __init__(self) -> None:
        super().__init__(MAX_DEFINITIONS)
        self.optimizers = 0
        """Number of lines that report a new optimizer."""
        self._written: set[int] = set()
        """Numbers that already have a row."""

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add the definition in a line. Return False if the line defines nothing."""
        if "optimizer" in line:
            self.optimizers += 1
        elif "define" in line:
            self.remember(line["define"], parse_definition(line["value"]))
        else:
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
        """Return the number of rows in a batch of these sizes, for calls of a known layout.

        -1 if no tensor has the layout's batch dimension.
        """
        rows = count_rows(self.sizes.get(number), self.layouts[layout].dim)
        return -1 if rows is None else rows

    def pop_unwritten_rows(self, numbers: Iterable[int]) -> list[Definition]:
        """Return a row for each of these definitions that has none yet. Number 0 is skipped."""
        rows = []
        for number in numbers:
            if number and number not in self._written and (value := self.get(number)) is not None:
                self._written.add(number)
                rows.append(Definition(number, serialize_definition(value)))
        return rows

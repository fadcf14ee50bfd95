"""Keeps the definitions in the lines next to a ring: sizes, stages, layouts, collectives and losses."""

from __future__ import annotations

from dpmon.record.history_rows import Definitions
from dpmon.record.record_types import count_rows

MAX_DEFINITIONS = 1 << 15
"""How many definitions of each kind are kept. A reader keeps twice as many (dpmon.record.history_rows)."""


class KnownDefinitions(Definitions):
    """The definitions of one process."""

    def __init__(self) -> None:
        super().__init__(MAX_DEFINITIONS)
        self.optimizers = 0
        """Number of lines that report a new optimizer."""

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

"""Fits the columns of a table into the width of a panel: numbers are never cut, and drawings get what texts leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from dpmon.text.cells import span_width
from dpmon.text.fact_table import DURATION, FactTable
from dpmon.ui.styled_rows import Row, fit_row, row_width

Fact = TypeVar("Fact")

DURATION_CELLS = len("4.12 ms")
_MIN_TEXT_CELLS = 4


class PanelColumn(NamedTuple):
    """A column of a table: its title and its cells, or a function that draws both in a number of cells."""

    title: str | Row = ""
    cells: Sequence[str | Row] = ()
    style: str = ""
    is_text: bool = False
    """True for text: it is aligned at the left, and long text is truncated."""
    short: str | Row = ""
    """The title where there is little room."""
    rank: int = 0
    """Those with a higher rank are shown only if the others have all the cells that they want; 0: always."""
    min_width: int = 1
    draw: Callable[[int], Sequence[str | Row]] | None = None
    """Returns the title and the cells of a drawing."""
    max_width: int = 24
    """Maximum width of a drawing."""
    wanted_width: int = 0
    """Width that a drawing gets before columns with a higher rank are shown."""

    def in_little_room(self) -> PanelColumn:
        """Return the column with its short title, and values without a blank before their unit."""
        cells = [cell.replace(" ", "") if isinstance(cell, str) and not self.is_text else cell for cell in self.cells]
        return self._replace(title=self.short or self.title, cells=cells, min_width=max(self.min_width - 1, 1))

    @property
    def full_width(self) -> int:
        """The cells of its title and its longest cell; the fewest of a drawing."""
        return max([self.min_width, _cell_width(self.title), *map(_cell_width, self.cells)])

    @property
    def least_width(self) -> int:
        """The fewest cells in which it can be shown."""
        return min(max(_MIN_TEXT_CELLS, _cell_width(self.title)), self.full_width) if self.is_text else self.full_width


def fact_columns(
    table: FactTable[Fact], rows: Sequence[Fact], styles: Mapping[str, str] | None = None
) -> list[PanelColumn]:
    """Return the columns of a table of facts that panels show. `styles`: by title."""
    return [
        PanelColumn(
            column.head,
            [column.cell(row) for row in rows],
            (styles or {}).get(column.head, ""),
            column.form.is_text,
            column.short,
            min_width=DURATION_CELLS if column.form is DURATION else 1,
        )
        for column in table.shown_columns(rows, on_screen=True)
    ]


def draw_table(columns: Sequence[PanelColumn], width: int, *, keeps_columns: bool = False) -> list[Row]:
    """Return a row of titles and a row for each cell of the columns, in at most `width` cells.

    `keeps_columns`: titles and values become shorter before a column is left out.
    """
    gap = 2
    shown, widths = _fit_columns(columns, width, gap)
    is_short_of_room = keeps_columns and len(shown) < len(columns)
    if is_short_of_room or sum(widths) + gap * (len(shown) - 1) > width:
        gap = 1
        shown, widths = _fit_columns([column.in_little_room() for column in columns], width, gap)
    rows: list[Row] = [[] for _ in range(1 + max(len(column.cells) for column in shown))]
    for index, (column, column_width) in enumerate(zip(shown, widths, strict=True)):
        title, *cells = column.draw(column_width) if column.draw is not None else (column.title, *column.cells)
        gap_text = " " * gap if index else ""
        for row, cell, style in zip(rows, (title, *cells), ("dim", *[column.style] * len(cells)), strict=True):
            spans = [(cell, style)] if isinstance(cell, str) else cell
            if column.is_text or column.draw is not None:
                row += [(gap_text, ""), *fit_row(spans, column_width)]
            else:
                row += [(gap_text + " " * (column_width - row_width(spans)), ""), *spans]
    return rows


def _fit_columns(columns: Sequence[PanelColumn], width: int, gap: int) -> tuple[list[PanelColumn], list[int]]:
    """Return the columns that fit, and their widths; those that are always shown may be too wide together."""
    full_widths = [column.full_width for column in columns]
    wanted_widths = [max(column.wanted_width, full) for column, full in zip(columns, full_widths, strict=True)]
    chosen = {index for index, column in enumerate(columns) if not column.rank}
    for rank in sorted({column.rank for column in columns} - {0}):
        group = [index for index, column in enumerate(columns) if column.rank == rank]
        wanted_cells = sum(wanted_widths[index] + gap for index in chosen)
        if wanted_cells + sum(full_widths[index] + gap for index in group) - gap <= width:
            chosen.update(group)
    shown = [columns[index] for index in sorted(chosen)]
    widths = [full_widths[index] for index in sorted(chosen)]
    free_cells = width - sum(widths) - gap * (len(shown) - 1)
    least_widths = [column.least_width for column in shown] if free_cells < 0 else []
    while free_cells < 0:
        longest = max(range(len(shown)), key=lambda index: widths[index] - least_widths[index])
        if widths[longest] <= least_widths[longest]:
            break
        widths[longest] -= 1
        free_cells += 1
    drawings = [index for index, column in enumerate(shown) if column.draw is not None]
    for count, index in enumerate(drawings):
        added = min(max(free_cells, 0) // (len(drawings) - count), shown[index].max_width - widths[index])
        widths[index] += added
        free_cells -= added
    return shown, widths


def _cell_width(cell: str | Row) -> int:
    return span_width(cell) if isinstance(cell, str) else row_width(cell)

"""The widget of every panel: rows of a fixed size; only changed rows are drawn again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dpmon.text.cells import ascii_text
from dpmon.ui.cell_diff import CellChange, diff_rows
from dpmon.ui.styled_rows import Row, plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle


class PanelView(Widget):
    """A widget that shows rows exactly as wide as itself, and redraws only the rows that changed."""

    DEFAULT_CSS = "PanelView { position: absolute; padding: 0; margin: 0; }"

    def __init__(self, panel: str, style: TerminalStyle) -> None:
        super().__init__(id=panel)
        self.style = style
        self.rows: list[Row] = []
        """The drawn rows."""

    def set_region(self, x: int, y: int, width: int, height: int) -> bool:
        """Place the widget. Return whether Textual has already laid it out in this place."""
        styles = self.styles
        if (styles.offset.x.value, styles.offset.y.value) != (x, y):
            styles.offset = (x, y)
        if styles.width is None or styles.width.value != width:
            styles.width = width
        if styles.height is None or styles.height.value != height:
            styles.height = height
        return self.region == Region(x, y, width, height)

    def show_rows(self, rows: Sequence[Row], changes: list[CellChange] | None = None) -> None:
        """Draw `rows` from now on. Textual draws changed rows from their left edge.

        With `changes`, append the changed cells to it, without a refresh by Textual. Pass it only if the terminal shows
        the whole widget, in its place and with the rows of the last call.
        """
        new_rows = [to_ascii_row(row) for row in rows] if self.style.glyphs.ascii else list(rows)
        old_rows = self.rows
        changed_indices = [
            index for index, row in enumerate(new_rows) if index >= len(old_rows) or row != old_rows[index]
        ]
        if not changed_indices and len(new_rows) == len(old_rows):
            return
        self.rows = new_rows
        if changes is not None and len(new_rows) == len(old_rows):
            for y in changed_indices:
                changes += diff_rows(old_rows[y], new_rows[y], self.region.x, self.region.y + y)
            return
        width = max(self.size.width, max(map(row_width, new_rows), default=0))
        self.refresh(*(Region(0, y, width, 1) for y in changed_indices or range(len(new_rows), len(old_rows))))

    def set_style(self, style: TerminalStyle) -> None:
        """Draw everything again, in another style, at the next `show_rows`."""
        self.style = style
        self.rows = []

    def text(self) -> list[str]:
        """Return the text of the rows (for tests)."""
        return [plain_text(row) for row in self.rows]

    def _strip(self, row: Row) -> Strip:
        style = self.style.rich_style
        return Strip([Segment(text, style(name)) for text, name in row if text]).simplify()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the newest rows in `crop`: Textual's own cache lacks the changes that were written past it."""
        return [self.render_line(y).crop(crop.x, crop.right) for y in crop.line_range]

    def render_line(self, y: int) -> Strip:
        """Return one row; blank below the last one."""
        if y < len(self.rows):
            return self._strip(self.rows[y]).adjust_cell_length(self.size.width, self.style.rich_style(""))
        return Strip.blank(self.size.width, self.style.rich_style(""))


def to_ascii_row(row: Row) -> Row:
    """Return the row for a terminal that knows only ASCII; it is as wide as before."""
    return [(ascii_text(text), style) for text, style in row]

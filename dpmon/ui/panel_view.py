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
    """Shows rows exactly as wide as the widget. Compares them with the last ones and redraws the differences."""

    DEFAULT_CSS = "PanelView { position: absolute; padding: 0; margin: 0; }"

    def __init__(self, panel: str, look: TerminalStyle) -> None:
        super().__init__(id=panel)
        self.style = look
        self.rows: list[Row] = []
        """The drawn rows."""

    def set_region(self, x: int, y: int, width: int, height: int) -> bool:
        """Place the widget; returns whether Textual has already laid it out in this place."""
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
        fresh = [to_ascii_row(row) for row in rows] if self.style.glyphs.ascii else list(rows)
        before = self.rows
        changed = [i for i, row in enumerate(fresh) if i >= len(before) or row != before[i]]
        if not changed and len(fresh) == len(before):
            return
        self.rows = fresh
        if changes is not None and len(fresh) == len(before):
            for y in changed:
                changes += diff_rows(before[y], fresh[y], self.region.x, self.region.y + y)
            return
        width = max(self.size.width, max(map(row_width, fresh), default=0))
        self.refresh(*(Region(0, y, width, 1) for y in changed or range(len(fresh), len(before))))

    def set_style(self, look: TerminalStyle) -> None:
        """Draw everything again, with another look, at the next `show_rows`."""
        self.style = look
        self.rows = []

    def text(self) -> list[str]:
        """The rows' text, for tests."""
        return [plain_text(row) for row in self.rows]

    def _strip(self, row: Row) -> Strip:
        style = self.style.rich_style
        return Strip([Segment(text, style(name)) for text, name in row if text]).simplify()

    def render_lines(self, crop: Region) -> list[Strip]:
        """The newest rows in `crop`: Textual's own cache lacks the changes that were written past it."""
        return [self.render_line(y).crop(crop.x, crop.right) for y in crop.line_range]

    def render_line(self, y: int) -> Strip:
        """One row of the picture; blank beyond its end."""
        if y < len(self.rows):
            return self._strip(self.rows[y]).adjust_cell_length(self.size.width, self.style.rich_style(""))
        return Strip.blank(self.size.width, self.style.rich_style(""))


def to_ascii_row(row: Row) -> Row:
    """The row for a terminal that knows only ASCII; as wide as before."""
    return [(ascii_text(text), style) for text, style in row]

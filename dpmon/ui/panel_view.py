"""The widget of all panels, and that of a dialog: rows as wide as the screen; only what changed is drawn again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import COLOR_SYSTEMS
from rich.segment import Segment
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from dpmon.text.cells import ascii_text
from dpmon.ui.cell_diff import encode_changes, style_codes
from dpmon.ui.styled_rows import Row, plain_text
from dpmon.ui.terminal_driver import TerminalDriver
from dpmon.ui.terminal_style import TerminalStyle


class PanelView(Widget):
    """A widget as wide as the screen and as high as its rows."""

    DEFAULT_CSS = "PanelView { width: 100%; height: auto; }"

    def __init__(self, style: TerminalStyle) -> None:
        super().__init__()
        self.style = style
        self.rows: list[Row] = []
        """The drawn rows."""
        self._drawn_size = Size()
        """The size of the screen for which they were drawn."""

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def show_rows(self, rows: Sequence[Row], terminal: TerminalDriver | None = None) -> None:
        """Draw `rows` from now on.

        `terminal`: where to write the changed cells, which takes a fifth of what Textual would send. Pass it only if
        the terminal shows this widget, from its upper left corner on, and nothing else.
        """
        new_rows = [to_ascii_row(row) for row in rows] if self.style.is_ascii else list(rows)
        old_rows, self.rows = self.rows, new_rows
        old_size, self._drawn_size = self._drawn_size, self.app.size
        if len(new_rows) != len(old_rows):
            self.refresh(layout=True)
        elif terminal is not None and self.size == self._drawn_size == old_size:
            color_system = COLOR_SYSTEMS[self.app.console.color_system or "standard"]
            rich_style = self.style.rich_style
            changes = encode_changes(old_rows, new_rows, lambda name: style_codes(rich_style(name), color_system))
            if changes:
                terminal.write(changes)
        else:
            changed = [y for y, (old, new) in enumerate(zip(old_rows, new_rows, strict=True)) if old != new]
            if changed:
                self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def set_style(self, style: TerminalStyle) -> None:
        """Draw everything again, in another style, at the next `show_rows`."""
        self.style = style
        self.rows = []

    def text(self) -> list[str]:
        """Return the text of the rows (for tests)."""
        return [plain_text(row) for row in self.rows]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the newest rows in `crop`: Textual's own cache lacks the changes that were written past it."""
        return [self.render_line(y).crop(crop.x, crop.right) for y in crop.line_range]

    def render_line(self, y: int) -> Strip:
        """Return one row; blank below the last one."""
        style = self.style.rich_style
        row = self.rows[y] if y < len(self.rows) else []
        strip = Strip([Segment(text, style(name)) for text, name in row if text]).simplify()
        return strip.adjust_cell_length(self.size.width, style(""))


def to_ascii_row(row: Row) -> Row:
    """Return the row for a terminal that knows only ASCII; it is as wide as before."""
    return [(ascii_text(text), style) for text, style in row]

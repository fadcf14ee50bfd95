"""The widget of every panel: rows of a fixed size; only changed rows are drawn again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.control import Control
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dpmon.text.cells import ascii_text, char_width
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, merged, plain, width_of


class PanelView(Widget):
    """Shows rows exactly as wide as the widget. Compares them with the last ones and redraws the differences."""

    DEFAULT_CSS = "PanelView { position: absolute; padding: 0; margin: 0; }"

    def __init__(self, panel: str, look: Look) -> None:
        super().__init__(id=panel)
        self.look = look
        self.rows: list[Row] = []
        """The drawn rows."""

    def place(self, x: int, y: int, width: int, height: int) -> bool:
        """Place the widget; returns whether Textual has already laid it out in this place."""
        styles = self.styles
        if (styles.offset.x.value, styles.offset.y.value) != (x, y):
            styles.offset = (x, y)
        if styles.width is None or styles.width.value != width:
            styles.width = width
        if styles.height is None or styles.height.value != height:
            styles.height = height
        return self.region == Region(x, y, width, height)

    def show(self, rows: Sequence[Row], changes: list[str] | None = None) -> None:
        """Draw `rows` from now on. Textual draws changed rows from their left edge.

        With `changes`, append to it the terminal text that draws only the changed cells, without a refresh by
        Textual. Pass it only if the terminal shows the whole widget, in its place and with the rows of the last call.
        """
        fresh = [in_ascii(row) for row in rows] if self.look.glyphs.ascii else list(rows)
        before = self.rows
        changed = [i for i, row in enumerate(fresh) if i >= len(before) or row != before[i]]
        if not changed and len(fresh) == len(before):
            return
        self.rows = fresh
        if changes is not None and len(fresh) == len(before):
            for y in changed:
                x, cells = changed_cells(before[y], fresh[y])
                changes.append(Control.move_to(self.region.x + x, self.region.y + y).segment.text)
                changes.append(self._strip(cells).render(self.app.console))
            return
        width = max(self.size.width, max(map(width_of, fresh), default=0))
        self.refresh(*(Region(0, y, width, 1) for y in changed or range(len(fresh), len(before))))

    def set_look(self, look: Look) -> None:
        """Draw everything again, with another look, at the next `show`."""
        self.look = look
        self.rows = []

    def text(self) -> list[str]:
        """The rows' text, for tests."""
        return [plain(row) for row in self.rows]

    def _strip(self, row: Row) -> Strip:
        style = self.look.style
        return Strip([Segment(text, style(name)) for text, name in row if text]).simplify()

    def render_lines(self, crop: Region) -> list[Strip]:
        """The newest rows in `crop`: Textual's own cache lacks the changes that were written past it."""
        return [self.render_line(y).crop(crop.x, crop.right) for y in crop.line_range]

    def render_line(self, y: int) -> Strip:
        """One row of the picture; blank beyond its end."""
        if y < len(self.rows):
            return self._strip(self.rows[y]).adjust_cell_length(self.size.width, self.look.style(""))
        return Strip.blank(self.size.width, self.look.style(""))


def changed_cells(before: Row, after: Row) -> tuple[int, Row]:
    """The column of the first cell that differs, and the cells of `after` from there to the last one that differs.

    The rows are equally wide. A mark without a width stays with the character before it.
    """
    old, new = ([(char, style) for text, style in row for char in text] for row in (before, after))
    most = min(len(old), len(new))
    first = next((i for i in range(most) if old[i] != new[i]), most)
    while first and not all(char_width(char) for char, _ in (*old[first : first + 1], *new[first : first + 1])):
        first -= 1
    last = next((i for i in range(most - first) if old[-1 - i] != new[-1 - i]), most - first)
    while last and not char_width(new[-last][0]):
        last -= 1
    return width_of(new[:first]), merged(new[first : len(new) - last])


def in_ascii(row: Row) -> Row:
    """The row for a terminal that knows only ASCII; as wide as before."""
    return [(ascii_text(text), style) for text, style in row]

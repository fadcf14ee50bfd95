"""The widgets of the panels, and the two ways on which their rows reach the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.segment import Segment
from textual.app import App
from textual.strip import Strip

from dpmon.ui.cell_diff import CellChange, encode_changes
from dpmon.ui.panel_layout import Slot
from dpmon.ui.panel_view import PanelView
from dpmon.ui.screen_data import PANELS
from dpmon.ui.screen_painter import join_panels
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_driver import TerminalDriver
from dpmon.ui.terminal_style import TerminalStyle

_WIDGET_NAMES = ("status", *PANELS, "footer", "timeline", "small")


class PanelDrawer:
    """The widgets of all panels. Shows painted rows in them, with as little output as possible."""

    def __init__(self, app: App[str], style: TerminalStyle) -> None:
        self._app = app
        self._style = style
        self._sgr_codes: dict[str, str] = {}
        """SGR codes by the name of a style."""
        self.widgets = {name: PanelView(name, style) for name in _WIDGET_NAMES}
        self.slots: dict[str, Slot] = {}
        """The places of the panels that are on the screen."""

    def set_style(self, style: TerminalStyle) -> None:
        """Draw everything in another style from the next `draw` on."""
        self._style, self._sgr_codes = style, {}
        for widget in self.widgets.values():
            widget.set_style(style)

    def draw(self, slots: dict[str, Slot], painted: Mapping[str, list[Row]], terminal: TerminalDriver | None) -> None:
        """Show the painted rows in these slots; a panel without a slot is hidden.

        `terminal`: the driver to which changed cells may be written past Textual's compositor; None if something
        covers the panels. This is done only for panels that keep their place.
        """
        can_bypass = terminal is not None and slots == self.slots
        changes: list[CellChange] = []
        with self._app.batch_update():
            for name, widget in self.widgets.items():
                slot = slots.get(name)
                if widget.display != (slot is not None):
                    widget.display = slot is not None
                if slot is not None:
                    is_laid_out = widget.set_region(slot.x, slot.y, slot.width, slot.height)
                    widget.show_rows(painted[name], changes if is_laid_out and can_bypass else None)
        self.slots = slots
        if terminal is not None and changes:
            terminal.write(encode_changes(changes, self._sgr))

    def _sgr(self, style: str) -> str:
        """Return the SGR codes of a style."""
        codes = self._sgr_codes.get(style)
        if codes is None:
            codes_before_text, _, _ = (
                Strip([Segment("x", self._style.rich_style(style))]).render(self._app.console).partition("x")
            )
            codes = self._sgr_codes[style] = codes_before_text.removeprefix("\x1b[").removesuffix("m")
        return codes

    def rows(self) -> list[Row]:
        """Return the rows on the screen, without dialogs."""
        return join_panels(self.slots, {name: widget.rows for name, widget in self.widgets.items()})

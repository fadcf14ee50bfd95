"""The drawing part of the Textual application: the feed, the clock and the panels. `monitor` handles keys."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.segment import Segment
from textual import events
from textual.app import App, ComposeResult
from textual.driver import Driver as TextualDriver
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.strip import Strip
from textual.timer import Timer

from dpmon.run.run_reader import RunReader
from dpmon.ui.alert import Alert
from dpmon.ui.cell_diff import CellChange, encode_changes
from dpmon.ui.dialogs import Dialog
from dpmon.ui.live_run import LiveRun, OpenStore
from dpmon.ui.panel_layout import Slot
from dpmon.ui.panel_view import PanelView
from dpmon.ui.scenes import choose_scene
from dpmon.ui.screen_data import PANELS, ScreenData, View
from dpmon.ui.screen_painter import TALL, join_panels, max_scroll, max_visible_ranks, paint_panels, places, shows_time
from dpmon.ui.styled_rows import Row, plain_text
from dpmon.ui.terminal_driver import ExitHandlers, TerminalDriver, is_terminal_gone
from dpmon.ui.terminal_style import TerminalStyle

_PLACES = ("status", *PANELS, "footer", "timeline", "small")
_REPAINT_S = 60.0


class ScreenApp(App[str]):
    """Draws one run at a regular interval."""

    ALLOW_SELECT = False
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    ModalScreen { background: transparent; }
    """

    def __init__(
        self,
        directory: Path,
        look: TerminalStyle,
        *,
        refresh: float = 1.0,
        alert: str | None = None,
        open_reader: Callable[[], RunReader] | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        """`refresh`: seconds between pictures."""
        super().__init__(ansi_color=not look.color)
        self.look = look
        self.period = refresh
        self.terminal: TerminalDriver | None = None
        """The driver of a real terminal, which sets this member itself."""
        self._was_ready = True
        self._alert = None if alert is None else Alert(alert)
        self.feed = LiveRun(directory, open_reader or (lambda: RunReader(directory)), open_store=open_store)
        self.leaving = ExitHandlers(self._ask_to_exit)
        self.problem: Exception | None = None
        """Why the run could not be opened."""
        self.view = View()
        self._lent = ("", "")
        """A panel in focus that is not on the screen, and the one that has the focus meanwhile."""
        self.slots: dict[str, Slot] = {}
        self._still: ScreenData | None = None
        self._stopping: str | None = None
        self._ticking: Timer | None = None
        self._codes: dict[str, str] = {}
        """SGR codes by the name of a style."""
        self._panels = {name: PanelView(name, look) for name in _PLACES}

    def get_driver_class(self) -> type[TextualDriver]:
        """Our driver instead of Textual's LinuxDriver; any other driver stays as Textual chose it."""
        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def exit(self, result: str | None = None, return_code: int = 0, message: object = None) -> None:
        """Exit; a deadline ends the process even if the terminal accepts no more output."""
        ended = self.feed.ended
        over = ended.status if ended is not None and ended.status is not None else 1
        self.leaving.start_deadline(return_code or {"left": 0, "ended": over, "stopped": over}.get(result or "", 1))
        super().exit(result, return_code, message)  # type: ignore[arg-type]

    def compose(self) -> ComposeResult:
        """Yield one widget per place; the first picture sets their sizes."""
        yield from self._panels.values()

    def on_mount(self) -> None:
        """Draw before reading anything, then begin to read."""
        self.app_resume_signal.subscribe(self, lambda _: self._repaint())
        self.screen.styles.background = self.look.background
        self.draw()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        try:
            self.feed.start()
        except Exception as error:  # noqa: BLE001  `run_screen` raises it again, for example for a missing run
            self.problem = error
            self.exit(None, return_code=2)
            return
        self._tick()
        self._ticking = self.set_interval(self.period, self._tick)
        self.set_interval(_REPAINT_S, self._repaint)

    def on_dialog_changed(self) -> None:
        """Redraw the footer, which lists the keys that work now."""
        self.draw()

    def on_resize(self) -> None:
        """Place everything in the new size."""
        self.draw()

    def exit_if_terminal_gone(self) -> bool:
        """Exit if the terminal has gone; returns whether it has."""
        gone = not self.is_headless and is_terminal_gone()
        if gone:
            self.leaving.exit_with_status(129)
        return gone

    def _ask_to_exit(self, status: int) -> bool:
        loop = getattr(self, "_loop", None)
        if loop is None or loop.is_closed():
            return False
        loop.call_soon_threadsafe(lambda: self.exit(None, return_code=status))
        return True

    # ------------------------------------------------------------------------------------------ drawing

    def _tick(self) -> None:
        if self.exit_if_terminal_gone():
            return
        self._adopt_terminal_size()
        self.feed.refresh()
        self._draw_frame()

    def _draw_frame(self) -> None:
        if self._still is None:
            self.feed.output.refresh()
        ready = self.terminal is None or self.terminal.is_writable()
        if ready or self._was_ready:  # a terminal that is still busy at the second look is stalled: skip the picture
            self.draw()
        self._was_ready = ready
        if self._alert is not None and self.terminal is not None:
            self.terminal.write(self._alert.bytes_to_send(self.feed.build_screen_data(self.view)))
        self.after_tick()

    @property
    def _dialog_open(self) -> bool:
        return len(self.screen_stack) > 1

    def _adopt_terminal_size(self) -> None:
        """Adopt the terminal's size if no signal announced it, or the signal came too early."""
        if self.is_headless:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found = Size(*os.get_terminal_size(sys.__stdin__.fileno()))  # type: ignore[union-attr]
            if found.area and found != self.size:
                self.post_message(events.Resize(found, found))

    def after_tick(self) -> None:
        """Called after each picture."""

    def set_refresh_interval(self, period: float) -> None:
        """Draw a picture every `period` seconds from now on."""
        self.period = period
        if self._ticking is not None:
            self._ticking.stop()
            self._ticking = self.set_interval(period, self._tick)

    def set_style(self, look: TerminalStyle) -> None:
        """Draw with another look from now on."""
        self.look, self._codes = look, {}
        self.ansi_color = not look.color
        self.screen.styles.background = look.background
        for panel in self._panels.values():
            panel.set_look(look)
        self.draw()

    def _repaint(self) -> None:
        """Send the whole picture again, over anything that another program wrote to the terminal."""
        self.screen.refresh()

    def on_app_focus(self) -> None:
        """Repaint when the terminal becomes visible again."""
        self._repaint()

    def data_to_draw(self) -> ScreenData:
        """The facts to draw: the live one, or the frozen one."""
        screen = self.screen_stack[-1] if self.screen_stack else None  # the stack is empty while the app exits
        view = replace(self.view, dialog=tuple(screen.footer_keys())) if isinstance(screen, Dialog) else self.view
        if self._still is not None:
            self._still = self.feed.with_view(self._still, view)
            return self.feed.at_past_time(self._still)
        return self.feed.build_screen_data(view, self._stopping)

    def draw(self) -> None:
        """Draw all panels; only changed rows reach the terminal."""
        width, height = self.size
        if not width or not height:
            return
        facts = self.data_to_draw()
        slots = places(facts, width, height)
        waits = height >= TALL or shows_time(facts, slots)
        lacks, self.feed.waits = waits and not self.feed.waits, waits
        if self._still is None and (self.feed.set_rank_room(max_visible_ranks(facts, slots)) or lacks):
            facts = self.data_to_draw()
        self._move_hidden_focus(facts, slots)
        if facts.view.focus != self.view.focus:
            facts = self.data_to_draw()
        painted = paint_panels(facts, self.feed.output, slots, self.look, noted=not self._dialog_open)
        # Bypass the compositor only while every panel keeps its place and nothing covers it.
        direct = self.terminal is not None and slots == self.slots and not self._dialog_open
        changes: list[CellChange] = []
        with self.batch_update():
            for name, panel in self._panels.items():
                slot = slots.get(name)
                if panel.display != (slot is not None):
                    panel.display = slot is not None
                if slot is not None:
                    settled = panel.set_region(slot.x, slot.y, slot.width, slot.height)
                    panel.show_rows(painted[name], changes if settled and direct else None)
        self.slots = slots
        if self.terminal is not None and changes:
            self.terminal.write(encode_changes(changes, self._sgr))

    def _sgr(self, style: str) -> str:
        """The SGR codes of a style."""
        codes = self._codes.get(style)
        if codes is None:
            before, _, _ = Strip([Segment("x", self.look.style(style))]).render(self.console).partition("x")
            codes = self._codes[style] = before.removeprefix("\x1b[").removesuffix("m")
        return codes

    def _move_hidden_focus(self, facts: ScreenData, slots: Mapping[str, Slot]) -> None:
        """While the panel in focus is not on the screen, the most important panel has the focus."""
        focus, (home, lent) = self.view.focus, self._lent
        if self.view.zoom is not None or (focus in slots and focus != lent):
            return
        home = home if focus == lent else focus
        focus = home if home in slots else next((panel for panel in choose_scene(facts).panels if panel in slots), home)
        self._lent = ("", "") if focus == home else (home, focus)
        self.view = replace(self.view, focus=focus)

    def painted_rows(self) -> list[Row]:
        """The rows on the screen, without dialogs."""
        return join_panels(self.slots, {name: panel.rows for name, panel in self._panels.items()})

    def panel_rows(self, name: str) -> list[Row]:
        """The rows of one panel."""
        return self._panels[name].rows

    def text(self) -> list[str]:
        """The screen as text rows (for tests)."""
        return [plain_text(row) for row in self.painted_rows()]

    def clamp_scroll(self, panel: str, wanted: int) -> int:
        """The scroll position `wanted`, limited to the panel's last position."""
        slot = self.slots.get(panel)
        if slot is None:
            return 0
        return min(wanted, max_scroll(panel, self.data_to_draw(), slot, self.look))

    def call_on_ui_thread(self, then: Callable[..., object], *arguments: object) -> None:
        """Call `then` on the screen's thread; do nothing if the screen has closed meanwhile."""
        with contextlib.suppress(RuntimeError):
            self.call_later(then, *arguments)

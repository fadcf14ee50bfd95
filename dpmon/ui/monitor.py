"""The Textual application: its timer and its drawing, and the effects of keys, clicks and dialogs."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from textual import events
from textual.app import App, ComposeResult
from textual.driver import Driver as TextualDriver
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.timer import Timer

from dpmon.errors import HistoryError
from dpmon.model.nodes import find_rank
from dpmon.record.schema import SECOND
from dpmon.run.run_reader import NO_TRAINING_MESSAGE, RunReader
from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_report import parse_report
from dpmon.text.formatting import format_elapsed, format_range_length, format_time_range
from dpmon.ui import keys
from dpmon.ui.dialogs import CommandPalette, Dialog, LineInput, TextPages, key_name
from dpmon.ui.footer import key_at, position_at
from dpmon.ui.help_text import help_rows
from dpmon.ui.live_run import LiveRun, OpenStore
from dpmon.ui.panel_layout import Slot
from dpmon.ui.panel_view import PanelView
from dpmon.ui.panels.panel_replicas import list_choices
from dpmon.ui.run_stopper import RunStopper
from dpmon.ui.scenes import choose_scene
from dpmon.ui.screen_data import PANELS, ScreenData, View
from dpmon.ui.screen_painter import (
    max_scroll,
    paint_screen,
    panel_slots,
)
from dpmon.ui.step_list import StepList
from dpmon.ui.styled_rows import Row, crop_row, plain_text, wrap_to_rows
from dpmon.ui.terminal_driver import ExitHandlers, TerminalDriver, is_terminal_gone
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_axis import shift_by_parts
from dpmon.ui.time_cursor import TimeCursor
from dpmon.ui.why_dialog import REQUEST_INTERVAL_S, WhyDialog

_REPAINT_S = 60.0
_MAX_LISTED_STEPS = 50


class Monitor(App[str]):
    """The live screen of one run, drawn at a regular interval."""

    ALLOW_SELECT = False
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    ModalScreen { background: transparent; }
    """
    message_s = 15.0
    """Seconds that a message stays, also while the picture is frozen."""

    def __init__(
        self,
        directory: Path,
        style: TerminalStyle,
        *,
        refresh: float = 1.0,
        open_reader: Callable[[], RunReader] | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        """Prepare a screen for the run in `directory`. `refresh`: seconds between frames."""
        super().__init__(ansi_color=not style.has_color)
        self.style = style
        self.refresh_interval_s = refresh
        self.terminal: TerminalDriver | None = None
        """The driver of a real terminal, which sets this member itself."""
        self._was_writable = True
        self.live_run = LiveRun(directory, open_reader or (lambda: RunReader(directory)), open_store=open_store)
        self.exit_handlers = ExitHandlers(self._ask_to_exit)
        self.open_error: Exception | None = None
        """Why the run could not be opened."""
        self.view = View()
        self._moved_focus = ("", "")
        """A panel in focus that is not on the screen, and the panel that has the focus meanwhile."""
        self._refresh_timer: Timer | None = None
        self._message_timer: Timer | None = None
        """The timer that removes the last message."""
        self._has_handled_end = False
        self._panel_view = PanelView(style)
        self.slots: dict[str, Slot] = {}
        """The places of the panels that are on the screen."""
        self._stopper = RunStopper(self)

    def get_driver_class(self) -> type[TextualDriver]:
        """Return our driver instead of Textual's LinuxDriver; any other driver stays as Textual chose it."""
        driver_class = super().get_driver_class()
        return TerminalDriver if driver_class is LinuxDriver else driver_class

    def exit(self, result: str | None = None, return_code: int = 0, message: object = None) -> None:
        """Exit; a deadline ends the process even if the terminal accepts no more output."""
        exit_info = self.live_run.exit_info
        run_status = exit_info.status if exit_info is not None and exit_info.status is not None else 1
        self.exit_handlers.start_deadline(
            return_code or {"left": 0, "ended": run_status, "stopped": run_status}.get(result or "", 1)
        )
        super().exit(result, return_code, message)  # type: ignore[arg-type]

    def compose(self) -> ComposeResult:
        """Yield the widget of all panels."""
        yield self._panel_view

    def on_mount(self) -> None:
        """Draw before reading anything, then begin to read."""
        self.app_resume_signal.subscribe(self, lambda _: self._repaint())
        self.screen.styles.background = self.style.background
        self.draw()
        self.call_after_refresh(self._start_reading)

    def _start_reading(self) -> None:
        try:
            self.live_run.start()
        except Exception as error:  # noqa: BLE001  `run_screen` raises it again, for example for a missing run
            self.open_error = error
            self.exit(None, return_code=2)
            return
        self._tick()
        self._refresh_timer = self.set_interval(self.refresh_interval_s, self._tick)
        self.set_interval(_REPAINT_S, self._repaint)

    def on_dialog_changed(self) -> None:
        """Redraw the footer, which lists the keys that work now."""
        self.draw()

    def on_resize(self) -> None:
        """Place all panels in the new size."""
        self.draw()

    def exit_if_terminal_gone(self) -> bool:
        """Exit if the terminal has gone. Return whether it has."""
        is_gone = not self.is_headless and is_terminal_gone()
        if is_gone:
            self.exit_handlers.exit_with_status(129)
        return is_gone

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
        self.live_run.refresh()
        self._draw_frame()

    def _draw_frame(self) -> None:
        if self.live_run.cursor.frozen_ns is None:
            self.live_run.output.refresh()
        is_writable = self.terminal is None or self.terminal.is_writable()
        is_stalled = not is_writable and not self._was_writable  # it is still busy at the second look
        if not is_stalled:
            self.draw()
        self.live_run.release_records()
        self._was_writable = is_writable
        if self.live_run.is_over and not self._has_handled_end:
            self._has_handled_end = True
            self._handle_run_end()
        self._stopper.poll()

    def _handle_run_end(self) -> None:
        """Show the whole run, unless the user looks at another time, and look for findings."""
        if self.live_run.cursor.time_ns is None:
            self.set_view(replace(self.view, range_s=0, message=None))

        def find() -> str | None:
            from dpmon.report.report_data import open_report_data

            with open_report_data(self.live_run.directory) as report:
                self.live_run.findings = report.findings
            return None

        self._run_in_thread(find, lambda problem: self.draw())

    @property
    def _is_dialog_open(self) -> bool:
        return len(self.screen_stack) > 1

    def _adopt_terminal_size(self) -> None:
        """Adopt the terminal's size if no signal announced it, or the signal came too early."""
        if self.is_headless:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            terminal_size = Size(*os.get_terminal_size(sys.__stdin__.fileno()))  # type: ignore[union-attr]
            if terminal_size.area and terminal_size != self.size:
                self.post_message(events.Resize(terminal_size, terminal_size))

    def set_refresh_interval(self, interval_s: float) -> None:
        """Draw a frame every `interval_s` seconds from now on."""
        self.refresh_interval_s = interval_s
        if self._refresh_timer is not None:
            self._refresh_timer.stop()
            self._refresh_timer = self.set_interval(interval_s, self._tick)

    def set_style(self, style: TerminalStyle) -> None:
        """Draw in another style from now on."""
        self.style = style
        self.ansi_color = not style.has_color
        self.screen.styles.background = style.background
        self._panel_view.set_style(style)
        self.draw()

    def _repaint(self) -> None:
        """Send the whole frame again, over anything that another program wrote to the terminal."""
        self.screen.refresh()

    def on_app_focus(self) -> None:
        """Repaint when the terminal becomes visible again."""
        self._repaint()

    def data_to_draw(self) -> ScreenData:
        """Return the data to draw, as of the time that the screen shows."""
        screen = self.screen_stack[-1] if self.screen_stack else None  # the stack is empty while the app exits
        view = replace(self.view, dialog_keys=tuple(screen.footer_keys())) if isinstance(screen, Dialog) else self.view
        return self.live_run.build_screen_data(view, self._stopper.progress)

    def draw(self) -> None:
        """Draw all panels; only changed rows reach the terminal."""
        width, height = self.size
        if not width or not height:
            return
        try:
            self._draw_panels(width, height)
        except HistoryError as error:
            self.live_run.note_unreadable(error)
            with contextlib.suppress(HistoryError):  # then the last picture stays
                self._draw_panels(width, height)
        self.live_run.finish_drawing()

    def _draw_panels(self, width: int, height: int) -> None:
        with self.live_run.reading_facts():
            data = self.data_to_draw()
            slots = panel_slots(data, width, height)
            self._move_hidden_focus(data, slots)
            if data.view.focus != self.view.focus:
                data = self.data_to_draw()
            self.slots = slots
            rows = paint_screen(data, self.live_run.output, slots, self.style, with_popup=not self._is_dialog_open)
        self._panel_view.show_rows(rows, None if self._is_dialog_open else self.terminal)

    def _move_hidden_focus(self, data: ScreenData, slots: Mapping[str, Slot]) -> None:
        """Move the focus to the most important panel while the panel in focus is not on the screen."""
        focus = self.view.focus
        hidden_panel, substitute = self._moved_focus
        if self.view.zoom is not None or (focus in slots and focus != substitute):
            return
        wanted_panel = hidden_panel if focus == substitute else focus
        focus = wanted_panel
        if wanted_panel not in slots:
            focus = next((panel for panel in choose_scene(data).panels if panel in slots), wanted_panel)
        self._moved_focus = ("", "") if focus == wanted_panel else (wanted_panel, focus)
        self.view = replace(self.view, focus=focus)

    def painted_rows(self) -> list[Row]:
        """Return the rows on the screen, without dialogs."""
        return self._panel_view.rows

    def panel_rows(self, name: str) -> list[Row]:
        """Return the rows of one panel."""
        x, y, width, height = self.slots[name]
        return [crop_row(row, x, x + width) for row in self.painted_rows()[y : y + height]]

    def text(self) -> list[str]:
        """Return the screen as text rows (for tests)."""
        return [plain_text(row) for row in self.painted_rows()]

    def clamp_scroll(self, panel: str, first_row: int) -> int:
        """Return the scroll position `first_row`, limited to the panel's last position."""
        slot = self.slots.get(panel)
        if slot is None:
            return 0
        return min(first_row, max_scroll(panel, self.data_to_draw(), slot, self.style))

    # ------------------------------------------------------------------------------------------ messages

    def show_message(self, message: str | None) -> None:
        """Show a message for `message_s` seconds; None removes the last one."""
        if self._message_timer is not None:  # one timer at a time: a held key repeats its message
            self._message_timer.stop()
        self.set_view(replace(self.view, message=message))
        status = self.slots.get("status")
        if self._is_dialog_open and isinstance(self.screen, Dialog):
            covers_messages = status is None or self.screen.box.region.y < status.height
            self.screen.show_message(message if message and covers_messages else "")
        if message is not None:
            self._message_timer = self.set_timer(self.message_s, partial(self.show_message, None))

    def set_view(self, view: View) -> None:
        """Draw with another view from now on."""
        self.view = view
        self.draw()

    # ------------------------------------------------------------------------------------------ the time shown

    def _move_cursor(self, move: Callable[[TimeCursor], TimeCursor]) -> None:
        """Show the time that `move` returns. Clear the message, which belongs to another time."""
        self.live_run.move_cursor(move)
        self.set_view(replace(self.view, message=None))

    def show_present(self) -> None:
        """Show the present, also if the screen is frozen."""
        self._move_cursor(TimeCursor.return_to_present)

    def action_freeze(self) -> None:
        """Freeze the screen, or show the live run again; play an earlier time, or a run that has ended."""
        cursor = self.live_run.cursor
        if cursor.is_frozen:
            self.show_present()
        elif cursor.is_looking_back or cursor.has_ended:
            self.action_play()
        else:
            self._move_cursor(TimeCursor.freeze)

    def action_play(self) -> None:
        """Play, or stop; at the end of the run, play from its first step on."""
        cursor = self.live_run.cursor
        if cursor.is_playing:
            self._move_cursor(TimeCursor.stop)
            return
        first_ns = cursor.time_ns
        if first_ns is None:
            first_ns = self.live_run.find_step_end_ns(0, forward=True) or 0
        self._move_cursor(lambda cursor: cursor.seek(first_ns).play())

    def action_step(self, direction: int) -> None:
        """Go to the training's next step, or to its previous one."""
        self.live_run.move_cursor(TimeCursor.stop)
        end_ns = self.live_run.find_step_end_ns(self.live_run.cursor.position_ns, forward=direction > 0)
        if end_ns is not None:
            self._move_cursor(lambda cursor: cursor.seek(end_ns))

    def action_change_speed(self, offset: int) -> None:
        """Play faster or slower."""
        self._move_cursor(lambda cursor: cursor.change_speed(offset))

    def action_seek(self, seconds: int) -> None:
        """Go this many seconds forward, or back."""
        self._move_cursor(lambda cursor: cursor.seek(cursor.position_ns + seconds * SECOND))

    def action_seek_to(self, fraction: float) -> None:
        """Go to a fraction of the run, from 0.0 to 1.0."""
        self._move_cursor(lambda cursor: cursor.seek(int(cursor.present_ns * fraction)))

    def action_time(self, parts: int) -> None:
        """Look back in time, or (`parts` 1) go forward, up to now; the training and its record continue."""
        self._show_time(shift_by_parts(self.data_to_draw(), parts))

    def _show_time(self, time_ns: int) -> None:
        """Show the run as it was at a time (ns since its start)."""
        data = self.data_to_draw()
        process = (data.history_state or data.state).representative
        if data.cursor.is_playback or data.cursor.has_ended:
            self._move_cursor(lambda cursor: cursor.seek(time_ns))
        elif process is None or process.last_step is None:
            self.show_message("no step has finished yet: there is nothing to look back to")
        else:
            self._move_cursor(lambda cursor: cursor.seek(max(time_ns, process.began_ns)))

    # ------------------------------------------------------------------------------------------ other threads

    def _run_in_thread(self, job: Callable[[], str | None], handle_result: Callable[[str | None], None]) -> None:
        """Run `job` on another thread; pass its result or its error to `handle_result` on the screen's thread."""

        def run() -> None:
            try:
                error_text = job()
            except Exception as error:  # noqa: BLE001  whatever went wrong is shown; the screen goes on
                error_text = f"{type(error).__name__}: {error}"
            self.call_on_ui_thread(handle_result, None if error_text is None else sanitize_line(error_text, 300))

        threading.Thread(target=run, name="dpmon job", daemon=True).start()

    def call_on_ui_thread(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the screen's thread; do nothing if the screen has closed meanwhile."""
        with contextlib.suppress(RuntimeError):
            self.call_later(function, *arguments)

    # ------------------------------------------------------------------------------------------ keys and clicks

    @property
    def _actions(self) -> Mapping[str, str]:
        """The action of each key now, by Textual's name of the key."""
        return keys.PLAYBACK_ACTIONS if self.live_run.cursor.is_playback else keys.ACTIONS

    async def on_event(self, event: events.Event) -> None:
        """Handle a key at once, so that keys typed ahead reach the dialog that an earlier key opens."""
        if not isinstance(event, events.Key):
            await super().on_event(event)
        elif self._is_dialog_open and event.key != "ctrl+c":
            self.screen.post_message(event)
        elif (action := self._actions.get(event.key)) is not None:
            await self.run_action(action)
        else:
            self.show_message(f"{key_name(event)} does nothing here: ? shows the keys")

    def action_leave(self, interrupt: bool = False) -> None:
        """Close the screen, after a question if the run has not ended; `interrupt`: for ctrl+c."""
        self._stopper.ask_to_leave(interrupt)

    def action_stop(self) -> None:
        """Stop the training after a confirmation."""
        self._stopper.ask_to_stop()

    # ------------------------------------------------------------------------------------------ moving

    async def on_click(self, event: events.Click) -> None:
        """Find the clicked panel, and handle the click there."""
        await self.handle_panel_click(*self._panel_under_mouse(event), event.chain)

    async def handle_panel_click(self, panel: str, x: int, click_count: int) -> None:
        """Go to the clicked panel, or press the key at column `x` of the footer; zoom the panel at the second click."""
        if panel == "footer":
            await self._press(key_at(self.panel_rows("footer")[0], x) or "")
        elif panel == "timeline" and not self._is_dialog_open:
            if (fraction := position_at(self.panel_rows("timeline")[0], x)) is not None:
                self.action_seek_to(fraction)
        elif self._is_dialog_open or panel not in PANELS:
            return
        elif click_count == 2:
            self.set_view(replace(self.view, focus=panel, zoom=None if self.view.zoom is not None else panel))
        else:
            self.set_view(replace(self.view, focus=panel))

    async def _press(self, key: str) -> None:
        """Act as if a key of the footer was pressed."""
        if isinstance(self.screen, Dialog):
            self.screen.press(key)
            return
        data = self.data_to_draw()
        action = next(
            (command.action for command in keys.COMMANDS if command.key == key and command.is_in_footer(data)), ""
        )
        if action:
            await self.run_action(action)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll the panel under the mouse towards its beginning."""
        self._scroll_by_wheel(event, -3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll the panel under the mouse towards its end."""
        self._scroll_by_wheel(event, 3)

    def _scroll_by_wheel(self, event: events.MouseEvent, rows: int) -> None:
        panel, _ = self._panel_under_mouse(event)
        if panel in PANELS and not self._is_dialog_open:
            self._scroll(panel, rows)

    def _panel_under_mouse(self, event: events.MouseEvent) -> tuple[str, int]:
        """Return the name of the panel under the mouse, "" if there is none, and the column in it."""
        for name, slot in self.slots.items():
            x, y = event.screen_x - slot.x, event.screen_y - slot.y
            if 0 <= x < slot.width and 0 <= y < slot.height:
                return name, x
        return "", 0

    def action_panel(self, name: str) -> None:
        """Go to a panel. If it is in focus already, or hidden, switch between full screen and back."""
        is_hidden = name not in self.slots or self.slots[name].is_folded
        goes_full_screen = self.view.zoom != name and (is_hidden or self.view.focus == name)
        self.set_view(replace(self.view, focus=name, zoom=name if goes_full_screen else None))

    def action_next_panel(self, direction: int) -> None:
        """Go to the next panel on the screen; from a full-screen panel, to the next one on the full screen."""
        view, index = self.view, PANELS.index(self.view.focus)
        order = [PANELS[(index + direction * step) % len(PANELS)] for step in range(1, len(PANELS) + 1)]
        focus = next((panel for panel in order if view.zoom is not None or panel in self.slots), view.focus)
        self.set_view(replace(view, focus=focus, zoom=view.zoom and focus))

    def action_arrow(self, direction: str) -> None:
        """Move between panels; scroll within the output, or within a full-screen panel."""
        if direction in ("up", "down") and (self.view.zoom is not None or self.view.focus == "output"):
            self._scroll(self.view.focus, -1 if direction == "up" else 1)
        elif self.view.zoom is None:
            self.set_view(keys.focus_neighbor(self.view, self.slots, direction))

    def action_zoom(self) -> None:
        """Show the node of the chosen rank, else the panel in focus on the full screen; or go back."""
        if (node := keys.node_to_show(self.data_to_draw())) is not None:
            self.set_view(replace(self.view, node_number=node.number))
            return
        self.set_view(replace(self.view, zoom=None if self.view.zoom is not None else self.view.focus))

    def action_unzoom(self) -> None:
        """Go back to now; else to all panels; else to all nodes; if they are shown already, end the search."""
        if self.live_run.cursor.can_return:
            self.show_present()
        elif self.view.zoom is not None:
            self.set_view(replace(self.view, zoom=None))
        elif self.view.node_number is not None:
            self.set_view(replace(self.view, node_number=None))
        else:
            self.set_view(replace(self.view, search=""))

    def action_scroll(self, rows: int) -> None:
        """Scroll the full-screen panel, else the output."""
        self._scroll(self.view.zoom or "output", rows)

    def action_scroll_page(self, pages: int) -> None:
        """Scroll by pages."""
        panel = self.view.zoom or "output"
        self._scroll(panel, pages * max(self._inner_height(panel) - 1, 1))

    def _inner_height(self, panel: str) -> int:
        """Return the number of rows inside the frame of a panel, at least 1."""
        slot = self.slots.get(panel)
        return 1 if slot is None else max(slot.height - 2, 1)

    def _scroll(self, panel: str, rows: int) -> None:
        if panel == "output":
            self.live_run.output.scroll(rows, self._inner_height(panel))
            self.draw()
            return
        first_row = max(self.view.first_rows.get(panel, 0) + rows, 0)
        self.set_view(
            replace(self.view, first_rows={**self.view.first_rows, panel: self.clamp_scroll(panel, first_row)})
        )

    # ------------------------------------------------------------------------------------------ looking

    def action_toggle_mode(self) -> None:
        """Request the other mode, or show why it is impossible."""
        self._send_request(
            "the mode cannot be switched", self.live_run.toggle_refusal(), self.live_run.request_other_mode
        )

    def action_pause(self) -> None:
        """Pause the training between two steps, or resume it, or show why this is impossible."""
        self._send_request(
            "no pause",
            self.live_run.pause_refusal(self.live_run.pause_state().is_requested),
            self.live_run.toggle_pause,
        )

    def _send_request(self, problem: str, refusal: str | None, send: Callable[[], bool]) -> None:
        if refusal is not None:
            self.show_message(f"{problem}: {refusal}")
            return
        self.show_present()
        self.show_message(None if send() else f"{problem}: {NO_TRAINING_MESSAGE}")

    def action_sample(self) -> None:
        """Have the ranks record the collectives of one of the next steps."""
        is_requested = self.live_run.request_collective_sample()
        sample_text = "the collectives of one of the next steps will be recorded"
        self.show_message(sample_text if is_requested else NO_TRAINING_MESSAGE)

    def action_next(self, direction: int) -> None:
        """Go to the next match of a search in the output; without a search, to the next call in panel 2."""
        if self.view.search and self.view.focus == "output":
            self._search(self.view.search, direction)
            return
        count = len(list_choices(self.live_run.state.representative))
        if direction > 0 and count > 1:
            self.set_view(replace(self.view, call_choice=(self.view.call_choice + 1) % (count + 1)))
        elif direction > 0:
            self.show_message("there is no other call or root; in the output, n continues a search (/)")
        else:
            self.show_message("N continues a search in the output (/)")

    def action_rank(self, direction: int) -> None:
        """Show the time of the straggler in panel 3, then that of the next rank."""
        state = self.live_run.state
        ranks = sorted(process.process for process in state.training_processes if process.rank is not None)
        representative, straggler = state.representative, state.straggler
        if len(ranks) < 2 or representative is None:
            self.show_message("there are no other ranks")
            return
        index = ranks.index(representative.process) if representative.process in ranks else 0
        chosen = ranks[(index + direction) % len(ranks)]
        if self.view.process_index is None and straggler is not None and straggler.process in ranks:
            chosen = straggler.process
        self.set_view(replace(self.view, process_index=chosen))

    def action_range(self, offset: int) -> None:
        """Choose a longer or shorter time range."""
        view = keys.next_time_range(self.view, offset)
        self.view = view
        self.show_message(f"time range: {format_range_length(view.range_s)}")

    def action_refresh(self, offset: int) -> None:
        """Draw less often (`offset` 1), or more often (-1)."""
        self.set_refresh_interval(keys.next_refresh_interval(self.refresh_interval_s, offset))
        self.show_message(f"the screen is drawn every {self.refresh_interval_s:g} s")

    def action_theme(self) -> None:
        """Choose the next theme."""
        self.set_style(self.style.with_next_theme())
        self.show_message(f"theme {self.style.theme}; DPMON_THEME={self.style.theme} makes it the default")

    def action_next_output(self) -> None:
        """Show the other output file of a headless run."""
        self.live_run.output.next_file()
        self.draw()

    # ------------------------------------------------------------------------------------------ finding

    def action_find(self) -> None:
        """Prompt for text to find in the output; in panel 2, for a rank."""
        if keys.slash_finds_rank(self.data_to_draw()):
            note = "the number of a rank, or the name of a node: its slowest rank"
            self.push_screen(LineInput("Find a rank", note, self.style), self._find_rank)
            return

        def start_search(text: str | None) -> None:
            if text:
                self.view = replace(self.view, focus="output", zoom=self.view.zoom and "output", search=text)
                self._search(text, 1)

        note = "enter searches from the newest line; case matters only if you type a capital"
        self.push_screen(LineInput("Find in the output", note, self.style, self.view.search), start_search)

    def _find_rank(self, text: str | None) -> None:
        if not text:
            return
        process = find_rank(self.live_run.state, text)
        if process is None:
            self.show_message(f"there is no rank or node {sanitize_line(text, 40)}")
        else:
            self.set_view(replace(self.view, focus="replicas", process_index=process))

    def _search(self, text: str, direction: int) -> None:
        """Go to the next older (1) or newer (-1) line that contains `text`."""
        self.show_message(self.live_run.output.find(text, direction > 0, self._inner_height("output")))

    # ------------------------------------------------------------------------------------------ dialogs

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(TextPages("Help", lambda width: help_rows(width, self.style), self.style))

    def action_palette(self) -> None:
        """List all commands that work now."""

        def run_chosen(action: str | None) -> None:
            if action:
                self.call_next(self.run_action, action)

        self.push_screen(CommandPalette(lambda: keys.available_commands(self.data_to_draw()), self.style), run_chosen)

    def action_why(self) -> None:
        """Show what each rank is doing, and its stack: now (every few seconds), or in the stall on the screen."""
        data, directory = self.data_to_draw(), self.live_run.directory
        report = None
        if data.is_over or data.shows_past:
            report = None if data.shown_stall is None else parse_report(data.shown_stall.record)
            if report is None:
                self.show_message(f"no stall was recorded {'until this time' if data.shows_past else 'in this run'}")
                return
        dialog = WhyDialog(self.data_to_draw, directory, report, self.style)

        def request() -> None:
            if not (dialog.is_closed or self.live_run.is_over):
                self._run_in_thread(dialog.request_reply, show)

        def show(problem: str | None) -> None:
            dialog.show_reply(problem)
            self.set_timer(REQUEST_INTERVAL_S, request)

        self.push_screen(dialog)
        if report is None:
            request()

    def action_slowest(self) -> None:
        """List the longest steps of the time range; go to the time of the chosen one."""
        data = self.data_to_draw()
        process = data.process
        if process is None or process.last_step is None:
            self.show_message("no step has finished yet")
            return
        dialog = StepList(f"The longest steps after the warm-up · {format_time_range(data.view.range_s)}", self.style)

        def read() -> str | None:
            dialog.slow_steps = self.live_run.slow_steps(data, _MAX_LISTED_STEPS)
            return None if dialog.slow_steps is not None else "the record cannot be read"

        def go_to_step(end_ns: str | None) -> None:
            if end_ns is not None:
                self._show_time(int(end_ns))

        def show(problem: str | None) -> None:
            if not dialog.is_closed:
                dialog.problem = problem
                dialog.draw()

        self.push_screen(dialog, go_to_step)
        self._run_in_thread(read, show)

    def action_warnings(self) -> None:
        """Show the newest warnings, as many as the state of the run has."""

        def build_rows(width: int) -> list[Row]:
            rows: list[Row] = []
            for warning in reversed(self.live_run.state.warnings):
                rows.append([(f"{format_elapsed(warning.t_ns)}  ", "dim"), (self._source(warning.process), "bold")])
                rows += wrap_to_rows(sanitize_line(warning.text), width, "", label=[("  ", "")])
            return rows

        self.push_screen(TextPages(f"Warnings ({self.live_run.state.warning_count})", build_rows, self.style))

    def _source(self, process_index: int | None) -> str:
        """Return the name of the process that a warning came from; None is dpmon itself."""
        if process_index is None:
            return "dpmon"
        process = self.live_run.state.processes.get(process_index)
        return f"process {process_index}" if process is None else process.name

    def action_type_line(self) -> None:
        """Type a line for the script's standard input."""
        if self.live_run.is_over:
            self.show_message("the run has ended: it reads no more input")
            return
        if self.live_run.is_ending:
            self.show_message("the command has ended: it reads no more input")
            return
        if not self.live_run.can_type():
            self.show_message("dpmon cannot reach the script's input")
            return

        def send(line: str | None) -> None:
            if line is not None:
                problem = "the run has ended" if self.live_run.is_over else self.live_run.type_line(line)
                # The output files of a headless run do not contain typed lines, so a message has to confirm the line.
                apart = len(self.live_run.output.tails) > 1
                sent = f"sent to the script: {sanitize_line(line, 200)}" if apart and not hides_input else None
                self.show_message(sent if problem is None else f"the line was not sent: {problem}")

        hides_input = self.live_run.hides_input()
        note = "enter sends the line to the script, esc does not"
        note += "; the script asked not to show it" if hides_input else ""
        self.push_screen(LineInput("Input", note, self.style, hides_text=hides_input), send)

    # ------------------------------------------------------------------------------------------ files

    def action_save_screenshot(self) -> None:
        """Save a screenshot (SVG)."""
        text = self.export_screenshot(title=f"dpmon {self.data_to_draw().title}", simplify=True)
        # Textual's picture would load its font from the network.
        text = re.sub(r"@font-face {.*?}", "", text, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono, Menlo")
        directory, name = self.live_run.directory, self.live_run.file_name()
        self._run_in_thread(lambda: f"screenshot: {_save_screenshot(text, name, directory)}", self.show_message)


def _save_screenshot(text: str, name: str, directory: Path) -> str:
    """Write `text` to a new file NAME-HHMMSS-....svg and return its path.

    It lies in the current directory or, if that is not writable, in the run's `directory`. Raises OSError.
    """
    import tempfile

    prefix = f"{name}-{time.strftime('%H%M%S')}-"
    try:
        descriptor, path = tempfile.mkstemp(".svg", prefix, Path.cwd())
        path = Path(path).name
    except OSError:
        descriptor, path = tempfile.mkstemp(".svg", prefix, directory.absolute())
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path

"""The Textual application: wiring between the feed, the pictures and the keys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType

from dpmon.ui import keys
from dpmon.ui.dialogs import Choice, Line, Pages
from dpmon.ui.feed import Feed, Reader
from dpmon.ui.format import clock
from dpmon.ui.help import help_rows
from dpmon.ui.layout import Slot
from dpmon.ui.leaving import Leaving, terminal_gone
from dpmon.ui.look import Look
from dpmon.ui.paint import paint, places
from dpmon.ui.panel_replicas import choices
from dpmon.ui.rows import Row, wrapped
from dpmon.ui.scene import PANELS, Scene, View
from dpmon.ui.text import clean
from dpmon.ui.view import PanelView

__all__ = ["Monitor"]

_PLACES = ("status", *PANELS, "footer", "small")
_REPAINT_S = 60.0
_SIP_S = 0.2
_QUEUED_WRITES = 2
"""With more writes than these waiting for the terminal, a frame is left out."""


def _open(directory: Path) -> Reader:
    from dpmon.run.reader import RunReader

    return RunReader(directory)


class Monitor(App[str]):
    """The live screen of one run."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    ModalScreen { background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = keys.BINDINGS

    def __init__(
        self,
        directory: Path,
        look: Look,
        *,
        refresh: float = 1.0,
        open_reader: Callable[[], Reader] | None = None,
        direct: bool = True,
    ) -> None:
        """`refresh`: seconds between pictures; `direct` False leaves all drawing to Textual."""
        super().__init__(ansi_color=not look.colour)
        self.look = look
        self.period = refresh
        self.direct = direct
        self.feed = Feed(directory, open_reader or (lambda: _open(directory)))
        self.leaving = Leaving(self._ask_to_exit)
        self.problem: Exception | None = None
        """Why the run could not be opened."""
        self.view = View()
        self.slots: dict[str, Slot] = {}
        self._still: Scene | None = None
        self._stopping: str | None = None
        self._stop_done = False
        self._panels = {name: PanelView(name, look) for name in _PLACES}

    def compose(self) -> ComposeResult:
        """One widget a place; the sizes come with the first picture."""
        yield from self._panels.values()

    def on_mount(self) -> None:
        """Draw before anything is read, then begin to read."""
        self.app_resume_signal.subscribe(self, lambda _: self._repaint())
        self.screen.styles.background = self.look.background
        self.draw()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        try:
            self.feed.start()
        except Exception as error:  # noqa: BLE001  a directory that is no run: told by whoever started the screen
            self.problem = error
            self.exit(None, return_code=2)
            return
        self._tick()
        self.set_interval(self.period, self._tick)
        self.set_interval(_SIP_S, self.feed.sip)
        self.set_interval(_REPAINT_S, self._repaint)

    def on_resize(self) -> None:
        """Everything finds its place in the new size."""
        self.draw()

    def _ask_to_exit(self, status: int) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: self.exit(None, return_code=status))

    # ------------------------------------------------------------------------------------------ drawing

    def _tick(self) -> None:
        if not self.is_headless and terminal_gone():
            self.leaving.go(129)
            return
        self.feed.tick()
        if self._still is None:
            self.feed.output.refresh()
        if self._queued() <= _QUEUED_WRITES:
            self.draw()
        if self._stop_done:
            self._after_stop()

    def _queued(self) -> int:
        """Writes that wait for the terminal; 0 where Textual does not tell."""
        queue = getattr(getattr(self._driver, "_writer_thread", None), "_queue", None)
        return int(queue.qsize()) if queue is not None else 0

    def _past_compositor(self) -> Callable[[str], object] | None:
        """How to write to the terminal without Textual; None where there is none, or Textual has it elsewhere."""
        if self.is_headless or not self.direct:
            return None
        write = getattr(self._driver, "write", None)
        return write if callable(write) else None

    def _repaint(self) -> None:
        """Send the whole picture again: whatever else wrote to the terminal is gone then."""
        self.screen.refresh()

    def on_app_focus(self) -> None:
        """The terminal comes into sight."""
        self._repaint()

    def on_panel_view_picked(self, event: PanelView.Picked) -> None:
        """A click goes to a panel."""
        if event.panel in PANELS:
            self.action_panel(event.panel)

    def on_panel_view_wheel(self, event: PanelView.Wheel) -> None:
        """The wheel scrolls the output."""
        if event.panel == "output":
            self.action_scroll(event.by)

    def scene(self) -> Scene:
        """What is to be drawn: now, or the instant at which the picture was frozen."""
        if self._still is not None:
            return replace(self._still, view=self.view)
        return self.feed.scene(self.view, self._stopping)

    def draw(self) -> None:
        """Build the pictures and hand each panel its rows; only rows that differ reach the terminal."""
        width, height = self.size
        if not width or not height:
            return
        scene = self.scene()
        slots = places(scene, width, height)
        painted = paint(scene, self.feed.output, slots, self.look)
        # Past the compositor only while every panel stands where it stood and nothing lies over it.
        write = self._past_compositor() if slots == self.slots and len(self.screen_stack) == 1 else None
        patches: list[str] = []
        with self.batch_update():
            for name, panel in self._panels.items():
                slot = slots.get(name)
                if panel.display != (slot is not None):
                    panel.display = slot is not None
                if slot is not None:
                    settled = panel.place(slot.x, slot.y, slot.width, slot.height)
                    panel.show(painted[name], patches.append if settled and write is not None else None)
        self.slots = slots
        if patches:
            write("".join(patches))  # type: ignore[misc]

    def text(self) -> list[str]:
        """What is on the screen, as text rows (for tests)."""
        rows = [""] * max((slot.y + slot.height for slot in self.slots.values()), default=0)
        for name, slot in sorted(self.slots.items(), key=lambda item: item[1].x):
            for index, line in enumerate(self._panels[name].text()):
                rows[slot.y + index] += line
        return rows

    def _say(self, message: str | None) -> None:
        self._see(replace(self.view, message=message, message_ns=self.feed.now_ns()))

    def _see(self, view: View) -> None:
        self.view = view
        self.draw()

    # ------------------------------------------------------------------------------------------ keys

    def action_panel(self, name: str) -> None:
        """Go to a panel, or zoom it."""
        self._see(keys.to_panel(self.view, self.slots, name))

    def action_next_panel(self, by: int) -> None:
        """Go to the next panel."""
        if len(self.screen_stack) == 1:
            self._see(keys.next_panel(self.view, self.slots, by))

    def action_zoom(self) -> None:
        """The panel in focus: full screen and back."""
        self._see(keys.zoomed(self.view))

    def action_unzoom(self) -> None:
        """Back to all panels; the output follows again."""
        self._see(replace(self.view, zoom=None))

    def action_freeze(self) -> None:
        """Hold the picture, or let it go on."""
        self._still = None if self._still is not None else self.feed.frozen(self.view)
        self._see(replace(self.view, frozen=self._still is not None))

    def _let_go(self) -> None:
        if self._still is not None:
            self.action_freeze()

    def action_toggle_mode(self) -> None:
        """Ask the training for the other mode."""
        if self.feed.can_toggle():
            self._let_go()
            self.feed.toggle()
            self.draw()

    def action_next_root(self) -> None:
        """Show the next root module; after the last one again the one that was called last."""
        count = len(choices(self.feed.state.focus()))
        if count > 1:
            self._see(replace(self.view, root=(self.view.root + 1) % (count + 1)))

    def _output_height(self) -> int:
        slot = self.slots.get("output")
        return max(slot.height - 2, 1) if slot is not None else 1

    def action_scroll(self, by: int) -> None:
        """Move in the output by lines."""
        self.feed.output.scroll(by, self._output_height())
        self.draw()

    def action_scroll_page(self, by: int) -> None:
        """Move in the output by pages."""
        self.action_scroll(by * max(self._output_height() - 1, 1))

    def action_shift(self, by: int) -> None:
        """Move in the output's long lines."""
        self.feed.output.left = max(self.feed.output.left + by, 0)
        self.draw()

    def action_next_output(self) -> None:
        """The other file of a headless run."""
        output = self.feed.output
        if len(output.tails) > 1:
            output.which, output.top = (output.which + 1) % len(output.tails), None
            self.draw()

    # ------------------------------------------------------------------------------------------ dialogs

    def action_help(self) -> None:
        """What the words mean."""
        if len(self.screen_stack) == 1:
            self.push_screen(Pages("Help", lambda width: help_rows(width, self.look), self.look))

    def action_warnings(self) -> None:
        """All warnings that are kept."""
        if len(self.screen_stack) > 1 or not self.feed.state.warnings:
            return

        def rows(width: int) -> list[Row]:
            found: list[Row] = []
            for warning in reversed(self.feed.state.warnings):
                who = "dpmon" if warning.process is None else f"process {warning.process}"
                found.append([(f"{clock(warning.t_ns)}  ", "dim"), (who, "bold")])
                found += [[("  " + line, "")] for line in wrapped(clean(warning.text), width - 2)]
            return found

        self.push_screen(Pages(f"Warnings ({self.feed.state.warning_count})", rows, self.look))

    def action_type_line(self) -> None:
        """A line for the script's standard input."""
        if len(self.screen_stack) > 1 or not self.feed.can_type():
            return

        def send(line: str | None) -> None:
            if line is not None:
                problem = self.feed.type_line(line)
                self._say(None if problem is None else f"the line was not sent: {problem}")

        self.push_screen(Line("Input", "enter sends the line to the script, esc does not", self.look), send)

    def action_leave(self) -> None:
        """After the end: close. Before it: ask what is to become of the training."""
        scene = self.feed.scene(self.view)
        if scene.over:
            self.exit("ended")
            return
        if len(self.screen_stack) > 1:
            self.screen.dismiss(None)
            return
        answers = [("l", "left", "leave it running; this screen closes")]
        if self._stopping is None:
            answers.append(("s", "stop", "stop the training: interrupt, then terminate, then kill"))
        answers.append(("esc", "stay", "stay here"))
        text = ["The training does not need this screen."]
        self.push_screen(Choice("Leave", text, answers, self.look), self._left)

    def _left(self, answer: str | None) -> None:
        if answer == "left":
            self.exit("left")
        elif answer == "stop":
            self._let_go()
            self._stopping = "the training is asked to stop"
            self.draw()
            threading.Thread(target=self._stop, name="dpmon stop", daemon=True).start()

    def _stop(self) -> None:
        """On a thread of its own: stop the whole run, telling how it goes."""
        try:
            from dpmon.run.stop import stop_run

            for progress in stop_run(self.feed.directory):
                self.call_from_thread(self._stopped_so_far, clean(progress, 200))
            self._stop_done = True
        except Exception as error:  # noqa: BLE001  whatever went wrong is shown; the screen goes on
            self.call_from_thread(self._stop_failed, clean(f"{type(error).__name__}: {error}", 200))

    def _stopped_so_far(self, text: str) -> None:
        self._stopping = text
        self.draw()

    def _after_stop(self) -> None:
        """Every signal was sent: leave when the end is known, or say what is left."""
        scene = self.feed.scene(self.view)
        if scene.over:
            self.exit("stopped")
        elif not scene.ending:
            self._stop_done = False
            self._stop_failed(self._stopping or "it still runs")

    def _stop_failed(self, text: str) -> None:
        self._stopping = None
        self._say(f"could not stop the training: {text}")

"""The Textual application: the effects of keys, clicks and dialogs. `screen_app` draws the screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from textual import events

from dpmon.model.nodes import find_rank
from dpmon.run.run_reader import NO_TRAINING
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import wrap_text
from dpmon.text.formatting import format_clock, format_range_length, format_time_range
from dpmon.ui import background_jobs, keys
from dpmon.ui.dialogs import Choice, CommandPalette, Dialog, LineInput, TextPages, key_name
from dpmon.ui.footer import key_at
from dpmon.ui.help_text import help_rows
from dpmon.ui.list_dialogs import RunList, StepList
from dpmon.ui.live_run import FROZEN_RANKS
from dpmon.ui.panels.panel_replicas import list_choices
from dpmon.ui.screen_control import ScreenControl
from dpmon.ui.screen_data import PANELS, View
from dpmon.ui.styled_rows import Row
from dpmon.ui.time_axis import shift_by_parts
from dpmon.ui.why_dialog import WhyDialog

_SLOWEST = 50
_FORMS = [
    ("j", "jsonl", "JSON, one object a line: every record"),
    ("c", "csv", "CSV: a directory with one table per kind"),
    ("p", "perfetto", "a trace for ui.perfetto.dev, one track per replica"),
    ("esc", "stay", "none"),
]


class Monitor(ScreenControl):
    """The live screen of one run."""

    ACTIONS: ClassVar[Mapping[str, str]] = keys.ACTIONS
    _clicked = View()
    """The view before the click changed it, with the clicked panel in focus."""

    async def on_event(self, event: events.Event) -> None:
        """Handle a key at once, so that keys typed ahead reach the dialog that an earlier key opens."""
        if not isinstance(event, events.Key):
            await super().on_event(event)
        elif self._dialog_open and event.key not in keys.ANYWHERE:
            self.screen.post_message(event)
        elif event.key in self.ACTIONS:
            await self.run_action(self.ACTIONS[event.key])
        else:
            self._show_message(f"{key_name(event)} does nothing here: ? shows the keys")

    # ------------------------------------------------------------------------------------------ moving

    async def on_click(self, event: events.Click) -> None:
        """Tell `clicked` the panel under the mouse."""
        await self.clicked(*self._panel_under_mouse(event), event.chain)

    async def clicked(self, panel: str, x: int, nth: int) -> None:
        """Go to the clicked panel, or press the key at column `x` of the footer; at the second click, zoom as enter."""
        if panel == "footer":
            await self._press(key_at(self.panel_rows("footer")[0], x) or "")
        elif self._dialog_open or panel not in PANELS:
            return
        elif nth == 1:
            self._clicked = replace(self.view, focus=panel)
            self.action_panel(panel)
        else:
            # Use the view before the first click, which may have moved everything under the mouse.
            before = self._clicked
            self._set_view(
                replace(self.view, focus=before.focus, zoom=None if before.zoom is not None else before.focus)
            )

    async def _press(self, key: str) -> None:
        """Act as if a key of the footer was pressed."""
        if isinstance(self.screen, Dialog):
            self.screen.press(key)
            return
        facts = self.data_to_draw()
        action = next((one.action for one in keys.COMMANDS if one.key == key and one.footer_word(facts)), "")
        if action:
            await self.run_action(action)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll the panel under the mouse towards its beginning."""
        self._scroll_by_wheel(event, -3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll the panel under the mouse towards its end."""
        self._scroll_by_wheel(event, 3)

    def _scroll_by_wheel(self, event: events.MouseEvent, by: int) -> None:
        panel, _ = self._panel_under_mouse(event)
        if panel in PANELS and not self._dialog_open:
            self._scroll(panel, by)

    def _panel_under_mouse(self, event: events.MouseEvent) -> tuple[str, int]:
        """The panel under the mouse, and the column in it."""
        for name, slot in self.slots.items():
            x, y = event.screen_x - slot.x, event.screen_y - slot.y
            if 0 <= x < slot.width and 0 <= y < slot.height:
                return name, x
        return "", 0

    def action_panel(self, name: str) -> None:
        """Go to a panel. If it is in focus already, or hidden, switch between full screen and back."""
        hidden = name not in self.slots or self.slots[name].is_folded
        full = self.view.zoom != name and (hidden or self.view.focus == name)
        self._set_view(replace(self.view, focus=name, zoom=name if full else None))

    def action_next_panel(self, by: int) -> None:
        """Go to the next panel on the screen; from a full-screen panel, to the next one on the full screen."""
        view, here = self.view, PANELS.index(self.view.focus)
        order = [PANELS[(here + by * i) % len(PANELS)] for i in range(1, len(PANELS) + 1)]
        focus = next((panel for panel in order if view.zoom is not None or panel in self.slots), view.focus)
        self._set_view(replace(view, focus=focus, zoom=view.zoom and focus))

    def action_arrow(self, way: str) -> None:
        """Move between panels; scroll within the output, or within a full-screen panel."""
        output = self.feed.output
        scrolls = self.view.zoom is not None or self.view.focus == "output"
        if not scrolls or (way == "left" and self.view.zoom is None and not output.left):
            self._set_view(keys.focus_neighbor(self.view, self.slots, way))
        elif way in ("up", "down"):
            self._scroll(self.view.focus, -1 if way == "up" else 1)
        elif self.view.focus == "output":
            output.left = max(output.left + (-8 if way == "left" else 8), 0)
            self.draw()

    def action_zoom(self) -> None:
        """Show the node of the chosen rank, else the panel in focus on the full screen; or go back."""
        if (node := keys.node_to_show(self.data_to_draw())) is not None:
            self._set_view(replace(self.view, node=node.number))
            return
        self._set_view(replace(self.view, zoom=None if self.view.zoom is not None else self.view.focus))

    def action_unzoom(self) -> None:
        """Go back to now; else to all panels; else to all nodes; if they are shown already, end the search."""
        if self.view.at_ns is not None:
            self._unfreeze()
        elif self.view.zoom is not None:
            self._set_view(replace(self.view, zoom=None))
        elif self.view.node is not None:
            self._set_view(replace(self.view, node=None))
        else:
            self._set_view(replace(self.view, search=""))

    def action_scroll(self, by: int) -> None:
        """Scroll the full-screen panel, else the output."""
        self._scroll(self.view.zoom or "output", by)

    def action_scroll_page(self, by: int) -> None:
        """Scroll by pages."""
        panel = self.view.zoom or "output"
        self._scroll(panel, by * max(self._inner_size(panel)[1] - 1, 1))

    def _inner_size(self, panel: str) -> tuple[int, int]:
        """The width and height inside the frame of a panel."""
        slot = self.slots.get(panel)
        return (max(slot.width - 4, 1), max(slot.height - 2, 1)) if slot is not None else (1, 1)

    def _scroll(self, panel: str, by: int) -> None:
        if panel == "output":
            self.feed.output.scroll(by, self._inner_size(panel)[1])
            self.draw()
            return
        first = max(self.view.scrolled.get(panel, 0) + by, 0)
        self._set_view(replace(self.view, scrolled={**self.view.scrolled, panel: self.clamp_scroll(panel, first)}))

    # ------------------------------------------------------------------------------------------ looking

    def action_toggle_mode(self) -> None:
        """Ask the training for the other mode, or say why it is impossible."""
        self._send_request("the mode cannot be switched", self.feed.toggle_refusal(), self.feed.request_other_mode)

    def action_pause(self) -> None:
        """Pause the training between two steps, or resume it, or say why this is impossible."""
        self._send_request("no pause", self.feed.pause_refusal(self.feed.pause_state().wanted), self.feed.toggle_pause)

    def _send_request(self, impossible: str, refusal: str | None, ask: Callable[[], None]) -> None:
        if refusal is not None:
            self._show_message(f"{impossible}: {refusal}")
            return
        self._unfreeze()
        ask()
        self._show_message(None)  # clear older messages before the answer

    def action_sample(self) -> None:
        """Have the ranks record the collectives of one of the next steps."""
        if not self.feed.request_collective_sample():
            self._show_message(NO_TRAINING)
        elif any(process.rank is not None for process in self.feed.state.processes.values()):
            self._show_message("the collectives of one of the next steps will be recorded")
        else:
            self._show_message("this run has no ranks: only collectives that the script calls itself will be recorded")

    def action_next(self, by: int) -> None:
        """Go to the next hit of a search in the output; without a search, to the next root or call in panel 2."""
        if self.view.search and self.view.focus == "output":
            self._search(self.view.search, by)
            return
        count = len(list_choices(self.feed.state.representative))
        if by > 0 and count > 1:
            self._set_view(replace(self.view, root=(self.view.root + 1) % (count + 1)))
        elif by > 0:
            self._show_message("there is no other call or root; in the output, n continues a search (/)")
        else:
            self._show_message("N continues a search in the output (/)")

    def action_rank(self, by: int) -> None:
        """Show the time of the next rank in panel 3, and that of the straggler first."""
        state = self.feed.state
        ranks = sorted(one.process for one in state.training_processes if one.rank is not None)
        focus, slow = state.representative, state.straggler
        if len(ranks) < 2 or focus is None:
            self._show_message("there are no other ranks")
            return
        at = ranks.index(focus.process) if focus.process in ranks else 0
        chosen = ranks[(at + by) % len(ranks)]
        if self.view.process is None and slow is not None and slow.process in ranks:
            chosen = slow.process
        self._set_view(replace(self.view, process=chosen))

    def action_time(self, by: int) -> None:
        """Look back in time, or (`by` 1) go forward again, at last to now; the training and its record go on."""
        self._show_time(shift_by_parts(self.data_to_draw(), by))

    def _show_time(self, at_ns: int) -> None:
        """Show the run as it was at a time (ns since its start)."""
        facts, process = self.data_to_draw(), self.feed.state.representative
        present = facts.elapsed_ns if facts.past is None else facts.past.until_ns
        if process is None or process.last_step is None:
            self._show_message("no step has ended yet: there is nothing to look back to")
        elif at_ns >= present:
            self._unfreeze()
        else:
            if self._still is None:
                self.feed.set_rank_room(FROZEN_RANKS)
                self._still = self.feed.build_screen_data(self.view)
            self._set_view(replace(self.view, frozen=True, at_ns=max(at_ns, process.began_ns)))

    def action_range(self, by: int) -> None:
        """Choose a longer or shorter time range."""
        view = keys.next_time_range(self.view, by)
        self.view = view
        self._show_message(f"time range: {format_range_length(view.span_s)}")

    def action_refresh(self, by: int) -> None:
        """Draw more or less often."""
        self.set_refresh_interval(keys.next_refresh_interval(self.period, by))
        self._show_message(f"the screen is drawn every {self.period:g} s")

    def action_theme(self) -> None:
        """Choose the next theme."""
        self.set_style(self.look.next())
        self._show_message(f"theme {self.look.theme}; DPMON_THEME={self.look.theme} makes it the default")

    def action_next_output(self) -> None:
        """Show the other output file of a headless run."""
        if len(self.feed.output.tails) < 2:
            self._show_message("there is only one output file; it includes the errors")
            return
        self.feed.output.next_file()
        self.draw()

    # ------------------------------------------------------------------------------------------ finding

    def action_find(self) -> None:
        """Ask for text to find in the output; in panel 2, for a rank."""
        if keys.slash_finds_rank(self.data_to_draw()):
            note = "the number of a rank, or the name of a node: its slowest rank"
            self.push_screen(LineInput("Find a rank", note, self.look), self._find_rank)
            return

        def begin(text: str | None) -> None:
            if text:
                self.view = replace(self.view, focus="output", zoom=self.view.zoom and "output", search=text)
                self._search(text, 1)

        note = "enter searches from the newest line; case matters only if you type a capital"
        self.push_screen(LineInput("Find in the output", note, self.look, self.view.search), begin)

    def _find_rank(self, text: str | None) -> None:
        if not text:
            return
        process = find_rank(self.feed.state, text)
        if process is None:
            self._show_message(f"there is no rank or node {sanitize_line(text, 40)}")
        else:
            self._set_view(replace(self.view, focus="replicas", process=process))

    def _search(self, text: str, by: int) -> None:
        """Go to the next older (1) or newer (-1) line with `text`."""
        width, height = self._inner_size("output")
        self._show_message(self.feed.output.find(text, by > 0, height, width))

    # ------------------------------------------------------------------------------------------ dialogs

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(TextPages("Help", lambda width: help_rows(width, self.look), self.look))

    def action_palette(self) -> None:
        """List everything that can be done now."""

        def do(action: str | None) -> None:
            if action:
                self.call_next(self.run_action, action)

        self.push_screen(CommandPalette(lambda: keys.available_commands(self.data_to_draw()), self.look), do)

    def action_why(self) -> None:
        """Show what each rank does, and its stack: now (every few seconds), or in the stall of the picture."""
        facts, directory = self.data_to_draw(), self.feed.directory
        recorded = (
            facts.shown_stall.record if facts.shown_stall is not None and (facts.is_over or facts.shows_past) else None
        )
        if recorded is None and (facts.is_over or facts.shows_past):
            self._show_message(f"no stall was recorded {'until this time' if facts.shows_past else 'in this run'}")
            return
        pages = WhyDialog(self.data_to_draw, directory, recorded, self.look)
        self.push_screen(pages)
        if recorded is None:
            self._in_thread(pages.request_reply, pages.show)
            pages.set_interval(
                1.0, lambda: self._in_thread(pages.request_reply, pages.show) if pages.refresh_age() else None
            )

    def action_slowest(self) -> None:
        """List the longest steps of the time range; go to the time of the chosen one."""
        facts = self.data_to_draw()
        process = facts.process
        if process is None or process.last_step is None:
            self._show_message("no step has ended yet")
            return
        steps = StepList(
            f"The longest steps {self.look.glyphs.middot} {format_time_range(facts.view.span_s)}", self.look
        )

        def read() -> str | None:
            steps.found = self.feed.slow_steps(facts, _SLOWEST)
            return None if steps.found is not None else "the record cannot be read"

        def go(end_ns: str | None) -> None:
            if end_ns is not None:
                self._show_time(int(end_ns))

        self.push_screen(steps, go)
        self._update_dialog_after(steps, read)

    def action_warnings(self) -> None:
        """Show the newest warnings, as many as the state has."""
        if not self.feed.state.warnings:
            self._show_message("there are no warnings")
            return

        def rows(width: int) -> list[Row]:
            found: list[Row] = []
            for warning in reversed(self.feed.state.warnings):
                found.append([(f"{format_clock(warning.t_ns)}  ", "dim"), (self._source(warning.process), "bold")])
                found += [[("  " + line, "")] for line in wrap_text(sanitize_line(warning.text), width - 2)]
            return found

        self.push_screen(TextPages(f"Warnings ({self.feed.state.warning_count})", rows, self.look))

    def _source(self, number: int | None) -> str:
        process = self.feed.state.processes.get(number) if number is not None else None
        return process.name if process is not None else "dpmon" if number is None else f"process {number}"

    def action_type_line(self) -> None:
        """Type a line for the script's standard input."""
        facts = self.data_to_draw()
        if facts.is_over or facts.playing is not None:
            self._show_message("the run is over: it reads no more input")
            return
        if facts.ending:
            self._show_message("the command has ended: it reads no more input")
            return
        if not self.feed.can_type():
            self._show_message("dpmon cannot reach the script's input")
            return

        def send(line: str | None) -> None:
            if line is not None:
                problem = self.feed.type_line(line)
                # The output files of a headless run do not contain typed lines, so a message has to confirm the line.
                apart = len(self.feed.output.tails) > 1
                sent = f"sent to the script: {sanitize_line(line, 200)}" if apart and not hidden else None
                self._show_message(sent if problem is None else f"the line was not sent: {problem}")

        hidden = self.feed.hides_input()
        note = "enter sends the line to the script, esc does not"
        note += "; the script asked not to show it" if hidden else ""
        over_note = "the run is over: this line cannot be sent; esc closes"
        self.push_screen(LineInput("Input", note, self.look, hidden=hidden, over_note=over_note), send)

    # ------------------------------------------------------------------------------------------ files

    def action_picture(self) -> None:
        """Save a picture of the current screen (SVG)."""
        from dpmon.ui.svg_export import render_svg

        rows = self.painted_rows()
        if isinstance(self.screen, Dialog):
            rows[self.screen.row : self.screen.row + len(self.screen.rows)] = self.screen.rows
        text = render_svg(rows, self.look, f"dpmon {self.data_to_draw().title}")
        directory, name = self.feed.directory, self.feed.file_name()
        self._in_thread(
            lambda: f"picture: {background_jobs.save_text(text, name, 'svg', directory)}", self._show_message
        )

    def action_export(self) -> None:
        """Export all records in the background, after asking for the format."""
        text = ["Writes all records so far into a new file, in the background."]
        self.push_screen(Choice("Export", text, _FORMS, self.look), self._export)

    def _export(self, form: str | None) -> None:
        if form in background_jobs.ENDINGS:
            self._show_message("exporting in the background")
            directory, name = self.feed.directory, self.feed.file_name()
            self._in_thread(
                lambda: f"exported: {background_jobs.export_records(directory, name, form)}", self._show_message
            )

    def action_report(self) -> None:
        """Show the report on the run so far."""
        directory = self.feed.directory
        self._show_text(
            "Report", "writing the report ...", lambda width: background_jobs.render_report(directory, width)
        )

    def action_compare(self) -> None:
        """Choose runs to compare, and show the comparison."""
        runs = RunList(self.feed.directory, self.look)

        def compare(answer: str | None) -> None:
            if answer is not None:
                before, after = runs.runs_on_side("A"), runs.runs_on_side("B")
                self._show_text(
                    "Comparison",
                    "comparing the runs ...",
                    lambda width: background_jobs.render_comparison(before, after, width),
                )

        self.push_screen(runs, compare)
        self._update_dialog_after(runs, runs.read)

    def run_ended(self) -> None:
        """Show the whole run, and look for what is worth a look in it."""
        self._set_view(replace(self.view, span_s=0))

        def look() -> str | None:
            self.feed.findings = background_jobs.read_findings(self.feed.directory)
            return None

        self._in_thread(look, lambda problem: self.draw())

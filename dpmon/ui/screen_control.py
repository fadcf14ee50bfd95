"""Shows messages and what other threads find, and asks before it leaves the screen or stops the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from textual.timer import Timer

from dpmon.sanitize import sanitize_line
from dpmon.ui import background_jobs
from dpmon.ui.dialogs import Choice, Dialog, TextPages
from dpmon.ui.live_run import FROZEN_RANKS
from dpmon.ui.screen_app import ScreenApp
from dpmon.ui.screen_data import View
from dpmon.ui.styled_rows import Row

_STOPS = "stop the training: interrupt, then terminate, then kill"


class ScreenControl(ScreenApp):
    """The part of the monitor that shows messages, waits for other threads, freezes the picture, leaves and stops."""

    said_s = 15.0
    """Seconds that a message stays, also while the picture is frozen."""
    _stop_done = False
    _leaves_when_stopped = False
    _told_of_end = False
    _message_timer: Timer | None = None
    """The timer that removes the last message."""

    def _show_message(self, message: str | None) -> None:
        if self._message_timer is not None:  # one timer at a time: a held key repeats its message
            self._message_timer.stop()
        self._set_view(replace(self.view, message=message))
        if self._dialog_open and isinstance(self.screen, Dialog):
            self.screen.show_message(message or "")
        if message is not None:
            self._message_timer = self.set_timer(self.said_s, partial(self._show_message, None))

    def _set_view(self, view: View) -> None:
        self.view = view
        self.draw()

    def action_freeze(self) -> None:
        """Freeze the picture, or let it go on."""
        if self._still is None and self.data_to_draw().is_over:
            self._show_message("there is nothing to freeze: the run is over; dpmon attach can play it back")
            return
        if self._still is None:
            self.feed.set_rank_room(FROZEN_RANKS)
            self._still = self.feed.build_screen_data(self.view)
        else:
            self._still = None
        self._set_view(replace(self.view, frozen=self._still is not None, at_ns=None))

    def _unfreeze(self) -> None:
        if self._still is not None:
            self.action_freeze()

    # ------------------------------------------------------------------------------------------ on another thread

    def _show_text(self, title: str, waits: str, write: Callable[[int], list[str]]) -> None:
        """Show what `write` returns on another thread: lines of at most as many cells as it is given."""
        width = max(min(self.size.width - 4, 108), 20)
        rows: list[Row] = [[(waits, "dim")]]
        # Open the dialog first: text that is ready later must not cover whatever the user has opened meanwhile.
        pages = TextPages(title, lambda _: rows, self.look)

        def make() -> str | None:
            nonlocal rows
            lines = [sanitize_line(line, 400) for line in write(width)]
            rows = [[(line, "title" if line[:1] not in ("", " ") else "")] for line in lines]
            return None

        self.push_screen(pages)
        self._update_dialog_after(pages, make)

    def _update_dialog_after(self, dialog: Dialog, job: Callable[[], str | None]) -> None:
        """Draw an open dialog again after `job`, which runs on another thread; close it with a message if it fails."""

        def show(problem: str | None) -> None:
            if dialog.answered:
                return
            if problem is None:
                dialog.draw()
            else:
                dialog.close_once(None)
                self._show_message(problem)

        self._in_thread(job, show)

    def _in_thread(self, job: Callable[[], str | None], then: Callable[[str | None], None]) -> None:
        """Run `job` on another thread; pass its result or its error to `then` on the screen's thread."""

        def run() -> None:
            try:
                error_text = job()
            except Exception as error:  # noqa: BLE001  whatever went wrong is shown; the screen goes on
                is_job_error = isinstance(error, background_jobs.JobError)
                error_text = str(error) if is_job_error else f"{type(error).__name__}: {error}"
            self.call_on_ui_thread(then, None if error_text is None else sanitize_line(error_text, 300))

        threading.Thread(target=run, name="dpmon job", daemon=True).start()

    # ------------------------------------------------------------------------------------------ leaving

    def action_leave(self, interrupt: bool = False) -> None:
        """After the end, close. Before it, ask what to do with the training; a second ctrl+c leaves it running."""
        if self.feed.is_over:
            if self._stopping is not None and not self._leaves_when_stopped:  # some processes may still live
                self._leaves_when_stopped = True
                self._stopping += "; q again closes this screen at once"
                self.draw()
            else:
                self.exit("ended")
            return
        if isinstance(self.screen, Dialog):
            leaving = isinstance(self.screen, Choice) and self.screen.offers("left")
            self.screen.close_once("left" if interrupt and leaving else None)
            return
        answers = [("l", "left", "leave it running; this screen closes (ctrl+c too)")]
        if self._stopping is None:
            answers.append(("x", "stop and leave", f"{_STOPS}; close; asks first"))
        answers.append(("esc", "stay", "stay here"))
        text = ["The training does not need this screen."]
        self.push_screen(
            Choice("Leave this screen?", text, answers, self.look, self._say_nothing_to_stop), self._handle_leave_answer
        )

    def action_stop(self) -> None:
        """Stop the training after a confirmation."""
        if self._stopping is not None:
            return
        if self.feed.is_over or self.data_to_draw().playing is not None:
            self._show_message("there is nothing to stop: the run is over")
        else:
            self._confirm_stop(leaves=False)

    def _confirm_stop(self, leaves: bool) -> None:
        answers = [("y", "stop", _STOPS), ("esc", "stay", "let it go on")]
        text, info = ["Everything computed since the last checkpoint is lost."], self.feed.info
        if info is not None and len(info.nodes) > 1:
            text.append(f"It stops on all {len(info.nodes)} nodes.")
        then = partial(self._handle_stop_answer, leaves)
        self.push_screen(Choice("Stop the training?", text, answers, self.look, self._say_nothing_to_stop), then)

    def _say_nothing_to_stop(self) -> None:
        self._show_message("the run is over: there is nothing left to stop; q closes this screen")

    def _handle_leave_answer(self, answer: str | None) -> None:
        if answer == "left":
            self.exit("ended" if self.feed.is_over else "left")
        elif answer == "stop and leave":
            self._confirm_stop(leaves=True)

    def _handle_stop_answer(self, leaves: bool, answer: str | None) -> None:
        if answer != "stop":
            return
        if self.feed.is_over:
            self._say_nothing_to_stop()
        else:
            self._leaves_when_stopped = leaves
            self._unfreeze()
            self._stopping = "the training is asked to stop"
            self.draw()
            threading.Thread(target=self._stop_run, name="dpmon stop", daemon=True).start()

    def _stop_run(self) -> None:
        """Stop the whole run and report the progress; runs on a thread of its own."""
        from dpmon.run.run_signals import stop_run

        try:
            for progress in stop_run(self.feed.directory, self.feed.info):
                self.call_on_ui_thread(self._stopped_so_far, sanitize_line(progress, 200))
            self.call_on_ui_thread(self._handle_stop_done)
        except Exception as error:  # noqa: BLE001  whatever went wrong is shown; the screen goes on
            self.call_on_ui_thread(self._stop_failed, sanitize_line(f"{type(error).__name__}: {error}", 200))

    def _stopped_so_far(self, text: str) -> None:
        self._stopping = text
        self.draw()

    def _handle_stop_done(self) -> None:
        self._stop_done = True

    def after_tick(self) -> None:
        """Tell dialogs that the run ended. After all signals were sent, leave, or report the remaining processes."""
        over = self.feed.is_over
        if over and not self._told_of_end:
            self._told_of_end = True
            self.run_ended()
            for screen in self.screen_stack:
                if isinstance(screen, Dialog):
                    screen.run_ended()
        if not self._stop_done:
            return
        if over:
            self._stop_done, self._stopping = False, None
            if self._leaves_when_stopped:
                self.exit("stopped")
        elif not self.feed.ending:
            self._stop_done = False
            self._stop_failed(self._stopping or "it still runs")

    def run_ended(self) -> None:
        """Called once after the end of the run."""

    def _stop_failed(self, text: str) -> None:
        self._stopping = None
        self._show_message(f"could not stop the training: {text}")

"""The questions before the screen closes and before the run is stopped, and the stop itself."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from dpmon.sanitize import sanitize_line
from dpmon.ui.dialogs import Choice, Dialog

if TYPE_CHECKING:
    from dpmon.ui.monitor import Monitor

_STOPS = "stop the training: interrupt, then terminate, then kill"


class RunStopper:
    """The questions before the screen closes or the run is stopped, and the state of a stop that has begun."""

    def __init__(self, app: Monitor) -> None:
        self._app = app
        self.progress: str | None = None
        """How far the stop has come, in words; None if none is under way."""
        self._all_signals_sent = False
        self._leaves_when_stopped = False

    def ask_to_leave(self, interrupt: bool) -> None:
        """Close the screen after the run's end. Before it, ask what to do with the training.

        `interrupt`: the key was ctrl+c; pressed twice, it leaves the training running.
        """
        app, dialog = self._app, self._app.screen
        if isinstance(dialog, Dialog):
            offers_leaving = isinstance(dialog, Choice) and dialog.offers("left")
            dialog.close_once("left" if interrupt and offers_leaving else None)
            return
        if app.live_run.is_over:
            if self.progress is not None and not self._leaves_when_stopped:  # some processes may still live
                self._leaves_when_stopped = True
                self._show_progress(f"{self.progress}; q again closes this screen at once")
            else:
                app.exit("ended")
            return
        answers = [("l", "left", "leave it running; this screen closes (ctrl+c too)")]
        if self.progress is None:
            answers.append(("x", "stop and leave", "stop the training, close this screen; asks first"))
        answers.append(("esc", "stay", "stay here"))
        text = ["The training does not need this screen."]
        app.push_screen(Choice("Leave this screen?", text, answers, app.style), self._handle_leave_answer)

    def ask_to_stop(self) -> None:
        """Stop the training after a confirmation."""
        if self.progress is not None:
            return
        if self._app.live_run.is_over:
            self._app.show_message("there is nothing to stop: the run has ended")
        else:
            self._confirm_stop(leaves=False)

    def _confirm_stop(self, leaves: bool) -> None:
        answers = [("y", "stop", _STOPS), ("esc", "stay", "keep it running")]
        text, run_info = ["Everything computed since the last checkpoint is lost."], self._app.live_run.info
        if run_info is not None and len(run_info.nodes) > 1:
            text.append(f"It stops on all {len(run_info.nodes)} nodes.")
        question = Choice("Stop the training?", text, answers, self._app.style)
        self._app.push_screen(question, partial(self._handle_stop_answer, leaves))

    def _handle_leave_answer(self, answer: str | None) -> None:
        if answer in ("left", "stop and leave") and self._app.live_run.is_over:
            self._app.exit("ended")
        elif answer == "left":
            self._app.exit("left")
        elif answer == "stop and leave":
            self._confirm_stop(leaves=True)

    def _handle_stop_answer(self, leaves: bool, answer: str | None) -> None:
        if answer != "stop":
            return
        if self._app.live_run.is_over:
            if leaves:
                self._app.exit("ended")
        else:
            self._leaves_when_stopped = leaves
            self._app.show_present()
            self._show_progress("asking the training to stop")
            threading.Thread(target=self._stop_run, name="dpmon stop", daemon=True).start()

    def _stop_run(self) -> None:
        """Stop the whole run and report the progress; runs on a thread of its own."""
        from dpmon.run.run_signals import STOPPED_BY, stop_run

        app = self._app
        try:
            for progress in stop_run(app.live_run.directory, app.live_run.info):
                if not progress.startswith(STOPPED_BY):  # the screen shows how the run has ended
                    app.call_on_ui_thread(self._show_progress, sanitize_line(progress, 200))
            app.call_on_ui_thread(self._note_all_signals_sent)
        except Exception as error:  # noqa: BLE001  whatever went wrong is shown; the screen goes on
            app.call_on_ui_thread(self._report_failure, sanitize_line(f"{type(error).__name__}: {error}", 200))

    def _show_progress(self, text: str) -> None:
        self.progress = text
        self._app.draw()

    def _note_all_signals_sent(self) -> None:
        self._all_signals_sent = True

    def poll(self) -> None:
        """Once all signals are sent: close the screen if the run has ended, or report what is still running."""
        if not self._all_signals_sent:
            return
        if self._app.live_run.is_over:
            self._all_signals_sent, self.progress = False, None
            if self._leaves_when_stopped:
                self._app.exit("stopped")
        elif not self._app.live_run.is_ending:
            self._all_signals_sent = False
            self._report_failure(self.progress or "it is still running")

    def _report_failure(self, text: str) -> None:
        self.progress = None
        self._app.show_message(f"could not stop the training: {text}")

"""One run as the screen sees it, as of any time: its records, activities, and the replies to requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.run_analysis import EVERYTHING, RunAnalysis, RunCaches, Selection, toggle_refusal
from dpmon.model.run_events import WarningRecord
from dpmon.record.schema import SECOND
from dpmon.run.activities import StartupStage, current_startup_stage, read_startup_stages
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.run_reader import NO_TRAINING_MESSAGE, PauseState, RunReader
from dpmon.ui.panels.panel_output import LogTail, OutputView
from dpmon.ui.screen_data import ModeRequest, ScreenData, View, all_finished, last_mode_reply
from dpmon.ui.time_cursor import TimeCursor

if TYPE_CHECKING:
    from dpmon.model.findings.finding import Finding
    from dpmon.model.slow_steps import SlowSteps
    from dpmon.run.run_directory import ExitInfo, RunInfo
    from dpmon.store.store_queries import Store

_Result = TypeVar("_Result")
OpenStore = Callable[[], "AbstractContextManager[Store]"]
"""Opens the records written so far."""

_SLOW_READ_S, _REST_RATIO = 0.1, 10
"""After a read that took more than `_SLOW_READ_S` s, the next one waits for at least as long, and for `_REST_RATIO`
times the CPU time of the read, so that keys are still handled."""
_MIN_INTERVAL_OF_MANY_S = 1.5
"""The state of many processes is read at most once in this time."""
_MAX_RECORD_DELAY_NS = 2 * SECOND
"""A step's records are usually written within this time after its end."""
_MAX_CLOCK_DIFFERENCE_NS = SECOND
"""The clocks of the nodes of a run differ by at most this."""


class LiveRun:
    """One run as of the time of `cursor`. `start` calls `open_reader`, so that the first frame waits for no file."""

    def __init__(
        self,
        directory: Path,
        open_reader: Callable[[], RunReader],
        clock: Callable[[], int] = time.monotonic_ns,
        open_store: OpenStore | None = None,
    ) -> None:
        """Prepare for the run in `directory`. `open_store`: opens its records; by default those in `directory`."""
        self.directory = directory
        self.cursor = TimeCursor()
        self._last_clock_ns = clock()
        self.state = RunAnalysis()
        """The state of the run at the time of the cursor. Its facts are queried when a picture needs them."""
        self._state_ns: int | None = None
        """The time of `state`; None for the present."""
        self.output = OutputView()
        self._open_reader = open_reader
        self._open_store = open_store
        self._clock = clock
        self._reader: RunReader | None = None
        self._caches = RunCaches()
        self._history = ExitStack()
        """Ends the use of the records that `state` reads."""
        self._store: Store | None = None
        self._drawn_state = self.state
        """The state of the last picture."""
        self._read_start: tuple[float, float] | None = None
        """When the reading of a state began that was not drawn yet, and the CPU time then (s)."""
        self._selection = EVERYTHING
        self.exit_info: ExitInfo | None = None
        """How the run ended; None while it runs or while its end is unknown."""
        self.findings: Sequence[Finding] | None = None
        """The findings of the finished run; None while they are not known."""
        self._is_command_alive: bool | None = None
        self._end_ns: int | None = None
        """The end of the run, or of its records if they go further (ns since its start); None while it runs."""
        self.is_ending = False
        """Whether the command is gone and its supervisor has not recorded its exit yet."""
        self._activities: Mapping[int, tuple[str, int]] = {}
        """Each process's activity when last polled, and its start (ns since the run's start; 0 if unknown)."""
        self._mode_request: ModeRequest | None = None
        self._rest_end_s = 0.0
        self._present_screen = ScreenData(self.state, 0)
        """The last picture of the present: the one that a freeze keeps."""
        self._frozen_state = self.state
        """The state at the time of the freeze, for `_frozen_selection`."""
        self._frozen_selection: Selection | None = None
        self._has_final_state = False
        """Whether `state` has all that will ever be recorded."""

    def start(self) -> None:
        """Open the run; one that has ended is played back. Raises the reader's error if the directory is not a run."""
        self._reader = self._open_reader()
        has_ended = self._reader.exit_info() is not None
        self.cursor = TimeCursor(is_playback=has_ended, has_ended=has_ended)
        self.output.tails = [LogTail(path) for path in self._reader.output_paths]

    def close(self) -> None:
        """Close all descriptors."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._history.close()
        for tail in self.output.tails:
            tail.close()

    @property
    def info(self) -> RunInfo | None:
        """The contents of run.json, kept after it was deleted; None before the run is opened."""
        return None if self._reader is None else self._reader.info

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come (dpmon.ui.screen_data.ScreenData.is_over)."""
        return self.exit_info is not None or self._is_command_alive is False

    def now_ns(self) -> int:
        """Return the time since the run's start (ns)."""
        return self._time_of_run(self._clock()) or 0

    def _time_of_run(self, monotonic_ns: int | None) -> int | None:
        """Return a monotonic time as ns since the run's start, at least 0."""
        return None if monotonic_ns is None or self.info is None else max(monotonic_ns - self.info.start_ns, 0)

    def _stage_of_run(self, stage: StartupStage | None) -> StartupStage | None:
        """Return a startup stage with its start as ns since the run's start."""
        return None if stage is None else stage._replace(start_ns=self._time_of_run(stage.start_ns) or 0)

    # ------------------------------------------------------------------------------------------ reading

    def refresh(self) -> None:
        """Read the run again, after a playback has moved on.

        Check for its end first, so that everything written before the end is read; before that, check the processes,
        which write the end.
        """
        reader = self._reader
        if reader is None:
            return
        reader.refresh()
        is_alive = reader.is_command_alive()
        may_be_recorded = is_alive is False and has_live_supervisor(reader.info)
        self.exit_info = reader.exit_info()
        self.is_ending = may_be_recorded and self.exit_info is None
        self._is_command_alive = True if self.is_ending else is_alive
        if self.is_over and self._end_ns is None:
            from dpmon.store.records import newest_record_ns

            duration_ns = 0 if self.exit_info is None else int(self.exit_info.seconds * 1e9)
            self._end_ns = max(duration_ns, self._read(None, newest_record_ns) or 0, 1)
        self.move_cursor(lambda cursor: cursor)
        if self.cursor.time_ns is None:
            try:
                with self.reading_facts():
                    self._refresh_state(reader)
                    self._update_mode_request(reader)
            except HistoryError as error:
                self.note_unreadable(error)

    def _refresh_state(self, reader: RunReader) -> None:
        """Open the records again, until all is recorded; keep the old state if they cannot be read.

        The activities of many processes are read together with their state.
        """
        selection = self._selection._replace(over=self.is_over)
        is_resting = selection == self._selection and time.perf_counter() < self._rest_end_s
        if not is_resting or not self.state.has_many:
            self._activities = {
                process_index: (activity, self._time_of_run(start_ns) or 0)
                for process_index, (activity, start_ns) in reader.activities().items()
            }
        if is_resting or (selection == self._selection and self._has_final_state):
            return
        self._selection = selection
        self._has_final_state = self.exit_info is not None and self.exit_info.drained
        self.state = self._open_state(selection, None, ended_processes(self._activities)) or self.state

    def _open_state(
        self, selection: Selection, time_ns: int | None, ended: frozenset[int] = frozenset()
    ) -> RunAnalysis | None:
        """Open the records and return the state as of a time; None if they cannot be read.

        While the screen is frozen, the same records are read: those of the time before the freeze are complete.
        """
        from dpmon.run.run_directory import RunError

        self._read_start = time.perf_counter(), time.thread_time()
        try:
            with self.reading_facts():
                if self._store is None or self.cursor.frozen_ns is None:
                    history = ExitStack()
                    self._store = history.enter_context(self._open_records())
                    self._history.close()
                    self._history = history
                return RunAnalysis(self._store.as_of(time_ns), selection, ended, self._caches)
        except RunError:
            pass
        except HistoryError as error:
            self._warn(error)
        return None

    @contextmanager
    def reading_facts(self) -> Iterator[None]:
        """Raise HistoryError instead of what damaged records raise when the block needs a fact of `state`."""
        try:
            yield
        except Exception as error:
            from dpmon.store.database import DAMAGE

            if isinstance(error, DAMAGE):
                raise HistoryError(f"the history is damaged: {error or type(error).__name__}") from error
            raise

    def note_unreadable(self, error: HistoryError) -> None:
        """Go back to the state of the last picture, whose facts are known, and warn of the error."""
        self.state = self._drawn_state
        self._warn(error)

    def _warn(self, error: HistoryError) -> None:
        warning = WarningRecord(None, self.now_ns(), str(error))
        self.state = self.state.with_facts(warnings=(warning,), warning_count=1)

    def release_records(self) -> None:
        """Close the records until a fact is needed again: they must not be open while nothing is read."""
        if self._store is not None:
            self._store.connection.release()

    def finish_drawing(self) -> None:
        """Note that the state was drawn. If reading it was slow, let the next read wait."""
        self._drawn_state = self.state
        self.release_records()
        if self._read_start is None:
            return
        start_s, start_cpu_s = self._read_start
        self._read_start = None
        end_s, cpu_s = time.perf_counter(), time.thread_time() - start_cpu_s
        read_s = end_s - start_s
        self._rest_end_s = end_s + (max(_REST_RATIO * cpu_s, read_s) if read_s > _SLOW_READ_S else 0.0)
        if self.state.has_many and self.cursor.time_ns is None:
            self._rest_end_s = max(self._rest_end_s, start_s + _MIN_INTERVAL_OF_MANY_S)

    def _open_records(self) -> AbstractContextManager[Store]:
        from dpmon.store.store_opening import open_store

        return open_store(self.directory) if self._open_store is None else self._open_store()

    def _read(self, time_ns: int | None, read: Callable[[Store], _Result]) -> _Result | None:
        """Return the result of `read`, called with the records as of a time; None if they cannot be read.

        The state then has a warning with the reason.
        """
        from dpmon.run.run_directory import RunError

        try:
            with suppress(RunError), self._open_records() as store:
                return read(store.as_of(time_ns))
        except HistoryError as error:
            self._warn(error)
        return None

    # ------------------------------------------------------------------------------------------ asking

    def _request_refusal(self) -> str | None:
        """Return why no request can be sent to the training; None if one can."""
        if self._reader is None or self.is_over:
            return NO_TRAINING_MESSAGE
        if self.cursor.shows_past:
            return "an earlier time is shown: esc goes back to now"
        return "the command has ended" if self.is_ending else None

    def toggle_refusal(self) -> str | None:
        """Return why no other mode can be requested; None if one can."""
        refusal = self._request_refusal() or (NO_TRAINING_MESSAGE if self._all_finished() else None)
        if refusal is None and self.info is not None and self.info.options.get("mode") == "script":
            return "--mode script leaves the computation as written"
        return refusal or toggle_refusal(self.state)

    def _all_finished(self) -> bool:
        """Return whether every process that has trained is finished; the command may start another one."""
        return all_finished(self.state, self._activities)

    def request_other_mode(self) -> bool:
        """Request the other mode, which is pending from now on. Return False if no process could be reached."""
        process = self.state.representative
        if self._reader is None or process is None:
            return False
        current_mode = process.mode if self._mode_request is None else self._mode_request.mode
        new_mode = "dp" if current_mode == "single" else "single"
        if not self._reader.request_mode(new_mode):
            return False
        self._mode_request = ModeRequest(new_mode, self.now_ns())
        return True

    def _update_mode_request(self, reader: RunReader) -> None:
        """Forget the requested mode once every process has replied, and the record has a reply."""
        request, reply, process = self._mode_request, last_mode_reply(self.state), self.state.representative
        if request is None or reader.has_pending_request(self._activities):
            return
        is_recorded = reply is not None and (reply.t_ns or 0) >= request.since_ns - _MAX_CLOCK_DIFFERENCE_NS
        if is_recorded or (process is not None and process.mode == request.mode):
            self._mode_request = None

    def pause_state(self) -> PauseState:
        """Return the last request for a pause, and since when the training has been paused (ns of the run)."""
        if self._reader is None or self.is_over or not self.state.processes:
            return PauseState()
        now = self._reader.pause_state()
        return PauseState(now.is_requested, now.is_pending, self._time_of_run(now.since_ns))

    def pause_refusal(self, is_requested: bool) -> str | None:
        """Return why the training cannot be paused or, if a pause is requested already, resumed; None if it can."""
        refusal = self._request_refusal()
        if refusal is not None or self._reader is None or is_requested:
            return refusal
        if self._all_finished():
            return NO_TRAINING_MESSAGE
        refusal = self._reader.pause_refusal(self._activities)
        return refusal or (None if self.state.processes else "no training process is known yet")

    def toggle_pause(self) -> bool:
        """Request a pause, or the end of the requested pause. Return False if no process could be reached."""
        return self._reader is not None and self._reader.request_pause(not self.pause_state().is_requested) > 0

    def request_collective_sample(self) -> bool:
        """Request the collectives of one of the next steps. Return False if there is no process to ask."""
        return self._reader is not None and self.exit_info is None and self._reader.request_sample() > 0

    def can_type(self) -> bool:
        """Return whether the script's standard input can be reached."""
        from dpmon.run.stdin_terminal import INPUT_FIFO

        return (self.directory / INPUT_FIFO).is_fifo()

    def hides_input(self) -> bool:
        """Return whether typed text must stay hidden, as for a password."""
        from dpmon.run.stdin_terminal import has_echo_off

        pid = None if self._reader is None else self._reader.info.command_pid
        return pid is not None and has_echo_off(pid)

    def type_line(self, line: str) -> str | None:
        """Send a line to the script's standard input. Return None, or why it failed."""
        from dpmon.run.stdin_terminal import send_input

        is_sent = send_input(self.directory, (line + "\n").encode("utf-8", "replace"))
        return None if is_sent else "the input pipe is full or closed"

    def file_name(self) -> str:
        """Return the first part of the names of files about this run: "dpmon-linear-7f3a"."""
        return "dpmon-" + re.sub(r"^\d{8}-\d{6}-|[^A-Za-z0-9._-]+", "", self.directory.name)[:80]

    # ------------------------------------------------------------------------------------------ the picture

    def move_cursor(self, move: Callable[[TimeCursor], TimeCursor]) -> None:
        """Show another time: what `move` returns for the cursor, which goes on first if it plays."""
        now_ns = self._clock()
        elapsed_ns, self._last_clock_ns = now_ns - self._last_clock_ns, now_ns
        self.cursor = move(self.cursor.advance(elapsed_ns))

    def find_step_end_ns(self, time_ns: int, *, forward: bool) -> int | None:
        """Return the end (ns) of the training's first step after a time, or of its last one before; None if unknown."""
        from dpmon.store.steps import find_step_end

        def read(store: Store) -> int | None:
            store_at_time = store.as_of(time_ns if forward else time_ns - 1)
            ends_ns = (find_step_end(store_at_time, process, forward=forward) for process in store.processes)
            choose = min if forward else max
            return choose((end_ns for end_ns in ends_ns if end_ns is not None), default=None)

        return self._read(None, read)

    def build_screen_data(self, view: View, stopping: str | None = None) -> ScreenData:
        """Return the data for drawing the run as of the time of the cursor, with a view."""
        reader = self._reader
        if reader is None:
            is_reading = any(self.directory.glob("process-*.ring"))
            return ScreenData(self.state, 0, view=view, is_reading=is_reading)
        selection = self._select(view)
        if selection.node != self._selection.node and not self.is_over:
            self._request_records(reader, selection.node)
        self._read_state(reader, selection)
        self._update_cursor_limits()
        cursor, pause_state = self.cursor, self.pause_state()
        if cursor.time_ns is None:
            self._present_screen, self._frozen_selection = self._read_present(reader, pause_state), None
        is_present = cursor.time_ns is None or cursor.is_frozen
        screen = self._present_screen if is_present else self._read_past(reader, pause_state)
        state, later_state = self.state, None
        if cursor.is_looking_back:
            later_state = self._read_frozen_state(selection)
            state = state.with_histories(later_state)
        return replace(
            screen,
            state=state,
            history_state=later_state,
            view=view,
            cursor=cursor,
            can_pause=self.pause_refusal(pause_state.is_requested) is None,
            can_toggle=self.toggle_refusal() is None,
            can_type=self.exit_info is None and not cursor.shows_past and self.can_type(),
            output_file_count=len(self.output.tails),
            is_output_scrolled_back=self.output.top is not None,
            stop_progress=stopping,
        )

    def _update_cursor_limits(self) -> None:
        """Tell the cursor how far the run has come.

        If the run makes steps, its records are complete until the end of the newest one: later ones may not be written
        yet.
        """
        present_ns, newest_ns = self.now_ns() if self._end_ns is None else self._end_ns, self.state.newest_ns
        self.cursor = replace(self.cursor, present_ns=present_ns, has_ended=self.is_over)
        if self.cursor.time_ns is None:
            may_be_behind = newest_ns >= 0 and present_ns - newest_ns < _MAX_RECORD_DELAY_NS
            self.cursor = replace(self.cursor, recorded_ns=newest_ns if may_be_behind else present_ns)

    def _read_state(self, reader: RunReader, selection: Selection) -> None:
        """Open the state at the time of the cursor, unless it was opened for this selection."""
        time_ns = self.cursor.time_ns
        if (selection, time_ns) == (self._selection, self._state_ns) or self._is_resting_playback(selection):
            return
        self._selection, self._state_ns = selection, time_ns
        if time_ns is None:
            self._rest_end_s, self._has_final_state = 0.0, False
            self._refresh_state(reader)
        elif self.cursor.is_frozen:
            self.state = self._read_frozen_state(selection)
        else:
            self.state = self._open_state(selection, time_ns) or self.state

    def _is_resting_playback(self, selection: Selection) -> bool:
        """Return whether a playback of many processes goes on with an earlier picture: reading this one takes long."""
        if not self.cursor.is_playing or selection != self._selection or not self.state.has_many:
            return False
        is_earlier = self._state_ns is not None and self._state_ns <= self.cursor.position_ns
        return is_earlier and time.perf_counter() < self._rest_end_s

    def _read_frozen_state(self, selection: Selection) -> RunAnalysis:
        """Return the state when the picture was frozen, for this selection.

        The first picture after the freeze is read, too: so all frozen ones have values of the same time.
        """
        if self._frozen_selection != selection:
            present_state = self._present_screen.state
            opened = self._open_state(selection, self.cursor.frozen_ns, present_state.ended)
            self._frozen_selection, self._frozen_state = selection, opened or present_state
        return self._frozen_state

    def _read_present(self, reader: RunReader, pause_state: PauseState) -> ScreenData:
        """Return what only the present has: what the processes do now, requests, and how the run ended."""
        has_ended = self.exit_info is not None
        return ScreenData(
            self.state,
            self.cursor.present_ns,
            reader.info,
            startup_stage=None if has_ended else self._stage_of_run(reader.startup_stage()),
            input_wait_since_ns=None if has_ended else self._time_of_run(reader.input_wait_start_ns()),
            activities=self._activities,
            is_command_alive=self._is_command_alive,
            exit_info=self.exit_info,
            findings=self.findings if self.is_over else None,
            mode_request=self._mode_request,
            pause_state=pause_state,
            is_ending=self.is_ending,
            node_replies=None if has_ended else reader.node_replies(),
        )

    def _read_past(self, reader: RunReader, pause_state: PauseState) -> ScreenData:
        """Return what the files say about the time of the cursor."""
        time_ns = self.cursor.position_ns
        wait_ns = None if self.exit_info is not None else self._time_of_run(reader.input_wait_start_ns())
        stages = read_startup_stages(self.directory, reader.info.start_ns + time_ns)
        return ScreenData(
            self.state,
            time_ns,
            reader.info,
            startup_stage=self._stage_of_run(current_startup_stage(stages)),
            # A wait that has ended is an event.
            input_wait_since_ns=wait_ns if wait_ns is not None and wait_ns <= time_ns else None,
            is_command_alive=True,
            pause_state=PauseState(pause_state.is_requested),
        )

    def _request_records(self, reader: RunReader, node_number: int | None) -> None:
        """Request all records of the processes of one node; by default, a mirror sends only a selection of them."""
        with suppress(OSError):  # without them, it shows what there is
            reader.request_records(
                [
                    process_index
                    for node_info in self.state.nodes
                    if node_info.number == node_number
                    for process_index in node_info.processes
                ]
            )

    def _select(self, view: View) -> Selection:
        """Return what of the run a view shows."""
        is_over = self.is_over and self.cursor.time_ns is None
        return Selection(view.range_s, is_over, view.process_index, view.node_number)

    def slow_steps(self, screen: ScreenData, limit: int) -> SlowSteps | None:
        """Return the longest steps of the time range and the mode on the screen; None if the records cannot be read.

        Unlike a picture, this has no limits of a screen: it may take a second.
        """
        selection = self._select(screen.view)

        def read(store: Store) -> SlowSteps:
            return RunAnalysis(store, selection, screen.state.ended).read_slow_steps(limit)

        return self._read(screen.cursor.time_ns, read)

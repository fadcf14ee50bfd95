"""One live run as the screen sees it: its records, activities, and the replies to requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dpmon.model.active_processes import ended_processes
from dpmon.model.rank_stats import MAX_LEAST_WAITING
from dpmon.model.run_events import WarningRecord
from dpmon.model.run_snapshot import MAX_FULLY_READ, MAX_RANKS, RunSnapshot, SnapshotRequest, toggle_refusal
from dpmon.record.schema import SECOND
from dpmon.run.run_reader import NO_TRAINING_MESSAGE, PauseState, RunReader
from dpmon.sanitize import sanitize_line
from dpmon.ui.panels.panel_output import LogTail, OutputView
from dpmon.ui.screen_data import LookBack, ModeRequest, ScreenData, View, all_finished

if TYPE_CHECKING:
    from dpmon.model.findings.finding import Finding
    from dpmon.model.slow_steps import SlowSteps
    from dpmon.model.snapshot_builder import SnapshotBuilder
    from dpmon.run.run_directory import ExitInfo, RunInfo
    from dpmon.store.store_queries import Store


_Result = TypeVar("_Result")
OpenStore = Callable[[], "AbstractContextManager[Store]"]
"""Opens the records written so far."""

_MAX_EXIT_RECORD_WAIT_NS = 3_000_000_000
"""Nanoseconds to wait for the exit record of a command that is gone; then its status is shown as unknown."""
_SLOW_READ_S, _REST_RATIO = 0.1, 10
"""After a read that took more than `_SLOW_READ_S` s, the next one waits for at least as long, and for `_REST_RATIO`
times the CPU time of the read, so that keys are still handled."""
_MIN_INTERVAL_OF_MANY_S = 1.5
"""The state of many processes is read at most once in this time."""
_SPARE_RANKS = 4
"""Ranks read beyond the visible ones, so that the user can scroll before more are read."""
_LONGEST_STEP_COUNT = 8
"""Number of the longest steps that a picture can show."""
FROZEN_RANKS = 2 * MAX_RANKS
"""Ranks that are read for a frozen picture: the user can zoom and scroll it without a new read."""
_MAX_RECORD_DELAY_NS = 2 * SECOND
"""A step's records are usually written within this time after its end."""
_FROZEN = SnapshotRequest(ranks=FROZEN_RANKS, slowest=_LONGEST_STEP_COUNT, worst=MAX_LEAST_WAITING)


class LiveRun:
    """One live run. `start` calls `open_reader`, so that the first frame waits for no file."""

    _snapshot_builder: SnapshotBuilder
    _still: SnapshotBuilder
    """Takes snapshots for a frozen picture."""
    _earlier: SnapshotBuilder
    """Takes snapshots of the time that the user looks back to."""

    def __init__(
        self,
        directory: Path,
        open_reader: Callable[[], RunReader],
        clock: Callable[[], int] = time.monotonic_ns,
        open_store: OpenStore | None = None,
    ) -> None:
        """Prepare for the run in `directory`. `open_store`: opens its records; by default those in `directory`."""
        self.directory = directory
        self.state = RunSnapshot()
        self.output = OutputView()
        self._open_reader = open_reader
        self._open_store = open_store
        self._clock = clock
        self._reader: RunReader | None = None
        self._request = SnapshotRequest(slowest=_LONGEST_STEP_COUNT, worst=MAX_LEAST_WAITING)
        self.exit_info: ExitInfo | None = None
        """How the run ended; None while it runs or while its end is unknown."""
        self._exit_cause: str | None = None
        self.shows_rank_waits = False
        """Whether the screen has room for the ranks over time."""
        self.findings: Sequence[Finding] | None = None
        """The findings of the finished run; None while they are not known."""
        self._is_command_alive: bool | None = None
        self._vanished_ns: int | None = None
        self.is_ending = False
        """Whether the command is gone and its exit is not recorded yet."""
        self._activities: Mapping[int, tuple[str, int]] = {}
        """Each process's activity when last polled, and its start (monotonic ns)."""
        self._activities_of_run: Mapping[int, tuple[str, int]] = {}
        """`_activities` with the start in ns since the run's start."""
        self._rank_limit = self._request.ranks
        """Number of ranks that fit on the screen."""
        self._is_reading = any(directory.glob("process-*.ring"))
        """Whether records exist that were not read yet, as when the user attaches to a running command."""
        self._mode_request: ModeRequest | None = None
        self._changes_at_request = 0
        self._rest_end_s = 0.0
        self._looked: tuple[int | None, SnapshotRequest, RunSnapshot] | None = None
        """The time that the user looks back to, and its state."""
        self._last_stamp: object = None
        """The stamp of the last read, which shows whether anything is new."""

    def start(self) -> None:
        """Open the run. Raises the reader's error if the directory is not a run."""
        from dpmon.model.snapshot_builder import SnapshotBuilder

        self._snapshot_builder, self._still, self._earlier = SnapshotBuilder(), SnapshotBuilder(), SnapshotBuilder()
        self._reader = self._open_reader()
        self.output.tails = [LogTail(path) for path in self._reader.output_paths]

    def close(self) -> None:
        """Close all descriptors."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
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
        return max(self._clock() - self.info.start_ns, 0) if self.info is not None else 0

    # ------------------------------------------------------------------------------------------ reading

    def refresh(self, *, immediately: bool = False) -> None:
        """Read the run again; `immediately`: even after a slow read.

        Check for its end first, so that everything written before the end is read.
        """
        reader = self._reader
        self._rest_end_s = 0.0 if immediately else self._rest_end_s
        if reader is None:
            return
        reader.refresh()
        if self.exit_info is None and (exit_info := reader.exit_info()) is not None:
            self._note_exit(exit_info)
        self._refresh_liveness(reader)
        self._refresh_snapshot(reader)
        self._update_mode_request(reader)

    def _refresh_snapshot(self, reader: RunReader) -> None:
        """Read a new snapshot if anything has changed; keep the old one if reading fails.

        The activities of many processes are read together with their snapshot.
        """
        request = self._request._replace(over=self.is_over, ranks=self._rank_limit)
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        is_resting = request == self._request and start_s < self._rest_end_s
        if not is_resting or len(self.state.processes) <= MAX_FULLY_READ:
            self._activities, start = reader.activities(), reader.info.start_ns
            self._activities_of_run = {
                process_index: (activity, start_ns - start if start_ns else 0)
                for process_index, (activity, start_ns) in self._activities.items()
            }
        if is_resting or (request == self._request and not self._may_have_changed()):
            return
        self._request = request
        self.state = self._build_snapshot(self._snapshot_builder, self._request, self._position_ns()) or self.state
        self._is_reading = False
        end_s = time.perf_counter()
        read_s, cpu_s = end_s - start_s, time.thread_time() - cpu_s
        self._rest_end_s = end_s + (max(_REST_RATIO * cpu_s, read_s) if read_s > _SLOW_READ_S else 0.0)
        if len(self.state.processes) > MAX_FULLY_READ:
            self._rest_end_s = max(self._rest_end_s, start_s + _MIN_INTERVAL_OF_MANY_S)

    def _may_have_changed(self) -> bool:
        """Return whether a record may have been written, or a process may have ended, since the last read."""
        if self._open_store is not None:
            return True
        from dpmon.store.store_opening import commit_stamp

        last_stamp = self._last_stamp
        stamp = self.info and commit_stamp(self.directory, self.info)
        self._last_stamp = stamp and (stamp, ended_processes(self._activities), self._position_ns())
        return self._last_stamp is None or self._last_stamp != last_stamp

    def _position_ns(self) -> int | None:
        """Return the time that the screen shows (ns); None for the present."""
        return None

    def _build_snapshot(
        self, snapshots: SnapshotBuilder, request: SnapshotRequest, time_ns: int | None
    ) -> RunSnapshot | None:
        return self._read(time_ns, lambda rows: snapshots.build(rows, request, ended_processes(self._activities)))

    def _read(self, time_ns: int | None, read: Callable[[Store], _Result]) -> _Result | None:
        """Return the result of `read`, called with the records as of a time; None if they cannot be read.

        The state then has a warning with the reason.
        """
        from dpmon.errors import HistoryError
        from dpmon.run.run_directory import RunError
        from dpmon.store.store_opening import open_store

        store_context = open_store(self.directory) if self._open_store is None else self._open_store()
        try:
            with suppress(RunError), store_context as store:
                return read(store.as_of(time_ns))
        except HistoryError as error:
            warning = WarningRecord(None, self.now_ns(), str(error))
            self.state = self.state.with_facts(warnings=(warning,), warning_count=1)
        return None

    def _refresh_liveness(self, reader: RunReader) -> None:
        is_alive = reader.is_command_alive()
        self.is_ending = False
        if is_alive is False and self.exit_info is None:
            now = self._clock()
            self._vanished_ns = self._vanished_ns or now
            self.is_ending = now - self._vanished_ns < _MAX_EXIT_RECORD_WAIT_NS
            is_alive = self.is_ending
        self._is_command_alive = is_alive

    def _note_exit(self, exit_info: ExitInfo) -> None:
        for tail in self.output.tails:
            tail.refresh()
        cause = None
        if exit_info.status is None:
            cause = exit_info.unknown
        elif exit_info.status and not exit_info.stopped:
            cause = exit_info.error or exit_info.cause
        self.exit_info, self._exit_cause = exit_info, sanitize_line(cause, 500) if cause else None

    # ------------------------------------------------------------------------------------------ asking

    def _request_refusal(self) -> str | None:
        """Return why no request can be sent to the training; None if one can."""
        if self._reader is None or self.is_over:
            return NO_TRAINING_MESSAGE
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

    def request_other_mode(self) -> None:
        """Request the other mode; the request is pending from now on."""
        process = self.state.representative
        if self._reader is None or process is None or self.toggle_refusal() is not None:
            return
        current_mode = (
            self._mode_request.mode
            if self._mode_request is not None and self._mode_request.status == "pending"
            else process.mode
        )
        new_mode = "dp" if current_mode == "single" else "single"
        self._changes_at_request = self.state.mode_change_count
        request_count = self._reader.request_mode(new_mode)
        status, reason = ("pending", None) if request_count else ("refused", NO_TRAINING_MESSAGE)
        self._mode_request = ModeRequest(new_mode, status, self.now_ns(), reason=reason)

    def _update_mode_request(self, reader: RunReader) -> None:
        request = self._mode_request
        if request is None or request.status != "pending" or reader.has_pending_request(self._activities):
            return
        new_change_count = self.state.mode_change_count - self._changes_at_request
        process = self.state.representative
        changes = self.state.mode_changes[-new_change_count:] if new_change_count > 0 else ()
        replies = [change for change in changes if change.requested_by == "user"]
        refusal = next((change for change in replies if change.refused is not None), None)
        if refusal is not None:
            self._mode_request = ModeRequest(request.mode, "refused", self.now_ns(), reason=refusal.refused)
        elif replies:
            self._mode_request = ModeRequest(request.mode, "done", self.now_ns(), replies[-1].step)
        elif process is not None and process.mode == request.mode:
            self._mode_request = ModeRequest(request.mode, "done", self.now_ns())

    def pause_state(self) -> PauseState:
        """Return the last request for a pause, and since when the training has been paused (ns of the run)."""
        if self._reader is None or self.is_over or not self.state.processes:
            return PauseState()
        now = self._reader.pause_state()
        since = None if now.since_ns is None else max(now.since_ns - self._reader.info.start_ns, 0)
        return PauseState(now.is_requested, now.is_pending, since)

    def pause_refusal(self, is_requested: bool) -> str | None:
        """Return why the training cannot be paused or, if a pause is requested already, resumed; None if it can."""
        refusal = self._request_refusal()
        if refusal is not None or self._reader is None or is_requested:
            return refusal
        if self._all_finished():
            return NO_TRAINING_MESSAGE
        refusal = self._reader.pause_refusal(self._activities)
        return refusal or (None if self.state.processes else "no training process is known yet")

    def toggle_pause(self) -> None:
        """Request a pause, or the end of the requested pause."""
        if self._reader is not None:
            self._reader.request_pause(not self.pause_state().is_requested)

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

    # ------------------------------------------------------------------------------------------ scenes

    def build_screen_data(self, view: View, stopping: str | None = None) -> ScreenData:
        """Return the data for drawing the run as it is now, with a view."""
        reader = self._reader
        if reader is None:
            return ScreenData(self.state, 0, view=view, is_reading=self._is_reading)
        request = self._snapshot_request(view, self._request._replace(ranks=max(self._rank_limit, self._request.ranks)))
        if self._request != request:
            if request.node != self._request.node and not self.is_over:
                self._request_records(reader, request.node)
            self._request, self._rest_end_s, self._last_stamp = request, 0.0, None
            self._refresh_snapshot(reader)
        start = reader.info.start_ns
        pause_state = self.pause_state()
        startup_stage = reader.startup_stage() if self.exit_info is None else None
        if startup_stage is not None:
            startup_stage = startup_stage._replace(start_ns=max(startup_stage.start_ns - start, 0))
        input_wait_since = reader.input_wait_start_ns() if self.exit_info is None else None
        return ScreenData(
            self.state,
            self.now_ns(),
            reader.info,
            view,
            startup_stage=startup_stage,
            input_wait_since_ns=None if input_wait_since is None else max(input_wait_since - start, 0),
            activities=self._activities_of_run,
            is_command_alive=self._is_command_alive,
            exit_info=self.exit_info,
            exit_cause=self._exit_cause,
            findings=self.findings if self.is_over else None,
            mode_request=self._mode_request,
            pause_state=pause_state,
            can_pause=self.pause_refusal(pause_state.is_requested) is None,
            can_toggle=self.toggle_refusal() is None,
            can_type=self.exit_info is None and self.can_type(),
            output_file_count=len(self.output.tails),
            is_output_scrolled_back=self.output.top is not None,
            stop_progress=stopping,
            is_ending=self.is_ending,
            is_reading=self._is_reading,
            node_replies=reader.node_replies() if self.exit_info is None else None,
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

    def _snapshot_request(self, view: View, base: SnapshotRequest, scroll_step: int = _SPARE_RANKS) -> SnapshotRequest:
        """Return the request for the data that a view needs; a frozen one has what any panel needs.

        `scroll_step`: how many ranks the user scrolls before more are read.
        """
        lists_ranks = view.is_frozen or view.zoom == "replicas"
        return base._replace(
            span_s=view.range_s,
            first_rank=view.first_rows.get("replicas", 0) // scroll_step * scroll_step,
            process=view.process_index,
            node=view.node_number,
            listed=lists_ranks,
            waits=self.shows_rank_waits or lists_ranks,
        )

    def set_visible_ranks(self, rank_count: int) -> bool:
        """Set how many ranks fit on the screen. Return whether the snapshot lacks some of them."""
        self._rank_limit = rank_count + _SPARE_RANKS
        return self._rank_limit > self._request.ranks

    def with_view(self, screen: ScreenData, view: View) -> ScreenData:
        """Apply another view to the frozen data, querying the same moment again if the view needs more.

        The first view after the freeze is queried, too: so all frozen views have values of the same time.
        """
        before, wanted = (self._snapshot_request(each, _FROZEN, FROZEN_RANKS // 2) for each in (screen.view, view))
        if before != wanted:
            wanted, ended = wanted._replace(over=screen.is_over), screen.state.ended
            state = self._read(_frozen_ns(screen), lambda store: self._still.build(store, wanted, ended))
            screen = screen if state is None else replace(screen, state=state)
        return replace(screen, view=view, is_output_scrolled_back=self.output.top is not None)

    def slow_steps(self, screen: ScreenData, limit: int) -> SlowSteps | None:
        """Return the longest steps of the time range and the mode on the screen; None if the records cannot be read.

        Unlike a snapshot, this has no limits of a screen: it may take a second.
        """
        request = self._snapshot_request(screen.view, _FROZEN)

        def read(store: Store) -> SlowSteps:
            return RunSnapshot(store, request, screen.state.ended).read_slow_steps(limit)

        time_ns = _frozen_ns(screen) if screen.view.is_frozen else None
        return self._read(screen.elapsed_ns if screen.shows_past else time_ns, read)

    def at_past_time(self, screen: ScreenData) -> ScreenData:
        """Return the data as of the earlier time of the view; the histories stay those of the frozen `screen`."""
        at_ns, wanted = (screen.view.shown_ns, self._snapshot_request(screen.view, _FROZEN, FROZEN_RANKS // 2))
        if at_ns is None:
            return screen
        if self._looked is None or self._looked[:2] != (at_ns, wanted):
            state = self._build_snapshot(self._earlier, wanted, at_ns)
            self._looked = self._looked if state is None else (at_ns, wanted, state)
        if self._looked is None:
            return screen
        return ScreenData(
            self._looked[2].with_histories(screen.state),
            at_ns,
            screen.run_info,
            screen.view,
            is_command_alive=True,
            can_pause=screen.can_pause,
            can_toggle=screen.can_toggle,
            can_type=screen.can_type,
            output_file_count=screen.output_file_count,
            is_output_scrolled_back=screen.is_output_scrolled_back,
            stop_progress=screen.stop_progress,
            past=LookBack(
                screen.state,
                screen.now_ns if screen.exit_info is None else screen.elapsed_ns,
                None if screen.is_over else self.now_ns(),
            ),
        )


def _frozen_ns(screen: ScreenData) -> int:
    """Return the time of the frozen data (ns since the run's start).

    If the run makes steps, this is the end of the newest one: later steps may not be written yet.
    """
    newest_ns = screen.state.newest_ns
    may_be_behind = newest_ns >= 0 and screen.now_ns - newest_ns < _MAX_RECORD_DELAY_NS
    return newest_ns if may_be_behind else screen.now_ns

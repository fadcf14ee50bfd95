"""The screen's state of one run: its records, its processes' activities, and the answers to requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dpmon.model.active_processes import ended_processes
from dpmon.model.run_snapshot import MANY, MOST_RANKS, WORST, RunSnapshot, SnapshotRequest, toggle_refusal
from dpmon.run.process_notes import traceback_line
from dpmon.run.run_reader import NO_TRAINING, PauseState, RunReader
from dpmon.sanitize import sanitize_line
from dpmon.ui.panels.panel_output import LogTail, OutputView
from dpmon.ui.screen_data import LookBack, ModeRequest, ScreenData, View, all_finished

if TYPE_CHECKING:
    from dpmon.model.finding_text import Finding
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
FROZEN_RANKS = 2 * MOST_RANKS
"""Ranks that are read for a frozen picture: the user can zoom and scroll it without a new read."""
_FROZEN = SnapshotRequest(ranks=FROZEN_RANKS, slowest=_LONGEST_STEP_COUNT, worst=WORST)


class LiveRun:
    """One run, live. `start` calls `open_reader`, so that the first picture waits for no file."""

    _snapshots: SnapshotBuilder
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
        """`open_store`: opens the records; by default those in `directory`."""
        self.directory = directory
        self.state = RunSnapshot()
        self.output = OutputView()
        self._open_reader = open_reader
        self._open_store = open_store
        self._clock = clock
        self._reader: RunReader | None = None
        self._request = SnapshotRequest(slowest=_LONGEST_STEP_COUNT, worst=WORST)
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
        """Each process's activity at the last look, and its start (monotonic ns)."""
        self._activities_of_run: Mapping[int, tuple[str, int]] = {}
        """The same with the start in ns since the run's start."""
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

        self._snapshots, self._still, self._earlier = SnapshotBuilder(), SnapshotBuilder(), SnapshotBuilder()
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
        """Time since the run's start."""
        return max(self._clock() - self.info.start_ns, 0) if self.info is not None else 0

    # ------------------------------------------------------------------------------------------ reading

    def refresh(self, *, at_once: bool = False) -> None:
        """Read the run again, `at_once` even after a slow read.

        Check for its end first, so that everything written before the end is read.
        """
        reader = self._reader
        self._rest_end_s = 0.0 if at_once else self._rest_end_s
        if reader is None:
            return
        reader.refresh()
        if self.exit_info is None and (ended := reader.exit_info()) is not None:
            self._note_exit(ended)
        self._refresh_liveness(reader)
        self._refresh_snapshot(reader)
        self._update_mode_request(reader)

    def _refresh_snapshot(self, reader: RunReader) -> None:
        """Read the state if anything is new; keep the old one if reading fails.

        What many processes do is read together with their state.
        """
        wanted = self._request._replace(over=self.is_over, ranks=self._rank_limit)
        began, used = time.perf_counter(), time.thread_time()
        rests = wanted == self._request and began < self._rest_end_s
        if not rests or len(self.state.processes) <= MANY:
            self._activities, start = reader.activities(), reader.info.start_ns
            self._activities_of_run = {
                p: (what, since - start if since else 0) for p, (what, since) in self._activities.items()
            }
        if rests or (wanted == self._request and not self._may_have_changed()):
            return
        self._request = wanted
        self.state = self._build_snapshot(self._snapshots, self._request, self._position_ns()) or self.state
        self._is_reading = False
        ended = time.perf_counter()
        took, used = ended - began, time.thread_time() - used
        self._rest_end_s = ended + (max(_REST_RATIO * used, took) if took > _SLOW_READ_S else 0.0)
        if len(self.state.processes) > MANY:
            self._rest_end_s = max(self._rest_end_s, began + _MIN_INTERVAL_OF_MANY_S)

    def _may_have_changed(self) -> bool:
        """Whether there may be something new: a record was written, or a process ended."""
        if self._open_store is not None:
            return True
        from dpmon.store.store_opening import commit_stamp

        before = self._last_stamp
        written = self.info and commit_stamp(self.directory, self.info)
        self._last_stamp = written and (written, ended_processes(self._activities), self._position_ns())
        return self._last_stamp is None or self._last_stamp != before

    def _position_ns(self) -> int | None:
        """The time that the picture shows (ns); None for the present."""
        return None

    def _build_snapshot(
        self, snapshots: SnapshotBuilder, wanted: SnapshotRequest, t_ns: int | None
    ) -> RunSnapshot | None:
        return self._read(t_ns, lambda rows: snapshots.build(rows, wanted, ended_processes(self._activities)))

    def _read(self, t_ns: int | None, read: Callable[[Store], _Result]) -> _Result | None:
        """What `read` finds in the records as of a time; None if they cannot be read."""
        from dpmon.errors import HistoryError
        from dpmon.run.run_directory import RunError
        from dpmon.store.store_opening import open_store

        opened = open_store(self.directory) if self._open_store is None else self._open_store()
        with suppress(HistoryError, RunError), opened as store:
            return read(store.as_of(t_ns))
        return None

    def _refresh_liveness(self, reader: RunReader) -> None:
        alive = reader.command_alive()
        self.is_ending = False
        if alive is False and self.exit_info is None:
            now = self._clock()
            self._vanished_ns = self._vanished_ns or now
            self.is_ending = now - self._vanished_ns < _MAX_EXIT_RECORD_WAIT_NS
            alive = self.is_ending
        self._is_command_alive = alive

    def _note_exit(self, ended: ExitInfo) -> None:
        for tail in self.output.tails:
            tail.refresh()
        text = None
        if ended.status is None:
            text = ended.unknown
        elif ended.status and not ended.stopped:
            lines = [line for tail in reversed(self.output.tails) if (line := traceback_line(tail.last_bytes()))]
            text = ended.error or ended.cause or (lines[0] if lines else None)
        self.exit_info, self._exit_cause = ended, sanitize_line(text, 500) if text else None

    # ------------------------------------------------------------------------------------------ asking

    def _request_refusal(self) -> str | None:
        """Why nothing can be asked of the training; None if something can."""
        if self._reader is None or self.is_over:
            return NO_TRAINING
        return "the command has ended" if self.is_ending else None

    def toggle_refusal(self) -> str | None:
        """Why no other mode can be requested; None if one can."""
        refusal = self._request_refusal() or (NO_TRAINING if self._all_finished() else None)
        if refusal is None and self.info is not None and self.info.options.get("mode") == "script":
            return "--mode script leaves the computation as written"
        return refusal or toggle_refusal(self.state)

    def _all_finished(self) -> bool:
        """Whether every process that has trained is finished; the command may start another one."""
        return all_finished(self.state, self._activities)

    def request_other_mode(self) -> None:
        """Ask for the other mode; the request is pending from now on."""
        process = self.state.representative
        if self._reader is None or process is None or self.toggle_refusal() is not None:
            return
        mode = (
            self._mode_request.mode
            if self._mode_request is not None and self._mode_request.status == "pending"
            else process.mode
        )
        wanted = "dp" if mode == "single" else "single"
        self._changes_at_request = self.state.mode_change_count
        asked = self._reader.request_mode(wanted)
        status, reason = ("pending", None) if asked else ("refused", NO_TRAINING)
        self._mode_request = ModeRequest(wanted, status, self.now_ns(), reason=reason)

    def _update_mode_request(self, reader: RunReader) -> None:
        toggle = self._mode_request
        if toggle is None or toggle.status != "pending" or reader.has_pending_request(self._activities):
            return
        fresh = self.state.mode_change_count - self._changes_at_request
        process = self.state.representative
        changes = self.state.mode_changes[-fresh:] if fresh > 0 else ()
        answers = [c for c in changes if c.requested_by == "user"]
        refused = next((c for c in answers if c.refused is not None), None)
        if refused is not None:
            self._mode_request = ModeRequest(toggle.mode, "refused", self.now_ns(), reason=refused.refused)
        elif answers:
            self._mode_request = ModeRequest(toggle.mode, "done", self.now_ns(), answers[-1].step)
        elif process is not None and process.mode == toggle.mode:
            self._mode_request = ModeRequest(toggle.mode, "done", self.now_ns())

    def pause_state(self) -> PauseState:
        """The last request for a pause, and whether the training is paused (since when, in ns of the run)."""
        if self._reader is None or self.is_over or not self.state.processes:
            return PauseState()
        now = self._reader.pause_state(self._activities)
        since = None if now.since_ns is None else max(now.since_ns - self._reader.info.start_ns, 0)
        return PauseState(now.wanted, now.pending, since)

    def pause_refusal(self, wanted: bool) -> str | None:
        """Why the training cannot be paused or, if a pause is `wanted` already, resumed; None if it can."""
        refusal = self._request_refusal()
        if refusal is not None or self._reader is None or wanted:
            return refusal
        if self._all_finished():
            return NO_TRAINING
        refusal = self._reader.pause_refusal(self._activities)
        return refusal or (None if self.state.processes else "no training process is known yet")

    def toggle_pause(self) -> None:
        """Ask for a pause, or for the end of the requested pause."""
        if self._reader is not None:
            self._reader.request_pause(not self.pause_state().wanted)

    def request_collective_sample(self) -> bool:
        """Ask for the collectives of one of the next steps; False if there was no process to ask."""
        return self._reader is not None and self.exit_info is None and self._reader.request_sample() > 0

    def can_type(self) -> bool:
        """Whether the script's standard input can be reached."""
        from dpmon.run.stdin_terminal import INPUT_FIFO

        return (self.directory / INPUT_FIFO).is_fifo()

    def hides_input(self) -> bool:
        """Whether typed text must stay hidden, as for a password."""
        from dpmon.run.stdin_terminal import has_echo_off

        pid = None if self._reader is None else self._reader.info.command_pid
        return pid is not None and has_echo_off(pid)

    def type_line(self, line: str) -> str | None:
        """Send a line to the script's standard input; returns None, or why it failed."""
        from dpmon.run.stdin_terminal import send_input

        sent = send_input(self.directory, (line + "\n").encode("utf-8", "replace"))
        return None if sent else "the input pipe is full or closed"

    def file_name(self) -> str:
        """The first part of the names of files about this run: "dpmon-linear-7f3a"."""
        return "dpmon-" + re.sub(r"^\d{8}-\d{6}-|[^A-Za-z0-9._-]+", "", self.directory.name)[:80]

    # ------------------------------------------------------------------------------------------ scenes

    def build_screen_data(self, view: View, stopping: str | None = None) -> ScreenData:
        """The current facts, for drawing."""
        reader = self._reader
        if reader is None:
            return ScreenData(self.state, 0, view=view, is_reading=self._is_reading)
        wanted = self._snapshot_request(view, self._request._replace(ranks=max(self._rank_limit, self._request.ranks)))
        if self._request != wanted:
            if wanted.node != self._request.node and not self.is_over:
                self._request_records(reader, wanted.node)
            self._request, self._rest_end_s, self._last_stamp = wanted, 0.0, None
            self._refresh_snapshot(reader)
        start = reader.info.start_ns
        pausing = self.pause_state()
        stage = reader.startup_stage() if self.exit_info is None else None
        reads = reader.waits_for_input() if self.exit_info is None else None
        return ScreenData(
            self.state,
            self.now_ns(),
            reader.info,
            view,
            startup_stage=None if stage is None else (stage[0], max(stage[1] - start, 0)),
            input_wait_since_ns=None if reads is None else max(reads - start, 0),
            activities=self._activities_of_run,
            is_command_alive=self._is_command_alive,
            exit_info=self.exit_info,
            exit_cause=self._exit_cause,
            findings=self.findings if self.is_over else None,
            mode_request=self._mode_request,
            pause_state=pausing,
            can_pause=self.pause_refusal(pausing.wanted) is None,
            can_toggle=self.toggle_refusal() is None,
            can_type=self.exit_info is None and self.can_type(),
            output_file_count=len(self.output.tails),
            is_output_scrolled_back=self.output.top is not None,
            stop_progress=stopping,
            is_ending=self.is_ending,
            is_reading=self._is_reading,
            node_replies=reader.node_replies() if self.exit_info is None else None,
        )

    def _request_records(self, reader: RunReader, node: int | None) -> None:
        """Ask for all records of the processes of one node, instead of some: its screen shows their last steps."""
        with suppress(OSError):  # without them, it shows what there is
            reader.request_records([one for each in self.state.nodes if each.number == node for one in each.processes])

    def _snapshot_request(self, view: View, before: SnapshotRequest, stride: int = _SPARE_RANKS) -> SnapshotRequest:
        """The parts of the state that a view needs; `stride`: how many ranks the user scrolls before more are read."""
        first = view.first_rows.get("replicas", 0) // stride * stride
        parts = before._replace(
            span_s=view.range_s, first_rank=first, process=view.process_index, node=view.node_number
        )
        listed = view.zoom == "replicas"
        return parts._replace(listed=listed, waits=self.shows_rank_waits or listed, changes=view.zoom == "compare")

    def set_visible_ranks(self, ranks: int) -> bool:
        """Set how many ranks fit on the screen; returns whether the state lacks some of them."""
        self._rank_limit = ranks + _SPARE_RANKS
        return self._rank_limit > self._request.ranks

    def with_view(self, facts: ScreenData, view: View) -> ScreenData:
        """The frozen facts with another view; reads more of the same moment if the view needs it."""
        before, wanted = (self._snapshot_request(each, _FROZEN, FROZEN_RANKS // 2) for each in (facts.view, view))
        if before != wanted:
            wanted = wanted._replace(over=facts.is_over)
            state = self._build_snapshot(self._still, wanted, facts.now_ns)
            facts = facts if state is None else replace(facts, state=state)
        return replace(facts, view=view, is_output_scrolled_back=self.output.top is not None)

    def slow_steps(self, facts: ScreenData, most: int) -> SlowSteps | None:
        """The longest steps of a picture's time range and mode; None if the record cannot be read. May take a second.

        Without the bounds of a picture.
        """
        from dpmon.model.run_events import RunEvents
        from dpmon.model.slow_steps import SlowStepCache
        from dpmon.model.snapshot_builder import slow_steps_of

        def read(rows: Store) -> SlowSteps:
            waits = RunEvents.read(rows).inputs
            return slow_steps_of(rows, facts.state, facts.view.range_s, most, waits, SlowStepCache())

        return self._read(facts.elapsed_ns if facts.shows_past else None, read)

    def at_past_time(self, facts: ScreenData) -> ScreenData:
        """The facts as of the earlier time of their view; the histories stay those of the frozen `facts`."""
        at_ns, wanted = (facts.view.shown_ns, self._snapshot_request(facts.view, _FROZEN, FROZEN_RANKS // 2))
        if at_ns is None:
            return facts
        if self._looked is None or self._looked[:2] != (at_ns, wanted):
            state = self._build_snapshot(self._earlier, wanted, at_ns)
            self._looked = self._looked if state is None else (at_ns, wanted, state)
        if self._looked is None:
            return facts
        return ScreenData(
            self._looked[2].with_histories(facts.state),
            at_ns,
            facts.run_info,
            facts.view,
            is_command_alive=True,
            can_pause=facts.can_pause,
            can_toggle=facts.can_toggle,
            can_type=facts.can_type,
            output_file_count=facts.output_file_count,
            is_output_scrolled_back=facts.is_output_scrolled_back,
            stop_progress=facts.stop_progress,
            past=LookBack(
                facts.state,
                facts.now_ns if facts.exit_info is None else facts.elapsed_ns,
                None if facts.is_over else self.now_ns(),
            ),
        )

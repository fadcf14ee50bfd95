"""Detects stalls of a live run, records when they begin and end, and replies to readers that ask for the reason."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from dpmon.record.schema import SECOND
from dpmon.record.typed_json import to_json
from dpmon.run.process_notes import read_notes
from dpmon.run.run_directory import RunInfo, stop_requested_unix
from dpmon.run.safe_files import write_atomically
from dpmon.run.stdin_terminal import input_wait_start_ns
from dpmon.stalls.rank_inspector import INSPECT_AFTER_NS, RankInspector
from dpmon.stalls.run_state import WAITING_FOR_DATA
from dpmon.stalls.stacks import ProcessStacks
from dpmon.stalls.stall_detection import (
    FIRST_BATCH,
    LearnedDurations,
    NodeActivities,
    RankActivity,
    Stall,
    find_stall,
    sentence,
)
from dpmon.stalls.stall_report import STANDING_FILE, StallReport, build_report, last_request_number, write_reply

CHECK_INTERVAL_NS = SECOND
STACKS_AFTER_NS = 5 * SECOND
"""Stacks are dumped after a rank has made no progress for this long, and again after half of the time that it lasts."""
STACK_DUMP_BACKOFF = 50
"""After a stack dump that took t seconds, wait STACK_DUMP_BACKOFF * t seconds before the next one."""


class StallRecorder(Protocol):
    """What StallWatch needs from the run's record. The record of a mirror has no steps and no samples."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event."""

    def last_steps(self) -> Mapping[int, int | None]:
        """Return the number of the last step by process."""
        return {}

    def gpus(self) -> list[Mapping[str, Any]]:
        """Return the newest sample of each GPU."""
        return []

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the last record of a stall; None if there is none."""


class StallWatch:
    """The check for stalls, once per second."""

    def __init__(
        self,
        directory: Path,
        run_info: RunInfo,
        recorder: StallRecorder,
        *,
        is_takeover: bool = False,
        inspector: RankInspector | None = None,
    ) -> None:
        """`is_takeover`: an earlier supervisor started the command, and may have recorded the start of a stall.

        `inspector`: inspects the ranks if they run on several nodes. In this case, the caller replies to requests.
        """
        self._directory = directory
        self._spans_nodes = inspector is not None
        self._run_info = run_info
        self._recorder = recorder
        self._inspector = inspector or RankInspector(directory, run_info.cwd)
        self._durations = LearnedDurations()
        self._check_at_ns = 0
        self._earlier_ranks: dict[tuple[str | None, int], RankActivity] = {}
        self._stacks_at_ns = 0
        self._request_number = 0
        self._thread: threading.Thread | None = None
        self._requested_stacks: tuple[int, Mapping[int, ProcessStacks]] | None = None
        """The number of a request, and the stacks for its reply."""
        self._error: Exception | None = None
        """The exception that ended the thread that dumps stacks."""
        self._reported_ranks: list[RankActivity] = []
        """The ranks in the file STANDING_FILE."""
        self.stall: Stall | None = None
        self.stall_text = ""
        """The sentence about the stall."""
        self.waits: Mapping[tuple[str | None, int], bool] = {}
        """Whether each rank of the stall waits for another one, by the rank's key."""
        self._has_failed = False
        stall_record = recorder.last_stall() if is_takeover else None
        if stall_record is not None and "lasted_s" not in stall_record:  # continue it
            self.stall = Stall(run_info.start_ns + int(stall_record["since_s"] * SECOND), (), ())
            self.stall_text = stall_record["text"]

    def poll(self) -> None:
        """Check the ranks if it is time. Never blocks, never raises."""
        if self._has_failed:
            return
        try:
            self._inspect()
        except Exception as error:  # noqa: BLE001 - the run must be recorded further
            self._has_failed = True
            text = f"stalls are no longer detected: {type(error).__name__}: {error}"
            self._recorder.emit("warning", {"process": None, "text": text})

    def _inspect(self) -> None:
        if self._error is not None:
            raise self._error
        now_ns = time.monotonic_ns()
        request = 0 if self._spans_nodes else last_request_number(self._directory)
        if request != self._request_number and not self._is_taking_stacks():
            self._request_number = request
            # This finds processes that were started meanwhile, for example before a takeover.
            self._read_rank_activities(now_ns)
            self._start_taking_stacks(request)
        if self._requested_stacks is not None:
            (request_number, dumps), self._requested_stacks = self._requested_stacks, None
            ranks = self._inspector.with_exceptions(self._read_rank_activities(now_ns))
            report = self._build_report(ranks, dumps, self._current_stall(ranks, now_ns), now_ns)
            write_reply(self._directory, request_number, report)
        if now_ns < self._check_at_ns:
            return
        self._check_at_ns = now_ns + CHECK_INTERVAL_NS
        ranks = self._read_rank_activities(now_ns)
        self._learn_durations(ranks)
        if self.stall is not None and (self._all_died(ranks) or self._is_stopping(now_ns)):
            return
        running = [rank for rank in ranks if not rank.is_over and rank.doing != "paused" and rank.since_ns]
        longest_ns = max((now_ns - rank.since_ns for rank in running), default=0)
        waits_for_input = longest_ns >= INSPECT_AFTER_NS and input_wait_start_ns(self._directory) is not None
        if waits_for_input:
            self._earlier_ranks = {}  # the time that a user takes to type is not learned
        is_still = longest_ns >= INSPECT_AFTER_NS and not waits_for_input
        self._write_rank_report(ranks if is_still or any(rank.is_over for rank in ranks) else [], now_ns)
        if not is_still:
            self._record_stall_change(None, ranks, now_ns)
            return
        stall = find_stall(ranks, self._durations, now_ns)
        involved = () if stall is None else (*stall.blockers, *stall.waiters)
        needs_stacks = not all(ranks[i].has_current_stack for i in involved)
        is_due = longest_ns >= STACKS_AFTER_NS and now_ns >= self._stacks_at_ns
        if not self._is_taking_stacks() and (needs_stacks or is_due):
            self._stacks_at_ns = now_ns + max(STACKS_AFTER_NS, longest_ns // 2)
            self._start_taking_stacks(None)
        # Without stacks, the wrong rank may be named.
        if not needs_stacks and not self._may_still_be_stalled(ranks, now_ns):
            self._record_stall_change(stall, ranks, now_ns)

    def _read_rank_activities(self, now_ns: int) -> list[RankActivity]:
        """Return what each training process does now; empty while no ring can be read."""
        return self._inspector.inspect_ranks(self._recorder.last_steps(), now_ns)

    def _write_rank_report(self, ranks: list[RankActivity], now_ns: int) -> None:
        """Write the report on these ranks that a mirror reads; it is empty unless the job has other ranks.

        CPU use, which varies, is not a reason to write it again.
        """
        if self._spans_nodes or len(ranks) >= max((rank.world for rank in ranks), default=0):
            ranks = []
        ranks = self._inspector.with_exceptions(ranks) if any(rank.is_over for rank in ranks) else ranks
        ranks = [rank._replace(cpu=None, usual_ns=self._durations.learned_ns(rank)) for rank in ranks]
        if ranks != self._reported_ranks:
            self._reported_ranks = ranks
            with contextlib.suppress(OSError):
                activities = NodeActivities(now_ns, tuple(ranks))
                write_atomically(self._directory / STANDING_FILE, json.dumps(to_json(activities)))

    def _is_stopping(self, now_ns: int) -> bool:
        """Return whether the user has asked to stop the run since the stall began. What ranks do then is no cause."""
        stop_unix = stop_requested_unix(self._directory)
        start_unix = time.time() - (now_ns - self.stall.since_ns) / SECOND if self.stall is not None else 0.0
        return stop_unix is not None and stop_unix > start_unix

    def _all_died(self, ranks: list[RankActivity]) -> bool:
        """Return whether all processes were killed or failed, which is no progress: the run ends in its stall."""
        if not ranks or not all(rank.is_over for rank in ranks):
            return False
        return all(rank.doing != "ended" or rank.raised is not None for rank in self._inspector.with_exceptions(ranks))

    def _current_stall(self, ranks: list[RankActivity], now_ns: int) -> Stall | None:
        """Return the recorded stall with the indices of these ranks, which the last check may not have seen."""
        if self.stall is None:
            return None
        stall = find_stall(ranks, self._durations, now_ns) or Stall(0, (), ())
        return stall._replace(since_ns=self.stall.since_ns)

    def _may_still_be_stalled(self, ranks: list[RankActivity], now_ns: int) -> bool:
        """Return whether an earlier supervisor's stall may still be going on: at first, no signs of life are known."""
        if self.stall is None:
            return False
        still_ranks = [rank for rank in ranks if not rank.is_over and rank.since_ns <= self.stall.since_ns + SECOND]
        return any(rank.busy is None and now_ns - rank.since_ns >= INSPECT_AFTER_NS for rank in still_ranks)

    def close(self) -> None:
        """Close the rings. If the run ends while it is stalled, the record of the stall has no end."""
        if self._thread is not None:
            self._thread.join(1.0)
        now_ns = time.monotonic_ns()
        with contextlib.suppress(Exception):  # as in `poll`
            self._write_rank_report(self._read_rank_activities(now_ns), now_ns)
        self._inspector.close()

    def _is_taking_stacks(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start_taking_stacks(self, request_number: int | None) -> None:
        """Dump stacks on a thread, because py-spy may take long. `request_number`: of a reader's request, or None."""

        def work() -> None:
            start_ns = time.monotonic_ns()
            try:
                if request_number is None:
                    self._inspector.take_stacks(still_ns=INSPECT_AFTER_NS)
                    duration_ns = time.monotonic_ns() - start_ns
                    self._stacks_at_ns = max(self._stacks_at_ns, start_ns + STACK_DUMP_BACKOFF * duration_ns)
                else:
                    dumps = self._inspector.take_stacks()
                    self._requested_stacks = request_number, dumps
            except Exception as error:  # noqa: BLE001 - the next check reports it
                self._error = error

        self._thread = threading.Thread(target=work, name="dpmon stacks", daemon=True)
        self._thread.start()

    def _learn_durations(self, ranks: list[RankActivity]) -> None:
        """Learn how long each finished operation took, unless the rank waited for another one in it or was stopped."""
        earlier_ranks, self._earlier_ranks = self._earlier_ranks, {rank.key: rank for rank in ranks}
        jobs_at_work = {rank.job for rank in earlier_ranks.values() if not rank.is_in_collective}
        for rank in ranks:
            earlier = earlier_ranks.get(rank.key)
            if earlier is None:  # before its first call, a process has startup stages but no ring
                notes = [note for note in read_notes(self._directory / "stages.log") if note.pid == rank.pid]
                for note, next_note in pairwise(notes):
                    if note.text.startswith(WAITING_FOR_DATA):
                        self._durations.add_duration(FIRST_BATCH, next_note.at_ns - note.at_ns)
                continue
            if earlier.state == "stopped" or (earlier.is_in_collective and earlier.job in jobs_at_work):
                continue
            if rank.since_ns > earlier.since_ns > 0:
                self._durations.add_duration(earlier.timing_key, rank.since_ns - earlier.since_ns)

    def _record_stall_change(self, stall: Stall | None, ranks: list[RankActivity], now_ns: int) -> None:
        """Record the start, a change, or the end of a stall. `stall`: the current stall; None for none."""
        earlier = self.stall
        if stall is not None and earlier is not None:  # all records of a stall have the same start
            stall = stall._replace(since_ns=earlier.since_ns)
        self.stall = stall
        if stall is None:
            if earlier is not None:
                since_s = (earlier.since_ns - self._run_info.start_ns) / 1e9
                lasted_s = (now_ns - earlier.since_ns) / 1e9
                self._recorder.emit("stall", {"since_s": since_s, "lasted_s": lasted_s, "text": self.stall_text})
            return
        earlier_waits, self.waits = (
            self.waits,
            {ranks[i].key: i in stall.waiters for i in (*stall.blockers, *stall.waiters)},
        )
        ranks = self._inspector.with_exceptions(ranks)
        text = sentence(stall, ranks, self._run_info.cwd)
        if earlier is None or (text != self.stall_text and earlier_waits != self.waits):
            self.stall_text = text
            self._recorder.emit("stall", to_json(self._build_report(ranks, {}, stall, now_ns)))

    def _build_report(
        self, ranks: list[RankActivity], dumps: Mapping[int, ProcessStacks], stall: Stall | None, now_ns: int
    ) -> StallReport:
        gpus = self._recorder.gpus()
        return build_report(ranks, dumps, stall, now_ns, self._run_info, text=self.stall_text, gpus=gpus)

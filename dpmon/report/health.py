"""The health of a run: a state with a reason and a remedy, for `status`, `ls` and the lines of `--json`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.run_analysis import EVERYTHING, RunAnalysis, RunCaches, Selection
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import ELSEWHERE
from dpmon.report.outcome import LOST, exit_cause, exit_sentence
from dpmon.run.activities import startup_wait_reason
from dpmon.run.lifecycle import UNSUPERVISED, run_state
from dpmon.run.run_directory import ExitInfo, RunError
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.stalls.run_state import (
    ENDED,
    EVALUATING,
    PAUSED,
    QUIET,
    QUIET_NS,
    RUNNING,
    STALLED,
    STARTING,
    TRAINING,
    WAITING_FOR_INPUT,
    WAITS,
    RunState,
    decide_state,
    format_state,
)
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import format_calls_so_far, format_count, format_long_duration

_Result = TypeVar("_Result")
FINE = (TRAINING, EVALUATING, RUNNING, *WAITS.values())
"""States that are fine. A run that nobody records is not: whether it makes progress is unknown."""
IS_FINE, NOT_TRAINING, IS_STALLED, HAS_FAILED, TIMED_OUT = 0, 3, 5, 6, 124
"""Exit statuses of `dpmon status`."""
_FAILED_ENDS = ("failed", "killed", LOST, "ended")
"""Ends that count as failures; it is unknown how a run that is lost or ended came to its end."""
_MIN_SHOWN_S = 1.0
"""Shorter durations are not shown."""


class Health(NamedTuple):
    """The health of a run."""

    state: str
    """One of dpmon.stalls.run_state.STATES; "elsewhere" for a run on another machine, or "unsupervised"."""
    since_s: float | None
    """Since when, in seconds since the run's start; None if unknown."""
    reason: str | None = None
    remedy: str | None = None
    end: str | None = None
    """How it ended: finished, stopped, interrupted, failed, killed, lost, ended (unknown); None while it runs."""
    exit_info: ExitInfo | None = None
    """The record of its end; not in JSON."""

    @property
    def word(self) -> str:
        """The state in lists; after the end of the run, how it ended."""
        return self.end or self.state

    @property
    def exit_status(self) -> int:
        """The exit status of `dpmon status`."""
        if self.state in FINE:
            return IS_FINE
        if self.state == STALLED:
            return IS_STALLED
        return HAS_FAILED if self.end in _FAILED_ENDS else NOT_TRAINING

    def fields(self) -> dict[str, object]:
        """Return the members of the JSON object."""
        members = self._asdict()
        del members["exit_info"]
        return {**members, "fine": self.exit_status == IS_FINE}

    def sentence(self, t_s: float) -> str:
        """Return state, duration and reason in a sentence. `t_s`: now, in seconds since the run's start."""
        if self.end is not None:
            return exit_sentence(self.exit_info)
        duration_text = ""
        if self.since_s is not None and t_s - self.since_s >= _MIN_SHOWN_S:
            duration_text = f" for {format_long_duration((t_s - self.since_s) * SECOND)}"
        return f"{format_state(self.state)}{duration_text}" + (f": {self.reason}" if self.reason else "")


def read_run(
    reader: RunReader,
    read: Callable[[RunAnalysis], _Result],
    selection: Selection = EVERYTHING,
    caches: RunCaches | None = None,
) -> _Result:
    """Return what `read` returns for the run as of now; for a run without records if its history cannot be read."""
    with suppress(HistoryError, RunError), open_store(reader.directory) as store:
        return read(RunAnalysis(store, selection, ended_processes(reader.activities()), caches))
    return read(RunAnalysis())


def read_health(directory: Path) -> Health:
    """Return the health of the run in `directory` now."""
    with closing(RunReader(directory)) as reader:
        if reader.exit_info() is not None:  # the history cannot change the result
            return assess_health(reader, RunAnalysis())
        return read_run(reader, partial(assess_health, reader))


def assess_health(reader: RunReader, run: RunAnalysis) -> Health:
    """Return the health of a run; `run`: its state according to its history."""
    directory, run_info = reader.directory, reader.info
    word, exit_info = run_state(directory, run_info)
    if exit_info is not None or word == LOST:
        since_s = None if exit_info is None else exit_info.seconds
        return Health(ENDED, since_s, _end_reason(exit_info), None, word, exit_info)
    if word == "ending":
        return Health(ENDED, None, "its record is being completed")
    if word == ELSEWHERE:
        return Health(ELSEWHERE, None, f"it runs on {run_info.host}", "run this command there")
    if word == UNSUPERVISED:
        reason, remedy = "its supervisor was killed: nothing is recorded", "starts another one"
        if run_info.nodes:
            reason = "its mirror has exited: what its nodes do is not known here, but they keep recording"
            remedy = "starts the mirror again"
        return Health(UNSUPERVISED, None, reason, f"dpmon attach {short_name(run_info)} {remedy}")
    return assess_live_run(reader, run, time.monotonic_ns() - run_info.start_ns)


def assess_live_run(reader: RunReader, run: RunAnalysis, now_ns: int) -> Health:
    """Return the health of a live run on this machine; `now_ns`: the time since its start."""
    start_ns, name = reader.info.start_ns, short_name(reader.info)
    activities = {
        process_index: (activity, since_ns - start_ns if since_ns else 0)
        for process_index, (activity, since_ns) in reader.activities().items()
    }
    paused_ns = _ns_since_start(reader.pause_state().since_ns, start_ns)
    input_wait_ns = _ns_since_start(reader.input_wait_start_ns(), start_ns)
    process = run.representative
    activity, since_ns = activities.get(-1 if process is None else process.process, ("", 0))
    state = decide_state(run.state_inputs(now_ns, activities, paused_ns, input_wait_ns))
    stage, reason, remedy = reader.startup_stage(), None, None
    if stage is not None and activity == "ended" and state.word in (QUIET, *FINE):
        _, stage_ns = stage
        if stage_ns - start_ns > run.newest_ns:
            state = RunState(STARTING)  # the command starts another training
    if state.word == STALLED and run.current_stall is not None:
        reason, remedy = run.current_stall.text, f"dpmon why {name} shows the stacks"
    elif state.word == STARTING:
        reason = startup_wait_reason(stage, now_ns) or None
    elif state.word == PAUSED:
        remedy = f"dpmon attach {name}, then p"
    elif state.word == QUIET:
        reason, remedy = _quiet_reason(run, activity), f"dpmon why {name} shows where it is"
    elif state.word == WAITING_FOR_INPUT:
        remedy = f"dpmon attach {name}, then i"
    elif state.word in FINE[:3] and activity not in ("", "other", "ended") and now_ns - since_ns > QUIET_NS:
        reason = f"in {activity} for {format_long_duration(now_ns - since_ns)}"
    if run.open_calls and reason is None:
        reason = format_calls_so_far(run.open_calls)
    return Health(state.word, None if state.since_ns is None else state.since_ns / SECOND, reason, remedy)


def _quiet_reason(run: RunAnalysis, activity: str) -> str:
    """Return why no model is called any more. `activity`: that of the process that represents the run."""
    step = 0 if run.representative is None else run.representative.step_number
    call_text = f"no call since step {format_count(step)}" if step else "no recent call"
    text = "the training process has ended" if activity == "ended" else "the script does something else"
    return f"{call_text}; {text}"


def _ns_since_start(time_ns: int | None, start_ns: int) -> int | None:
    return None if time_ns is None else max(time_ns - start_ns, 0)


def _end_reason(exit_info: ExitInfo | None) -> str | None:
    cause = exit_cause(exit_info)
    if cause is not None or exit_info is None or exit_info.stopped or not exit_info.status:
        return cause
    return exit_info.signal or f"exit status {exit_info.status}"

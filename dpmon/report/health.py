"""How a run does, in one word, with the reason and a remedy: for `status`, `ls` and the lines of `--json`."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.run_snapshot import RunSnapshot
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.record.schema import SECOND
from dpmon.run.activities import startup_wait_reason
from dpmon.run.lifecycle import ELSEWHERE, STOPPED_BY_YOU, run_state
from dpmon.run.run_directory import ExitInfo, RunError, load_exit
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import short_name
from dpmon.stalls.run_state import (
    ENDED,
    EVALUATING,
    PAUSED,
    QUIET,
    QUIET_NS,
    STALLED,
    STARTING,
    TRAINING,
    WAITING_FOR_DATA,
    WAITING_FOR_INPUT,
    RunState,
    decide_state,
)
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import format_calls_so_far, format_count, format_long_duration, format_run_time

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

FINE = (TRAINING, EVALUATING, WAITING_FOR_DATA)
IS_FINE, NOT_TRAINING, NO_RUN, IS_STALLED, HAS_FAILED, TIMED_OUT = 0, 3, 4, 5, 6, 124
"""Exit statuses of `dpmon status`."""
LOST = "lost"
_FAILED = ("failed", "killed", LOST, "ended")
"""Ends that are not as wanted; of a run that is lost or has ended, it is unknown how."""
_AFTER_A_MOMENT_S = 1.0


class Health(NamedTuple):
    """How a run does."""

    state: str
    """One of dpmon.stalls.run_state.STATES; "elsewhere" for a run of another machine."""
    since_s: float | None
    """Since when, in seconds since the run's start; None if unknown."""
    reason: str | None = None
    remedy: str | None = None
    end: str | None = None
    """How it ended: finished, stopped, interrupted, failed, killed, lost, ended (unknown); None while it goes on."""

    @property
    def status(self) -> int:
        """The exit status of `dpmon status`."""
        if self.state in FINE:
            return IS_FINE
        if self.state == STALLED:
            return IS_STALLED
        return HAS_FAILED if self.end in _FAILED else NOT_TRAINING

    def fields(self) -> dict[str, object]:
        """The members of `assess_health`."""
        return {**self._asdict(), "fine": self.status == IS_FINE}

    def sentence(self, t_s: float) -> str:
        """State, duration and reason in a sentence. `t_s`: now, in seconds since the run's start."""
        took = ""
        if self.since_s is not None and self.end is not None:
            took = f" after {format_run_time(self.since_s)}"
        elif self.since_s is not None and t_s - self.since_s >= _AFTER_A_MOMENT_S:
            took = f" for {format_long_duration((t_s - self.since_s) * SECOND)}"
        word = STOPPED_BY_YOU if self.end == "stopped" else self.end or self.state
        return f"{word}{took}" + (f": {self.reason}" if self.reason else "")


def read_health(directory: Path) -> Health:
    """How the run in `directory` does now."""
    if load_exit(directory) is None:  # else nothing in the history changes the answer
        with suppress(HistoryError, RunError), open_store(directory) as store:
            return health_from_store(directory, store)
    return health_from_store(directory, None)


def health_from_store(directory: Path, store: Store | None) -> Health:
    """How the run in `directory` does now. `store`: its history; None if it cannot be read."""
    with closing(RunReader(directory)) as reader:
        state = (
            RunSnapshot()
            if store is None
            else SnapshotBuilder().build(store, ended=ended_processes(reader.activities()))
        )
        return assess_health(reader, state)


def assess_health(reader: RunReader, state: RunSnapshot) -> Health:
    """How a run does; `state`: what its history says."""
    directory, info = reader.directory, reader.info
    word, how = run_state(directory, info)
    if how is not None or word == LOST:
        return Health(ENDED, None if how is None else how.seconds, _end_reason(how), None, word)
    if word == "ending":
        return Health(ENDED, None, "its record is being completed")
    if word == ELSEWHERE:
        return Health(ELSEWHERE, None, f"it runs on {info.host}", "ask there")
    if word == "unsupervised" and info.nodes:
        reason = "its mirror has gone: what its machines do is not known here, but they record it"
        return Health(QUIET, None, reason, f"dpmon attach {short_name(info)} starts the mirror again")
    now = assess_live_run(reader, state, time.monotonic_ns() - info.start_ns)
    if word == "unsupervised" and now.remedy is None:
        remedy = f"dpmon attach {short_name(info)} starts another one"
        return now._replace(reason="its supervisor was killed: nothing is recorded", remedy=remedy)
    return now


def assess_live_run(reader: RunReader, state: RunSnapshot, now_ns: int) -> Health:
    """How a run does that goes on here; `now_ns`: the time since its start."""
    start, name = reader.info.start_ns, short_name(reader.info)
    since = {number: (what, at - start if at else 0) for number, (what, at) in reader.activities().items()}
    paused, reads = reader.pause_state().since_ns, reader.input_wait_start_ns()
    doing, began_ns = since.get(-1 if state.representative is None else state.representative.process, ("", 0))
    found = decide_state(
        state.state_inputs(now_ns, since, _seconds_since_start(paused, start), _seconds_since_start(reads, start))
    )
    stage, reason, remedy = reader.startup_stage(), None, None
    over = doing == "ended" and found.word in (QUIET, *FINE)
    if over and stage is not None and stage[1] - start > state.newest_ns:
        found = RunState(STARTING)  # the command starts another training
    if found.word == STALLED and state.current_stall is not None:
        reason, remedy = state.current_stall.text, f"dpmon why {name} shows the stacks"
    elif found.word == STARTING:
        reason = startup_wait_reason(stage, now_ns) or None
    elif found.word == PAUSED:
        remedy = f"dpmon attach {name}, then p"
    elif found.word == QUIET:
        reason, remedy = _quiet_reason(state, doing), f"dpmon why {name} shows where it is"
    elif found.word == WAITING_FOR_INPUT:
        remedy = f"dpmon attach {name}, then i"
    elif found.word in FINE[:2] and doing not in ("", "other", "ended") and now_ns - began_ns > QUIET_NS:
        reason = f"in {doing} for {format_long_duration(now_ns - began_ns)}"
    if state.open_calls and reason is None:
        reason = format_calls_so_far(state.open_calls)
    return Health(found.word, None if found.since_ns is None else found.since_ns / SECOND, reason, remedy)


def _quiet_reason(state: RunSnapshot, doing: str) -> str:
    """Why nothing is called any more. `doing`: what the process that represents the run does."""
    step = None if state.representative is None else state.representative.last_step
    since = "no call for so long" if step is None else f"no call since step {format_count(step.step)}"
    return f"{since}; {'the training process has ended' if doing == 'ended' else 'the script does something else'}"


def _seconds_since_start(at_ns: int | None, start_ns: int) -> int | None:
    return None if at_ns is None else max(at_ns - start_ns, 0)


def _end_reason(how: ExitInfo | None) -> str | None:
    if how is None:
        return "it ended without a record of its end"
    status = how.signal or (f"exit status {how.status}" if how.status else None)
    return how.error or (None if how.stopped else how.cause or how.unknown or status)

"""Defines the state of a run in one word, for header, list, status, metrics, events and playback. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dpmon.record.record_types import Step
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import ELSEWHERE

STARTING, TRAINING, EVALUATING, RUNNING = "starting", "training", "evaluating", "running"
WAITING_FOR_DATA, WAITING_FOR_INPUT, PAUSED = "waiting for data", "waiting for input", "paused"
SAVING, QUIET, STALLED, ENDED = "saving a checkpoint", "quiet", "stalled", "ended"
WAITS = {"data": WAITING_FOR_DATA, "checkpoint": SAVING}
"""States of a process that has been in an activity for WAIT_SHOWN_NS, by activity."""
STATES = (STARTING, TRAINING, EVALUATING, RUNNING, *WAITS.values(), WAITING_FOR_INPUT, PAUSED, QUIET, STALLED, ENDED)
_WORDS_OF_STEPS = {"evaluation": EVALUATING, "forward only": RUNNING}
"""State by the word for the kind of the newest step; any other step belongs to a training."""
_SHOWN_WORDS = {QUIET: "idle", ELSEWHERE: "on another node"}
"""States whose word for readers differs from the one in JSON."""
WAIT_SHOWN_NS = SECOND
"""A wait becomes a state of its own after this time."""
QUIET_NS, QUIET_STEPS = 5 * SECOND, 3
"""A run is quiet after this long without a traced operation, and after the time of this many of its steps."""


def format_state(state: str) -> str:
    """Return a state as the screen, lists and reports show it; JSON has it unchanged."""
    return _SHOWN_WORDS.get(state, state)


class StateInputs(NamedTuple):
    """The inputs of `decide_state`. Times are ns on one clock; None: unknown, or it does not apply."""

    now_ns: int
    over: bool = False
    paused_ns: int | None = None
    """When the pause started; `input_ns` and `stalled_ns` likewise for a wait for input and a stall."""
    input_ns: int | None = None
    stalled_ns: int | None = None
    step: Step | None = None
    """The last step of the process that represents the run."""
    seen_ns: int = -1
    """End of the newest step or call of any process; negative if there is none."""
    calls: int = 0
    """Calls so far in open steps of processes without a finished step."""
    activity: tuple[str, int] = ("", 0)
    """Activity of the process that represents the run (data, forward, other ...), and its start; empty if unknown."""
    step_word: str = ""
    """Word for the kind of its last step (`dpmon.store.store_queries.Store.kind_words`)."""


class RunState(NamedTuple):
    """One of STATES, and when it started (None: unknown)."""

    word: str
    since_ns: int | None = None


def decide_state(inputs: StateInputs) -> RunState:
    """Return the state of a run. If several apply, the first one counts: a paused run is not quiet."""
    now_ns, (activity, activity_ns) = inputs.now_ns, inputs.activity
    if inputs.over:
        return RunState(ENDED)
    if inputs.paused_ns is not None:
        return RunState(PAUSED, inputs.paused_ns)
    if inputs.input_ns is not None and inputs.input_ns >= inputs.seen_ns and now_ns - inputs.input_ns > WAIT_SHOWN_NS:
        return RunState(WAITING_FOR_INPUT, inputs.input_ns)
    if inputs.stalled_ns is not None:
        return RunState(STALLED, inputs.stalled_ns)
    if activity in WAITS and activity_ns and now_ns - activity_ns > WAIT_SHOWN_NS:
        return RunState(WAITS[activity], activity_ns)
    if inputs.seen_ns < 0 and not inputs.calls:
        return RunState(STARTING)
    newest_ns, step_ns = max(inputs.seen_ns, activity_ns, 0), 0 if inputs.step is None else inputs.step.wall_ns
    if activity in ("", "other", "ended") and now_ns - newest_ns > max(QUIET_NS, QUIET_STEPS * step_ns):
        return RunState(QUIET, max(inputs.seen_ns, 0) or activity_ns or None)
    return RunState(_WORDS_OF_STEPS.get(inputs.step_word, TRAINING))

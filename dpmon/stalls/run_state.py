"""The state of a run in one word: the definition for header, list, status, metrics, events and playback. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dpmon.record.record_types import Step
from dpmon.record.schema import SECOND

STARTING, TRAINING, EVALUATING = "starting", "training", "evaluating"
WAITING_FOR_DATA, WAITING_FOR_INPUT, PAUSED = "waiting for data", "waiting for input", "paused"
QUIET, STALLED, ENDED = "quiet", "stalled", "ended"
STATES = (STARTING, TRAINING, EVALUATING, WAITING_FOR_DATA, WAITING_FOR_INPUT, PAUSED, QUIET, STALLED, ENDED)
WAIT_SHOWN_NS = SECOND
"""A wait is a state of its own after this time."""
QUIET_NS, QUIET_STEPS = 5 * SECOND, 3
"""A run is quiet when its script has done nothing traced for this long, and for the time of this many of its steps."""


class StateInputs(NamedTuple):
    """What is known about a run at one time. Times are ns on one clock; None: unknown, or it does not apply."""

    now_ns: int
    over: bool = False
    paused_ns: int | None = None
    """Since when it is paused; `input_ns`, `stalled_ns` likewise."""
    input_ns: int | None = None
    stalled_ns: int | None = None
    step: Step | None = None
    """The last step of the process that represents the run."""
    seen_ns: int = -1
    """End of the newest step or call of any process; negative without one."""
    calls: int = 0
    """Calls so far in open steps of processes without a step."""
    activity: tuple[str, int] = ("", 0)
    """What the process that represents the run does (data, forward, other ...), and since when; empty if unknown."""


class RunState(NamedTuple):
    """One of STATES, and since when (None: unknown)."""

    word: str
    since_ns: int | None = None


def decide_state(run: StateInputs) -> RunState:
    """The state of a run. The first of several that apply: a paused run is not quiet."""
    now_ns, (doing, since_ns) = run.now_ns, run.activity
    if run.over:
        return RunState(ENDED)
    if run.paused_ns is not None:
        return RunState(PAUSED, run.paused_ns)
    if run.input_ns is not None and run.input_ns >= run.seen_ns and now_ns - run.input_ns > WAIT_SHOWN_NS:
        return RunState(WAITING_FOR_INPUT, run.input_ns)
    if run.stalled_ns is not None:
        return RunState(STALLED, run.stalled_ns)
    if doing == "data" and since_ns and now_ns - since_ns > WAIT_SHOWN_NS:
        return RunState(WAITING_FOR_DATA, since_ns)
    if run.seen_ns < 0 and not run.calls:
        return RunState(STARTING)
    newest_ns, step_ns = max(run.seen_ns, since_ns, 0), 0 if run.step is None else run.step.wall_ns
    if doing in ("", "other", "ended") and now_ns - newest_ns > max(QUIET_NS, QUIET_STEPS * step_ns):
        return RunState(QUIET, max(run.seen_ns, 0) or since_ns or None)
    return RunState(EVALUATING if run.step is not None and run.step.is_evaluation else TRAINING)

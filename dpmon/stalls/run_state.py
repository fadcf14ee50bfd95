"""The state of a run in one word: the definition for header, list, status, metrics, events and playback. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dpmon.record.kinds import Step
from dpmon.record.schema import SECOND

STARTING, TRAINING, EVALUATING = "starting", "training", "evaluating"
WAITING_FOR_DATA, WAITING_FOR_INPUT, PAUSED = "waiting for data", "waiting for input", "paused"
QUIET, STALLED, ENDED = "quiet", "stalled", "ended"
STATES = (STARTING, TRAINING, EVALUATING, WAITING_FOR_DATA, WAITING_FOR_INPUT, PAUSED, QUIET, STALLED, ENDED)
WAIT_SHOWN_NS = SECOND
"""A wait is a state of its own after this time."""
QUIET_NS, QUIET_STEPS = 5 * SECOND, 3
"""A run is quiet when its script has done nothing traced for this long, and for the time of this many of its steps."""


class Now(NamedTuple):
    """What is known about a run at one time. Times are ns on one clock; None: unknown, or it does not apply."""

    now_ns: int
    over: bool = False
    paused_ns: int | None = None
    """Since when it is paused; `input_ns`, `stalled_ns` likewise."""
    input_ns: int | None = None
    stalled_ns: int | None = None
    stepped: bool = False
    """Whether a step or a call has ended."""
    last_end_ns: int = 0
    """End of the newest step or call."""
    step_ns: int = 0
    """Duration of that step."""
    evaluation: bool = False
    """Whether it was an evaluation step."""
    doing: str = ""
    """What the process that represents the run does: data, forward, backward, other ...; empty if unknown."""
    since_ns: int = 0
    """Since when; 0 if unknown."""


def now_of(
    now_ns: int,
    step: Step | None,
    seen_ns: int,
    calls: int,
    activity: tuple[str, int],
    *,
    paused_ns: int | None,
    input_ns: int | None,
    stalled_ns: int | None,
    over: bool = False,
) -> Now:
    """The facts at a time. Times are ns since the run's start.

    `step`: the last one of the process that represents the run; `activity`: what that process does, and since when.
    `seen_ns`: end of the newest step or call of any process; negative without one. `calls`: calls so far in open
    steps of processes without a step.
    """
    return Now(
        now_ns,
        over,
        paused_ns,
        None if input_ns is None or seen_ns > input_ns else input_ns,
        stalled_ns,
        seen_ns >= 0 or calls > 0,
        max(seen_ns, 0),
        0 if step is None else step.wall_ns,
        step is not None and step.evaluation,
        *activity,
    )


class RunState(NamedTuple):
    """One of STATES, and since when (None: unknown)."""

    word: str
    since_ns: int | None = None


def state_of(run: Now) -> RunState:
    """The state of a run. The first of several that apply: a paused run is not quiet."""
    if run.over:
        return RunState(ENDED)
    if run.paused_ns is not None:
        return RunState(PAUSED, run.paused_ns)
    if run.input_ns is not None and run.now_ns - run.input_ns > WAIT_SHOWN_NS:
        return RunState(WAITING_FOR_INPUT, run.input_ns)
    if run.stalled_ns is not None:
        return RunState(STALLED, run.stalled_ns)
    if run.doing == "data" and run.since_ns and run.now_ns - run.since_ns > WAIT_SHOWN_NS:
        return RunState(WAITING_FOR_DATA, run.since_ns)
    if not run.stepped:
        return RunState(STARTING)
    usual = max(QUIET_NS, QUIET_STEPS * run.step_ns)
    if run.doing in ("", "other", "ended") and run.now_ns - max(run.last_end_ns, run.since_ns) > usual:
        return RunState(QUIET, run.last_end_ns or run.since_ns or None)
    return RunState(EVALUATING if run.evaluation else TRAINING)

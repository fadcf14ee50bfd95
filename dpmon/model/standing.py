"""The facts from which the state of a run follows (dpmon.stalls.run_state). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.model.state import State
from dpmon.stalls.run_state import Now


def now_of(
    state: State,
    now_ns: int,
    activities: Mapping[int, tuple[str, int]],
    paused_ns: int | None,
    input_ns: int | None,
    *,
    over: bool = False,
) -> Now:
    """The facts at a time. Times are ns since the run's start. `activities`: by process; empty in a playback."""
    focus = state.focus
    doing, since = activities.get(focus.process, ("", 0)) if focus is not None else ("", 0)
    step = None if focus is None else focus.last_step
    seen = max((each.seen_ns for each in state.processes.values()), default=-1)
    return Now(
        now_ns,
        over,
        paused_ns,
        None if input_ns is None or seen > input_ns else input_ns,
        None if state.stall is None else state.stall.since_ns,
        seen >= 0,
        max(seen, 0),
        0 if step is None else step.wall_ns,
        step is not None and step.evaluation,
        doing,
        since,
    )

"""The facts from which the state of a run follows (dpmon.stalls.run_state), in the state at a time. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.model.state import State
from dpmon.stalls.run_state import Now, now_of


def now_in(
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
    return now_of(
        now_ns,
        None if focus is None else focus.last_step,
        max((each.seen_ns for each in state.processes.values()), default=-1),
        state.open_calls,
        ("", 0) if focus is None else activities.get(focus.process, ("", 0)),
        paused_ns=paused_ns,
        input_ns=input_ns,
        stalled_ns=None if state.stall is None else state.stall.since_ns,
        over=over,
    )

"""Folds what a record keeps of the time before the records that a late reader was given. Pure.

To be folded before those records. Sums are exact; medians are of steps drawn from those that the record has in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpmon.model.devices import add_mean
from dpmon.model.fold import process_of, refined
from dpmon.model.history import add_column
from dpmon.model.phases import CALLS_AT, FORWARD, STEP_SLOTS
from dpmon.model.state import (
    NOT_RUN,
    PHASES,
    SAMPLED,
    SETTLED_KEPT,
    SETTLED_MOST,
    WARM_STEPS,
    Column,
    ModeTrack,
    State,
    StepSample,
)
from dpmon.past import DevicePast, Drawn, Kept, Past
from dpmon.record.wire import CALL_PHASES, STEP_PHASES

__all__ = ["fold_past"]

_SECOND = 1_000_000_000


def fold_past(state: State, past: Past | Drawn | DevicePast) -> State:
    """The state with `past` in it; the state that is given is used up."""
    if isinstance(past, DevicePast):
        add_mean(state, past)
        return state
    process = process_of(state, past.process, past.rank)
    if process is None:
        return state
    track = process.modes.get(past.mode)
    if track is None:
        track = process.modes[past.mode] = ModeTrack(past.mode)
    if isinstance(past, Drawn):
        _settle(track, past)
        return state
    first = (past.last_step or past.steps) - past.steps + 1
    if process.marks_mode != past.mode:
        process.marks_mode, process.visit = past.mode, max(first, 0)
        process.marks.clear()
    process.mode = process.mode or past.mode
    process.step_count += past.steps
    process.call_count += past.calls
    track.count += past.steps
    begin_s = past.start_s if past.width_s else 0
    process.paces.sums(past.mode, past.pace, begin_s * _SECOND, (past.start_s + past.width_s) * _SECOND)
    if process.began_ns < 0:
        process.began_ns = process.resumed_ns = past.start_s * _SECOND if past.width_s else 0
    process.seen_ns = max(process.seen_ns, past.start_s * _SECOND)
    state.newest_ns = max(state.newest_ns, process.seen_ns)
    if past.width_s:
        add_column(process, _column(past), fine=past.width_s == 1)
    return state


def _column(past: Past) -> Column:
    spent = past.sums.get("step", 0)
    # The start of the first step is no longer known; assume that it took the mean step time.
    begin = max(past.start_s * _SECOND - spent // max(past.steps, 1), 0)
    column = Column(0, past.start_s, past.mode, past.steps, spent, begin, past.pace.copy())
    sums, ran = _slots(past.sums), _slots(past.ran)
    inside = [past.sums.get(name, 0) for name in CALL_PHASES]
    sums[CALLS_AT] = inside
    sums[FORWARD] -= sum(inside)
    ran[CALLS_AT] = [past.ran.get(name, 0) for name in CALL_PHASES]
    column.phases = [max(took, 0) for took in sums]
    column.ran = [max(count, 0) for count in ran]
    column.sampled = _samples(past.drawn)[:SAMPLED]
    return column


def _samples(steps: Sequence[Kept]) -> list[StepSample]:
    return [
        StepSample(
            step.step, step.start_ns + step.wall_ns, step.wall_ns, step.samples,
            refined(step, None if inside is None else list(inside)),
        )
        for step, inside in steps
        if step.wall_ns >= 0 and step.start_ns >= 0
    ]  # fmt: skip


def _slots(values: Mapping[str, float]) -> list[int]:
    slots = [NOT_RUN] * len(PHASES)
    for name, slot in zip(STEP_PHASES, STEP_SLOTS, strict=True):
        slots[slot] = int(values.get(name, NOT_RUN))
    return slots


def _settle(track: ModeTrack, drawn: Drawn) -> None:
    warm = {first + index for first in drawn.switches for index in range(WARM_STEPS)}
    track.settled = [sample for sample in _samples(drawn.steps) if sample.step not in warm][:SETTLED_MOST]
    newest = max((step.step for step, _ in drawn.steps), default=0)
    left_out = WARM_STEPS * sum(first <= newest for first in drawn.own_switches)
    track.settled_of = max(drawn.of - left_out if drawn.of > SETTLED_KEPT else 0, len(track.settled))
    track.settled_count += len(track.settled)

"""The phases of a step in the order of PHASES: those of its calls are taken out of its forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpmon.model.state import NOT_RUN, OPEN_STEPS_KEPT, PHASES
from dpmon.record.wire import CALL_PHASES, STEP_PHASES

__all__ = ["CALLS_AT", "FORWARD", "STEP_SLOTS", "add_call", "with_calls"]

STEP_SLOTS = tuple(PHASES.index(name) for name in STEP_PHASES)
"""Where in PHASES each of STEP_PHASES is."""
FORWARD = PHASES.index("forward")
_FIRST = PHASES.index(CALL_PHASES[0])
_COPY, _APPLY = PHASES.index("copy"), CALL_PHASES.index("parallel_apply")
CALLS_AT = slice(_FIRST, _FIRST + len(CALL_PHASES))
"""Where in PHASES those of CALL_PHASES are, one after the other."""


def add_call(open_steps: dict[int, list[int]], step: int, took: Iterable[int]) -> None:
    """Add what a call's phases took (ns, in the order of CALL_PHASES, NOT_RUN) to the other calls of its step."""
    sums = open_steps.get(step)
    if sums is None:
        if len(open_steps) >= OPEN_STEPS_KEPT:
            del open_steps[next(iter(open_steps))]
        sums = open_steps[step] = [NOT_RUN] * len(CALL_PHASES)
    for index, one in enumerate(took):
        if one >= 0:
            sums[index] = max(sums[index], 0) + one


def with_calls(own: Iterable[int], of_calls: Sequence[int] | None) -> tuple[int, ...]:
    """All phases of a step in ns, from its own in the order of STEP_PHASES (NOT_RUN) and what `add_call` added up."""
    slots = [NOT_RUN] * len(PHASES)
    for slot, took in zip(STEP_SLOTS, own, strict=True):
        slots[slot] = took
    forward = slots[FORWARD]
    if of_calls is not None and forward >= 0:
        inside = sum(took for took in of_calls if took > 0)
        over, applied = inside - forward, of_calls[_APPLY]
        if 0 < over <= min(slots[_COPY], applied):
            # A lone replica runs on the training thread, whose copies are taken off the forward, not off the call.
            of_calls = [applied - over if at == _APPLY else took for at, took in enumerate(of_calls)]
            inside = forward
        # More than the whole means that calls ran elsewhere too (recomputed in backward): they cannot be told apart.
        if inside <= forward:
            slots[CALLS_AT] = of_calls
            slots[FORWARD] = forward - inside
    return tuple(slots)

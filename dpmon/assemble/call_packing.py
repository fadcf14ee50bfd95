"""Packs the payload of a call from its span and the spans of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.assemble.definitions import Definitions
from dpmon.assemble.device_waits import Slots
from dpmon.assemble.nesting import PRIMITIVES
from dpmon.record.spans import Flag, Kind, Span
from dpmon.record.wire import CALL_PHASES, Untimed, call_flags, pack_call

WIRE_FLAGS = tuple(
    call_flags(
        virtual=bool(flags & Flag.VIRTUAL),
        training=bool(flags & Flag.TRAINING),
        grad=bool(flags & Flag.GRAD),
        failed=bool(flags & Flag.FAILED),
    )
    for flags in range(16)
)
"""Flag byte of a call by the lowest four flags of its span."""
_LARGEST = (1 << 62) - 1
_MAX_STAGES = 255
_NO_PHASES = (-1, 0) * len(CALL_PHASES)


class UnnumberedCall(NamedTuple):
    """A call that is ready to be packed, except for its step and call numbers."""

    mode: int
    flags: int
    layout: int
    start: int
    wall: int
    inputs: int
    outputs: int
    phases: Sequence[int]
    replicas: Sequence[int]
    stages: Sequence[int]
    slots: Slots
    """The spans that add up to each device time."""
    why: int
    """Reason for missing device times, if no span gives another."""

    def definitions(self) -> list[int]:
        """Return the numbers of all definitions that it refers to."""
        inner = [*self.replicas[::4], *self.replicas[1::4]]
        for at in range(3):
            inner += self.stages[at::5]
        return [self.layout, self.inputs, self.outputs, *inner]


def mode_of(flags: int) -> int:
    """Return the mode of a call as an index in dpmon.record.wire.MODES."""
    return 1 if flags & Flag.DP else 2


def pack_numbered(call: UnnumberedCall, step: int, number: int) -> bytes:
    """Return the payload of a call."""
    head = call.mode, call.flags, call.layout, step, number, call.start, call.wall, call.inputs, call.outputs
    return pack_call(*head, call.phases, call.replicas, call.stages)


def unnumbered_call(known: Definitions, span: Span, layout: int, parts: Sequence[Span]) -> UnnumberedCall:
    """Build a call from its span and the spans of its parts. `layout` must be known."""
    phases, slots = list(_NO_PHASES), [[] for _ in CALL_PHASES]  # type: list[int], Slots
    shares: dict[int, Span] = {}
    stages: list[int] = []
    of_stages: Slots = []
    for one in parts:
        if one.kind == Kind.REPLICA:
            shares.setdefault(one.site, one)
        elif one.kind == Kind.STAGE:
            if len(of_stages) < _MAX_STAGES and known.is_stage(one.site):
                stages += _stage(known, one, span.start)
                of_stages.append(_timed(one))
        elif one.kind in PRIMITIVES:
            _add_phase(phases, slots, one, span.start)
    inputs, outputs = known.known_sizes(span.inputs), known.known_sizes(span.outputs)
    failed = span.flags & Flag.FAILED
    replicas, of_replicas = _replicas_of(known, shares, layout, span.start)
    if not (of_replicas or of_stages or phases[2 * PRIMITIVES[Kind.PARALLEL_APPLY]] >= 0):
        replicas, of_replicas = _whole(known, span, layout, phases, slots, parts)
    elif of_replicas == [[]] and phases[2 * PRIMITIVES[Kind.PARALLEL_APPLY]] < 0:
        of_replicas = [_after_scatter(span, slots)]  # the module itself ran as the only replica
    why = Untimed.SAMPLED if span.flags & Flag.UNTIMED else Untimed.ON_CPU if of_stages else Untimed.NONE
    return UnnumberedCall(
        mode_of(span.flags),
        WIRE_FLAGS[span.flags & 15],
        layout,
        span.start,
        span.took,
        inputs,
        0 if failed else outputs,
        phases,
        () if of_stages else replicas,
        stages,
        [*slots, *(of_stages or of_replicas)],
        why,
    )


def _timed(span: Span) -> list[tuple[int, int]]:
    """Return the slot of one span; empty if it is not timed on devices."""
    return [(span.number, 1)] if span.flags & Flag.TIMED else []


def _add_phase(phases: list[int], slots: Slots, span: Span, start: int) -> None:
    """Add a phase to a call that began at `start`. A subclass of DataParallel may run a phase twice."""
    at = PRIMITIVES[span.kind]
    if phases[2 * at] < 0:
        phases[2 * at] = max(span.start - start, 0)
    phases[2 * at + 1] = min(phases[2 * at + 1] + span.took, _LARGEST)
    slots[at] += _timed(span)


def _replicas_of(known: Definitions, shares: dict[int, Span], layout: int, start: int) -> tuple[list[int], Slots]:
    """Return four numbers per replica, in order of index, and the slots of their times. A missing replica has zeros."""
    flat: list[int] = []
    slots: Slots = []
    for index in range(max((i for i in shares if i < known.layouts[layout].devices), default=-1) + 1):
        one = shares.get(index)
        if one is None:
            flat += (0, 0, 0, 0)
            slots.append([])
            continue
        outputs = 0 if one.flags & Flag.FAILED else known.known_sizes(one.outputs)
        flat += (known.known_sizes(one.inputs), outputs, max(one.start - start, 0), one.took)
        slots.append(_timed(one))
    return flat, slots


def _whole(
    known: Definitions, span: Span, layout: int, phases: Sequence[int], slots: Slots, parts: Sequence[Span]
) -> tuple[list[int], Slots]:
    """Return the single replica of an undivided call: the call without its scatter."""
    about = known.layouts[layout]
    if not about.devices or "replicas" in about.value["absent"]:
        return [], []
    inputs = span.inputs
    for one in parts:
        if one.kind == Kind.SCATTER and known.known_sizes(one.outputs):
            inputs = one.outputs
    began = phases[0] + phases[1] if phases[0] >= 0 else 0
    outputs = 0 if span.flags & Flag.FAILED else known.known_sizes(span.outputs)
    return [known.known_sizes(inputs), outputs, began, max(span.took - began, 0)], [_after_scatter(span, slots)]


def _after_scatter(span: Span, slots: Slots) -> list[tuple[int, int]]:
    """Return the slot of a call without its scatter."""
    slot = _timed(span)
    return slot and slot + [(number, -sign) for number, sign in slots[0]]


def _stage(known: Definitions, one: Span, start: int) -> tuple[int, ...]:
    failed = one.flags & Flag.FAILED
    outputs = 0 if failed else known.known_sizes(one.outputs)
    return one.site, known.known_sizes(one.inputs), outputs, max(one.start - start, 0), -1 if failed else one.took

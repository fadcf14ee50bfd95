"""Makes the row of a call from its span and the spans of its parts."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.device_waits import Pending, Slots
from dpmon.assemble.nesting import PRIMITIVES
from dpmon.record.history_rows import CallParts, CallRow
from dpmon.record.names import CALL_PHASES, Untimed
from dpmon.record.spans import Flag, Kind, Span

LARGEST = (1 << 62) - 1
"""Longest duration in a row (ns)."""
FLAGS = Flag.TRAINING | Flag.GRAD | Flag.FAILED | Flag.VIRTUAL
"""The flags of a span that its call keeps."""
_MAX_STAGES = 255
_APPLY = PRIMITIVES[Kind.PARALLEL_APPLY]
_Replica = tuple[int, int, int, int]


def mode_of(flags: int) -> str:
    """Return the mode of a call."""
    return "dp" if flags & Flag.DP else "single"


def unnumbered_call(known: KnownDefinitions, span: Span, layout: int, parts: Sequence[Span]) -> Pending:
    """Make the row of a call from its span and the spans of its parts: without step, number and device times.

    `layout` must be known.
    """
    phases: list[tuple[int, int] | None] = [None] * len(CALL_PHASES)
    slots: Slots = [[] for _ in CALL_PHASES]
    shares: dict[int, Span] = {}
    stages: list[tuple[int, int, int, int, int | None]] = []
    of_stages: Slots = []
    for one in parts:
        if one.kind == Kind.REPLICA:
            shares.setdefault(one.site, one)
        elif one.kind == Kind.STAGE:
            if len(of_stages) < _MAX_STAGES and one.site in known.stages:
                stages.append(_stage(known, one, span.start))
                of_stages.append(_timed(one))
        elif one.kind in PRIMITIVES:
            _add_phase(phases, slots, one, span.start)
    inputs, outputs = known.known_sizes(span.inputs), known.known_sizes(span.outputs)
    outputs = 0 if span.flags & Flag.FAILED else outputs
    replicas, of_replicas = _replicas_of(known, shares, layout, span.start)
    if not (of_replicas or of_stages or phases[_APPLY]):
        replicas, of_replicas = _whole(known, span, layout, phases, slots, parts)
    elif of_replicas == [[]] and not phases[_APPLY]:
        of_replicas = [_after_scatter(span, slots)]  # the module itself ran as the only replica
    why = Untimed.SAMPLED if span.flags & Flag.UNTIMED else Untimed.ON_CPU if of_stages else Untimed.NONE
    row = CallRow(
        *(0, 0, mode_of(span.flags), span.flags & FLAGS, layout, span.start, span.took, inputs, outputs),
        CallParts(phases, () if of_stages else replicas, stages),
    )
    return Pending(row, [*slots, *(of_stages or of_replicas)], why)


def _timed(span: Span) -> list[tuple[int, int]]:
    """Return the slot of one span; empty if it is not timed on devices."""
    return [(span.number, 1)] if span.flags & Flag.TIMED else []


def _add_phase(phases: list[tuple[int, int] | None], slots: Slots, span: Span, start: int) -> None:
    """Add a phase to a call that began at `start`. A subclass of DataParallel may run a phase twice."""
    at = PRIMITIVES[span.kind]
    offset, took = phases[at] or (max(span.start - start, 0), 0)
    phases[at] = offset, min(took + span.took, LARGEST)
    slots[at] += _timed(span)


def _replicas_of(
    known: KnownDefinitions, shares: dict[int, Span], layout: int, start: int
) -> tuple[Sequence[_Replica], Slots]:
    """Return the replicas, in order of index, and the slots of their times. A missing replica has zeros."""
    found: list[_Replica] = []
    slots: Slots = []
    for index in range(max((i for i in shares if i < len(known.layouts[layout].devices)), default=-1) + 1):
        one = shares.get(index)
        if one is None:
            found.append((0, 0, 0, 0))
            slots.append([])
            continue
        outputs = 0 if one.flags & Flag.FAILED else known.known_sizes(one.outputs)
        found.append((known.known_sizes(one.inputs), outputs, max(one.start - start, 0), one.took))
        slots.append(_timed(one))
    return found, slots


def _whole(
    known: KnownDefinitions,
    span: Span,
    layout: int,
    phases: Sequence[tuple[int, int] | None],
    slots: Slots,
    parts: Sequence[Span],
) -> tuple[Sequence[_Replica], Slots]:
    """Return the single replica of an undivided call: the call without its scatter."""
    about = known.layouts[layout]
    if not about.devices or "replicas" in about.absent:
        return (), []
    inputs = span.inputs
    for one in parts:
        if one.kind == Kind.SCATTER and known.known_sizes(one.outputs):
            inputs = one.outputs
    began = sum(phases[0] or (0,))
    outputs = 0 if span.flags & Flag.FAILED else known.known_sizes(span.outputs)
    replica = known.known_sizes(inputs), outputs, began, max(span.took - began, 0)
    return (replica,), [_after_scatter(span, slots)]


def _after_scatter(span: Span, slots: Slots) -> list[tuple[int, int]]:
    """Return the slot of a call without its scatter."""
    slot = _timed(span)
    return slot and slot + [(number, -sign) for number, sign in slots[0]]


def _stage(known: KnownDefinitions, one: Span, start: int) -> tuple[int, int, int, int, int | None]:
    failed = one.flags & Flag.FAILED
    outputs = 0 if failed else known.known_sizes(one.outputs)
    return one.site, known.known_sizes(one.inputs), outputs, max(one.start - start, 0), None if failed else one.took

"""Makes the rows of calls from their spans and the spans of their parts.

A script may use scatter, replicate, parallel_apply and gather itself. Such a composed call has one parallel_apply, the
scatters and replicates before it in the same step, and the next gather in that step. It lasts from the first of these
to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpmon.assemble.device_times import PendingTimes, Slots
from dpmon.assemble.nesting import PRIMITIVES
from dpmon.record.history_rows import Definitions
from dpmon.record.record_types import CallParts, CallRow
from dpmon.record.shared_names import CALL_PHASES, Untimed
from dpmon.record.span_format import Flag, Kind, Span

MAX_PHASE_NS = (1 << 62) - 1
"""Longest duration of a phase in a row (ns)."""
FLAGS = Flag.TRAINING | Flag.GRAD | Flag.FAILED | Flag.VIRTUAL | Flag.DP | Flag.BY_SCRIPT
"""The flags of a span that its call keeps."""
_SCATTER, _APPLY = PRIMITIVES[Kind.SCATTER], PRIMITIVES[Kind.PARALLEL_APPLY]
_Replica = tuple[int, int, int, int]


def build_call(definitions: Definitions, span: Span, parts: Sequence[Span]) -> tuple[CallRow, PendingTimes]:
    """Return a call without its number, from its span and the spans of its parts, and its device times to come.

    Its layout must be known.
    """
    layout = definitions.layouts[span.site]
    phases: list[tuple[int, int] | None] = [None] * len(CALL_PHASES)
    slots: Slots = [[] for _ in CALL_PHASES]
    replica_spans: dict[int, Span] = {}
    stages: list[tuple[int, int, int, int, int | None]] = []
    part_slots: Slots = []
    inputs, outputs, _, _ = _part_of_call(span, span.start)
    scattered = inputs
    for part in parts:
        if part.kind == Kind.REPLICA and part.site < len(layout.devices):
            replica_spans.setdefault(part.site, part)
        elif part.kind == Kind.STAGE and part.site in definitions.stages:
            stage_inputs, stage_outputs, offset, duration_ns = _part_of_call(part, span.start)
            known_ns = None if part.flags & Flag.FAILED else duration_ns
            stages.append((part.site, stage_inputs, stage_outputs, offset, known_ns))
            part_slots.append(_timed_slot(part))
        elif part.kind in PRIMITIVES:
            _add_phase(phases, slots, part, span.start)
            if part.kind == Kind.SCATTER:
                scattered = part.outputs or scattered
    untimed: int = Untimed.NONE
    if span.flags & Flag.UNTIMED:
        untimed = Untimed.SAMPLED
    elif stages:
        untimed = Untimed.ON_CPU
    replicas: list[_Replica] = []
    if not stages:
        for index in range(max(replica_spans, default=-1) + 1):
            replica = replica_spans.get(index)
            replicas.append((0, 0, 0, 0) if replica is None else _part_of_call(replica, span.start))
            part_slots.append([] if replica is None else _timed_slot(replica))
        scatter, scatter_slot = phases[_SCATTER], slots[_SCATTER]
        after_scatter = _timed_slot(span)
        if after_scatter:
            after_scatter += [(number, -sign) for number, sign in scatter_slot]
        if not (replicas or phases[_APPLY]) and layout.can_have_replicas:
            # The single replica of an undivided call is the call without its scatter.
            start_ns = sum(scatter or ())
            replicas = [(scattered, outputs, start_ns, max(span.took - start_ns, 0))]
            part_slots = [after_scatter]
        elif part_slots == [[]] and not phases[_APPLY]:
            part_slots = [after_scatter]  # the module itself ran as the only replica
    numbers = 0, span.flags & FLAGS, span.site, span.start, span.took, inputs, outputs
    call = CallRow(*numbers, CallParts(phases, replicas, stages))
    return call, PendingTimes([*slots, *part_slots], untimed)


def _timed_slot(span: Span) -> list[tuple[int, int]]:
    """Return the slot of a single span; an empty list if the span is not timed on devices."""
    return [(span.number, 1)] if span.flags & Flag.TIMED else []


def _add_phase(phases: list[tuple[int, int] | None], slots: Slots, span: Span, call_start: int) -> None:
    """Add a phase to a call that began at `call_start`. A subclass of DataParallel may run a phase twice."""
    index = PRIMITIVES[span.kind]
    offset, duration_ns = phases[index] or (max(span.start - call_start, 0), 0)
    phases[index] = offset, min(duration_ns + span.took, MAX_PHASE_NS)
    slots[index] += _timed_slot(span)


def _part_of_call(span: Span, call_start: int) -> _Replica:
    """Return (inputs, outputs, offset in ns, duration in ns) of a part of a call that began at `call_start`."""
    outputs = 0 if span.flags & Flag.FAILED else span.outputs
    return span.inputs, outputs, max(span.start - call_start, 0), span.took


class ComposedCallBuilder:
    """Composes calls from the primitives that the script uses, and passes each complete call to `finish`."""

    def __init__(self, definitions: Definitions, finish: Callable[[CallRow, PendingTimes], None]) -> None:
        self._definitions = definitions
        self._finish = finish
        self._partial: dict[int, list[Span]] = {}
        """By thread: the primitives of its unfinished call in order, with the replicas before their parallel_apply."""

    def add_primitive(self, span: Span, replicas: Sequence[Span]) -> int:
        """Add the span of a primitive, and the spans of its `replicas` if it is a parallel_apply.

        For a parallel_apply, return the definition of the call's inputs if it is known. Otherwise, return 0.
        """
        kind, thread, failed = span.kind, span.thread, span.flags & Flag.FAILED
        earlier_parts = self._partial.get(thread)
        has_parallel_apply = earlier_parts is not None and earlier_parts[-1].kind == Kind.PARALLEL_APPLY
        if kind == Kind.GATHER:
            if has_parallel_apply and not failed:
                self._partial[thread].append(span)
                self.flush(thread)
            return 0
        if has_parallel_apply:
            self.flush(thread)
        if failed and kind != Kind.PARALLEL_APPLY:
            return 0
        parts = self._partial.setdefault(thread, [])
        if kind != Kind.PARALLEL_APPLY:
            parts.append(span)
            return 0
        parts += [*(replica for replica in replicas if replica.kind == Kind.REPLICA), span]
        inputs = self._inputs(parts)
        if failed:
            self.flush(thread)
        return inputs

    def flush(self, thread: int) -> None:
        """Finish the call of a thread, because it has its gather or no gather will follow."""
        parts = self._partial.pop(thread, [])
        for part in parts:
            if part.kind == Kind.PARALLEL_APPLY and part.site in self._definitions.layouts:
                self._finish(*self._composed_call(parts, part))

    def flush_all(self) -> None:
        """Finish all calls, because the step has ended."""
        for thread in list(self._partial):
            self.flush(thread)

    def _inputs(self, parts: Sequence[Span]) -> int:
        """Return the definition of the first scattered inputs; 0 if it is unknown."""
        return next((part.inputs for part in parts if part.kind == Kind.SCATTER and part.inputs), 0)

    def _composed_call(self, parts: Sequence[Span], apply: Span) -> tuple[CallRow, PendingTimes]:
        start, last = min(part.start for part in parts), parts[-1]
        outputs = last.outputs if last.kind == Kind.GATHER else 0
        duration_ns = max(last.end - start, 0)
        call_span = apply._replace(start=start, took=duration_ns, inputs=self._inputs(parts), outputs=outputs)
        return build_call(self._definitions, call_span, parts)

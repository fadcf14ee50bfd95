"""Makes the rows of calls from their spans and the spans of their parts.

A script may use scatter, replicate, parallel_apply and gather itself. Such a call has one parallel_apply, the scatters
and replicates before it in the same step, and the next gather in that step. It lasts from the first of these to the
last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.device_times import PendingRow, Slots
from dpmon.assemble.nesting import PRIMITIVES
from dpmon.record.history_rows import CallParts, CallRow
from dpmon.record.shared_names import CALL_PHASES, Untimed
from dpmon.record.span_format import Flag, Kind, Span

LARGEST = (1 << 62) - 1
"""Longest duration of a phase in a row (ns)."""
FLAGS = Flag.TRAINING | Flag.GRAD | Flag.FAILED | Flag.VIRTUAL
"""The flags of a span that its call keeps."""
_APPLY = PRIMITIVES[Kind.PARALLEL_APPLY]
_Replica = tuple[int, int, int, int]


def mode_of(flags: int) -> str:
    """Return the mode of a call."""
    return "dp" if flags & Flag.DP else "single"


def unnumbered_call(known: KnownDefinitions, span: Span, layout: int, parts: Sequence[Span]) -> PendingRow:
    """Make the row of a call from its span and the spans of its parts: without step, number and device times.

    `layout` must be known.
    """
    about = known.layouts[layout]
    phases: list[tuple[int, int] | None] = [None] * len(CALL_PHASES)
    slots: Slots = [[] for _ in CALL_PHASES]
    shares: dict[int, Span] = {}
    stages: list[tuple[int, int, int, int, int | None]] = []
    of_parts: Slots = []
    inputs, outputs, _, _ = _part_of_call(known, span, span.start)
    scattered = inputs
    for one in parts:
        if one.kind == Kind.REPLICA and one.site < len(about.devices):
            shares.setdefault(one.site, one)
        elif one.kind == Kind.STAGE and one.site in known.stages:
            got, gave, offset, took = _part_of_call(known, one, span.start)
            stages.append((one.site, got, gave, offset, None if one.flags & Flag.FAILED else took))
            of_parts.append(_timed_slot(one))
        elif one.kind in PRIMITIVES:
            _add_phase(phases, slots, one, span.start)
            if one.kind == Kind.SCATTER:
                scattered = known.sizes_or_zero(one.outputs) or scattered
    why = Untimed.SAMPLED if span.flags & Flag.UNTIMED else Untimed.ON_CPU if stages else Untimed.NONE
    replicas: list[_Replica] = []
    if not stages:
        found = [shares.get(index) for index in range(max(shares, default=-1) + 1)]
        replicas = [(0, 0, 0, 0) if one is None else _part_of_call(known, one, span.start) for one in found]
        of_parts = [[] if one is None else _timed_slot(one) for one in found]
        after_scatter = _timed_slot(span) and _timed_slot(span) + [(number, -sign) for number, sign in slots[0]]
        if not (replicas or phases[_APPLY]) and about.devices and "replicas" not in about.absent:
            # The single replica of an undivided call is the call without its scatter.
            began = sum(phases[0] or (0,))
            replicas, of_parts = [(scattered, outputs, began, max(span.took - began, 0))], [after_scatter]
        elif of_parts == [[]] and not phases[_APPLY]:
            of_parts = [after_scatter]  # the module itself ran as the only replica
    row = CallRow(
        *(0, 0, mode_of(span.flags), span.flags & FLAGS, layout, span.start, span.took, inputs, outputs),
        CallParts(phases, replicas, stages),
    )
    return PendingRow(row, [*slots, *of_parts], why)


def _timed_slot(span: Span) -> list[tuple[int, int]]:
    """Return the slot of one span; empty if it is not timed on devices."""
    return [(span.number, 1)] if span.flags & Flag.TIMED else []


def _add_phase(phases: list[tuple[int, int] | None], slots: Slots, span: Span, start: int) -> None:
    """Add a phase to a call that began at `start`. A subclass of DataParallel may run a phase twice."""
    at = PRIMITIVES[span.kind]
    offset, took = phases[at] or (max(span.start - start, 0), 0)
    phases[at] = offset, min(took + span.took, LARGEST)
    slots[at] += _timed_slot(span)


def _part_of_call(known: KnownDefinitions, span: Span, start: int) -> _Replica:
    """Return inputs, outputs, offset and duration of a part of a call that began at `start`."""
    outputs = 0 if span.flags & Flag.FAILED else known.sizes_or_zero(span.outputs)
    return known.sizes_or_zero(span.inputs), outputs, max(span.start - start, 0), span.took


_NOT_SCATTERED = "the script did not scatter in this step"
_NO_INPUTS = "the script did not scatter: only the inputs of the replicas are known"
_NOT_REPLICATED = "the script did not replicate in this step"
_NOT_GATHERED = "the script did not gather the outputs of the replicas"


class ComposedCallBuilder:
    """Composes the calls of one process and passes each complete call to `finish`."""

    def __init__(self, known: KnownDefinitions, finish: Callable[[PendingRow], None]) -> None:
        self._known = known
        self._finish = finish
        self._partial: dict[int, list[Span]] = {}
        """The unfinished call of each thread: its primitives in order, and the replicas before their parallel_apply."""

    def add_primitive(self, span: Span, replicas: Sequence[Span]) -> int:
        """Take the span of a primitive, and the spans of its `replicas` if it is a parallel_apply.

        Return the definition of the call's inputs for a parallel_apply, if it is known; else 0.
        """
        kind, thread, failed = span.kind, span.thread, span.flags & Flag.FAILED
        before = self._partial.get(thread)
        applied = before is not None and before[-1].kind == Kind.PARALLEL_APPLY
        if kind == Kind.GATHER:
            if applied and not failed:
                self._partial[thread].append(span)
                self.flush(thread)
            return 0
        if applied:
            self.flush(thread)
        if failed and kind != Kind.PARALLEL_APPLY:
            return 0
        parts = self._partial.setdefault(thread, [])
        if kind != Kind.PARALLEL_APPLY:
            parts.append(span)
            return 0
        parts += [*(one for one in replicas if one.kind == Kind.REPLICA), span]
        inputs = self._inputs(parts)
        if failed:
            self.flush(thread)
        return inputs

    def flush(self, thread: int) -> None:
        """Finish the call of a thread: it has its gather, or no gather follows."""
        parts = self._partial.pop(thread, [])
        for one in parts:
            if one.kind == Kind.PARALLEL_APPLY and one.site in self._known.layouts:
                self._finish(self._composed_call(parts, one))

    def flush_all(self) -> None:
        """Finish all calls, because the step is over."""
        for thread in list(self._partial):
            self.flush(thread)

    def _inputs(self, parts: Sequence[Span]) -> int:
        """Return the sizes of the first scattered inputs; 0 if they are unknown."""
        numbers = (self._known.sizes_or_zero(one.inputs) for one in parts if one.kind == Kind.SCATTER)
        return next((number for number in numbers if number), 0)

    def _composed_call(self, parts: Sequence[Span], apply: Span) -> PendingRow:
        kinds, start, last = {one.kind for one in parts}, min(one.start for one in parts), parts[-1]
        outputs = self._known.sizes_or_zero(last.outputs) if last.kind == Kind.GATHER else 0
        absent = {}
        if Kind.SCATTER not in kinds:
            absent["scatter"] = _NOT_SCATTERED
            absent["inputs"] = _NO_INPUTS
        if Kind.REPLICATE not in kinds:
            absent["replicate"] = _NOT_REPLICATED
        if not (outputs or apply.flags & Flag.FAILED):
            absent["gather"] = absent["outputs"] = _NOT_GATHERED
        layout = self._known.with_absent(apply.site, absent)
        took = max(last.end - start, 0)
        whole = apply._replace(start=start, took=took, inputs=self._inputs(parts), outputs=outputs)
        return unnumbered_call(self._known, whole, layout, parts)

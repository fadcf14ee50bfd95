"""Groups spans into blocks. A block is a top-level span of a thread with the spans inside it.

One pass over these spans, in order of their ends, finds the exclusive time of each phase, the calls with their parts,
and the optimizers that stepped. It uses no recursion, so the nesting may be deep.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

from dpmon.record.record_types import BUCKET, MAX_SPANS
from dpmon.record.schema import SPAN_PHASES, SYNC_NUMBER
from dpmon.record.span_format import COUNTED, DOING, LEAD_NS, MAX_LEAD, WRAPPER_AT, Flag, Kind, Span

DATA, FORWARD, BACKWARD, OPTIMIZER, COPY, SYNC = map(
    SPAN_PHASES.index, ("data", "forward", "backward", "optimizer", "copy", "sync")
)
_PARTS = (Kind.REPLICA, Kind.STAGE, Kind.RESTARTED)
PHASE_OF = tuple(
    SPAN_PHASES.index(DOING[kind]) if DOING.get(kind) in SPAN_PHASES and kind not in _PARTS else -1
    for kind in range(max(DOING) + 1)
)
"""Phase of a step by kind of span; -1 for none."""
PRIMITIVES = {Kind.SCATTER: 0, Kind.REPLICATE: 1, Kind.PARALLEL_APPLY: 2, Kind.GATHER: 3}
"""Indices in dpmon.record.shared_names.CALL_PHASES by kind of span."""
CALLS = (Kind.CALL, Kind.WRAPPED)
LEARNS = Flag.TRAINING | Flag.GRAD
"""Flags of calls that train or record gradients."""
EDGE = (Kind.PAUSE, Kind.MEMORY)
"""Kinds of spans that are dpmon's time, not the script's. At the edge of a step, they belong to no step."""


_LEADS, _SIZES = struct.Struct("<4e"), struct.Struct("<2I")


class PhaseSums:
    """What the spans of a block or of a step add up to."""

    missing_spans = 0
    """Number of spans after the first MAX_SPANS."""
    skipped = False
    """Whether sampling left a span untimed on devices."""
    mixed: frozenset[int] = frozenset()
    """COPY and the phases around copies without device times; empty if there are none."""

    def __init__(self) -> None:
        self.times = [-1] * len(SPAN_PHASES)
        """Exclusive ns of each phase; -1: did not run."""
        self.counts: dict[str, int] = {}
        """Values of the quantities that were counted, and the highest number of a synchronized pass."""
        self.spans: list[tuple[int, int, int]] = []
        """Phase, start and duration of each occurrence of a phase, in order of start, outer before nested ones."""
        self.timed: list[tuple[int, int, int]] = []
        """Spans with device times: number, phase, and phase of the enclosing timed span (-1: none)."""

    def add_count(self, quantity: str, value: int) -> None:
        """Add to a quantity; for pass numbers, keep the highest."""
        before = self.counts.get(quantity, 0)
        self.counts[quantity] = max(before, value) if quantity == SYNC_NUMBER else before + value

    def truncate_spans(self) -> None:
        """Drop the spans after the first MAX_SPANS."""
        self.missing_spans += len(self.spans[MAX_SPANS:])
        del self.spans[MAX_SPANS:]

    def add(self, other: PhaseSums) -> None:
        """Add the sums of a later block."""
        for phase, took in enumerate(other.times):
            if took >= 0:
                self.times[phase] = max(self.times[phase], 0) + took
        for quantity, value in other.counts.items():
            self.add_count(quantity, value)
        self.spans += other.spans
        self.missing_spans += other.missing_spans
        self.timed += other.timed
        self.skipped = self.skipped or other.skipped
        self.mixed |= other.mixed


Block: TypeAlias = tuple[Span, Sequence[Span], Sequence[int], "BlockContents | None"]
"""The outermost span, the spans of its calls, the optimizers that stepped, and the contents (or None)."""


class BlockContents(PhaseSums):
    """Sums and lists made from the spans of a block, in one pass."""

    backward = False

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        """The lowest number of its spans."""
        self.parts: dict[int, list[Span]] = {}
        """Phases, replicas and stages of each call, by the number of its span."""
        self.by_script: list[Span] = []
        """Primitives that the script calls itself, in order."""
        self.memory_looks: list[int] = []
        self._within: list[tuple[int, int, int, int]] = []
        """Spans that the next span may enclose: start, duration, phase, number (-1: not timed on devices)."""
        self._open_parts: list[Span] = []
        """Parts of the unfinished call."""
        self._calls: list[Span] = []
        self._leads: list[int] = []
        """For each bucket of the next synchronized pass: how long before the last gradient it was ready (ns)."""
        self._stepped: list[Span] = []
        """The steps of optimizers."""

    def summarize(self, span: Span, inner: Sequence[Span]) -> Block:
        for part in inner:
            self._add(part)
        self._add(span)
        self.timed += [(number, phase, -1) for _, _, phase, number in self._within if number >= 0]
        self.spans.reverse()  # enclosing spans end last and must come first at equal starts
        self.spans.sort(key=lambda run: (run[1], -run[2]))
        self.truncate_spans()
        return span, self._calls, [one.site for one in self._stepped], self

    def _add(self, span: Span) -> None:
        kind, flags = span.kind, span.flags
        if kind in _PARTS:
            self._open_parts.append(span)
            return
        if kind in PRIMITIVES:
            if not flags & Flag.BY_SCRIPT:
                self._open_parts.append(span)
                return
            self._add_primitive(span)
            if span.inside in CALLS:  # its time belongs to the enclosing call
                self.spans.append((FORWARD, span.start, span.took))
                return
        elif kind in CALLS:
            self._add_call(span)
        elif kind == Kind.OPTIMIZER:
            # A nested optimizer step is part of the outer one.
            _pop_since(self._stepped, span.start)
            if not flags & Flag.FAILED:
                self._stepped.append(span)
        elif kind == Kind.BACKWARD:
            self.backward = True
        elif kind in COUNTED:
            self.add_count(COUNTED[kind], span.inputs | span.outputs << 32)
        elif kind == Kind.MEMORY:
            self.memory_looks.append(span.site)
        elif kind == Kind.SYNC:
            self._add_sync(span)
            if flags & Flag.UNSYNCED:
                return
        elif kind == Kind.BUCKETS:
            self._leads += decode_bucket_leads(span)
            return
        self._add_exclusive_time(span)

    def _add_sync(self, span: Span) -> None:
        leads, self._leads = self._leads, []
        if span.flags & Flag.UNSYNCED:
            self.add_count("unsynced", 1)
            return
        self.add_count("synced", 1)
        self.add_count(SYNC_NUMBER, span.inputs)
        count = span.site & (1 << WRAPPER_AT) - 1
        leads = leads[:count] if count > 1 else [0] * count  # a single bucket is ready at the last gradient
        self.spans += [(BUCKET, max(span.start - lead, 0), 0) for lead in leads]

    def _add_primitive(self, span: Span) -> None:
        self.by_script.append(span)
        if span.kind == Kind.PARALLEL_APPLY:
            self._calls.append(span)
            self.parts[span.number] = _pop_since(self._open_parts, span.start)

    def _add_call(self, span: Span) -> None:
        parts, within = _pop_since(self._open_parts, span.start), _pop_since(self._calls, span.start)
        if span.kind == Kind.CALL:
            recorded = [call for call in within if call.kind != Kind.CALL or call.flags & Flag.DP]
            if recorded:  # the data-parallel calls inside replace it
                self._calls += recorded
                return
        _pop_since(self.by_script, span.start)
        restart = max((place for place, part in enumerate(parts, 1) if part.kind == Kind.RESTARTED), default=0)
        self.parts[span.number] = parts[restart:]
        self._calls.append(span)

    def _add_exclusive_time(self, span: Span) -> None:
        """Add the span's exclusive time."""
        start, own, phase = span.start, span.took, PHASE_OF[span.kind]
        within = self._within
        timed = bool(span.flags & Flag.TIMED)
        if span.flags & Flag.UNTIMED:
            self.skipped = True
        while within and within[-1][0] >= start:
            _, took, inner_phase, number = within.pop()
            own -= took
            if number >= 0:
                self.timed.append((number, inner_phase, phase if timed else -1))
            elif inner_phase == COPY:
                self.mixed |= {COPY, phase}
        within.append((start, span.took, phase, span.number if timed and phase >= 0 else -1))
        if phase >= 0:
            self.times[phase] = max(self.times[phase], 0) + max(own, 0)
            self.spans.append((phase, start, span.took))


def make_block(span: Span, inner: Sequence[Span]) -> Block:
    """Make the block of a top-level span and the spans inside it (in order of number)."""
    kind = span[1]
    if inner:
        return BlockContents(inner[0][0]).summarize(span, inner)
    if kind in CALLS or (kind == Kind.PARALLEL_APPLY and span[2] & Flag.BY_SCRIPT):
        return span, (span,), (), None
    if kind == Kind.OPTIMIZER and not span[2] & Flag.FAILED:
        return span, (), (span[5],), None
    return span, (), (), None


def decode_bucket_leads(span: Span) -> list[int]:
    """Return the leads of four buckets (ns) in a span of kind BUCKETS."""
    leads = _LEADS.unpack(_SIZES.pack(span.inputs, span.outputs))
    return [int(lead * LEAD_NS) if 0 <= lead <= MAX_LEAD else 0 for lead in leads]


def _pop_since(spans: list[Span], start: int) -> list[Span]:
    """Take the spans that began at `start` or later from the end of a list."""
    at = len(spans)
    while at and spans[at - 1].start >= start:
        at -= 1
    taken = spans[at:]
    del spans[at:]
    return taken

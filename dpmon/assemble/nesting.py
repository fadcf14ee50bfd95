"""Groups spans into blocks. A block is a top-level span of a thread with the spans inside it.

One pass over these spans, in order of their ends, finds the exclusive time of each phase, the calls with their parts,
and the optimizers that stepped. There is no recursion, so the nesting may be deep.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from dpmon.record.record_types import BUCKET, MAX_SPANS
from dpmon.record.schema import SPAN_PHASES, SYNC_NUMBER
from dpmon.record.span_format import COUNTED, DOING, LEAD_NS, MAX_LEAD, WRAPPER_AT, Flag, Kind, Span

DATA, FORWARD, BACKWARD, OPTIMIZER, COPY, SYNC = map(
    SPAN_PHASES.index, ("data", "forward", "backward", "optimizer", "copy", "sync")
)
_PARTS = (Kind.REPLICA, Kind.STAGE, Kind.RESTARTED)
PHASE_OF = tuple(
    SPAN_PHASES.index(DOING[kind]) if DOING.get(kind) in SPAN_PHASES and kind not in _PARTS else -1
    for kind in range(256)
)
"""Phase of a step by kind of span; -1 for none."""
PRIMITIVES = {Kind.SCATTER: 0, Kind.REPLICATE: 1, Kind.PARALLEL_APPLY: 2, Kind.GATHER: 3}
"""Indices in dpmon.record.shared_names.CALL_PHASES by kind of span."""
CALLS = (Kind.CALL, Kind.WRAPPED)
LEARNS = Flag.TRAINING | Flag.GRAD
"""Flags of calls that train or record gradients."""
EDGE = (Kind.PAUSE, Kind.MEMORY)
"""Kinds of spans whose time is dpmon's, not the script's. At the edge of a step, they belong to no step."""


_LEADS, _SIZES = struct.Struct("<4e"), struct.Struct("<2I")


class PhaseSums:
    """The sums of the spans in a block or a step."""

    missing_spans = 0
    """Number of spans after the first MAX_SPANS."""
    skipped = False
    """Whether a span was not timed on devices, to limit the cost of timing."""
    mixed: frozenset[int] = frozenset()
    """COPY and the phases that enclose copies without device times; empty if there are none."""

    def __init__(self) -> None:
        self.times = [-1] * len(SPAN_PHASES)
        """Exclusive time of each phase (ns); -1 if it did not run."""
        self.counts: dict[str, int] = {}
        """The quantities that spans count, and the highest number of a sync pass."""
        self.spans: list[tuple[int, int, int]] = []
        """Phase, start and duration of each occurrence of a phase, in order of start, outer before nested ones. A
        closure divides the optimizer's occurrence in two."""
        self.timed: list[tuple[int, int, int]] = []
        """Spans with device times, as (number, phase, phase of the enclosing timed span), with -1 for no phase."""

    def add_count(self, quantity: str, value: int) -> None:
        """Add a value to a quantity. For the number of a sync pass, keep the highest value."""
        previous = self.counts.get(quantity, 0)
        self.counts[quantity] = max(previous, value) if quantity == SYNC_NUMBER else previous + value

    def truncate_spans(self) -> None:
        """Drop the spans after the first MAX_SPANS."""
        self.missing_spans += len(self.spans[MAX_SPANS:])
        del self.spans[MAX_SPANS:]

    def add(self, other: PhaseSums) -> None:
        """Add the sums of a later block."""
        for phase, duration_ns in enumerate(other.times):
            if duration_ns >= 0:
                self.times[phase] = max(self.times[phase], 0) + duration_ns
        for quantity, value in other.counts.items():
            self.add_count(quantity, value)
        self.spans += other.spans
        self.missing_spans += other.missing_spans
        self.timed += other.timed
        self.skipped = self.skipped or other.skipped
        self.mixed |= other.mixed


class Block(NamedTuple):
    """A top-level span of a thread, with the spans inside it."""

    span: Span
    calls: Sequence[Span]
    """Its calls, in order."""
    optimizers: Sequence[int]
    """Numbers of the optimizers that stepped in it, in order."""
    contents: BlockContents | None
    """None if there are no spans inside."""


class BlockContents(PhaseSums):
    """The sums and lists that one pass over the spans of a block makes."""

    backward = False

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, list[Span]] = {}
        """By number of a call's span: its phases, replicas and stages."""
        self.by_script: list[Span] = []
        """The primitives that the script calls itself, in order."""
        self._within: list[tuple[int, int, int, int]] = []
        """Spans that the next span may enclose, as (start, duration, phase, number or -1 if not timed on devices)."""
        self._open_parts: list[Span] = []
        """Parts of the unfinished call."""
        self._calls: list[Span] = []
        self._leads: list[int] = []
        """For each bucket of the next sync pass: how long before the last gradient it was ready (ns)."""
        self._optimizer_steps: list[Span] = []

    def summarize(self, span: Span, inner: Sequence[Span]) -> Block:
        """Return the block of a top-level span and the spans inside it, in order of number. Call it once."""
        for part in inner:
            self._add(part)
        self._add(span)
        self.timed += [(number, phase, -1) for _, _, phase, number in self._within if number >= 0]
        self.spans.reverse()  # enclosing spans end last and must come first at equal starts
        self.spans.sort(key=_start_and_length)
        self.truncate_spans()
        return Block(span, self._calls, [optimizer.site for optimizer in self._optimizer_steps], self)

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
            _pop_since(self._optimizer_steps, span.start)
            if not flags & Flag.FAILED:
                self._optimizer_steps.append(span)
        elif kind == Kind.BACKWARD:
            self.backward = True
        elif kind in COUNTED:
            self.add_count(COUNTED[kind], span.inputs | span.outputs << 32)
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
        parts, inner_calls = _pop_since(self._open_parts, span.start), _pop_since(self._calls, span.start)
        if span.kind == Kind.CALL:
            data_parallel_calls = [call for call in inner_calls if call.kind != Kind.CALL or call.flags & Flag.DP]
            if data_parallel_calls:  # the data-parallel calls inside replace it
                self._calls += data_parallel_calls
                return
        _pop_since(self.by_script, span.start)
        restart = max((index for index, part in enumerate(parts, 1) if part.kind == Kind.RESTARTED), default=0)
        self.parts[span.number] = parts[restart:]
        self._calls.append(span)

    def _add_exclusive_time(self, span: Span) -> None:
        """Add the exclusive time of a span to its phase."""
        start_ns, end_ns, exclusive_ns, phase = span.start, span.end, span.took, PHASE_OF[span.kind]
        stack = self._within
        is_timed = bool(span.flags & Flag.TIMED)
        if span.flags & Flag.UNTIMED:
            self.skipped = True
        while stack and stack[-1][0] >= start_ns:
            inner_start_ns, inner_ns, inner_phase, number = stack.pop()
            exclusive_ns -= inner_ns
            if phase == OPTIMIZER and inner_phase < 0:  # a closure
                self.spans.append((phase, inner_start_ns + inner_ns, end_ns - inner_start_ns - inner_ns))
                end_ns = inner_start_ns
            if number >= 0:
                self.timed.append((number, inner_phase, phase if is_timed else -1))
            elif inner_phase == COPY:
                self.mixed |= {COPY, phase}
        stack.append((start_ns, span.took, phase, span.number if is_timed else -1))
        if phase >= 0:
            self.times[phase] = max(self.times[phase], 0) + max(exclusive_ns, 0)
            self.spans.append((phase, start_ns, end_ns - start_ns))


def make_block(span: Span, inner: Sequence[Span]) -> Block:
    """Return the block of a top-level span and the spans inside it, in order of number."""
    if inner:
        return BlockContents().summarize(span, inner)
    kind = span.kind
    if kind in CALLS or (kind == Kind.PARALLEL_APPLY and span.flags & Flag.BY_SCRIPT):
        return Block(span, (span,), (), None)
    if kind == Kind.OPTIMIZER and not span.flags & Flag.FAILED:
        return Block(span, (), (span.site,), None)
    return Block(span, (), (), None)


def _start_and_length(run: tuple[int, int, int]) -> tuple[int, int]:
    """Return the sort key of a (phase, start, duration): by start, the longest first."""
    _, start, duration_ns = run
    return start, -duration_ns


def decode_bucket_leads(span: Span) -> list[int]:
    """Return how long before the last gradient each of four buckets was ready (ns), from a span of kind BUCKETS."""
    leads = _LEADS.unpack(_SIZES.pack(span.inputs, span.outputs))
    return [int(lead * LEAD_NS) if 0 <= lead <= MAX_LEAD else 0 for lead in leads]


def _pop_since(spans: list[Span], start: int) -> list[Span]:
    """Remove and return the spans that began at `start` or later from the end of a list."""
    index = len(spans)
    while index and spans[index - 1].start >= start:
        index -= 1
    popped = spans[index:]
    del spans[index:]
    return popped

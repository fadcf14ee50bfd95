"""Turns the blocks of a step into rows: its calls, the events between them, and the step itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dpmon.assemble.boundary_state import FetchTracker
from dpmon.assemble.call_rows import FLAGS, ComposedCallBuilder, mode_of, unnumbered_call
from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.device_times import PendingRow, TimingIntervalController, Waiting
from dpmon.assemble.event_queue import QueuedEvent
from dpmon.assemble.nesting import COPY, EDGE, LEARNS, PHASE_OF, PRIMITIVES, Block, BlockContents
from dpmon.assemble.sampled_collectives import SampledCollectives
from dpmon.assemble.step_totals import MAX_TIMED, StepTotals
from dpmon.record.history_rows import CallRow
from dpmon.record.record_types import MAX_SPANS
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import COUNTED, Flag, Kind, Span

Item: TypeAlias = "Block | QueuedEvent"
_SLOW = Flag.TIMED | Flag.UNTIMED | Flag.FAILED
_MAX_KNOWN = 1 << 15
_MAX_LOOKS = 64
_NOTHING: Sequence[Span] = ()


class StepRowBuilder:
    """Makes and numbers the rows of one process."""

    def __init__(self, known: KnownDefinitions, communication: SampledCollectives) -> None:
        self.known = known
        self._communication = communication
        self.number = 0
        """Number of steps that have ended."""
        self.calls = 0
        self.unmatched_fetches = 0
        """Number of batches fetched directly after another fetch; each may have its own call in the same step."""
        self.fetches = FetchTracker()
        self.thread = -1
        """The training thread; -1 while unknown."""
        self.memory_looks = {0: 0}
        """Per memory look: the last step that had begun."""
        self.awaiting_call: list[QueuedEvent] = []
        """Events that wait for the next call."""
        self.dropped = 0
        self.out: list[Waiting] = []
        self.sampling = TimingIntervalController()
        self._peaks: set[int] = set()
        self._totals = StepTotals()
        self._step = 1
        self._composer = ComposedCallBuilder(known, self._record_call)
        self._known: dict[tuple[int, int, int], tuple[bool, int, int, int, int]] = {}
        """What `_common_facts` returns, by (layout, inputs, outputs) of a call."""

    # ------------------------------------------------------------------------------------------ steps

    def step(self, totals: StepTotals, start: int, end: int) -> None:
        """Record a step."""
        self.number += 1
        self.out.append(totals.build_row(self.number, start, max(end - start, 0), self.fetches.pop_step_batches()))
        self._communication.close_step(self.number, start, end)
        if totals.timed or totals.skipped:
            self.sampling.count_step(max(end - start, 0), not totals.skipped)

    def record_items(self, items: Iterable[Item], part: StepTotals | None = None) -> StepTotals:
        """Record items of the open step; return what they and its recorded `part` add up to."""
        totals = self._totals = part or StepTotals()
        self._step = self.number + 1
        times, spans, thread = totals.times, totals.spans, self.thread
        for item in items:
            if isinstance(item, QueuedEvent):
                self.place_event(item, self.number + 1)
                continue
            span, calls, _, inner = item
            kind, flags = span[1], span[2]
            if span[4] == thread or kind == Kind.OPTIMIZER_FREED:
                if inner is not None:
                    totals.add(inner)
                    for look in inner.memory_looks:
                        self.note_memory_sample(look, self.number + 1)
                elif (phase := PHASE_OF[kind]) >= 0:
                    took = times[phase]
                    times[phase] = span[7] if took < 0 else took + span[7]
                    spans.append((phase, span[6], span[7]))
                    if kind in COUNTED:
                        totals.add_count(COUNTED[kind], span[8] | span[9] << 32)
                    if flags & _SLOW or phase == COPY:
                        totals.note_timing(span, phase)
                elif kind == Kind.MEMORY:
                    self.note_memory_sample(span[5], self.number + 1)
            if calls or kind in PRIMITIVES:
                self._calls(span, calls, (), inner)
            if kind == Kind.BACKWARD or (inner is not None and inner.backward):
                totals.end_micro_batch()
                totals.failed = flags & Flag.FAILED != 0
            if kind == Kind.OPTIMIZER:
                totals.failed = flags & Flag.FAILED != 0
                totals.stepped = totals.stepped or not totals.failed
        if len(spans) > MAX_SPANS:
            totals.truncate_spans()
        del totals.timed[MAX_TIMED + 1 :]
        self._composer.flush_all()
        return totals

    # ------------------------------------------------------------------------------------------ calls

    def add_calls_outside_step(self, block: Block) -> None:
        """Record calls of another thread while no step is open."""
        if not (block[1] or block[0][1] in PRIMITIVES):
            return
        self._step = max(self.number, 1)
        self._calls(*block)
        self._composer.flush_all()

    def _calls(self, span: Span, calls: Sequence[Span], _: Sequence[int], inner: BlockContents | None) -> None:
        if inner is None:
            if span.kind in PRIMITIVES:
                self._primitive(span, None)
            else:
                self._composer.flush(span.thread)
                self._call(span, None)
            return
        by_script = inner.by_script
        at = 0
        for call in calls:
            while at < len(by_script) and by_script[at].number <= call.number:
                self._primitive(by_script[at], inner)
                at += 1
            if call.kind != Kind.PARALLEL_APPLY:
                self._composer.flush(span.thread)
                self._call(call, inner)
        for primitive in by_script[at:]:
            self._primitive(primitive, inner)

    def _call(self, call: Span, inner: BlockContents | None) -> None:
        flags, thread, site, start, took, inputs, outputs = call[2], *call[4:]
        known = self._known.get((site, inputs, outputs)) or self._common_facts(call)
        if known is None:
            self.dropped += 1
            if thread == self.thread:
                self._count(flags, -1 - site, -1)
            return
        plain, inputs, outputs, module, rows = known
        if thread == self.thread:
            self._count(flags, module, rows)
        parts = inner.parts.get(call[0]) if inner is not None else None
        if parts or flags & _SLOW or not plain:
            self._record_call(unnumbered_call(self.known, call, site, parts or ()))
            return
        self.calls = number = self.calls + 1
        if self.awaiting_call:
            self._emit_awaiting_call()
        mode = mode_of(flags)
        self.out.append(CallRow(self._step, number, mode, flags & FLAGS, site, start, took, inputs, outputs))

    def _common_facts(self, call: Span) -> tuple[bool, int, int, int, int] | None:
        """Return and cache the common facts of calls with this layout and these sizes; None if the layout is unknown.

        The facts: whether a call without parts has exactly one replica; inputs and outputs (0: unknown); the module;
        the rows (-1: unknown).
        """
        site, inputs, outputs = call.site, self.known.sizes_or_zero(call.inputs), self.known.sizes_or_zero(call.outputs)
        layout = self.known.layouts.get(site)
        if layout is None:
            return None
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self.out += self.known.pop_unwritten_rows((site, inputs, outputs))
        plain = bool(layout.devices) and "replicas" not in layout.absent
        known = plain, inputs, outputs, self.known.module(site), self.known.batch_rows(inputs, site)
        self._known[call.site, call.inputs, call.outputs] = known
        return known

    def _record_call(self, call: PendingRow) -> None:
        self.calls += 1
        assert isinstance(call.row, CallRow)
        row = call.row._replace(step=self._step, call=self.calls)
        self.out += self.known.pop_unwritten_rows(sorted(row.definitions))
        if self.awaiting_call:
            self._emit_awaiting_call()
        if call.why == Untimed.SAMPLED:
            self.out.append(row.with_device_times([None] * len(call.slots), call.why))
        else:
            self.out.append(call._replace(row=row) if any(call.slots) else row)

    def _primitive(self, span: Span, inner: BlockContents | None) -> None:
        """Record a primitive that the script calls itself."""
        parts = inner.parts.get(span.number, _NOTHING) if inner is not None else _NOTHING
        inputs = self._composer.add_primitive(span, parts)
        if span.kind != Kind.PARALLEL_APPLY:
            return
        if span.site not in self.known.layouts:
            self.dropped += 1
        elif span.thread == self.thread:
            self._count(span.flags, self.known.module(span.site), self.known.batch_rows(inputs, span.site))

    def _count(self, flags: int, module: int, rows: int) -> None:
        """Count the rows of a call on the training thread."""
        totals = self._totals
        if not totals.mode:
            totals.mode = mode_of(flags)
        totals.failed = bool(flags & Flag.FAILED)
        if not flags & LEARNS:
            totals.evaluated_rows = max(totals.evaluated_rows, rows)
            return
        if flags & Flag.GRAD:  # without gradients, a GAN's generator only makes samples for its discriminator
            totals.add_training_call(module, rows)
        if self.unmatched_fetches and totals.is_micro_batch(module):
            self.unmatched_fetches -= 1
            if rows >= 0:
                totals.learned_rows = max(totals.learned_rows, 0) + rows
        elif rows > totals.learned_rows:
            totals.learned_rows = rows
        totals.learns = True
        totals.module, totals.passes = module, totals.backwards

    # ------------------------------------------------------------------------------------------ events

    def place_event(self, event: QueuedEvent, step: int) -> None:
        """Take an event that happened here. `step`: the last step that has begun."""
        if event.fill == "next":
            self.awaiting_call.append(event)
        else:
            self._emit(event, step, self.calls)

    def _emit_awaiting_call(self) -> None:
        for event in self.awaiting_call:
            self._emit(event, self._step, self.calls)
        self.awaiting_call = []

    def finish(self) -> None:
        """Emit the waiting events, because there are no more calls."""
        self._step, self.calls = self.number + 1, self.calls + 1
        self._emit_awaiting_call()

    def _emit(self, event: QueuedEvent, step: int, call: int) -> None:
        event.finalize(step, call, self.memory_looks)
        self.out.append(event)
        peaks = event.referenced_memory_samples()
        if peaks:
            self._peaks = set(peaks)

    def note_memory_sample(self, look: int, step: int) -> None:
        """Note a memory look taken after `step` began."""
        self.memory_looks[look] = step
        if len(self.memory_looks) > 2 * _MAX_LOOKS:
            newest = list(self.memory_looks)[-_MAX_LOOKS:]
            self.memory_looks = {
                look: step for look, step in self.memory_looks.items() if look in self._peaks or look in newest
            }


def end_without_overhead(items: Sequence[Item], end: int) -> int:
    """Return the end of a step, without dpmon's own spans just before `end`."""
    for item in reversed(items):
        if isinstance(item, QueuedEvent):
            continue
        span = item[0]
        if span.kind not in EDGE:
            break
        end = span.start
    return end

"""Turns the blocks of a step into rows: the events during it, and the step with its calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dpmon.assemble.boundary_state import FetchTracker, kind_of_call
from dpmon.assemble.call_rows import FLAGS, ComposedCallBuilder, build_call
from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.device_times import PendingTimes, RowQueue, TimingIntervalController
from dpmon.assemble.event_queue import QueuedEvent
from dpmon.assemble.nesting import COPY, EDGE, PHASE_OF, PRIMITIVES, Block, BlockContents
from dpmon.assemble.sampled_collectives import SampledCollectives
from dpmon.assemble.step_totals import MAX_TIMED, StepTotals
from dpmon.record.record_types import MAX_SPANS, CallRow, mode_of
from dpmon.record.schema import FORWARD_ONLY, STEP_KINDS, TRAINING
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import COUNTED, Flag, Kind, Span

Item: TypeAlias = "Block | QueuedEvent"
_NOT_PLAIN = Flag.TIMED | Flag.UNTIMED | Flag.FAILED
_MAX_CALL_FACTS = 1 << 15
_NO_SPANS: Sequence[Span] = ()


class StepRowBuilder:
    """Makes and numbers the rows of one process, and adds them to `rows`."""

    def __init__(self, definitions: KnownDefinitions, collectives: SampledCollectives, rows: RowQueue) -> None:
        self.definitions = definitions
        self._collectives = collectives
        self._rows = rows
        self.numbers = dict.fromkeys(STEP_KINDS, 0)
        """Number of steps so far, by kind."""
        self.calls = 0
        """Number of calls so far."""
        self.unmatched_fetches = 0
        """Number of batches fetched directly after another fetch. Each may have its own call in the same step."""
        self.fetches = FetchTracker()
        self.thread = -1
        """The training thread; -1 while unknown."""
        self.awaiting_events: list[QueuedEvent] = []
        """Events that wait for the next call."""
        self.dropped = 0
        self.sampling = TimingIntervalController()
        self._totals = StepTotals()
        self._call_builder = ComposedCallBuilder(definitions, self._record_call)
        self._call_facts: dict[tuple[int, int, int], tuple[bool, int, int, int, int]] = {}
        """By (layout, inputs, outputs) of a call: the result of `_find_call_facts`."""

    # ------------------------------------------------------------------------------------------ steps

    @property
    def number(self) -> int:
        """Number of training steps so far."""
        return self.numbers[TRAINING]

    def add_step(self, totals: StepTotals, start: int, end: int) -> None:
        """Add the row of a step. If it has no number, it only takes time."""
        number, kind, wall_ns = totals.number, totals.kind, max(end - start, 0)
        self.numbers[kind] = max(self.numbers[kind], number)
        self._rows.add(totals.build_row(start, wall_ns, self.fetches.pop_step_batches()))
        self._collectives.close_step(number if kind == TRAINING else 0, start, end)
        if totals.timed or totals.skipped:
            self.sampling.count_step(wall_ns, not totals.skipped)

    def add_calls_alone(self, totals: StepTotals) -> None:
        """Add a row of the calls so far, which the row of their step will not hold."""
        row = totals.pop_calls()
        if row is not None:
            self._rows.add(row)

    def record_items(
        self, items: Iterable[Item], kind: int, part: StepTotals | None = None, *, numbered: bool = True
    ) -> StepTotals:
        """Record items of the open step. Return the totals of these items and of the step's recorded `part`.

        `kind`: the kind of the step. `numbered`: whether the step gets a number.
        """
        totals = self._totals = part or StepTotals()
        totals.number, totals.kind = self.numbers[kind] + 1 if numbered else 0, kind
        last_started = self.number + (kind == TRAINING)
        times, spans, thread = totals.times, totals.spans, self.thread
        for item in items:
            if isinstance(item, QueuedEvent):
                self.place_event(item, last_started)
                continue
            span, calls, optimizers, contents = item
            kind, flags = span.kind, span.flags
            if optimizers:
                totals.optimizer_steps.update(optimizers)
            if span.thread == thread or kind == Kind.OPTIMIZER_FREED:
                if contents is not None:
                    totals.add(contents)
                elif (phase := PHASE_OF[kind]) >= 0:
                    previous_ns = times[phase]
                    times[phase] = max(previous_ns, 0) + span.took
                    spans.append((phase, span.start, span.took))
                    if kind in COUNTED:
                        totals.add_count(COUNTED[kind], span.inputs | span.outputs << 32)
                    if flags & _NOT_PLAIN or phase == COPY:
                        totals.note_timing(span, phase)
            if calls or kind in PRIMITIVES:
                self._record_calls(item)
            if kind == Kind.BACKWARD or (contents is not None and contents.backward):
                totals.end_micro_batch()
                totals.failed = flags & Flag.FAILED != 0
            if kind == Kind.OPTIMIZER:
                totals.failed = flags & Flag.FAILED != 0
                totals.stepped = totals.stepped or not totals.failed
        if len(spans) > MAX_SPANS:
            totals.truncate_spans()
        del totals.timed[MAX_TIMED + 1 :]
        self._call_builder.flush_all()
        return totals

    # ------------------------------------------------------------------------------------------ calls

    def add_calls_outside_step(self, block: Block) -> None:
        """Record the calls of another thread while no step is open."""
        if not (block.calls or block.span.kind in PRIMITIVES):
            return
        totals = self._totals = StepTotals()
        totals.kind = max(map(kind_of_call, block.calls), default=FORWARD_ONLY)
        self._record_calls(block)
        self._call_builder.flush_all()
        self.add_calls_alone(totals)

    def _record_calls(self, block: Block) -> None:
        span, calls, _, contents = block
        if contents is None:
            if span.kind in PRIMITIVES:
                self._record_primitive(span, None)
            else:
                self._call_builder.flush(span.thread)
                self._record_plain_call(span, None)
            return
        by_script = contents.by_script
        index = 0
        for call in calls:
            while index < len(by_script) and by_script[index].number <= call.number:
                self._record_primitive(by_script[index], contents)
                index += 1
            if call.kind != Kind.PARALLEL_APPLY:
                self._call_builder.flush(span.thread)
                self._record_plain_call(call, contents)
        for primitive in by_script[index:]:
            self._record_primitive(primitive, contents)

    def _record_plain_call(self, call: Span, contents: BlockContents | None) -> None:
        number, _, flags, _, thread, site, start, duration_ns, inputs, outputs = call
        call_facts = self._call_facts.get((site, inputs, outputs)) or self._find_call_facts(call)
        if call_facts is None:
            self.dropped += 1
            if thread == self.thread:
                self._count_call(flags, -1 - site, -1)
            return
        is_plain, inputs, outputs, module, rows = call_facts
        if thread == self.thread:
            self._count_call(flags, module, rows)
        parts = contents.parts.get(number) if contents is not None else None
        if parts or flags & _NOT_PLAIN or not is_plain:
            self._record_call(*build_call(self.definitions, call, parts or ()))
            return
        self.calls += 1
        if self.awaiting_events:
            self._emit_awaiting_events()
        self._totals.calls.append(CallRow(self.calls, flags & FLAGS, site, start, duration_ns, inputs, outputs))

    def _find_call_facts(self, call: Span) -> tuple[bool, int, int, int, int] | None:
        """Return and cache what calls with this layout and these sizes share; None if the layout is unknown.

        The result is (whether a call without parts has exactly one replica, inputs or 0, outputs or 0, module, rows or
        -1), with 0 and -1 for unknown values.
        """
        site, inputs, outputs = call.site, *map(self.definitions.sizes_or_zero, (call.inputs, call.outputs))
        layout = self.definitions.layouts.get(site)
        if layout is None:
            return None
        if len(self._call_facts) >= _MAX_CALL_FACTS:
            self._call_facts.clear()
        is_plain = bool(layout.devices) and "replicas" not in layout.absent
        call_facts = is_plain, inputs, outputs, self.definitions.module(site), self.definitions.batch_rows(inputs, site)
        self._call_facts[call.site, call.inputs, call.outputs] = call_facts
        return call_facts

    def _record_call(self, call: CallRow, times: PendingTimes) -> None:
        self.calls += 1
        call = call._replace(call=self.calls)
        if self.awaiting_events:
            self._emit_awaiting_events()
        if times.untimed == Untimed.SAMPLED:
            call = call.with_device_times([None] * len(times.slots), times.untimed)
        elif any(times.slots):
            self._totals.call_times[len(self._totals.calls)] = times
        self._totals.calls.append(call)

    def _record_primitive(self, span: Span, contents: BlockContents | None) -> None:
        """Record a primitive that the script itself called."""
        parts = contents.parts.get(span.number, _NO_SPANS) if contents is not None else _NO_SPANS
        inputs = self._call_builder.add_primitive(span, parts)
        if span.kind != Kind.PARALLEL_APPLY:
            return
        if span.site not in self.definitions.layouts:
            self.dropped += 1
        elif span.thread == self.thread:
            self._count_call(
                span.flags, self.definitions.module(span.site), self.definitions.batch_rows(inputs, span.site)
            )

    def _count_call(self, flags: int, module: int, rows: int) -> None:
        """Count the rows of a call on the training thread."""
        totals = self._totals
        if not totals.mode:
            totals.mode = mode_of(flags)
        totals.failed = bool(flags & Flag.FAILED)
        if not flags & Flag.GRAD:  # an evaluation, or a GAN's generator that makes samples for its discriminator
            totals.evaluated_rows = max(totals.evaluated_rows, rows)
            return
        totals.batch_models |= {module}
        totals.batch_rows = max(totals.batch_rows, rows)
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
        """Queue an event that happened now. `step`: the last step that has started."""
        if event.fill == "next":
            self.awaiting_events.append(event)
        else:
            self._emit_event(event, step, self.calls)

    def _emit_awaiting_events(self) -> None:
        for event in self.awaiting_events:
            self._emit_event(event, self.number + 1, self.calls)
        self.awaiting_events = []

    def finish(self) -> None:
        """Queue the waiting events, because no more calls will arrive."""
        self.calls += 1
        self._emit_awaiting_events()

    def _emit_event(self, event: QueuedEvent, step: int, call: int) -> None:
        self._rows.add(event.record(step, call))


def end_without_overhead(items: Sequence[Item], end: int) -> int:
    """Return the end of a step that ends at `end`, without dpmon's own spans just before."""
    for item in reversed(items):
        if isinstance(item, QueuedEvent):
            continue
        if item.span.kind not in EDGE:
            break
        end = item.span.start
    return end

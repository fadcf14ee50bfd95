"""Turns the blocks of a step into rows: the events during it, and the step with its calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dpmon.assemble.boundary_state import FetchTracker, kind_of_call
from dpmon.assemble.call_rows import FLAGS, ComposedCallBuilder, build_call
from dpmon.assemble.device_times import PendingTimes, RowQueue, TimingIntervalController
from dpmon.assemble.event_queue import QueuedEvent
from dpmon.assemble.nesting import COPY, EDGE, PHASE_OF, PRIMITIVES, Block, BlockContents
from dpmon.assemble.sampled_collectives import SampledCollectives
from dpmon.assemble.step_totals import MAX_TIMED, BatchCounts, StepTotals
from dpmon.record.history_rows import Definitions, Layout
from dpmon.record.record_types import MAX_SPANS, CallRow, count_rows, count_tokens, mode_of
from dpmon.record.schema import FORWARD_ONLY, STEP_KINDS, TRAINING
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import COUNTED, Flag, Kind, Span

Item: TypeAlias = "Block | QueuedEvent"
_NOT_PLAIN = Flag.TIMED | Flag.UNTIMED | Flag.FAILED
_NO_SPANS: Sequence[Span] = ()
_MASK_DECAY = 0.98  # the weight of earlier masks after each further one: about the newest 50 count
_MAX_EDGE_GAP_NS = 1_000_000
"""Longest time between a measurement at the edge of a step and that edge."""


class StepRowBuilder:
    """Makes and numbers the rows of one process, and adds them to `rows`."""

    def __init__(self, definitions: Definitions, collectives: SampledCollectives, rows: RowQueue) -> None:
        self.definitions = definitions
        self._collectives = collectives
        self._rows = rows
        self.numbers = dict.fromkeys(STEP_KINDS, 0)
        """Number of steps so far, by kind."""
        self.calls = 0
        """Number of calls so far."""
        self.fetches = FetchTracker()
        self.thread = -1
        """The training thread; -1 while unknown."""
        self.awaiting_events: list[QueuedEvent] = []
        """Events that wait for the next call."""
        self.dropped = 0
        self.sampling = TimingIntervalController()
        self._masks: dict[int, tuple[float, float]] = {}
        """By Flag.GRAD of their calls: decayed sums of the nonzero values, and of all values, of attention masks."""
        self._totals = StepTotals()
        self._counted_totals: StepTotals | None = None
        """The totals of the last step if its FLOPs were counted from its first call on."""
        self._flops_by_shape: dict[object, dict[str, int]] = {}
        self._call_builder = ComposedCallBuilder(definitions, self._record_call)

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

    def record_items(self, items: Iterable[Item], kind: int, *, numbered: bool) -> StepTotals:
        """Record the items of the open step. Return its totals.

        `kind`: the kind of the step. `numbered`: whether the step gets a number.
        """
        totals = self._totals = StepTotals()
        self._counted_totals = None
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
            if kind == Kind.PROFILE:
                totals.is_slowed = True
            if kind == Kind.FLOPS:
                totals.is_slowed, self._counted_totals = True, None if totals.calls else totals
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
        if self._flops_by_shape:
            totals.counts.update(self._flops_by_shape.get(totals.shape, {}))
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
        layout = self.definitions.layouts.get(site)
        if thread == self.thread:
            self._count_call(call, layout, inputs)
        if layout is None:
            self.dropped += 1
            return
        parts = contents.parts.get(number) if contents is not None else None
        if parts or flags & _NOT_PLAIN or not layout.can_have_replicas:
            self._record_call(*build_call(self.definitions, call, parts or ()))
            return
        self.calls += 1
        if self.awaiting_events:
            self._emit_awaiting_events()
        self._totals.calls.append(CallRow(self.calls, flags & FLAGS, site, start, duration_ns, inputs, outputs))

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
        layout = self.definitions.layouts.get(span.site)
        if layout is None:
            self.dropped += 1
        elif span.thread == self.thread:
            self._count_call(span, layout, inputs)

    def _count_call(self, call: Span, layout: Layout | None, inputs: int) -> None:
        """Count the rows and tokens of a call on the training thread. `inputs`: the definition of its batch's sizes."""
        totals, flags, module, counts = self._totals, call.flags, -1 - call.site, BatchCounts()
        if layout is not None:
            module, sizes = layout.module, self.definitions.sizes.get(inputs, ())
            rows = count_rows(sizes, layout.dim)
            is_lookup = layout.root.partition(" ")[0] == "Embedding"  # its integers may be categorical features
            tokens = 0 if is_lookup else count_tokens(sizes, self.definitions.sizes.get(call.outputs, ()))
            if self._masks and any(size.path.endswith("attention_mask") for size in sizes):
                nonzero, elements = self._masks.get(flags & Flag.GRAD) or next(iter(self._masks.values()))
                tokens = round(tokens * nonzero / elements)
            counts = BatchCounts(-1 if rows is None else rows, tokens)
        if not totals.mode:
            totals.mode = mode_of(flags)
        totals.failed = bool(flags & Flag.FAILED)
        if not flags & Flag.GRAD:  # an evaluation, or a GAN's generator that makes samples for its discriminator
            totals.evaluated = totals.evaluated.largest(counts)
            return
        totals.batch_models |= {module}
        totals.batch, totals.learned = totals.batch.largest(counts), totals.learned.largest(counts)
        totals.learns = True

    def add_mask(self, mask: Span) -> None:
        """Add an attention mask. As much of later calls with a mask as in the newest masks is padding, and no token."""
        learns = mask.flags & Flag.GRAD
        nonzero, elements = self._masks.get(learns, (0.0, 0.0))
        self._masks[learns] = nonzero * _MASK_DECAY + mask.inputs, elements * _MASK_DECAY + max(mask.outputs, 1)

    # ------------------------------------------------------------------------------------------ events

    def place_event(self, event: QueuedEvent, step: int) -> None:
        """Queue an event that happened now. `step`: the last step that has started."""
        if event.kind == "flops" and event.data["flops"] is not None and self._counted_totals is not None:
            figures = {name: event.data[name] for name in ("flops", "recomputed_flops") if event.data[name]}
            self._flops_by_shape[self._counted_totals.shape] = figures
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
    """Return the end of a step that ends at `end`, without dpmon's own spans just before.

    A measurement of memory after a backward pass may be followed by the script's own work, such as logging.
    """
    for item in reversed(items):
        if isinstance(item, QueuedEvent):
            continue
        is_followed_by_work = item.span.kind == Kind.MEMORY and end - item.span.end > _MAX_EDGE_GAP_NS
        if item.span.kind not in EDGE or is_followed_by_work:
            break
        end = item.span.start
    return end

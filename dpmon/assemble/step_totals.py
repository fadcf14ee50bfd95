"""Adds up the spans of a step, and makes the row of the step with its calls."""

from __future__ import annotations

from collections import Counter
from operator import add
from typing import NamedTuple

from dpmon.assemble.device_times import PendingStep, PendingTimes, Slots
from dpmon.assemble.nesting import BACKWARD, COPY, DATA, OPTIMIZER, PhaseSums
from dpmon.record.record_types import Batches, CallRow, Step
from dpmon.record.schema import SPAN_PHASES, STEP_PHASES, TRAINING
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import Flag, Span

_IN_ORDER = tuple((name, SPAN_PHASES.index(name)) for name in STEP_PHASES[:-1])
MAX_TIMED = 4096
"""A step with device times of more spans than this gets no device times."""


class BatchCounts(NamedTuple):
    """The rows (-1: unknown) and tokens (0: none, or unknown) of calls."""

    samples: int = -1
    tokens: int = 0

    def largest(self, other: BatchCounts) -> BatchCounts:
        """Return the larger of each count."""
        return BatchCounts(*map(max, self, other))


class StepTotals(PhaseSums):
    """The calls and the sums of one step."""

    number = 0
    """Its number; 0: it is no step of a loop."""
    kind = TRAINING
    learned = evaluated = BatchCounts()
    """Counts of the calls that train or record gradients, and of the other calls."""
    mode = ""
    learns = False
    """Whether a call trains or records gradients."""
    failed = False
    """Whether the last call, backward pass or optimizer step raised an exception."""
    backwards = 0
    """Number of backward passes so far."""
    batch_models: frozenset[int] = frozenset()
    """Modules of the calls that recorded gradients since the last backward pass."""
    batch = BatchCounts(0)
    """Counts of the largest of these calls."""
    first_models: frozenset[int] = frozenset()
    """`batch_models` before the first backward pass."""
    batches, sums = 0, BatchCounts(0)
    """Number of backward passes after such calls, and the sums of their `batch`. The number is -1 if one pass followed
    calls of other models or an optimizer step."""
    stepped = False
    """Whether an optimizer has stepped."""
    is_slowed = False
    """Whether dpmon counted its FLOPs or profiled it."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer_steps: Counter[int] = Counter()
        """Successful steps by number of the optimizer. The optimizer that steps most often makes the updates."""
        self.calls: list[CallRow] = []
        self.call_times: dict[int, PendingTimes] = {}
        """Device times of the calls that are still to come, by index in `calls`."""

    @property
    def shape(self) -> object:
        """What decides its FLOPs: layouts and inputs of its calls, and the number of its backward passes."""
        return tuple([(call.layout, call.inputs, call.flags & Flag.GRAD) for call in self.calls]), self.backwards

    def note_timing(self, span: Span, phase: int) -> None:
        """Note whether a span without inner spans has device times."""
        if span.flags & Flag.TIMED:
            self.timed.append((span.number, phase, -1))
        elif span.flags & Flag.UNTIMED:
            self.skipped = True
        elif phase == COPY:
            self.mixed |= {COPY, -1}

    @property
    def is_missing_update(self) -> bool:
        """Whether the step should learn but has no backward pass and no optimizer step."""
        return self.learns and self.times[BACKWARD] < 0 and self.times[OPTIMIZER] < 0

    def end_micro_batch(self) -> None:
        """Add a backward pass. It ends a micro-batch if the same models, and no optimizer, ran before each pass."""
        self.backwards += 1
        models = self.batch_models
        if not models:
            return
        self.first_models = self.first_models or models
        is_same = models == self.first_models and not self.stepped
        self.batches = self.batches + 1 if self.batches >= 0 and is_same else -1
        self.sums = BatchCounts(*map(add, self.sums, self.batch))
        self.batch_models, self.batch = frozenset(), BatchCounts(0)

    def build_row(self, start_ns: int, wall_ns: int, batches: Batches | None) -> Step | PendingStep:
        """Return the row of the step. `batches`: the batches that it fetched."""
        counts = self.learned if self.learned.samples >= 0 else self.evaluated
        # The backward passes divide a step into micro-batches, unless it fetched a single batch. In a GAN they do not,
        # because passes through the discriminator alone alternate with passes through both models.
        if self.batches > 1 and self.batch_models <= self.first_models and counts.samples >= 0:
            occurrences = [phase for phase, _, _ in self.spans]
            if occurrences.count(DATA) != 1:
                counts = self.sums
        spans = [(phase, span_start - start_ns, ns) for phase, span_start, ns in self.spans]
        if self.optimizer_steps:
            self.counts["updates"] = max(self.optimizer_steps.values())
        if counts.tokens:
            self.counts["tokens"] = counts.tokens
        times = self.times
        phases = {name: times[index] for name, index in _IN_ORDER if times[index] >= 0}
        phases["other"] = max(0, wall_ns - sum(phases.values()))
        known_samples = counts.samples if counts.samples >= 0 else None
        times_and_counts = start_ns, wall_ns, known_samples, phases, self.counts, spans, self.missing_spans
        values = self.number, self.mode, *times_and_counts
        row = Step(0, None, *values, batches=batches, kind=self.kind, calls=self.calls, is_slowed=self.is_slowed)
        pending = None
        if self.skipped:
            row = row.with_device_times([None] * len(SPAN_PHASES), Untimed.SAMPLED)
        elif self.timed:
            pending = PendingTimes(*self._device_time_slots(), DATA)
        return PendingStep(row, pending, self.call_times) if pending or self.call_times else row

    def pop_calls(self) -> Step | PendingStep | None:
        """Remove the calls, and return a row that has only them; None if there are none."""
        calls, self.calls = self.calls, []
        call_times, self.call_times = self.call_times, {}
        if not calls:
            return None
        start_ns = min(call.start for call in calls)
        wall_ns = max(call.end for call in calls) - start_ns
        row = Step(0, None, -self.number, calls[-1].mode, start_ns, wall_ns, None, {}, kind=self.kind, calls=calls)
        return PendingStep(row, None, call_times) if call_times else row

    def _device_time_slots(self) -> tuple[Slots, int]:
        """Return the slots of the phases' device times, and the reason for missing times (see PendingTimes)."""
        slots: Slots = [[] for _ in SPAN_PHASES]
        if len(self.timed) > MAX_TIMED:
            return slots, Untimed.TOO_MANY
        for number, phase, enclosing_phase in self.timed:
            if 0 <= phase < len(slots):
                slots[phase].append((number, 1))
            if 0 <= enclosing_phase < len(slots):
                slots[enclosing_phase].append((number, -1))
        if not self.mixed:
            return slots, Untimed.NONE
        for phase in self.mixed - {-1}:
            slots[phase] = []
        return slots, Untimed.COPIES

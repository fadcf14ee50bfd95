"""Finds the step of each sampled collective and of each loss, and how long a collective was queued.

The span of a sample arrives at the end of the sample. Its flags show whether the sample is discarded because it
contains an evaluation. Until then, the collectives are held.

A collective belongs to the step in which it was launched. Its span may arrive before that step ends, so it waits until
a step has ended after the launch. Collectives of one process group run one after the other, so a collective is queued
until all earlier ones have ended.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from dpmon.assemble.definitions import KnownDefinitions
from dpmon.record.history_rows import CollectiveRow, LossRow
from dpmon.record.span_format import Flag, Span

MAX_STEPS = 32
"""How many training steps are remembered. A collective or loss of an older step is recorded without a step."""
MAX_SAMPLES = 64
"""How many samples are remembered. A collective may end after several later samples."""
MAX_WAITING = 1 << 14
MAX_GROUPS = 256
MAX_EARLIER = 64
"""With how many earlier collectives of its group a collective is compared."""


@dataclass
class _Sample:
    """A sample that has ended."""

    start: int
    end: int
    discarded: bool
    missing: int
    """Number of its collectives that have not arrived. A collective that arrives when this is 0 is dropped: another
    thread launched it just as the sample ended, so the sample did not count it."""


class SampledCollectives:
    """Finds the steps of one process's sampled collectives and losses."""

    def __init__(self, definitions: KnownDefinitions) -> None:
        self._definitions = definitions
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=MAX_STEPS)
        """The last training steps, as (start, end, number)."""
        self._last_step_end = -1
        self._rows_before_sample_end: list[CollectiveRow] = []
        """Collectives of the unfinished sample."""
        self._sampled: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        """The last samples."""
        self._rows_before_step_end: list[CollectiveRow | LossRow] = []
        """Collectives and losses that wait until a step ends after their start."""
        self._recent_by_group: dict[str, list[tuple[int, int]]] = {}
        """By process group: its last collectives, as (start, end)."""
        self._ready: list[CollectiveRow | LossRow] = []

    def add_span(self, span: Span) -> bool:
        """Add the span of a collective or a sample. Return False if its definition is unknown."""
        quantity = span.inputs | span.outputs << 32
        unended_reason = span.took if span.flags & Flag.UNENDED else 0
        duration_ns = -1 if unended_reason else span.took
        queued_ns, is_launched = -1, False
        if span.site:
            definition = self._definitions.collectives.get(span.site)
            if definition is None:
                return False
            is_launched = definition.operation is not None
            if duration_ns >= 0 and is_launched:
                queued_ns = self._queue_delay_ns(definition.group, span)
        row = CollectiveRow(
            span.number, span.site, span.inside, unended_reason & 0xFF, 0, span.start, duration_ns, queued_ns, quantity
        )
        if is_launched:
            self._hold(row)
            return True
        if not span.site:
            discarded = bool(span.flags & Flag.FAILED)
            self._sampled.append(_Sample(span.start, span.end, discarded, quantity))
            held_rows, self._rows_before_sample_end = self._rows_before_sample_end, []
            for held_row in held_rows:
                self._hold(held_row)
        if span.site or not discarded:
            self._place_row(row)
        return True

    def add_loss(self, span: Span) -> bool:
        """Add the span of a loss. Return False if its definition is unknown."""
        (value,) = struct.unpack("=d", struct.pack("=Q", span.inputs | span.outputs << 32))
        if span.site not in self._definitions.losses:
            return False
        self._place_row(LossRow(span.site, 0, span.start, value))
        return True

    def _hold(self, row: CollectiveRow) -> None:
        """Hold a collective until its sample has ended. If the sample has ended already, place or discard it now."""
        sample = next((sample for sample in self._sampled if row.start < sample.end), None)
        if sample is None:
            self._rows_before_sample_end.append(row)
            if len(self._rows_before_sample_end) > MAX_WAITING:
                self._place_row(self._rows_before_sample_end.pop(0))
        elif not sample.discarded:
            if row.start < sample.start:  # its own sample is too old to be remembered
                self._place_row(row)
            elif sample.missing > 0:
                sample.missing -= 1
                self._place_row(row)

    def _queue_delay_ns(self, group: str, span: Span) -> int:
        """Return how long a collective waited for earlier ones of its group (ns).

        An earlier collective that ended later ran at the same time and does not count.
        """
        earlier = self._recent_by_group.setdefault(group, [])
        ends = [end for start, end in earlier if start <= span.start and span.start < end <= span.end]
        earlier.append((span.start, span.end))
        del earlier[:-MAX_EARLIER]
        if len(self._recent_by_group) > MAX_GROUPS:
            del self._recent_by_group[next(iter(self._recent_by_group))]
        return max(ends, default=span.start) - span.start

    def _place_row(self, row: CollectiveRow | LossRow) -> None:
        """Give a collective or a loss its step, or let it wait for the end of a step."""
        if self._last_step_end > row.time_of_step:
            self._ready.append(row._replace(step=self._step_number_at(row.time_of_step)))
        else:
            self._rows_before_step_end.append(row)
            if len(self._rows_before_step_end) > MAX_WAITING:
                self._ready.append(self._rows_before_step_end.pop(0))

    def _step_number_at(self, time_ns: int) -> int:
        """Return the number of the step that ran at a time; 0 if there was none."""
        index = bisect_right(self._steps, (time_ns, 1 << 63, 0))
        if index == 0:
            return 0
        _, end, number = self._steps[index - 1]
        return number if time_ns < end else 0

    def close_step(self, number: int, start: int, end: int) -> None:
        """Add a step that has ended, and place the collectives and losses that waited for it.

        `number`: 0 if it is no training step.
        """
        if number:  # others would push out the last training step, whose loss arrives when the process ends
            self._steps.append((start, end, number))
        self._last_step_end = end
        if self._rows_before_step_end:
            waiting_rows, self._rows_before_step_end = self._rows_before_step_end, []
            for row in waiting_rows:
                self._place_row(row)

    def finish(self) -> None:
        """Release all collectives, because no more samples or steps will end."""
        for row in self._rows_before_sample_end:  # the process was killed in a sample
            self._place_row(row)
        self._ready += self._rows_before_step_end
        self._rows_before_sample_end.clear()
        self._rows_before_step_end.clear()

    def pop_rows(self) -> list[CollectiveRow | LossRow]:
        """Return the collectives and losses with known steps, each once."""
        ready, self._ready = self._ready, []
        return ready

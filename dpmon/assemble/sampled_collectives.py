"""Finds the step of each sampled collective and of each loss.

A collective belongs to the step in which it was launched. Its span may arrive before that step ends, so it waits until
a step has ended after the launch.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque

from dpmon.record.history_rows import CollectiveRow, Definitions, LossRow
from dpmon.record.span_format import Kind, Span

MAX_STEPS = 32
"""How many training steps are remembered. A collective or loss of an older step is recorded without a step."""
MAX_WAITING = 1 << 14


class SampledCollectives:
    """Finds the steps of one process's sampled collectives and losses."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=MAX_STEPS)
        """The last training steps, as (start, end, number)."""
        self._last_step_end = -1
        self._rows_before_step_end: list[CollectiveRow | LossRow] = []
        """Collectives and losses that wait until a step ends after their start."""
        self._ready: list[CollectiveRow | LossRow] = []

    def add_span(self, span: Span) -> bool:
        """Add the span of a collective, a sample or a loss. Return False if its definition is unknown."""
        quantity = span.inputs | span.outputs << 32
        if span.kind == Kind.LOSS:
            (loss,) = struct.unpack("=d", struct.pack("=Q", quantity))
            if span.site in self._definitions.losses:
                self._place_row(LossRow(span.site, 0, span.start, loss))
                return True
        elif not span.site or span.site in self._definitions.collectives:
            self._place_row(CollectiveRow(span.number, span.site, span.inside, 0, span.start, span.took, quantity))
            return True
        return False

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
        self._ready += self._rows_before_step_end
        self._rows_before_step_end.clear()

    def pop_rows(self) -> list[CollectiveRow | LossRow]:
        """Return the collectives and losses with known steps, each once."""
        ready, self._ready = self._ready, []
        return ready

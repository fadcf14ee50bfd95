"""Finds, for each collective of a sampled step, when it could begin and in which step it ran; for a loss, its step.

The span of a sample arrives at the end of the sample. Its flags show whether the sample is discarded because it holds
an evaluation. The collectives are held until then.

A collective belongs to the step in which it was launched. Its span may arrive before that step ends. So it waits until
a step has ended after the launch. Collectives of one process group run one after the other, so a collective could begin
once it was launched and all earlier ones had ended.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from dpmon.assemble.definitions import KnownDefinitions
from dpmon.record.history_rows import CollectiveRow, Definition, LossRow
from dpmon.record.span_format import Flag, Span

MAX_STEPS = 32
"""Most remembered steps. A collective that ends more than this many steps later is recorded without a step."""
MAX_SAMPLES = 64
"""Limit of remembered samples: a collective may end after several later samples."""
MAX_WAITING = 1 << 14
MAX_GROUPS = 256
MAX_EARLIER = 64
"""Most earlier collectives of a group to compare a collective with."""


@dataclass
class _Sample:
    """A sample that is over."""

    start: int
    end: int
    discarded: bool
    missing: int
    """Number of its collectives that have not arrived. One that arrives when this is 0 is dropped: another thread
    launched it just as the sample ended, and the sample does not count it."""


class SampledCollectives:
    """The collectives of one process."""

    def __init__(self, known: KnownDefinitions) -> None:
        self._known = known
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=MAX_STEPS)
        """Start, end and number of the last steps."""
        self._held: list[CollectiveRow] = []
        """Collectives of the unfinished sample."""
        self._sampled: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        """The last samples."""
        self._waiting: list[CollectiveRow | LossRow] = []
        """Collectives and losses that wait until a step ends after their start."""
        self._before: dict[str, list[tuple[int, int]]] = {}
        """Start and end of the last collectives by group."""
        self._ready: list[CollectiveRow | LossRow] = []
        self.skips = False
        """Whether to discard the next sample, because a predecessor may have read a part of it."""

    def add_span(self, span: Span) -> bool:
        """Take a span; False if its definition is unknown."""
        quantity = span.inputs | span.outputs << 32
        unended = span.took if span.flags & Flag.UNENDED else 0
        took = -1 if unended else span.took
        queued, launched = -1, False
        if span.site:
            facts = self._known.collectives.get(span.site)
            if facts is None:
                return False
            launched = facts.operation is not None
            if took >= 0 and launched:
                queued = self._queue_delay_ns(facts.group, span)
        one = CollectiveRow(span.number, span.site, span.inside, unended & 0xFF, 0, span.start, took, queued, quantity)
        if launched:
            self._hold(one)
            return True
        if not span.site:
            discarded, self.skips = span.flags & Flag.FAILED or self.skips, False
            self._sampled.append(_Sample(span.start, span.end, bool(discarded), quantity))
            held, self._held = self._held, []
            for before in held:
                self._hold(before)
        if span.site or not discarded:
            self._place(one)
        return True

    def add_loss(self, span: Span) -> bool:
        """Take the span of a loss; False if its definition is unknown."""
        (value,) = struct.unpack("=d", struct.pack("=Q", span.inputs | span.outputs << 32))
        if span.site not in self._known.losses:
            return False
        self._place(LossRow(span.site, 0, span.start, value))
        return True

    def _hold(self, one: CollectiveRow) -> None:
        """Hold a collective until its sample is over. If the sample is over already, place or discard it now."""
        sample = next((each for each in self._sampled if one.start < each.end), None)
        if sample is None:
            self._held.append(one)
            if len(self._held) > MAX_WAITING:
                self._place(self._held.pop(0))
        elif not sample.discarded:
            if one.start < sample.start:  # its own sample is too long ago to be remembered
                self._place(one)
            elif sample.missing > 0:
                sample.missing -= 1
                self._place(one)

    def _queue_delay_ns(self, group: str, span: Span) -> int:
        """Return how long a collective waited for earlier ones of its group (ns).

        An earlier collective that ended later ran at the same time and does not count.
        """
        before = self._before.setdefault(group, [])
        ends = [end for start, end in before if start <= span.start and span.start < end <= span.end]
        before.append((span.start, span.end))
        del before[:-MAX_EARLIER]
        if len(self._before) > MAX_GROUPS:
            del self._before[next(iter(self._before))]
        return max(ends, default=span.start) - span.start

    def _place(self, one: CollectiveRow | LossRow) -> None:
        if self._steps and self._steps[-1][1] > one.time_of_step:
            self._ready.append(one._replace(step=self._step_at(one.time_of_step)))
        else:
            self._waiting.append(one)
            if len(self._waiting) > MAX_WAITING:
                self._ready.append(self._waiting.pop(0))

    def _step_at(self, time: int) -> int:
        """Return the step that ran at a time; 0 for none."""
        at = bisect_right(self._steps, (time, 1 << 63, 0))
        if at == 0:
            return 0
        _, end, number = self._steps[at - 1]
        return number if time < end else 0

    def close_step(self, number: int, start: int, end: int) -> None:
        """Note the end of a step, and place what waited for it."""
        self._steps.append((start, end, number))
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._place(one)

    def finish(self) -> None:
        """Release all collectives, because no more samples or steps end."""
        for one in () if self.skips else self._held:  # the process was killed in a sample
            self._place(one)
        self._ready += self._waiting
        self._held.clear()
        self._waiting.clear()

    def pop_rows(self) -> list[CollectiveRow | LossRow | Definition]:
        """Return the collectives and losses with known steps, each once, with their definitions."""
        found: list[CollectiveRow | LossRow | Definition] = []
        for one in self._ready:
            found += self._known.pop_unwritten_rows((one.definition,))
            found.append(one)
        self._ready.clear()
        return found

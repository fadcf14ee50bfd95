"""Where, process by process, what is told by sums ends and what is given in full begins.

Rings are taken over in turn, so that the ids of several lie in disorder, by as much as a ring holds; those of one
process are in the order of its time.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from dpmon.record.codec import RecordError, call_head
from dpmon.run.kept import Kept, named
from dpmon.run.rollup import Gathered, Rollup
from dpmon.run.rows import step_columns

__all__ = ["Edge", "Edges", "Spans", "last_given"]

_SECOND = 1_000_000_000
_FINE_S = 660
"""So long before the loaded records seconds are given, before that minutes."""
_LOOSE = 8
"""Rows of one process whose order is not trusted: its threads write in turn."""
_ALL_S = 1 << 40
_ROWS = 50
"""So many rows are taken in between two turns of somebody else."""


class Edge(NamedTuple):
    """Of one process."""

    end_s: int
    """The last second of which something is told."""
    cut: bool
    """Whether rows of that second or minute are not to be told: they are given in full, or came later."""


class Spans:
    """First and last id of what a history has in full of each process; remembered."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._found: dict[int, tuple[int, int] | None] = {}

    def of(self, process: int) -> tuple[int, int] | None:
        """None: there is nothing."""
        if process not in self._found:
            self._found[process] = self._kept.span(process)
        return self._found[process]


class Edges:
    """For what is told of the time before the ids above `first`, which are given up to `until_ns` (None: all)."""

    def __init__(self, kept: Kept, spans: Spans, first: int, until_ns: int | None) -> None:
        self._kept, self._spans = kept, spans
        self._first, self._until = first, until_ns
        self._edges: dict[int, Edge] = {}
        self._untold: dict[int, dict[tuple[int, str], Gathered]] = {}
        after = kept.time_from(first + 1, events=False)
        if until_ns is not None:
            oldest = until_ns if after is None else min(after, until_ns)
        else:
            oldest = kept.newest_ns() + _SECOND if after is None else after
        self.fine = max((oldest // _SECOND - _FINE_S) // 60 * 60, kept.seconds_from())
        """From this second on there are sums of seconds, before it of minutes."""

    @property
    def until_s(self) -> int:
        """The second up to which anything is told at all."""
        return _ALL_S if self._until is None else self._until // _SECOND

    def of(self, process: int) -> Edge:
        """That of one process."""
        found = self._edges.get(process)
        if found is None:
            found = self._edges[process] = self._find(process)
        return found

    def _find(self, process: int) -> Edge:
        span, until = self._spans.of(process), self._until
        oldest = None if span is None else self._end(process, span[0], span[1])
        if span is None or oldest is None or (until is not None and oldest > until):
            # Of what nothing is left in full, the second that has begun is not told.
            return Edge(_ALL_S if until is None else until // _SECOND - 1, False)
        low, high = span
        end = self._end(process, low, min(self._first, high), back=True) if self._first >= low else oldest
        end = oldest if end is None else end
        if high <= self._first and (until is None or end <= until):
            return Edge(end // (60 * _SECOND) * 60 + 59, False)
        return Edge((end if until is None else min(end, until)) // _SECOND, True)

    def _end(self, process: int, low: int, high: int, *, back: bool = False) -> int | None:
        """When the first of its rows was over (with `back` the last), as far as they know it."""
        rows = islice(self._kept.rows_of(process, low, high, back=back), _LOOSE)
        ends = [end for row in rows if (end := _end_of(row)) is not None]
        return (max(ends) if back else ends[0]) if ends else None

    @property
    def latest_s(self) -> int:
        """The last second of which something is told, of any process."""
        return max((self.of(ring.process).end_s for ring in self._kept.rings.values()), default=_ALL_S)

    def whole(self, process: int, minute_s: int) -> bool:
        """Whether this minute is told as it is."""
        edge = self.of(process)
        return minute_s + 60 <= edge.end_s + (not edge.cut)

    def cut_minutes(self) -> list[int]:
        """Those that an edge cuts in two, where the sums of their seconds are not told or were deleted."""
        edges = [self.of(process) for process in {ring.process for ring in self._kept.rings.values()}]
        return sorted({edge.end_s // 60 * 60 for edge in edges if edge.cut and edge.end_s < self.fine})

    def tells(self, rollup: Rollup, width: int) -> bool:
        """Take out of `rollup`, of a second or of a minute that is cut, what is not to be told; whether any is left.

        `look` first.
        """
        edge = self.of(rollup.process)
        if rollup.start_s > edge.end_s or (width > 1 and not (edge.cut and edge.end_s < rollup.start_s + width)):
            return False
        if edge.cut:
            untold = self._untold.get(rollup.process, {})
            for second in range(rollup.start_s, rollup.start_s + width):
                gathered = untold.get((second, rollup.mode))
                if gathered is not None:
                    _take_out(rollup, gathered)
        return rollup.steps > 0 or rollup.calls > 0

    def look(self) -> Iterator[None]:
        """Find what is given in full or came later, of the time up to the edges; None in between: it takes a while."""
        number = 0
        for process in {ring.process for ring in self._kept.rings.values()}:
            edge, span = self.of(process), self._spans.of(process)
            if not edge.cut or span is None:
                continue
            before_s = edge.end_s + 1 if edge.end_s >= self.fine else edge.end_s // 60 * 60 + 60
            found = self._untold[process] = defaultdict(Gathered)
            for row in self._untold_rows(process, span, before_s * _SECOND):
                if number % _ROWS == 0:
                    yield
                number += 1
                with suppress(RecordError, ValueError, TypeError, struct.error, IndexError):
                    if row[1] == "steps":
                        _, _, mode, start, wall, _, _ = step_columns(row)
                        found[(start + wall) // _SECOND, mode].steps.append(named(row))
                    else:
                        _, _, _, _, _, _, mode, start, wall, _, payload = row
                        found[(start + wall) // _SECOND, mode].calls.append(call_head(payload)[10:])

    def _untold_rows(self, process: int, span: tuple[int, int], before_ns: int) -> Iterator[tuple[Any, ...]]:
        beyond = 0
        for row in self._kept.rows_of(process, max(self._first + 1, span[0]), span[1]):
            end = _end_of(row)
            if end is not None and end < before_ns:
                yield row
            beyond += end is not None and end >= before_ns
            if beyond >= _LOOSE:
                break
        if self._until is None:
            return
        beyond = 0
        for row in self._kept.rows_of(process, span[0], min(self._first, span[1]), back=True):
            end = _end_of(row)
            if end is not None and self._until < end < before_ns:
                yield row
            beyond += end is not None and end <= self._until
            if beyond >= _LOOSE:
                break


def _end_of(row: tuple[Any, ...]) -> int | None:
    """When what is in a row of calls or steps, as in `Kept.rows`, was over; None if it does not say."""
    start, wall = (row[7], row[8]) if row[1] == "calls" else (row[6], row[7])
    return start + wall if type(start) is int and type(wall) is int else None


def last_given(kept: Kept, spans: Spans, first: int, until_ns: int) -> int:
    """The highest of the ids above `first` of what was over at `until_ns`, of any process; `first` if there is none."""
    found = first
    for process in {ring.process for ring in kept.rings.values()}:
        span = spans.of(process)
        low, high = first, first if span is None else span[1] + 1
        while high - low > 1:
            middle = (low + high) // 2
            row = next(kept.rows_of(process, middle, high), None)
            end = None if row is None else _end_of(row)
            if row is None or end is None or end > until_ns:
                high = middle
            else:
                low = row[0]
        found = max(found, low)
    return found


def _take_out(rollup: Rollup, gathered: Gathered) -> None:
    out = Rollup(rollup.start_s, rollup.process, rollup.mode)
    out.add(gathered)
    rollup.steps -= out.steps
    rollup.calls -= out.calls
    rollup.samples -= out.samples
    rollup.unknown -= out.unknown
    rollup.pace.add(out.pace, -1)
    for index, value in enumerate(out.sums):
        if value is not None:
            rollup.sums[index] = (rollup.sums[index] or 0) - value
    for key, count in out.counts.items():
        rollup.counts[key] = rollup.counts.get(key, 0) - count
    if gathered.steps and rollup.last_step is not None:
        rollup.last_step = min(rollup.last_step, min(row["step"] for row in gathered.steps) - 1)

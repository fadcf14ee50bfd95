"""Reads the rows of one training process: its spans and lines, through the assembler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpmon.assemble.assembler import FULL_READ_SPANS, Assembler
from dpmon.record.history_rows import Row
from dpmon.record.span_format import Span
from dpmon.span_reader import SpanReader, current_span_in
from dpmon.span_ring import HeaderWord, RingError
from dpmon.store.rings import RingRow

_BACKLOG_DIVISOR = 8
"""If one read returns a ring's slots divided by this number, its process may write faster than the reader reads."""


class SpanSource:
    """Reads the rows of one training process from its ring and the lines next to it."""

    def __init__(self, path: Path, row: RingRow | None) -> None:
        """Continue with the first span that `row` does not count as read: the step that was open is lost.

        If the row has another process id, it belongs to an earlier, deleted ring: this ring is read from its start.
        Raises RingError or OSError.
        """
        self._ring = ring = SpanReader(str(path))
        missed = 0 if row is None else row.missed
        self.row = RingRow(path.name, ring.process, ring.rank, ring.pid, missed=missed)
        """How much of the ring is in the history and its next batch, once `update_position` was called."""
        self.over = False
        """Whether the process has ended and all its rows were returned."""
        self._assembler = Assembler()
        self._spans: list[Span] = []
        """Spans that were read but not yet fed to the assembler."""
        self._feed_again = True
        """Whether to feed the assembler without input, because it returns the events of a feed only at the next one."""
        self._timing_interval = 0
        """The last requested rate of device timing: one step in this many."""
        self._reported_span = (0, 0)
        """(Kind, start) of the training thread's current span, if it was reported since the last feed; else (0, 0)."""
        if row is not None and row.pid == ring.pid:
            self.row = replace(row)
            try:
                self._resume(self.row)
            except BaseException:  # each new try opens the ring again
                ring.close()
                raise
        self._missed_before = missed

    def _resume(self, row: RingRow) -> None:
        """Continue after another supervisor."""
        lines = row.lines or 0
        self.over = row.ended
        if not self.over:
            self._assembler.resume(self._lines_until(lines), row.events, row.last_steps, row.last_call or 0)
        self._ring.position, self._ring.lines_position = row.position, lines

    def _lines_until(self, end: int) -> Iterator[Mapping[str, Any]]:
        """Yield the lines up to byte `end` of their file. The damaged ones are already counted."""
        self._ring.lines_position = 0
        for part in self._ring.lines(end):
            yield from part
        self._ring.damaged_lines = 0

    def read_rows(self, now_ns: int, process_exited: bool) -> tuple[list[Row], bool]:
        """Return the new rows, and whether the ring filled faster than it was read. Raises RingError or OSError.

        `now_ns`: monotonic. `process_exited`: its process was gone before this call.
        """
        if self.over:
            return [], False
        ring = self._ring
        start_position = ring.position
        # The words are read before the spans, so that all spans before a thread's current span are included.
        words = ring.header_words()
        self._spans += ring.read(now_ns, process_ended=process_exited)
        if not ring.at_end and len(self._spans) < FULL_READ_SPANS:
            # Reading stopped at an empty slot. Wait until it is filled: if the assembler got so few spans, it would
            # conclude that it has caught up.
            return [], False
        rows = self._feed_assembler()
        if ring.at_end and self._assembler.thread >= 0:
            rows += self._report_current_span(*current_span_in(words, self._assembler.thread))
        if self._assembler.timing_interval not in (0, self._timing_interval):
            self._timing_interval = self._assembler.timing_interval
            with suppress(RingError, OSError):  # truncated or not writable: keep the old sampling
                ring.request_device_timing(self._timing_interval)
        if ring.at_end and (process_exited or words[HeaderWord.ENDED]):
            self.over = True
            rows += self._assembler.finish()  # they belong to the open step
        return rows, ring.position - start_position >= ring.slots // _BACKLOG_DIVISOR

    def _feed_assembler(self) -> list[Row]:
        """Feed the assembler the spans and lines read so far."""
        lines = [line for chunk in self._ring.lines() for line in chunk]
        spans, self._spans = self._spans, []
        if not (spans or lines or self._feed_again):
            return []
        self._feed_again = bool(spans or lines)
        if spans:
            self._reported_span = (0, 0)
        return self._assembler.feed(spans, lines)

    def _report_current_span(self, kind: int, since_ns: int) -> list[Row]:
        """Report the training thread's current span to the assembler."""
        if since_ns == 0 or (kind, since_ns) == self._reported_span:
            return []
        self._reported_span = (kind, since_ns)
        return self._assembler.take_current_span(kind, since_ns)

    def update_position(self) -> None:
        """Update `row` to the position that was read."""
        ring, assembler, row = self._ring, self._assembler, self.row
        row.position, row.lines = ring.position, ring.lines_position
        row.open_calls, row.ended = assembler.open_calls, self.over
        row.missed = self._missed_before + ring.missed + ring.damaged_lines + assembler.dropped

    def close(self) -> None:
        """Close the ring."""
        self._ring.close()


def count_unread_spans(path: Path, row: RingRow | None) -> int:
    """Return how many spans in a ring are not in the history with this `row`; 0 if the ring cannot be read."""
    with suppress(RingError, OSError), closing(SpanReader(str(path))) as ring:
        if row is not None and row.pid == ring.pid:
            ring.position = row.position
        return ring.count_unread()
    return 0

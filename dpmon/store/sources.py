"""Reads payloads from the rings of a run: from a ring of frames directly, from spans through the assembler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

from dpmon.assemble.assembler import CAUGHT_UP, Assembler, Predecessor
from dpmon.record.spans import Span
from dpmon.ring_file import RingError
from dpmon.ring_reader import RingReader
from dpmon.run.proc import alive
from dpmon.span_reader import SpanReader, current_span_in, holds_spans
from dpmon.span_ring import Word
from dpmon.store.tables import RingRow

_MUCH = 8
"""If one read returns this fraction of a ring (1/8), its process may write faster than the reader reads."""


class RingSource(Protocol):
    """One ring and the position of its reader."""

    pid: int
    process: int
    rank: int | None
    over: bool
    """Whether its process has ended and all records are taken."""

    def take(self, now_ns: int, gone: bool) -> tuple[list[bytes], bool]:
        """Return the new payloads, and whether the ring filled faster than it was read. Raises RingError or OSError.

        `now_ns`: monotonic. `gone`: its process was gone before this call.
        """

    def has_more(self) -> bool:
        """Whether the ring holds unread data. Raises as `take` does."""

    def note(self, row: RingRow) -> int:
        """Store the position and the writer's losses in `row`; return the number of missed records."""

    def close(self) -> None:
        """Close the ring."""


class FrameSource:
    """A ring of frames: the samples of a supervisor."""

    def __init__(self, path: Path, row: RingRow | None) -> None:
        """Continue where `row` left off. Raises RingError or OSError."""
        self._ring = RingReader(str(path))
        self.pid: int = self._ring.pid
        self.process: int = self._ring.process
        self.rank = self._ring.rank
        self.over = False
        if row is not None and row.pid == self.pid:
            self._ring.position, self._ring.sequence = row.position, row.sequence
        self._before = (self._ring.position, self._ring.sequence, 0)

    def take(self, now_ns: int, gone: bool) -> tuple[list[bytes], bool]:
        """As in RingSource."""
        ring = self._ring
        self._before = ring.position, ring.sequence, ring.missed
        payloads = ring.read()
        self.over = self.over or (gone and not ring.has_more())
        return payloads, ring.position - self._before[0] >= ring.capacity // _MUCH

    def put_back(self) -> None:
        """Undo the last `take`."""
        self._ring.position, self._ring.sequence, self._ring.missed = self._before

    def has_more(self) -> bool:
        """As in RingSource."""
        return self._ring.has_more()

    def note(self, row: RingRow) -> int:
        """As in RingSource."""
        ring = self._ring
        row.position, row.sequence = ring.position, ring.sequence
        with suppress(RingError, OSError):  # the file was truncated: keep the last value
            row.lost = ring.lost()
        return ring.missed

    def is_in(self, row: RingRow) -> bool:
        """Whether the history with this `row` holds all records that were taken."""
        return (row.pid, row.position) == (self.pid, self._ring.position)

    def close(self) -> None:
        """As in RingSource."""
        self._ring.close()


class SpanSource:
    """A ring of spans, and the lines beside it."""

    def __init__(self, path: Path, row: RingRow | None) -> None:
        """As in FrameSource."""
        self._ring = SpanReader(str(path))
        self.pid: int = self._ring.pid
        self.process: int = self._ring.process
        self.rank = self._ring.rank
        self.over = False
        self._assembler = Assembler()
        self._spans: list[Span] = []
        """Spans that were read and not yet given to the assembler."""
        self._again = True
        """Whether to feed once more without input: the assembler returns the events of a feed at the next feed."""
        self._one_in = 0
        """The last requested rate of device timing: one step in this many."""
        self._under_way = (0, 0)
        """Kind and start of the training thread's current span, as reported to the assembler since its last feed."""
        if row is not None and row.pid == self.pid:
            self._go_on(row)
        self._dropped_before = self._assembler.dropped

    def _go_on(self, row: RingRow) -> None:
        """Continue where a predecessor left off."""
        ring, lines = self._ring, row.lines or 0
        self.over = row.ended
        if not self.over:
            numbers = row.last_step or 0, row.last_call or 0, -1 if row.thread is None else row.thread
            pending = {int(number) for number in row.pending.split() if number.isdecimal()}
            before = Predecessor(*numbers, row.position, row.sequence, pending)
            self._assembler = Assembler.successor(self._lines_until(lines), before)
        ring.position, ring.seen, ring.lines_position = row.position, row.sequence, lines

    def _lines_until(self, end: int) -> Iterator[Mapping[str, Any]]:
        """Yield the lines up to byte `end` of their file. The predecessor has already counted the damaged ones."""
        self._ring.lines_position = 0
        for part in self._ring.lines(end):
            yield from part
        self._ring.damaged_lines = 0

    def take(self, now_ns: int, gone: bool) -> tuple[list[bytes], bool]:
        """As in RingSource."""
        if self.over:
            return [], False
        ring = self._ring
        before = ring.position
        try:
            # The words are read before the spans, so that all spans before a thread's current span are included.
            words = ring.words()
            self._spans += ring.read(now_ns, over=gone)
        except RingError:
            if not gone:
                raise
            return self._fed() + self._ended(), False
        if not ring.at_end and len(self._spans) < CAUGHT_UP:
            # Reading stopped at an empty slot. Wait until it is filled: if the assembler got so few spans, it would
            # conclude that it has caught up.
            return [], False
        payloads = self._fed()
        if ring.at_end and self._assembler.thread >= 0:
            payloads += self._report_under_way(*current_span_in(words, self._assembler.thread))
        if self._assembler.one_in not in (0, self._one_in):
            self._one_in = self._assembler.one_in
            with suppress(RingError, OSError):  # truncated or not writable: keep the old sampling
                ring.time_one_in(self._one_in)
        if ring.at_end and (gone or words[Word.ENDED]):
            payloads += self._ended()
        return payloads, ring.position - before >= ring.slots // _MUCH

    def _fed(self) -> list[bytes]:
        """Feed the assembler the spans and lines read so far."""
        lines = [line for part in self._ring.lines() for line in part]
        spans, self._spans = self._spans, []
        if not (spans or lines or self._again):
            return []
        self._again = bool(spans or lines)
        if spans:
            self._under_way = (0, 0)
        return self._assembler.feed(spans, lines)

    def _report_under_way(self, kind: int, since_ns: int) -> list[bytes]:
        """Report the training thread's current span to the assembler."""
        if since_ns == 0 or (kind, since_ns) == self._under_way:
            return []
        self._under_way = (kind, since_ns)
        return self._assembler.take_current_span(kind, since_ns)

    def _ended(self) -> list[bytes]:
        """Return the last payloads, which belong to the open step."""
        self.over = True
        return self._assembler.end()

    def has_more(self) -> bool:
        """As in RingSource."""
        return not self.over and self._ring.has_more()

    def note(self, row: RingRow) -> int:
        """As in RingSource."""
        ring, assembler = self._ring, self._assembler
        row.sequence, row.lines = ring.position, ring.lines_position
        row.open_calls = assembler.open_calls
        row.ended, row.thread = self.over, assembler.thread
        row.position = ring.position if self.over else assembler.position
        row.pending = " ".join(map(str, assembler.pending))
        return ring.missed + ring.damaged_lines + assembler.dropped - self._dropped_before

    def close(self) -> None:
        """As in RingSource."""
        self._ring.close()


def open_source(path: Path, row: RingRow | None) -> RingSource:
    """Open the ring at `path` where `row` left off; raises RingError or OSError.

    If the row has another process id, it belongs to an earlier, deleted ring: this ring is read from its start.
    """
    return SpanSource(path, row) if holds_spans(str(path)) else FrameSource(path, row)


def holds_more(path: Path, row: RingRow | None, over: bool) -> bool:
    """Whether a ring holds more than the history with this `row`. Raises RingError or OSError.

    `over`: the run has ended, so no supervisor continues its history.
    """
    if not holds_spans(str(path)):
        with closing(FrameSource(path, row)) as frames:
            return frames.has_more()
    with closing(SpanReader(str(path))) as ring:
        if row is None or row.pid != ring.pid:
            return True
        ring.position, ring.lines_position = row.sequence, row.lines or 0
        return not row.ended and (over or ring.has_more() or ring.has_lines() or not alive(ring.pid, None))

"""Reads a ring of spans (dpmon.span_ring) and the lines next to it, and sends requests to its process."""

from __future__ import annotations

import os
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dpmon.record.safe_json import load_json
from dpmon.record.span_format import DOING, LAP_AT, Span, unpack_span
from dpmon.span_ring import (
    HEAD,
    HEADER_BYTES,
    KINDS_AT,
    MAGIC,
    MAX_GROUPS,
    MAX_SLOTS,
    NO_NUMBER,
    SLOT,
    SLOT_BYTES,
    THREADS,
    VERSION,
    HeaderWord,
    RingError,
)

HOLE_NS = 1_000_000_000
"""How long to wait for an empty slot that precedes written ones. On a busy machine, a thread may be suspended between
taking a slot and writing it; an interrupt may leave a slot empty for good."""
READ_BYTES = 1 << 20
"""Bytes of lines per read, and the maximum length of a line."""
_MAX_BYTES_PER_CALL = 64 << 20
"""Maximum bytes of lines per call of `lines`."""
_WORD = struct.Struct("=Q")
_READ_SLOTS = 64
"""Slots that are read at once."""
_MAX_JUMPS = 8
"""Maximum number of jumps ahead per `read`, because a writer may be faster than the reader."""


def lines_path(ring: str) -> str:
    """Return the path of the JSON lines of a ring."""
    return f"{ring.removesuffix('.ring')}.jsonl"


class SpanReader:
    """A reader of a ring of spans. It never blocks the writer."""

    def __init__(self, path: str) -> None:
        """Open the ring. Raises RingError if the file is not a ring, OSError if it cannot be opened.

        To continue after another reader, set `position` and `lines_position`.
        """
        self.path = path
        try:
            self._fd = _open_regular_file(path, os.O_RDWR)
        except PermissionError:
            self._fd = _open_regular_file(path, os.O_RDONLY)
        try:
            self._read_header()
        except BaseException:
            os.close(self._fd)
            raise
        self.position = 0
        """Number of the next span to read."""
        self.missed = 0
        """Number of spans that were overwritten before they were read, or never written."""
        self.at_end = False
        """Whether the last `read` returned all spans that the process had written before it."""
        self.lines_position = 0
        """Bytes of lines read so far."""
        self.damaged_lines = 0
        """Number of lines that are not JSON. Each part of a line that is too long counts as one."""
        self._lines_fd = -1
        self._hole = (-1, 0)
        """Number of an empty slot that precedes written ones, and when it was first seen (monotonic ns)."""

    def _read_header(self) -> None:
        """Read who writes the ring, and its size. Raises RingError if the header is not that of a ring."""
        data = os.pread(self._fd, HEAD.size, 0)
        if len(data) < HEAD.size or not data.startswith(MAGIC):
            raise RingError(f"{self.path}: not a ring")
        words: tuple[int, ...] = HEAD.unpack(data)[1:]
        version, header, self.slots, self.pid, self.process, rank, world, self.start_ns = words
        self.rank: int | None = rank if rank >= 0 else None
        self.world: int | None = world if world >= 0 else None
        if version != VERSION or header != HEADER_BYTES:
            raise RingError(f"{self.path}: ring of another version ({version})")
        size = os.fstat(self._fd).st_size
        if not 0 < self.slots <= MAX_SLOTS or header + self.slots * SLOT_BYTES != size:
            raise RingError(f"{self.path}: damaged header")

    def close(self) -> None:
        """Close the files; the reader cannot be used any more."""
        for fd in (self._fd, self._lines_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lines_fd = -1

    # ------------------------------------------------------------------------------------------ control block

    def header_words(self) -> memoryview:
        """Return the current words of the header (see HeaderWord). Raises RingError if the file was truncated."""
        return memoryview(self._read(HEADER_BYTES, 0)).cast("Q")

    def _read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes of the ring's file from `offset` on. Raises RingError if the file was truncated."""
        data = os.pread(self._fd, size, offset)
        if len(data) < size:
            raise RingError(f"{self.path}: truncated")
        return data

    def _read_word(self, index: int) -> int:
        value: int = _WORD.unpack(self._read(_WORD.size, 8 * index))[0]
        return value

    def _write_word(self, index: int, value: int) -> None:
        os.pwrite(self._fd, _WORD.pack(value & 0xFFFFFFFFFFFFFFFF), 8 * index)

    def is_ended(self) -> bool:
        """Return whether the process has announced its end."""
        return self._read_word(HeaderWord.ENDED) != 0

    def current_span(self, thread: int | None = None) -> tuple[int, int]:
        """Return the kind (0: none) and start (monotonic ns) of a thread's current span.

        `thread`: its number; None for the training thread. The start is 0 if the thread has not started a span.
        """
        return current_span_in(self.header_words(), thread)

    def activity(self) -> tuple[str, int]:
        """Return the activity of the training thread, and when it started (monotonic ns; 0 before the first span).

        The activity is data, copy, forward, backward, sync, optimizer, paused, "other" (in the script) or "ended".
        """
        kind, since = self.current_span()
        return "ended" if self.is_ended() else DOING.get(kind, "other"), since

    def request(self, mode: int) -> int:
        """Ask the training process for `mode`. Return the serial of the request, to compare with `acknowledged`."""
        serial = (self._read_word(HeaderWord.REQUEST) + 1) & 0xFFFFFFFFFFFFFFFF
        self._write_word(HeaderWord.REQUESTED_MODE, mode)
        self._write_word(HeaderWord.REQUEST, serial)
        return serial

    def acknowledged(self) -> tuple[int, int]:
        """Return the serial of the last request acted upon, and the mode in force.

        The mode is 0 before the first call, and after a request that the process refused as a whole, as it does under
        --mode script.
        """
        words = self.header_words()
        return words[HeaderWord.ACKNOWLEDGED], words[HeaderWord.MODE]

    def request_pause(self, paused: bool) -> int:
        """Ask the training process to pause between two steps, or to resume. Return the request.

        Each request differs from the one before. Its lowest bit is 1 for a pause, and 0 to resume.
        """
        number = (((self._read_word(HeaderWord.PAUSE) >> 1) + 1) << 1 | paused) & 0xFFFFFFFF
        request = (number ^ 0xFFFFFFFF) << 32 | number
        self._write_word(HeaderWord.PAUSE, request)
        return request

    def pause_requests(self) -> tuple[int, int]:
        """Return the last request of `request_pause`, and the last request acted upon; 0 for none."""
        words = self.header_words()
        return words[HeaderWord.PAUSE], words[HeaderWord.PAUSED]

    def request_device_timing(self, steps: int) -> None:
        """Ask the training process to time one step in `steps` on its devices."""
        if self._read_word(HeaderWord.TIMED_ONE_IN) != steps:
            self._write_word(HeaderWord.TIMED_ONE_IN, steps)

    def request_sample(self) -> int:
        """Ask the training process to sample the collectives of a step soon. Return the serial of the request."""
        return self._count_request(HeaderWord.SAMPLE)

    def request_stacks(self) -> int:
        """Ask the training process to note the stacks of its threads. Return the serial of the request."""
        return self._count_request(HeaderWord.STACKS)

    def request_walk(self) -> int:
        """Ask the training process to look for what grows in memory. Return the serial of the request."""
        return self._count_request(HeaderWord.WALK)

    def request_profile(self, steps: int) -> int:
        """Ask the training process to profile some steps (at most 65,535), or to stop (0). Return the request."""
        request = ((self._read_word(HeaderWord.PROFILE) >> 16) + 1 & 0xFFFFFFFFFFFF) << 16 | steps
        self._write_word(HeaderWord.PROFILE, request)
        return request

    def _count_request(self, index: int) -> int:
        """Increment the serial of a request. Return it."""
        serial = (self._read_word(index) + 1) & 0xFFFFFFFFFFFFFFFF
        self._write_word(index, serial)
        return serial

    def groups(self) -> list[tuple[int, int, int | None]]:
        """Return the identity, number of ranks and sequence number (None: none) of each process group.

        Empty unless the training thread has made no progress for some seconds.
        """
        words, groups = self.header_words(), []
        for index in range(HeaderWord.GROUPS, HeaderWord.GROUPS + 2 * MAX_GROUPS, 2):
            if not words[index]:
                break
            identity, ranks, number = words[index] >> 32, words[index] & 0xFFFFFFFF, words[index + 1]
            groups.append((identity, ranks, None if number == NO_NUMBER else number))
        return groups

    def training_tid(self) -> int:
        """Return the kernel's id of the training thread; the id of the main thread while it is unknown."""
        return self._read_word(HeaderWord.TRAINING_TID) or self.pid

    def last_loop_end_ns(self) -> int:
        """Return the end of the last loop over a loader (monotonic ns); 0 if none has ended."""
        return self._read_word(HeaderWord.LAST_LOOP_END)

    # ------------------------------------------------------------------------------------------ spans

    def read(self, now_ns: int, limit: int = 1 << 14, *, process_ended: bool = False) -> list[Span]:
        """Return the next spans in order of number, at most `limit`. `now_ns`: monotonic.

        `process_ended`: whether the process has ended, so that an empty slot stays empty. Spans that were overwritten
        or never written are added to `missed`. Raises RingError if the file was truncated.
        """
        spans: list[Span] = []
        count = min(_READ_SLOTS, self.slots)
        self.at_end = False
        jumps = 0
        while len(spans) < limit and jumps < _MAX_JUMPS:
            marks = self._slot_marks(self.position, count)
            written = _count_consecutive(marks, self.position)
            copied = self._copy(min(written, limit - len(spans)))
            if self._skip_if_overwritten(marks[0], written > 0, process_ended):
                jumps += 1
                continue  # the copied spans may be torn
            if copied is None:
                self._continue_at(self.position + 1)
                continue
            spans += copied
            self.position += len(copied)
            if written > count // 2:
                continue  # too few marks follow the first empty slot to tell whether it is the end
            has_read_all_written = written < count and len(copied) == written
            if has_read_all_written and not self._skip_unwritten_slots(marks[written:], now_ns, process_ended):
                break
        return spans

    def _slot_marks(self, number: int, count: int) -> list[int]:
        """Return the mark (the last word) of `count` slots, starting with the slot of span `number`."""
        marks: list[int] = memoryview(self._slot_bytes(number, count)).cast("Q")[4::5].tolist()
        return marks

    def _slot_bytes(self, number: int, count: int) -> bytes:
        """Return the bytes of `count` slots, starting with the slot of span `number`."""
        slot = number % self.slots
        before_wrap = min(count, self.slots - slot)
        data = self._read(before_wrap * SLOT_BYTES, HEADER_BYTES + slot * SLOT_BYTES)
        return data if before_wrap == count else data + self._read((count - before_wrap) * SLOT_BYTES, HEADER_BYTES)

    def _copy(self, count: int) -> list[Span] | None:
        """Return the next spans, at most `count`, up to the first torn slot; None if the first slot is torn.

        A slot with the expected number is complete until the writer overwrites it: see `_skip_if_overwritten`.
        """
        spans: list[Span] = []
        data = self._slot_bytes(self.position, count) if count else b""
        for number, (word0, start, took, sizes, mark) in enumerate(SLOT.iter_unpack(data), self.position):
            if mark != number + 1 or word0 & 0xFF == 0 or word0 >> LAP_AT & 0xFF != number // self.slots & 0xFF:
                return spans or None
            spans.append(unpack_span(number, word0, start, took, sizes))
        return spans

    def _skip_if_overwritten(self, mark: int, copied: bool, process_ended: bool) -> bool:
        """Skip ahead if the writer has overwritten the next span, or is about to. Return whether it skipped.

        `mark`: the mark in the slot of that span. `copied`: whether spans from this slot on were copied. They are
        intact if the writer still has more than a sixteenth of the ring to write before it reaches them.
        """
        is_lapped = mark > self.position + self.slots
        if copied and not is_lapped and not process_ended:
            behind = self.position - self.slots // 16
            is_lapped = self._slot_marks(behind, 1)[0] > behind + self.slots
        if not is_lapped:
            return False
        oldest = max(self._slot_marks(0, self.slots)) - self.slots
        if not process_ended:
            oldest += self.slots // 8  # the writer overwrites these next
        self._continue_at(max(oldest, self.position + 1))
        return True

    def count_unread(self) -> int:
        """Return how many spans from `position` on are in the ring. Raises RingError if the file was truncated."""
        return sum(mark > self.position for mark in self._slot_marks(0, self.slots))

    def _skip_unwritten_slots(self, marks: list[int], now_ns: int, process_ended: bool) -> bool:
        """Skip slots that a thread has taken but not written within HOLE_NS. Return whether it skipped.

        `marks`: the marks from the next slot on. A slot counts as taken if a later one is written.
        """
        next_written = None
        if max(marks) > self.position + 1:
            next_written = next(
                (number for number, mark in enumerate(marks, self.position) if mark == number + 1), None
            )
        self.at_end = next_written is None
        if next_written is None:
            return False
        number, since_ns = self._hole
        if number != self.position:
            number, since_ns = self._hole = self.position, now_ns
        if not process_ended and now_ns - since_ns < HOLE_NS:
            return False
        self._continue_at(next_written)
        return True

    def _continue_at(self, span_number: int) -> None:
        """Continue at span `span_number`; the spans before it are lost."""
        self.missed += span_number - self.position
        self.position = span_number

    # ------------------------------------------------------------------------------------------ lines

    def lines(self, until: int = sys.maxsize) -> Iterator[list[dict[str, Any]]]:
        """Yield the new lines as JSON objects, in portions, up to byte `until` of their file.

        Call `read` first: a span refers only to lines written before it, so the lines then contain all definitions for
        the spans from `read`. Torn lines are skipped and counted.
        """
        fd = self._open_lines()
        if fd < 0:
            return
        end = min(until, self.lines_position + _MAX_BYTES_PER_CALL)
        while self.lines_position < end:
            data = os.pread(fd, min(READ_BYTES, end - self.lines_position), self.lines_position)
            complete_bytes = data.rfind(b"\n") + 1
            if not complete_bytes:
                if len(data) < READ_BYTES:
                    return
                complete_bytes = len(data)  # the tracer never writes so long a line: its parts count as damaged lines
            objects = self._parse_lines(data[:complete_bytes])
            self.lines_position += complete_bytes
            if objects:
                yield objects

    def _parse_lines(self, data: bytes) -> list[dict[str, Any]]:
        """Return the JSON objects in the lines of `data`."""
        objects = []
        # The writer ends a possibly torn line with a line break. If the line was complete, an empty line follows it.
        for line in filter(None, data.split(b"\n")):
            try:
                objects.append(load_json(line))
            except ValueError:
                self.damaged_lines += 1
        return objects

    def _open_lines(self) -> int:
        """Return the file descriptor of the lines; -1 if there is no such file."""
        if self._lines_fd < 0:
            with suppress(RingError, OSError):
                self._lines_fd = _open_regular_file(lines_path(self.path), os.O_RDONLY)
        return self._lines_fd


def current_span_in(words: memoryview, thread: int | None = None) -> tuple[int, int]:
    """Return the result of SpanReader.current_span from header words that were read earlier."""
    if thread is None:
        thread = words[HeaderWord.TRAINING_THREAD]
    thread = min(thread, THREADS - 1)
    return words.cast("B")[KINDS_AT + thread], words[HeaderWord.SPAN_START + thread]


def _open_regular_file(path: str, access: int) -> int:
    """Return a descriptor of a regular file. Raises RingError for anything else, OSError if it cannot be opened."""
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise RingError(f"{path}: not a regular file")


def _count_consecutive(marks: list[int], number: int) -> int:
    """Return the number of consecutive written slots, starting with the slot of span `number`."""
    if marks[-1] == number + len(marks) and marks == list(range(number + 1, number + 1 + len(marks))):
        return len(marks)
    return next(index for index, mark in enumerate(marks) if mark != number + 1 + index)

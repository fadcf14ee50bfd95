"""Reads a ring of spans (dpmon.span_ring) and the lines beside it, and sends requests to its process."""

from __future__ import annotations

import os
import stat
import struct
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
    OF_NCCL,
    SLOT,
    SLOT_BYTES,
    THREADS,
    VERSION,
    HeaderWord,
    RingError,
)

HOLE_NS = 1_000_000_000
"""Longest wait for an empty slot before written ones. An interrupt may leave a slot empty for good. On a busy machine,
a thread may be suspended between taking a slot and writing it."""
READ_BYTES = 1 << 20
"""Bytes of lines in one read, and the length of the longest line."""
_MAX_BYTES_PER_CALL = 64 << 20
"""Most bytes of lines in one call of `lines`."""
_WORD = struct.Struct("=Q")
_FIRST = 64
"""Slots in the first read. The number doubles with each further read, up to _MAX_READ."""
_MAX_READ = 4096
_MAX_JUMPS = 8
"""Most jumps ahead in one `read`, because a writer may be faster than the reader."""
_LAST_NUMBER = 1 << 56
"""Largest plausible span number. A higher one is damage, and would overflow the sum of missed spans."""


def lines_path(ring: str) -> str:
    """Return the path of the JSON lines of a ring."""
    return f"{ring.removesuffix('.ring')}.jsonl"


class SpanReader:
    """Reads a ring of spans. Never blocks the writer, and never trusts the file."""

    def __init__(self, path: str) -> None:
        """Raises RingError if the file is not a ring of this user, OSError if it cannot be opened.

        To continue after another reader, set `position`, `seen` and `lines_position`.
        """
        self.path = path
        try:
            self._fd = _open_own_file(path, os.O_RDWR)
        except PermissionError:
            self._fd = _open_own_file(path, os.O_RDONLY)
        try:
            self._read_header()
        except BaseException:
            os.close(self._fd)
            raise
        self.position = 0
        """Number of the next span to read."""
        self.seen = 0
        """Spans below this number were read before; empty slots among them are already counted."""
        self.missed = 0
        """Number of spans that were overwritten before they were read, or never written."""
        self.at_end = False
        """Whether the last `read` returned all spans that the process had written before it."""
        self.lines_position = 0
        """Bytes of lines read so far."""
        self.damaged_lines = 0
        """Number of lines that are not a JSON object, and of parts of lines that are too long."""
        self._lines_fd = -1
        self._hole = (-1, 0)
        """An empty slot before written ones, and when it was first seen (monotonic ns)."""

    def _read_header(self) -> None:
        """Read who writes the ring, and its size. Raises RingError if the header is not that of a ring."""
        raw = os.pread(self._fd, HEAD.size, 0)
        if len(raw) < HEAD.size or not raw.startswith(MAGIC):
            raise RingError(f"{self.path}: not a ring")
        words: tuple[int, ...] = HEAD.unpack(raw)[1:]
        version, header, self.slots, self.pid, self.process, rank, world, self.start_ns = words
        self.rank: int | None = rank if rank >= 0 else None
        self.world: int | None = world if world >= 0 else None
        if version != VERSION or header != HEADER_BYTES:
            raise RingError(f"{self.path}: ring of another version ({version})")
        size = os.fstat(self._fd).st_size
        if not 0 < self.slots <= MAX_SLOTS or header + self.slots * SLOT_BYTES != size or self.process < 0:
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

    def _read(self, size: int, at: int) -> bytes:
        """Return `size` bytes of the ring's file at offset `at`. Raises RingError if the file was truncated."""
        data = os.pread(self._fd, size, at)
        if len(data) < size:
            raise RingError(f"{self.path}: truncated")
        return data

    def _read_word(self, index: int) -> int:
        value: int = _WORD.unpack(self._read(_WORD.size, 8 * index))[0]
        return value

    def _write_word(self, index: int, value: int) -> None:
        os.pwrite(self._fd, _WORD.pack(value & 0xFFFFFFFFFFFFFFFF), 8 * index)

    def is_ended(self) -> bool:
        """Whether the process has announced its end."""
        return self._read_word(HeaderWord.ENDED) != 0

    def current_span(self, thread: int | None = None) -> tuple[int, int]:
        """Return kind (0: none) and start (monotonic ns) of a thread's current span.

        `thread`: its number; None for the training thread. The start is 0 for a thread that has begun no span.
        """
        return current_span_in(self.header_words(), thread)

    def activity(self) -> tuple[str, int]:
        """Return the activity of the training thread, and when it began (monotonic ns; 0 if nothing has begun).

        One of data, copy, forward, backward, optimizer, paused; "other": in the script; "ended".
        """
        kind, since = self.current_span()
        return "ended" if self.is_ended() else DOING.get(kind, "other"), since

    def request(self, mode: int) -> int:
        """Ask the training process for `mode`. Return the serial of the request, to compare with `acknowledged`."""
        serial = (self._read_word(HeaderWord.REQUEST) + 1) & 0xFFFFFFFFFFFFFFFF
        self._write_word(HeaderWord.WANTED, mode)
        self._write_word(HeaderWord.REQUEST, serial)
        return serial

    def acknowledged(self) -> tuple[int, int]:
        """Return the serial of the last request acted upon, and the mode in force.

        The mode is 0 before the first call, and after a request that the process refused as a whole, as it does under
        --mode script.
        """
        words = self.header_words()
        return words[HeaderWord.ANSWERED], words[HeaderWord.MODE]

    def request_pause(self, paused: bool) -> int:
        """Ask the training process to pause between two steps, or to resume. Return the request.

        Each request differs from the one before. Its lowest bit is 1 for a pause, and 0 to resume.
        """
        number = (((self._read_word(HeaderWord.PAUSE) >> 1) + 1) << 1 | paused) & 0xFFFFFFFF
        asked = (number ^ 0xFFFFFFFF) << 32 | number
        self._write_word(HeaderWord.PAUSE, asked)
        return asked

    def pause_requests(self) -> tuple[int, int]:
        """Return the last request of `request_pause`, and the last request acted upon; 0 for none."""
        words = self.header_words()
        return words[HeaderWord.PAUSE], words[HeaderWord.PAUSED]

    def request_device_timing(self, steps: int) -> None:
        """Ask the training process to time one step in `steps` on its devices."""
        if self._read_word(HeaderWord.ONE_IN) != steps:
            self._write_word(HeaderWord.ONE_IN, steps)

    def request_sample(self) -> int:
        """Ask the training process to sample the collectives of a step soon. Return the serial of the request."""
        serial = (self._read_word(HeaderWord.SAMPLE) + 1) & 0xFFFFFFFFFFFFFFFF
        self._write_word(HeaderWord.SAMPLE, serial)
        return serial

    def request_stacks(self) -> int:
        """Ask the training process to note the stacks of its threads. Return the serial of the request."""
        serial = (self._read_word(HeaderWord.STACKS) + 1) & 0xFFFFFFFFFFFFFFFF
        self._write_word(HeaderWord.STACKS, serial)
        return serial

    def allow_ptrace_by(self, pid: int) -> None:
        """Ask the training process to let `pid` look into it."""
        self._write_word(HeaderWord.PTRACER, pid)

    def groups(self) -> list[tuple[int, int, int | None, bool]]:
        """Return facts of each process group: identity, ranks, sequence number (None: none), whether it has NCCL.

        Empty unless the training thread has stood still for some seconds.
        """
        words, found = self.header_words(), []
        for at in range(HeaderWord.GROUPS, HeaderWord.GROUPS + 2 * MAX_GROUPS, 2):
            if not words[at]:
                break
            identity, ranks, number = words[at] >> 32, words[at] & 0xFFFFFFFF, words[at + 1]
            nccl = bool(ranks & OF_NCCL)
            found.append((identity, ranks & ~OF_NCCL, None if number == NO_NUMBER else number, nccl))
        return found

    def training_tid(self) -> int:
        """Return the kernel's number of the training thread; that of the main thread while it is unknown."""
        return self._read_word(HeaderWord.TRAINING_TID) or self.pid

    def last_loop_end_ns(self) -> int:
        """Return the end of the last loop over a loader (monotonic ns); 0 if none has ended."""
        return self._read_word(HeaderWord.LOOP_OVER)

    # ------------------------------------------------------------------------------------------ spans

    def read(self, now_ns: int, limit: int = 1 << 14, *, over: bool = False) -> list[Span]:
        """Return the next spans in order of number, at most `limit`. `now_ns`: monotonic.

        `over`: the process is gone, so an empty slot stays empty. Spans that were overwritten or never written are
        added to `missed`. Raises RingError if the file was truncated.
        """
        found: list[Span] = []
        count = _MAX_READ if over else _FIRST
        self.at_end = False
        overtaken = 0
        while len(found) < limit and overtaken < _MAX_JUMPS:
            count = min(count, self.slots)
            marks = self._slot_marks(self.position, count)
            there = _count_consecutive(marks, self.position)
            part = self._copy(min(there, limit - len(found)))
            if self._skip_if_overwritten(marks[0], there > 0, over):
                overtaken += 1
                continue  # the copied spans may be torn
            if part is None:
                self._continue_at(self.position + 1)
                continue
            found += part
            self.position += len(part)
            if there < count and len(part) == there and not self._skip_unwritten_slots(marks[there:], now_ns, over):
                break
            count = min(2 * count, _MAX_READ)
        return found

    def _slot_marks(self, number: int, count: int) -> list[int]:
        """Return the last words of `count` slots, starting with the slot of span `number`."""
        marks: list[int] = memoryview(self._slot_bytes(number, count)).cast("Q")[4::5].tolist()
        return marks

    def _slot_bytes(self, number: int, count: int) -> bytes:
        """Return the bytes of `count` slots, starting with the slot of span `number`."""
        at = number % self.slots
        first = min(count, self.slots - at)
        data = self._read(first * SLOT_BYTES, HEADER_BYTES + at * SLOT_BYTES)
        return data if first == count else data + self._read((count - first) * SLOT_BYTES, HEADER_BYTES)

    def _copy(self, count: int) -> list[Span] | None:
        """Return the next spans, at most `count`, from slots with the right numbers; None if the first is damaged.

        A slot with the right number is complete until the writer overwrites it: see `_skip_if_overwritten`.
        """
        found: list[Span] = []
        data = self._slot_bytes(self.position, count) if count else b""
        for number, (head, start, took, sizes, mark) in enumerate(SLOT.iter_unpack(data), self.position):
            if mark != number + 1 or head & 0xFF == 0 or head >> LAP_AT & 0xFF != number // self.slots & 0xFF:
                return found or None
            found.append(unpack_span(number, head, start, took, sizes))
        return found

    def _is_lapped(self, number: int, mark: int) -> bool:
        """Whether `mark`, in the slot of span `number`, belongs to a later lap."""
        return number + self.slots < mark <= _LAST_NUMBER and (mark - 1 - number) % self.slots == 0

    def _skip_if_overwritten(self, mark: int, copied: bool, over: bool) -> bool:
        """Skip ahead if the writer has overwritten the next span, or is about to. Return whether it skipped.

        `mark`: the mark in the slot of that span. `copied`: whether spans from there on were copied. They are
        intact if the writer still has more than a sixteenth of the ring to write before it reaches them.
        """
        lapped = self._is_lapped(self.position, mark)
        if copied and not lapped and not over:
            behind = self.position - self.slots // 16
            lapped = self._is_lapped(behind, self._slot_marks(behind, 1)[0])
        if not lapped:
            return False
        # Keep all spans if the writer is gone, else drop the eighth that it overwrites next.
        oldest = self._newest() + 1 - self.slots + (0 if over else self.slots // 8)
        ahead = max(oldest, self.position + 1)
        self.missed += ahead - self.position
        self.position = ahead
        return True

    def _newest(self) -> int:
        """Return the highest span number that directly follows its neighbor's: a single number may be damaged."""
        marks = self._slot_marks(0, self.slots)
        numbers = (mark - 1 for mark in marks)
        plausible = (n for at, n in enumerate(numbers) if n % self.slots == at and marks[at - 1] == n < _LAST_NUMBER)
        return max(plausible, default=-1)

    def _skip_unwritten_slots(self, marks: list[int], now_ns: int, over: bool) -> bool:
        """Skip slots that a thread has taken but not written within HOLE_NS. Return whether it skipped.

        `marks`: the marks from the next slot on. Slots count as taken if a later one is written.
        """
        later = None
        if max(marks) > self.position + 1:
            later = next((number for number, mark in enumerate(marks, self.position) if mark == number + 1), None)
        self.at_end = later is None
        if later is None:
            return False
        number, since = self._hole
        if number != self.position:
            self._hole = self.position, now_ns
        elif now_ns - since >= HOLE_NS:
            over = True
        if over:
            self._continue_at(later)
        return over

    def _continue_at(self, number: int) -> None:
        """Continue at span `number`; the spans before it are lost."""
        self.missed += max(0, number - max(self.position, self.seen))
        self.position = number

    # ------------------------------------------------------------------------------------------ lines

    def lines(self, until: int = _LAST_NUMBER) -> Iterator[list[dict[str, Any]]]:
        """Yield the new lines, in portions, up to byte `until` of their file.

        Call `read` first: a span refers only to lines written before it, so the lines contain all definitions for the
        spans from `read`. Damaged lines are skipped and counted.
        """
        fd = self._open_lines()
        if fd < 0:
            return
        end = min(until, self.lines_position + _MAX_BYTES_PER_CALL)
        while self.lines_position < end:
            data = os.pread(fd, min(READ_BYTES, end - self.lines_position), self.lines_position)
            if not data:
                self.lines_position = min(self.lines_position, os.fstat(fd).st_size)  # the file may be truncated
                return
            whole = data.rfind(b"\n") + 1
            if not whole:
                if len(data) < READ_BYTES:
                    return
                whole = len(data)  # the tracer never writes so long a line: its parts count as damaged lines
            found = self._parse_lines(data[:whole])
            self.lines_position += whole
            if found:
                yield found

    def _parse_lines(self, data: bytes) -> list[dict[str, Any]]:
        """Return the lines in `data`."""
        found = []
        # The writer ends a line that may be torn with a line break. If the line was whole, an empty line follows it.
        for line in filter(None, data.split(b"\n")):
            try:
                value = load_json(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                found.append(value)
            else:
                self.damaged_lines += 1
        return found

    def _open_lines(self) -> int:
        """Return the descriptor of the lines; -1 if this user has no such file."""
        if self._lines_fd < 0:
            with suppress(RingError, OSError):
                self._lines_fd = _open_own_file(lines_path(self.path), os.O_RDONLY)
        return self._lines_fd


def current_span_in(words: memoryview, thread: int | None = None) -> tuple[int, int]:
    """Return what SpanReader.current_span returns, from header words read earlier."""
    if thread is None:
        thread = words[HeaderWord.TRAINING_THREAD]
    thread = min(thread, THREADS - 1)
    return words.cast("B")[KINDS_AT + thread], words[HeaderWord.SPAN_START + thread]


def _open_own_file(path: str, access: int) -> int:
    """Open a file. Raises RingError if it is not a regular file of this user, OSError if it cannot be opened."""
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and info.st_nlink == 1:
        return fd
    os.close(fd)
    raise RingError(f"{path}: not a regular file with one name, or the file of another user")


def _count_consecutive(marks: list[int], number: int) -> int:
    """Return the number of consecutive written slots, starting with the slot of span `number`."""
    if marks[-1] == number + len(marks) and marks == list(range(number + 1, number + 1 + len(marks))):
        return len(marks)
    return next(place for place, mark in enumerate(marks) if mark != number + 1 + place)

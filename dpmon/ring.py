"""A memory-mapped ring of records: one writer that never waits, any number of readers that only read.

Layout of a ring file (native byte order; a run never leaves its machine)::

    0      magic, version, sizes, pid, process index, rank, world size, start     written once
    128    head, claim, lost                                                      written by the writer
    192    request serial, requested mode, request for a pause                    written by readers
    256    acknowledged serial, mode in force, activity and since when,
           size of a staged record, how many records are held back,
           the request for a pause that was acted upon                             written by the writer
    512    a record that is staged: its number plus one, the record, the number again
    4096   the data area: a whole number of blocks; a frame never crosses a block's end

A frame is ``length u32, check u32, sequence u64, payload``, padded to eight bytes; the check ties the length to the
sequence number, so that a reader that lands on anything but a frame's start sees it. Offsets grow for ever and are
taken modulo the capacity. The writer moves *claim* to a block's end before it writes there and *head* after each
frame, so what lies in ``[claim - capacity, head)`` is whole; a reader that was lapped jumps to the next block's start,
and the sequence numbers tell it how many records it missed.

A training loop of very short turns holds a few of them back and writes them together: code that has just run costs a
fifth of code that the training has driven out of the processor's caches. How many records are held is in the header,
so that those of a killed process are counted as lost.

The writer maps the file, so that a record costs no system call and survives the death of its process. Readers use
pread: a file that is truncated under them is a short read, not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import stat
import struct
import sys
import time
from typing import Any

__all__ = ["Activity", "Frame", "NoSizeSignal", "Ring", "RingError", "RingReader"]

MAGIC = b"DPMONRNG"
VERSION = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 16
DEFAULT_CAPACITY = 1 << 22
"""4 MiB: about 7,000 steps of one call over 8 replicas. Touched pages count as the training's memory, so not more."""

_HEAD_STRUCT = struct.Struct("=8sIIQIiiiq")  # magic version header capacity pid process rank world start_ns
_FRAME = struct.Struct("<IIQ")
_FRAME_BYTES = _FRAME.size
_WAIT_TURNS = 50
"""Tenths of a millisecond to wait for another thread's write, once at most."""
_UPPER = 0xFFFFFFFF_00000000
_PAD_LENGTH = 0xFFFFFFFF
MAX_PAYLOAD = BLOCK_BYTES - _FRAME_BYTES

# Indices of the 64-bit words that change while the ring is in use.
_HEAD, _CLAIM, _LOST = 16, 17, 18
_REQUEST_SERIAL, _REQUEST_MODE, _REQUEST_PAUSE = 24, 25, 26
_ACK_SERIAL, _ACK_MODE, _ACTIVITY, _STAGE_SIZE, _HELD, _ACK_PAUSE = 32, 33, 34, 35, 36, 37
_STAGE_AT = 512
_STAGE_MAX = 256
_LONG = struct.calcsize("l")
_GET_FLAGS, _SET_FLAGS = 2 << 30 | _LONG << 16 | 0x6601, 1 << 30 | _LONG << 16 | 0x6602
"""ioctl FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (linux/fs.h)."""
_NO_COPY_ON_WRITE = 0x00800000
"""FS_NOCOW_FL."""
_WORDS = struct.Struct("=22Q")  # bytes 128..304: words 16..37


class NoSizeSignal:
    """A context in which growing a file beyond RLIMIT_FSIZE only raises OSError.

    Otherwise the kernel also sends SIGXFSZ to the thread that writes. The signal would kill the script, or run the
    script's handler if it has one.
    """

    def __enter__(self) -> None:
        # Read the old mask first: if the script's signal handler raises now, the mask must still be restored.
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})

    def __exit__(self, *error: object) -> None:
        if signal.SIGXFSZ not in self._before:
            with contextlib.suppress(OSError):
                signal.sigtimedwait({signal.SIGXFSZ}, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


class RingError(Exception):
    """A file that is not a usable ring: foreign, truncated, of another version."""


class Activity:
    """What the training thread was last seen to begin, as numbers in the ring's header."""

    OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, ENDED, PAUSED, COPY = range(8)
    WORD = _ACTIVITY
    """Index in Ring.words: monotonic ns of the turn's start shifted left by three, and one of the numbers above."""
    BYTE = _ACTIVITY * 8
    """Index in Ring.map of the byte that holds the number (and a few low bits of the time, which do not matter)."""
    NAMES = ("other", "data", "forward", "backward", "optimizer", "ended", "paused", "copy")


class Frame:
    """A record of fixed layout, or two in a row, written by one call of struct straight into the map."""

    __slots__ = ("keys", "need", "pack_into", "size")

    def __init__(self, layout: str, second: str | None = None) -> None:
        """Layouts are struct formats of standard size, beginning with "<"."""
        self.size = struct.calcsize(layout)
        pad = -self.size % 8
        # The head's length and check are one number here, least significant half first, as in _FRAME.
        whole = f"<QQ{layout[1:]}"
        after = 0
        if second is not None:
            whole += f"{pad}xQQ{second[1:]}"
            after = struct.calcsize(second)
        packer = struct.Struct(whole)
        native = struct.Struct("@" + whole[1:])
        if native.size == packer.size and sys.byteorder == "little":
            packer = native  # the same bytes, packed several times faster, where the fields lie aligned anyway
        self.keys = self.size << 32 | self.size, after << 32 | after
        """What a frame's head is, but for the number that its upper half is crossed with."""
        self.need = (packer.size + 7) & ~7
        self.pack_into = packer.pack_into


class Ring:
    """The writing end. Create one in the process that is traced; `write` is safe from any thread of it."""

    __slots__ = (
        "_block_end",
        "_capacity",
        "_pair",
        "_sequence",
        "_stage_frame",
        "_stage_into",
        "_token",
        "head",
        "held",
        "map",
        "staged",
        "words",
    )

    def __init__(
        self,
        path: str,
        *,
        process: int,
        rank: int = -1,
        world: int = -1,
        start_ns: int = 0,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        """Create `path` (which must not exist), `capacity` bytes of it for records (whole blocks of 64 KiB).

        Raises FileExistsError if the name is taken and OSError if the disk has no room: the whole file is allocated
        here, since a page that cannot be had later would kill the process with SIGBUS.
        """
        if capacity < 2 * BLOCK_BYTES or capacity % BLOCK_BYTES:
            raise ValueError(f"capacity must be at least two blocks of {BLOCK_BYTES} bytes, whole: {capacity}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            try:
                _write_in_place(fd)
                with NoSizeSignal():
                    os.posix_fallocate(fd, 0, HEADER_BYTES + capacity)
            except BaseException:  # an interrupt must not leave an incomplete ring either
                os.unlink(path)
                raise
            self.map = mmap.mmap(fd, HEADER_BYTES + capacity)
        finally:
            os.close(fd)
        self._capacity = capacity
        self._token: list[None] = [None]
        """Holds one element while nobody writes."""
        self._sequence = 0
        self.head = 0
        """Bytes written since the ring was made (it grows for ever)."""
        self._block_end = 0
        """Where the block under way ends, as an offset like head; 0 before the first."""
        self.staged: tuple[int, ...] | None = None
        self.held: list[tuple[tuple[int, ...], tuple[int, ...] | None, Frame | None]] = []
        """Records that are written together a little later: of STAGE's layout, alone or with the one that follows, or
        of a layout of their own.

        Whoever appends counts them in `words` before, with no call in between (and `append` is one): where there is
        none, no other thread's flush and no signal comes.
        """
        self.words = memoryview(self.map)[:HEADER_BYTES].cast("Q")
        # The magic comes last: a reader that sees it sees a complete header.
        _HEAD_STRUCT.pack_into(
            self.map, 0, bytes(8), VERSION, HEADER_BYTES, capacity, os.getpid(), process, rank, world, start_ns
        )
        self.map[0:8] = MAGIC

    @property
    def capacity(self) -> int:
        """Bytes that the ring holds before the oldest are overwritten."""
        return self._capacity

    def put(self, frame: Frame, values: tuple[Any, ...]) -> bool:
        """Append one record of a fixed layout.

        False, and counted as lost, if it interrupts a write of its own thread (a signal handler of the script may call
        the model while we write). Raises struct.error for values that do not fit. On the hot path: no bytes object is
        made, and nothing but struct and the map is touched.
        """
        token = self._token
        try:
            token.pop()  # atomic, and cheaper than a lock when nobody else is there
        except IndexError:
            if not self._wait():
                return False
        try:
            head = self.head
            end = head + frame.need
            if end > self._block_end:
                head = self._next_block()
                end = head + frame.need
            sequence = self._sequence
            size = frame.size
            first = size | ((sequence ^ size) & 0xFFFFFFFF) << 32
            at = HEADER_BYTES + head % self._capacity
            frame.pack_into(self.map, at, first, sequence, *values)
            self._sequence = sequence + 1
            self.head = end
            self.words[_HEAD] = end
        finally:
            token.append(None)
        return True

    def _put_held(self) -> None:
        """As `put`, for all that is held; what cannot be written stays held.

        Whatever an interrupt ends it by, each is written once: what was not finished is written by the next flush.
        Raises struct.error for one whose values do not fit; that one is counted as lost.
        """
        held, token, ours, words = self.held, self._token, self.map, self.words
        single, pair = self._stage_frame, self._pair
        needs = single.need, pair.need
        first, second = pair.keys
        item: Any = None
        start = head = number = sequence = -1
        count = 0
        try:
            token.pop()
        except IndexError:
            if not self._wait(0):
                return
        try:
            while held:
                # As many as the block under way has room for, and then one step forward, which makes them count. An
                # interrupt may come after any of these lines: whether the step was made is told from `head`.
                start = head = -1
                item = held[0]
                need = needs[item[1] is not None] if item[2] is None else item[2].need
                if self.head + need > self._block_end:
                    self._next_block()
                number = sequence = self._sequence
                block_end = self._block_end
                count = 0
                start = head = self.head
                offset = HEADER_BYTES + head % self._capacity - head
                for staged, step, frame in held:
                    end = head + (needs[step is not None] if frame is None else frame.need)
                    if end > block_end:
                        break
                    key = (number << 32 & _UPPER) ^ (first if frame is None else frame.keys[0])
                    if step is None:
                        (frame or single).pack_into(ours, offset + head, key, number, *staged)
                    else:
                        following = number + 1
                        key_of_step = (following << 32 & _UPPER) ^ second
                        pair.pack_into(ours, offset + head, key, number, *staged, key_of_step, following, *step)
                        number = following
                    number += 1
                    head = end
                    count += 1
                if not count:
                    raise struct.error("a record that is larger than a block")
                self._sequence = number
                self.head = head
                words[_HEAD] = head
                del held[:count]
        except BaseException as error:
            if isinstance(error, struct.error):
                words[_LOST] += 1 if held[count][1] is None else 2
                del held[count]
                self._sequence, self.head = number, head
            if start >= 0 and self.head == head:
                words[_HEAD] = head
                if held and held[0] is item:
                    del held[:count]
            elif start >= 0:
                self._sequence = sequence
            raise
        finally:
            token.append(None)

    def _wait(self, lost: int = 1) -> bool:
        """Wait for another thread's write; False if the write under way is further down our own stack.

        `lost`: how many records to count as lost then.
        """
        caller = sys._getframe(1).f_back
        while caller is not None:
            if caller.f_code in _WRITERS:
                self.words[_LOST] += lost
                return False
            caller = caller.f_back
        head = self.head
        for _ in range(_WAIT_TURNS):
            time.sleep(0.0001)
            try:
                self._token.pop()
            except IndexError:
                continue
            return True
        if self.head == head:  # an exception (KeyboardInterrupt) struck between taking the token and the try
            return True
        self.words[_LOST] += lost
        return False

    def write(self, payload: bytes) -> bool:
        """Append one record of any layout, after the one that is staged; False, and counted as lost, if too large."""
        if len(payload) > MAX_PAYLOAD:
            self.words[_LOST] += 1
            return False
        self.flush()
        return self.put(Frame(f"<{len(payload)}s"), (payload,))

    def stage(self, values: tuple[int, ...]) -> None:
        """Keep a record (of STAGE's layout) where `RingReader.last_words` finds it if the process dies now.

        It costs less than a frame, since it is the same memory every time. It is written by the next `flush` or
        `write`, whichever comes first, so that nothing overtakes it.
        """
        self.staged = values
        number = self._sequence + 1
        self._stage_into(self.map, _STAGE_AT, number, *values, number)

    HELD, LOST = _HELD, _LOST
    """Indices in `words` of the number of records that are held back, and of those that could not be written."""

    def flush(self) -> None:
        """Write what is held back, then the record that is staged, if there is one."""
        staged: Any = None
        anything = bool(self.held) or self.staged is not None
        number = self._sequence
        try:
            if self.held:
                self._put_held()
                number = self._sequence
            staged, self.staged = self.staged, None
            if staged is not None:
                self.put(self._stage_frame, staged)
        except BaseException:  # an interrupt: this record has no second chance
            if staged is not None and self.staged is not staged:
                self.words[_LOST] += self._sequence == number
            raise
        finally:
            if anything:
                self.words[_HELD] = sum(1 if step is None else 2 for _, step, _ in self.held) if self.held else 0

    def staging(self, layout: str, second: str | None = None) -> None:
        """Say which layout `stage` takes, and which one the records have that are held with a staged one."""
        self._pair = Frame(layout, second)
        packer, native = struct.Struct(f"<Q{layout[1:]}Q"), struct.Struct(f"@Q{layout[1:]}Q")
        self._stage_into = (native if native.size == packer.size else packer).pack_into
        self._stage_frame = Frame(layout)
        self.words[_STAGE_SIZE] = struct.calcsize(layout)

    def _next_block(self) -> int:
        """Claim the next block, end the one under way with a pad, and return where the new one starts."""
        head, start = self.head, self._block_end
        self.words[_CLAIM] = start + BLOCK_BYTES
        if start - head >= _FRAME_BYTES:
            _FRAME.pack_into(self.map, HEADER_BYTES + head % self._capacity, _PAD_LENGTH, 0, 0)
        self.head = start  # before the block's end: an exception in between must not leave them in different blocks
        self._block_end = start + BLOCK_BYTES
        return start

    def activity(self, what: int, since_ns: int) -> None:
        """Say what the training thread has just begun (one of Activity) and when (monotonic, ns)."""
        self.words[_ACTIVITY] = since_ns << 3 | what

    REQUEST = _REQUEST_SERIAL
    """Index in `words` of what `request_serial` returns."""

    @property
    def request_serial(self) -> int:
        """The number of the last request that a reader made; 0 when there was none."""
        return self.words[_REQUEST_SERIAL]

    @property
    def request_mode(self) -> int:
        """The mode asked for by the last request, as `dpmon.record.wire.MODES` numbers it."""
        return self.words[_REQUEST_MODE]

    def acknowledge(self, serial: int, mode: int) -> None:
        """Tell readers which request was acted upon and which mode is in force now."""
        self.words[_ACK_MODE] = mode
        self.words[_ACK_SERIAL] = serial

    PAUSE, PAUSE_ANSWERED = _REQUEST_PAUSE, _ACK_PAUSE
    """Indices in `words` of the last request for a pause (odd) or its end (even), and of the last one acted upon."""


def _write_in_place(fd: int) -> None:
    """Switch copy-on-write off for an empty file (chattr +C), if the file system supports it.

    On btrfs each write of a page needs new space, so on a full disk SIGBUS would kill the process.
    """
    flags = bytearray(_LONG)
    with contextlib.suppress(OSError):  # other file systems do not know the flag
        fcntl.ioctl(fd, _GET_FLAGS, flags, True)
        flags[:4] = struct.pack("=I", struct.unpack("=I", flags[:4])[0] | _NO_COPY_ON_WRITE)
        fcntl.ioctl(fd, _SET_FLAGS, flags)


_WRITERS = (Ring.put.__code__, Ring._put_held.__code__)


class RingReader:
    """The reading end: never blocks the writer, never trusts the file."""

    def __init__(self, path: str, *, position: int = 0, sequence: int = 0, live: bool = False) -> None:
        """Open `path` and continue at byte `position`, where record number `sequence` is due.

        With `live`, start at what is still in the ring and do not count what was overwritten before as missed.
        Raises RingError if the file is not a ring of this user, OSError if it cannot be opened.
        """
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except PermissionError:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise RingError(f"{path}: not a regular file")
            if info.st_uid != os.getuid():
                raise RingError(f"{path}: belongs to another user")
            raw = os.pread(self._fd, _HEAD_STRUCT.size, 0)
            if len(raw) < _HEAD_STRUCT.size or raw[:8] != MAGIC:
                raise RingError(f"{path}: not a ring")
            _, version, header, capacity, pid, process, rank, world, start = _HEAD_STRUCT.unpack(raw)
            if version != VERSION or header != HEADER_BYTES:
                raise RingError(f"{path}: ring of another version ({version})")
            if capacity < 2 * BLOCK_BYTES or capacity % BLOCK_BYTES or header + capacity != info.st_size:
                raise RingError(f"{path}: size does not match its header")
        except BaseException:
            os.close(self._fd)
            raise
        self.path = path
        self.pid, self.process, self.start_ns = pid, process, start
        self.rank = rank if rank >= 0 else None
        self.world = world if world >= 0 else None
        self.capacity = capacity
        self.position = position
        self.sequence = sequence
        self.missed = 0
        """Records that were overwritten, torn or damaged before this reader came to them."""
        self._first = live
        self.ended = False

    def close(self) -> None:
        """Give the descriptor back; the reader is of no further use."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _words(self) -> tuple[int, ...]:
        raw = os.pread(self._fd, _WORDS.size, 128)
        if len(raw) < _WORDS.size:
            raise RingError(f"{self.path}: truncated")
        return _WORDS.unpack(raw)

    def held(self) -> int:
        """Records that the writer holds back; they are lost if its process is gone."""
        return self._words()[_HELD - 16]

    def lost(self) -> int:
        """Records that the writer itself could not write."""
        return self._words()[_LOST - 16]

    def activity(self) -> tuple[int, int]:
        """What the training thread last began (one of Activity), and when its turn of the loop began.

        Monotonic ns, 0 when there was none yet. A turn begins by waiting for data, so for DATA this is
        since when it waits.
        """
        word = self._words()[_ACTIVITY - 16]
        return word & 7, word >> 3

    def request(self, mode: int) -> int:
        """Ask the training process for `mode`; returns the request's serial, to compare with `acknowledged`."""
        serial = (self._words()[_REQUEST_SERIAL - 16] + 1) & 0xFFFFFFFFFFFFFFFF
        os.pwrite(self._fd, struct.pack("=Q", mode), _REQUEST_MODE * 8)
        os.pwrite(self._fd, struct.pack("=Q", serial), _REQUEST_SERIAL * 8)
        return serial

    def acknowledged(self) -> tuple[int, int]:
        """The serial of the last request acted upon and the mode in force (0: none yet)."""
        words = self._words()
        return words[_ACK_SERIAL - 16], words[_ACK_MODE - 16]

    def request_pause(self, paused: bool) -> int:
        """Ask the training process to pause between two steps, or to go on; returns the request.

        Requests are numbered, the lowest bit says what is asked for: 1 to pause, 0 to go on.
        """
        asked = (((self._words()[_REQUEST_PAUSE - 16] >> 1) + 1) << 1 | paused) & 0xFFFFFFFFFFFFFFFF
        os.pwrite(self._fd, struct.pack("=Q", asked), _REQUEST_PAUSE * 8)
        return asked

    def pause_requests(self) -> tuple[int, int]:
        """The last request that `request_pause` made, and the last one acted upon; 0 for none."""
        words = self._words()
        return words[_REQUEST_PAUSE - 16], words[_ACK_PAUSE - 16]

    def has_more(self) -> bool:
        """Whether the writer has written beyond what was read."""
        return self.position < self._words()[_HEAD - 16]

    def has_last_words(self) -> bool:
        """Whether a record is staged that was not read."""
        return self._staged() is not None

    def read(self, limit: int = 1 << 20) -> list[bytes]:
        """The next records' payloads, oldest first, from at most `limit` bytes; an empty list when there are none.

        What was overwritten before it could be read is added to `missed`. Raises RingError if the file was truncated.
        """
        words = self._words()
        head, claim = words[_HEAD - 16], max(words[_CLAIM - 16], words[_HEAD - 16])
        if self.position > head:  # damaged header: there is nothing to be trusted
            return []
        self._skip_overwritten(claim)
        start = self.position
        if start >= head:
            return []
        end = min(head, start + max(limit, BLOCK_BYTES))
        if end < head:
            end -= end % BLOCK_BYTES  # frames never cross a block, so a cut there is clean
        data = self._copy(start, end)
        words = self._words()
        safe_from = max(words[_CLAIM - 16] - self.capacity, 0)
        return self._parse(data, start, safe_from)

    def last_words(self) -> list[bytes]:
        """The record that a process staged and died before it could write it, once `read` has nothing more."""
        staged = self._staged()
        if staged is None:
            return []
        self.sequence, payload = staged
        return [payload]

    def _staged(self) -> tuple[int, bytes] | None:
        """Number and payload of the staged record, if `read` has not given it."""
        size = self._words()[_STAGE_SIZE - 16]
        if not 0 < size <= _STAGE_MAX:
            return None
        raw = os.pread(self._fd, size + 16, _STAGE_AT)
        if len(raw) < size + 16 or raw[:8] != raw[-8:]:  # killed while it staged: the record was not finished
            return None
        number = int.from_bytes(raw[:8], "little")
        return None if number <= self.sequence else (number, raw[8:-8])

    def _skip_overwritten(self, claim: int) -> None:
        oldest = claim - self.capacity
        if self.position < oldest:
            self.position = -(-oldest // BLOCK_BYTES) * BLOCK_BYTES

    def _copy(self, start: int, end: int) -> bytes:
        at = start % self.capacity
        size = end - start
        first = min(size, self.capacity - at)
        data = os.pread(self._fd, first, HEADER_BYTES + at)
        if size > first:
            data += os.pread(self._fd, size - first, HEADER_BYTES)
        if len(data) < size:
            raise RingError(f"{self.path}: truncated")
        return data

    def _parse(self, data: bytes, start: int, safe_from: int) -> list[bytes]:
        found: list[bytes] = []
        offset, size = 0, len(data)
        if start < safe_from:
            offset = min(-(-safe_from // BLOCK_BYTES) * BLOCK_BYTES - start, size)
        while offset < size:
            room = BLOCK_BYTES - ((start + offset) & (BLOCK_BYTES - 1))
            if min(room, size - offset) < _FRAME_BYTES:  # a block's end, or a damaged head
                offset += min(room, size - offset)
                continue
            length, check, sequence = _FRAME.unpack_from(data, offset)
            if length == _PAD_LENGTH:
                offset += room
                continue
            body = offset + _FRAME_BYTES
            payload = data[body : body + length]
            if length > room - _FRAME_BYTES or body + length > size or (sequence ^ length) & 0xFFFFFFFF != check:
                offset += room  # damaged: the next block starts with a frame again, its number tells what is missing
                continue
            if sequence < self.sequence:  # already taken from the stage
                offset = body + ((length + 7) & ~7)
                continue
            if not self._first:
                self.missed += sequence - self.sequence
            self._first = False
            self.sequence = sequence + 1
            found.append(payload)
            offset = body + ((length + 7) & ~7)
        self.position = start + offset
        return found

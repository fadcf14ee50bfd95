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
import struct
import sys
import time
from typing import Any

__all__ = ["Activity", "Frame", "NoSizeSignal", "Ring", "RingError"]

MAGIC = b"DPMONRNG"
VERSION = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 16
DEFAULT_CAPACITY = 1 << 22
"""4 MiB: about 7,000 steps of one call over 8 replicas. Touched pages count as the training's memory, so not more."""

HEAD_STRUCT = struct.Struct("=8sIIQIiiiq")  # magic version header capacity pid process rank world start_ns
FRAME = struct.Struct("<IIQ")
FRAME_BYTES = FRAME.size
_WAIT_TURNS = 50
"""Tenths of a millisecond to wait for another thread's write, once at most."""
_UPPER = 0xFFFFFFFF_00000000
PAD_LENGTH = 0xFFFFFFFF
MAX_PAYLOAD = BLOCK_BYTES - FRAME_BYTES

# Indices of the 64-bit words that change while the ring is in use.
HEAD, CLAIM, LOST = 16, 17, 18
REQUEST_SERIAL, REQUEST_MODE, REQUEST_PAUSE = 24, 25, 26
ACK_SERIAL, ACK_MODE, ACTIVITY, STAGE_SIZE, HELD, ACK_PAUSE = 32, 33, 34, 35, 36, 37
STAGE_AT = 512
STAGE_MAX = 256
_LONG = struct.calcsize("l")
_GET_FLAGS, _SET_FLAGS = 2 << 30 | _LONG << 16 | 0x6601, 1 << 30 | _LONG << 16 | 0x6602
"""ioctl FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (linux/fs.h)."""
_NO_COPY_ON_WRITE = 0x00800000
"""FS_NOCOW_FL."""
WORDS = struct.Struct("=22Q")  # bytes 128..304: words 16..37


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
    WORD = ACTIVITY
    """Index in Ring.words: monotonic ns of the turn's start shifted left by three, and one of the numbers above."""
    BYTE = ACTIVITY * 8
    """Index in Ring.map of the byte that holds the number (and a few low bits of the time, which do not matter)."""
    NAMES = ("other", "data", "forward", "backward", "optimizer", "ended", "paused", "copy")


class Frame:
    """A record of fixed layout, or two in a row, written by one call of struct straight into the map."""

    __slots__ = ("keys", "need", "pack_into", "size")

    def __init__(self, layout: str, second: str | None = None) -> None:
        """Layouts are struct formats of standard size, beginning with "<"."""
        self.size = struct.calcsize(layout)
        pad = -self.size % 8
        # The head's length and check are one number here, least significant half first, as in FRAME.
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
                write_in_place(fd)
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
        HEAD_STRUCT.pack_into(
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
            self.words[HEAD] = end
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
                words[HEAD] = head
                del held[:count]
        except BaseException as error:
            if isinstance(error, struct.error):
                words[LOST] += 1 if held[count][1] is None else 2
                del held[count]
                self._sequence, self.head = number, head
            if start >= 0 and self.head == head:
                words[HEAD] = head
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
                self.words[LOST] += lost
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
        self.words[LOST] += lost
        return False

    def write(self, payload: bytes) -> bool:
        """Append one record of any layout, after the one that is staged; False, and counted as lost, if too large."""
        if len(payload) > MAX_PAYLOAD:
            self.words[LOST] += 1
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
        self._stage_into(self.map, STAGE_AT, number, *values, number)

    HELD, LOST = HELD, LOST
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
                self.words[LOST] += self._sequence == number
            raise
        finally:
            if anything:
                self.words[HELD] = sum(1 if step is None else 2 for _, step, _ in self.held) if self.held else 0

    def staging(self, layout: str, second: str | None = None) -> None:
        """Say which layout `stage` takes, and which one the records have that are held with a staged one."""
        self._pair = Frame(layout, second)
        packer, native = struct.Struct(f"<Q{layout[1:]}Q"), struct.Struct(f"@Q{layout[1:]}Q")
        self._stage_into = (native if native.size == packer.size else packer).pack_into
        self._stage_frame = Frame(layout)
        self.words[STAGE_SIZE] = struct.calcsize(layout)

    def _next_block(self) -> int:
        """Claim the next block, end the one under way with a pad, and return where the new one starts."""
        head, start = self.head, self._block_end
        self.words[CLAIM] = start + BLOCK_BYTES
        if start - head >= FRAME_BYTES:
            FRAME.pack_into(self.map, HEADER_BYTES + head % self._capacity, PAD_LENGTH, 0, 0)
        self.head = start  # before the block's end: an exception in between must not leave them in different blocks
        self._block_end = start + BLOCK_BYTES
        return start

    def activity(self, what: int, since_ns: int) -> None:
        """Say what the training thread has just begun (one of Activity) and when (monotonic, ns)."""
        self.words[ACTIVITY] = since_ns << 3 | what

    REQUEST = REQUEST_SERIAL
    """Index in `words` of what `request_serial` returns."""

    @property
    def request_serial(self) -> int:
        """The number of the last request that a reader made; 0 when there was none."""
        return self.words[REQUEST_SERIAL]

    @property
    def request_mode(self) -> int:
        """The mode asked for by the last request, as `dpmon.record.wire.MODES` numbers it."""
        return self.words[REQUEST_MODE]

    def acknowledge(self, serial: int, mode: int) -> None:
        """Tell readers which request was acted upon and which mode is in force now."""
        self.words[ACK_MODE] = mode
        self.words[ACK_SERIAL] = serial

    PAUSE, PAUSE_ANSWERED = REQUEST_PAUSE, ACK_PAUSE
    """Indices in `words` of the last request for a pause (odd) or its end (even), and of the last one acted upon."""


def write_in_place(fd: int) -> None:
    """Switch copy-on-write off for an empty file (chattr +C), if the file system supports it.

    On btrfs each write of a page needs new space, so on a full disk SIGBUS would kill the process.
    """
    flags = bytearray(_LONG)
    with contextlib.suppress(OSError):  # other file systems do not know the flag
        fcntl.ioctl(fd, _GET_FLAGS, flags, True)
        flags[:4] = struct.pack("=I", struct.unpack("=I", flags[:4])[0] | _NO_COPY_ON_WRITE)
        fcntl.ioctl(fd, _SET_FLAGS, flags)


_WRITERS = (Ring.put.__code__, Ring._put_held.__code__)

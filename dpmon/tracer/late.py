"""The records of a process whose devices are timed: held back, in their order, until the devices have come that far.

A device is some steps behind the host. So what it took is known some steps after a record could be written, and what
comes after that record waits for it, too: the ring holds records in the order in which things happened. After a number
of turns a record is written without, and says so. How many are held is in the ring's header: those of a process that is
killed are counted as lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dpmon.record.wire import Untimed, pack_timed
from dpmon.ring import Frame, Ring
from dpmon.tracer.events import DeviceTimes, Span

__all__ = ["Late", "Slot"]

MAX_TURNS = 64
"""After which a record does not wait any longer."""
MAX_RECORDS = 1024
"""Held at most: a turn may have any number of calls."""

Slot = Sequence[tuple[Span, int]]
"""One time of a record: spans that are added (1) or taken off (-1) on each device, of which the slowest counts.

Of the wait for data the one that waits least: the others may be waiting for that one, which has work.
"""


class _Record:
    """One that is not written yet."""

    __slots__ = ("least", "payload", "slots", "turn", "why")

    def __init__(self, payload: bytes, slots: Sequence[Slot] | None, why: int, turn: int, least: int) -> None:
        self.payload = payload
        self.slots = slots
        self.why = why
        self.turn = turn
        self.least = least

    def settled(self) -> bool:
        return all(span.settled for slot in self.slots or () for span, _ in slot)

    def packed(self, unread: int) -> bytes:
        """As it goes into the ring; `unread`: why spans that are not settled have no time."""
        if self.slots is None:
            return self.payload
        why = Untimed.NONE
        times: list[float | None] = []
        for index, slot in enumerate(self.slots):
            if len(slot) == 1 and slot[0][0].ms is not None:  # what most are
                times.append(slot[0][0].ms)
                continue
            by_device: dict[int, float] = {}
            missing = not slot
            for span, sign in slot:
                if span.ms is None:
                    missing = True
                    why = why or span.why or unread
                else:
                    by_device[span.device] = by_device.get(span.device, 0.0) + sign * span.ms
            of_all = min if index == self.least else max
            times.append(None if missing else max(0.0, of_all(by_device.values())))
        return pack_timed(self.payload, times, why or self.why)


class Late:
    """The queue of one process; everything but `add` on its training thread, between two turns."""

    def __init__(self, ring: Ring, times: DeviceTimes) -> None:
        self._ring = ring
        self._times = times
        self._queue: deque[_Record] = deque()
        self._frames: dict[int, Frame] = {}
        self.turn = 0
        """Turns that have ended."""

    def add(
        self, payload: bytes, slots: Sequence[Slot] | None = None, why: int = Untimed.NONE, least: int = -1
    ) -> None:
        """A record of which these times are still to come (of any thread); None: of which there is nothing to come.

        `why`: the reason for times that have no spans. `least`: the one of the times of which the least counts.
        """
        self._queue.append(_Record(payload, slots, why, self.turn, least))
        if len(self._queue) > 4 * MAX_RECORDS:  # they cannot be written
            self._queue.popleft()
            self._ring.words[Ring.LOST] += 1
        self._ring.words[Ring.HELD] = len(self._queue)

    @property
    def full(self) -> bool:
        """Whether more are held than should be."""
        return len(self._queue) > MAX_RECORDS

    def write(self, unread: int = Untimed.NONE) -> None:
        """Write the records whose times are known, and those that are too old; all of them if there is an `unread`."""
        self._times.collect()
        queue = self._queue
        while queue:
            record = queue[0]
            why = unread
            if not (record.settled() or unread):
                if self.turn - record.turn <= MAX_TURNS and not self.full:
                    break
                why = Untimed.LATE
            self._put(record, why)

    def _put(self, record: _Record, why: int) -> None:
        """Write the first of the queue; whatever an interrupt ends this by, it is written once."""
        payload = record.packed(why)
        frame = self._frames.get(len(payload))
        if frame is None:
            frame = self._frames[len(payload)] = Frame(f"<{len(payload)}s")
        ring = self._ring
        head = ring.head
        try:
            ring.put(frame, (payload,))
        except BaseException:
            if ring.head != head:
                self._done(record)
            raise
        self._done(record)

    def _done(self, record: _Record) -> None:
        queue = self._queue
        if queue and queue[0] is record:
            del queue[0]
        self._ring.words[Ring.HELD] = len(queue)

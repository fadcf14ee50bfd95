"""Holds the payloads of a step until their device times arrive.

Later payloads wait, too, so that payloads keep their order. After MAX_STEPS further steps, a payload is released
without its missing times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from dpmon.record.spans import Span
from dpmon.record.wire import Untimed, pack_timed

MAX_STEPS = 64
MAX_GROUPS = 1 << 13
"""Most waiting groups. MAX_STEPS is not enough, because other threads may make calls while no step ends."""
MAX_TIMED_SPANS = 1 << 16
"""Most spans with remembered times."""
_MS = 1e6

Slots: TypeAlias = "list[list[tuple[int, int]]]"
"""For each time of a payload: pairs (number of a span, sign). On each device, the times of the spans are added
(sign 1) or subtracted (sign -1)."""


class Pending(NamedTuple):
    """A payload of a call or step that waits for device times."""

    payload: bytes
    slots: Slots
    why: int
    least: int
    """Index of the time for which the fastest device counts (-1: none). For all others, the slowest device counts."""


class EventPayload(NamedTuple):
    """The payload of an event, with its number."""

    payload: bytes
    event: int


Payload: TypeAlias = "bytes | Pending | EventPayload"


class _PayloadGroup:
    """Payloads that were recorded together."""

    __slots__ = ("ends_step", "first", "payloads", "steps")

    def __init__(self, payloads: Sequence[Payload], steps: int, first: int | None, ends_step: bool) -> None:
        self.payloads = payloads
        self.steps = steps
        """Number of steps so far."""
        self.ends_step = ends_step
        """Whether a step ends with it; if not, a later group may refer to the same spans."""
        self.first = first


class DeviceWaits:
    """The queue of payloads of one process."""

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[int, float | None, int]]] = {}
        """By span: device, ms (None: unknown) and the reason for an unknown time."""
        self._expected: dict[int, int] = {}
        """By span: number of devices that will report a time."""
        self._queue: deque[_PayloadGroup] = deque()
        self._steps = 0

    def firsts(self) -> list[int]:
        """Return the first span of each waiting group."""
        return [group.first for group in self._queue if group.first is not None]

    def time(self, span: Span) -> None:
        """Take a span of kind DEVICE_TIME: the time of an earlier span on one device."""
        number, why = span.inputs | span.outputs << 32, span.site >> 16
        times = self._times.setdefault(number, [])
        device, count = span.site & 0xFF, span.site >> 8 & 0xFF
        if not any(known == device for known, _, _ in times):
            times.append((device, None if why else span.took / _MS, why))
        self._expected[number] = count
        if len(self._times) > MAX_TIMED_SPANS:
            oldest = next(iter(self._times))
            del self._times[oldest], self._expected[oldest]

    def add(self, payloads: Sequence[Payload], first: int | None, step: bool) -> None:
        """Queue payloads that were made from the span `first` and later ones."""
        self._steps += step
        self._queue.append(_PayloadGroup(payloads, self._steps, first, step))

    @property
    def idle(self) -> bool:
        """Whether no payloads wait."""
        return not self._queue

    def ready(self, unread: int = Untimed.NONE) -> list[bytes | EventPayload]:
        """Take out complete and overdue payloads; with `unread` (reason for missing times), take out all."""
        found: list[bytes | EventPayload] = []
        while self._queue:
            group = self._queue[0]
            why = unread
            if not (unread or self._settled(group)):
                if self._steps - group.steps < MAX_STEPS and len(self._queue) <= MAX_GROUPS:
                    break
                why = Untimed.LATE
            self._queue.popleft()
            for one in group.payloads:
                found.append(self._packed(one, why) if isinstance(one, Pending) else one)
            for number in _numbers(group) if group.ends_step else ():
                self._times.pop(number, None)
                self._expected.pop(number, None)
        return found

    def _settled(self, group: _PayloadGroup) -> bool:
        return all(len(self._times.get(number, ())) >= self._expected.get(number, 1) for number in _numbers(group))

    def _packed(self, one: Pending, unread: int) -> bytes:
        why = Untimed.NONE
        times: list[float | None] = []
        for index, slot in enumerate(one.slots):
            by_device: dict[int, float] = {}
            missing = not slot
            for number, sign in slot:
                known = self._times.get(number, [])
                if len(known) < self._expected.get(number, 1):
                    missing, why = True, why or unread
                for device, ms, reason in known:
                    if ms is None:
                        missing, why = True, why or reason
                    else:
                        by_device[device] = by_device.get(device, 0.0) + sign * ms
            of_all = min if index == one.least else max
            times.append(None if missing or not by_device else max(0.0, of_all(by_device.values())))
        return pack_timed(one.payload, times, min(why or one.why, 0xFF))


def _numbers(group: _PayloadGroup) -> Iterator[int]:
    """Yield the numbers of the spans that the times of a group consist of."""
    for one in group.payloads:
        if isinstance(one, Pending):
            for slot in one.slots:
                for number, _ in slot:
                    yield number

"""Device times: they come after the spans that they are of, and the payloads of a step wait for them.

What comes after such a step waits, too: payloads keep the order in which things happened. After MAX_STEPS further steps
a payload goes without the times that have not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from dpmon.record.spans import Span
from dpmon.record.wire import Untimed, pack_timed

MAX_STEPS = 64
MOST = 1 << 16
"""Spans whose times are remembered."""
_MS = 1e6

Slots: TypeAlias = "list[list[tuple[int, int]]]"
"""For each time of a payload: numbers of spans that are added (1) or taken off (-1), on each device."""


class Pending(NamedTuple):
    """A payload of a call or a step that is to have device times."""

    payload: bytes
    slots: Slots
    why: int
    least: int
    """Index of the time of which the fastest device counts, -1 for none: the others count by the slowest."""


class Said(NamedTuple):
    """The payload of an event, with its number."""

    payload: bytes
    event: int


Payload: TypeAlias = "bytes | Pending | Said"


class _Group:
    """The payloads of one step, or of what came after one."""

    __slots__ = ("mark", "payloads", "step", "turn")

    def __init__(self, payloads: Sequence[Payload], turn: int, mark: Any, step: bool) -> None:
        self.payloads = payloads
        self.turn = turn
        self.step = step
        """Whether a step ends with it: else its spans may be a later group's, too."""
        self.mark = mark


class DeviceWaits:
    """The payloads of one process on their way out."""

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[int, float | None, int]]] = {}
        """By span: device, ms, why they are not known."""
        self._expected: dict[int, int] = {}
        self._queue: deque[_Group] = deque()
        self._turn = 0

    def marks(self) -> list[Any]:
        """The marks of the groups that wait, the oldest first."""
        return [group.mark for group in self._queue]

    def time(self, span: Span) -> None:
        """A device has told what an earlier span took on it."""
        number, why = span.inputs | span.outputs << 32, span.site >> 16
        times = self._times.setdefault(number, [])
        device, count = span.site & 0xFF, span.site >> 8 & 0xFF
        if not any(known == device for known, _, _ in times):
            times.append((device, None if why else span.took / _MS, why))
        self._expected[number] = count
        if len(self._times) > MOST:
            oldest = next(iter(self._times))
            del self._times[oldest], self._expected[oldest]

    def add(self, payloads: Sequence[Payload], mark: Any, step: bool) -> None:
        """Put payloads into the queue; `mark` stands for where a successor has to begin if these have not come out."""
        self._turn += step
        self._queue.append(_Group(payloads, self._turn, mark, step))

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._queue

    def ready(self, unread: int = Untimed.NONE) -> list[bytes | Said]:
        """Take out what is complete or too old; everything if there is an `unread`, the reason for missing times."""
        found: list[bytes | Said] = []
        while self._queue:
            group = self._queue[0]
            why = unread
            if not (unread or self._settled(group)):
                if self._turn - group.turn < MAX_STEPS:
                    break
                why = Untimed.LATE
            self._queue.popleft()
            for one in group.payloads:
                found.append(self._packed(one, why) if isinstance(one, Pending) else one)
            for number in _numbers(group) if group.step else ():
                self._times.pop(number, None)
                self._expected.pop(number, None)
        return found

    def _settled(self, group: _Group) -> bool:
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


def _numbers(group: _Group) -> Iterator[int]:
    """The spans that are timed."""
    for one in group.payloads:
        if isinstance(one, Pending):
            for slot in one.slots:
                for number, _ in slot:
                    yield number

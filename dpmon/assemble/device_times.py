"""Device times: how many steps are timed, and which rows wait for their times.

The rows of a step are held until their device times arrive. Later rows wait, too, so that rows keep their order. After
MAX_STEPS further steps, a row is released without its missing times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil
from statistics import median
from typing import NamedTuple, TypeAlias

from dpmon.assemble.event_queue import QueuedEvent
from dpmon.record.history_rows import CallRow, Row
from dpmon.record.record_types import Step
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import Span

MAX_STEPS = 64
MAX_GROUPS = 1 << 13
"""Most waiting groups. MAX_STEPS is not enough, because other threads may make calls while no step ends."""
MAX_TIMED_SPANS = 1 << 16
"""Most spans with remembered times."""
_MS, _LONGEST_MS = 1e6, 1e9

Slots: TypeAlias = "list[list[tuple[int, int]]]"
"""For each time of a row: pairs (number of a span, sign). On each device, the times of the spans are added
(sign 1) or subtracted (sign -1)."""


class PendingRow(NamedTuple):
    """A call or step that waits for device times."""

    row: CallRow | Step
    slots: Slots
    why: int
    """Reason for missing times, if no span gives another."""
    least: int = -1
    """Index of the time for which the fastest device counts (-1: none). For all others, the slowest device counts."""


Waiting: TypeAlias = "Row | PendingRow | QueuedEvent"


class _Group(NamedTuple):
    """Rows that were recorded together."""

    rows: Sequence[Waiting]
    steps: int
    """Number of steps so far."""
    first: int | None
    ends_step: bool
    """Whether a step ends with it; if not, a later group may refer to the same spans."""


class DeviceTimeQueue:
    """The queue of rows of one process."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[int, dict[int, tuple[float | None, int]]]] = {}
        """By span: number of devices that will report a time; by device, ms or the reason for an unknown time."""
        self._queue: deque[_Group] = deque()
        self._steps = 0

    def first_span_numbers(self) -> list[int]:
        """Return the first span of each waiting group."""
        return [group.first for group in self._queue if group.first is not None]

    def add_device_time(self, span: Span) -> None:
        """Take a span of kind DEVICE_TIME: the time of an earlier span on one device."""
        number, why = span.inputs | span.outputs << 32, span.site >> 16
        _, times = self._times_of_span(number)
        times.setdefault(span.site & 0xFF, (None if why else span.took / _MS, why))
        self._times[number] = span.site >> 8 & 0xFF, times
        if len(self._times) > MAX_TIMED_SPANS:
            del self._times[next(iter(self._times))]

    def _times_of_span(self, number: int) -> tuple[int, dict[int, tuple[float | None, int]]]:
        """Return how many devices time a span, and their times so far."""
        return self._times.get(number) or (1, {})

    def add(self, rows: Sequence[Waiting], first: int | None, step: bool) -> None:
        """Queue rows that were made from the span `first` and later ones."""
        self._steps += step
        self._queue.append(_Group(rows, self._steps, first, step))

    @property
    def is_empty(self) -> bool:
        """Whether no rows wait."""
        return not self._queue

    def pop_ready(self, unread: int = Untimed.NONE) -> list[Row | QueuedEvent]:
        """Take out complete and overdue rows; with `unread` (reason for missing times), take out all."""
        found: list[Row | QueuedEvent] = []
        while self._queue:
            group = self._queue[0]
            why = unread
            if not (unread or self._is_complete(group)):
                if self._steps - group.steps < MAX_STEPS and len(self._queue) <= MAX_GROUPS:
                    break
                why = Untimed.LATE
            self._queue.popleft()
            for one in group.rows:
                found.append(self._with_times(one, why) if isinstance(one, PendingRow) else one)
            for number in _numbers(group) if group.ends_step else ():
                self._times.pop(number, None)
        return found

    def _is_complete(self, group: _Group) -> bool:
        return all(len(times) >= count for count, times in map(self._times_of_span, _numbers(group)))

    def _with_times(self, one: PendingRow, unread: int) -> CallRow | Step:
        why = Untimed.NONE
        times: list[float | None] = []
        for index, slot in enumerate(one.slots):
            by_device: dict[int, float] = {}
            missing = not slot
            for number, sign in slot:
                count, known = self._times_of_span(number)
                if len(known) < count:
                    missing, why = True, why or unread
                for device, (ms, reason) in known.items():
                    if ms is None:
                        missing, why = True, why or reason
                    else:
                        by_device[device] = by_device.get(device, 0.0) + sign * ms
            of_all = min if index == one.least else max
            ms = None if missing or not by_device else round(max(0.0, of_all(by_device.values())), 6)
            times.append(ms if ms is None or ms < _LONGEST_MS else None)
        return one.row.with_device_times(times, why or one.why)


def _numbers(group: _Group) -> Iterator[int]:
    """Yield the numbers of the spans that the times of a group consist of."""
    for one in group.rows:
        if isinstance(one, PendingRow):
            for slot in one.slots:
                for number, _ in slot:
                    yield number


COST_NS = 12_000
"""Cost of one device time: recording, querying and reading two events (tests/benchmarks/bench_inside.py)."""
SHARE = 0.01
MAX_ONE_IN = 1024
"""The training process accepts no higher number."""
STEPS = 64
"""Steps between two decisions, and steps that a decision considers."""
_SMALL_CHANGE = 1.25
"""Smaller changes are ignored, because each new number starts a new block of steps."""


class TimingIntervalController:
    """Finds `one_in` for one process from its steps."""

    def __init__(self) -> None:
        self.one_in = 0
        """One step in `one_in` should be timed; 0 while unknown."""
        self._walls: deque[int] = deque(maxlen=STEPS)
        self._steps = 0
        self._timed = self._times = 0.0
        """Numbers of timed steps and of their device times. Older ones count less."""

    def count_device_time(self) -> None:
        """Count one device time."""
        self._times += 1

    def count_step(self, wall_ns: int, timed: bool) -> None:
        """Count a step that has ended."""
        self._walls.append(wall_ns)
        self._timed += timed
        self._steps += 1
        if self._steps % STEPS == 0 and self._timed:
            self._update_interval()

    def _update_interval(self) -> None:
        cost = self._times / self._timed * COST_NS
        wanted = min(max(ceil(cost / (SHARE * max(median(self._walls), 1))), 1), MAX_ONE_IN)
        if not self.one_in / _SMALL_CHANGE <= wanted <= self.one_in * _SMALL_CHANGE:
            self.one_in = wanted
        self._timed /= 2
        self._times /= 2

"""Adds device times to rows, and chooses how many steps are timed.

The rows of a step are held until their device times arrive. Later rows wait, too, so that the order is kept. After
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
"""How many groups may wait. MAX_STEPS is not enough, because other threads may make calls while no step ends."""
MAX_TIMED_SPANS = 1 << 16
"""How many spans' times are remembered."""
_MS, _MAX_MS = 1e6, 1e9

Slots: TypeAlias = "list[list[tuple[int, int]]]"
"""For each time of a row: pairs (number of a span, sign). On each device, the times of these spans are added (sign 1)
or subtracted (sign -1)."""


class PendingRow(NamedTuple):
    """A call or step that waits for device times."""

    row: CallRow | Step
    slots: Slots
    untimed: int
    """The reason for missing times, unless a span has another one."""
    fastest_slot: int = -1
    """Index of the time for which the fastest device counts; -1: none. For all other times, the slowest one counts."""


Waiting: TypeAlias = "Row | PendingRow | QueuedEvent"


class _Group(NamedTuple):
    """Rows that were recorded together."""

    rows: Sequence[Waiting]
    steps: int
    """Number of steps so far."""
    ends_step: bool
    """Whether a step ends with it. If not, a later group may refer to the same spans."""


class DeviceTimeQueue:
    """The queue of a process's rows, which wait for device times."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[int, dict[int, tuple[float | None, int]]]] = {}
        """By span: how many devices time it; and by device, its time (ms), or None and the reason."""
        self._queue: deque[_Group] = deque()
        self._steps = 0

    def add_device_time(self, span: Span) -> None:
        """Add a span of kind DEVICE_TIME, the time of an earlier span on one device."""
        number, reason = span.inputs | span.outputs << 32, span.site >> 16
        _, times = self._times_of_span(number)
        times.setdefault(span.site & 0xFF, (None if reason else span.took / _MS, reason))
        self._times[number] = span.site >> 8 & 0xFF, times
        if len(self._times) > MAX_TIMED_SPANS:
            del self._times[next(iter(self._times))]

    def _times_of_span(self, number: int) -> tuple[int, dict[int, tuple[float | None, int]]]:
        """Return how many devices time a span, and their times so far."""
        return self._times.get(number) or (1, {})

    def add(self, rows: Sequence[Waiting], ends_step: bool) -> None:
        """Queue rows that were recorded together. `ends_step`: whether a step ended with them."""
        self._steps += ends_step
        self._queue.append(_Group(rows, self._steps, ends_step))

    @property
    def is_empty(self) -> bool:
        """Whether no rows wait."""
        return not self._queue

    def pop_ready(self, missing_reason: int = Untimed.NONE) -> list[Row | QueuedEvent]:
        """Pop the rows whose times are complete or overdue.

        With `missing_reason`, pop all rows and give it as the reason for missing times.
        """
        released: list[Row | QueuedEvent] = []
        while self._queue:
            group = self._queue[0]
            reason = missing_reason
            if not (missing_reason or self._is_complete(group)):
                if self._steps - group.steps < MAX_STEPS and len(self._queue) <= MAX_GROUPS:
                    break
                reason = Untimed.LATE
            self._queue.popleft()
            for row in group.rows:
                released.append(self._with_times(row, reason) if isinstance(row, PendingRow) else row)
            for number in _span_numbers(group) if group.ends_step else ():
                self._times.pop(number, None)
        return released

    def _is_complete(self, group: _Group) -> bool:
        return all(len(times) >= count for count, times in map(self._times_of_span, _span_numbers(group)))

    def _with_times(self, pending: PendingRow, missing_reason: int) -> CallRow | Step:
        untimed = Untimed.NONE
        times: list[float | None] = []
        for index, slot in enumerate(pending.slots):
            by_device: dict[int, float] = {}
            is_missing = not slot
            for number, sign in slot:
                count, known_times = self._times_of_span(number)
                if len(known_times) < count:
                    is_missing, untimed = True, untimed or missing_reason
                for device, (ms, reason) in known_times.items():
                    if ms is None:
                        is_missing, untimed = True, untimed or reason
                    else:
                        by_device[device] = by_device.get(device, 0.0) + sign * ms
            combine = min if index == pending.fastest_slot else max
            ms = None if is_missing or not by_device else round(max(0.0, combine(by_device.values())), 6)
            times.append(ms if ms is None or ms < _MAX_MS else None)
        return pending.row.with_device_times(times, untimed or pending.untimed)


def _span_numbers(group: _Group) -> Iterator[int]:
    """Yield the numbers of the spans that the times of a group's rows come from."""
    for row in group.rows:
        if isinstance(row, PendingRow):
            for slot in row.slots:
                for number, _ in slot:
                    yield number


COST_NS = 12_000
"""Cost of one device time: recording, querying and reading two events (tests/benchmarks/bench_inside.py)."""
MAX_COST_SHARE = 0.01
"""Maximum share of the step time that device times may cost."""
MAX_INTERVAL = 1024
"""The training process accepts no larger interval."""
DECISION_STEPS = 64
"""Number of steps between two decisions, and of steps that a decision considers."""
_MIN_CHANGE = 1.25
"""Smaller changes (a ratio) are ignored, because each new interval starts a new block of steps."""


class TimingIntervalController:
    """Chooses the interval of timed steps for one process."""

    def __init__(self) -> None:
        self.interval = 0
        """One step in this many should be timed; 0 while unknown."""
        self._step_times: deque[int] = deque(maxlen=DECISION_STEPS)
        self._steps = 0
        self._timed_steps = self._device_times = 0.0
        """Number of timed steps, and of their device times. Older ones count less."""

    def count_device_time(self) -> None:
        """Count one device time."""
        self._device_times += 1

    def count_step(self, wall_ns: int, timed: bool) -> None:
        """Count a step that has ended."""
        self._step_times.append(wall_ns)
        self._timed_steps += timed
        self._steps += 1
        if self._steps % DECISION_STEPS == 0 and self._timed_steps:
            self._update_interval()

    def _update_interval(self) -> None:
        cost_ns = self._device_times / self._timed_steps * COST_NS
        interval = min(max(ceil(cost_ns / (MAX_COST_SHARE * max(median(self._step_times), 1))), 1), MAX_INTERVAL)
        if not self.interval / _MIN_CHANGE <= interval <= self.interval * _MIN_CHANGE:
            self.interval = interval
        self._timed_steps /= 2
        self._device_times /= 2

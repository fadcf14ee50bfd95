"""Adds device times to steps and their calls, and chooses how many steps are timed.

A step is held until its device times arrive. Later rows wait, too, so that the order is kept. After MAX_STEPS further
steps, it is released without its missing times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import ceil
from statistics import median
from typing import NamedTuple, TypeAlias

from dpmon.record.history_rows import Row
from dpmon.record.record_types import Step
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import Span

MAX_STEPS = 64
MAX_ROWS = 1 << 13
"""How many rows may wait. MAX_STEPS is not enough, because other threads may make calls while no step ends."""
MAX_TIMED_SPANS = 1 << 16
"""How many spans' times are remembered."""
_MS, _MAX_MS = 1e6, 1e9

Slots: TypeAlias = "list[list[tuple[int, int]]]"
"""For each time of a row: pairs (number of a span, sign). On each device, the times of these spans are added (sign 1)
or subtracted (sign -1)."""


class PendingTimes(NamedTuple):
    """Device times of a step or a call that are still to come."""

    slots: Slots
    untimed: int
    """The reason for missing times, unless a span has another one."""
    fastest_slot: int = -1
    """Index of the time for which the fastest device counts; -1: none. For all other times, the slowest one counts."""


class PendingStep(NamedTuple):
    """A step that waits for device times."""

    step: Step
    times: PendingTimes | None
    """Its own ones."""
    call_times: Mapping[int, PendingTimes]
    """Those of its calls, by index in `step.calls`."""

    def span_numbers(self) -> Iterator[int]:
        """Yield the numbers of the spans that the times come from."""
        for times in (self.times, *self.call_times.values()):
            for slot in () if times is None else times.slots:
                for number, _ in slot:
                    yield number


class RowQueue:
    """The queue of a process's rows. A step that waits for device times holds up the later rows."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[int, dict[int, tuple[float | None, int]]]] = {}
        """By span: how many devices time it; and by device, its time (ms), or None and the reason."""
        self._waiting: deque[tuple[Row | PendingStep, int]] = deque()
        """The rows from the first pending step on, and how many steps had ended with each of them."""
        self._steps = 0
        self._ready: list[Row] = []

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

    def add(self, row: Row | PendingStep) -> None:
        """Queue a row."""
        if not (self._waiting or isinstance(row, PendingStep)):
            self._ready.append(row)
            return
        step = row.step if isinstance(row, PendingStep) else row
        ends_step = isinstance(step, Step) and step.takes_time
        self._steps += ends_step
        self._waiting.append((row, self._steps))
        if ends_step or len(self._waiting) > MAX_ROWS:  # not only in `pop_rows`, whose times depend on the reader
            self._release()

    def pop_rows(self, missing_reason: int = Untimed.NONE) -> list[Row]:
        """Pop the rows whose times are complete or overdue.

        With `missing_reason`, pop all rows and give it as the reason for missing times.
        """
        self._release(missing_reason)
        ready, self._ready = self._ready, []
        return ready

    def _release(self, missing_reason: int = Untimed.NONE) -> None:
        while self._waiting:
            row, steps = self._waiting[0]
            if isinstance(row, PendingStep):
                reason = missing_reason
                if not (missing_reason or self._is_complete(row)):
                    if self._steps - steps < MAX_STEPS and len(self._waiting) <= MAX_ROWS:
                        return
                    reason = Untimed.LATE
                row = self._with_times(row, reason)
            self._ready.append(row)
            self._waiting.popleft()

    def _is_complete(self, pending: PendingStep) -> bool:
        return all(len(times) >= count for count, times in map(self._times_of_span, pending.span_numbers()))

    def _with_times(self, pending: PendingStep, missing_reason: int) -> Step:
        """Return the step with its device times and those of its calls."""
        step, calls = pending.step, list(pending.step.calls)
        for index, call_times in pending.call_times.items():
            calls[index] = calls[index].with_device_times(*self._device_times(call_times, missing_reason))
        if pending.times is not None:
            step = step.with_device_times(*self._device_times(pending.times, missing_reason))
        for number in pending.span_numbers():
            self._times.pop(number, None)
        return step._replace(calls=calls)

    def _device_times(self, pending: PendingTimes, missing_reason: int) -> tuple[list[float | None], int]:
        """Return device times (ms), and the number of Untimed that explains each None."""
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
        return times, untimed or pending.untimed


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

"""How long a device works on a phase, by events on the streams that do the work; the device is never waited for.

An event is recorded where a phase begins and where it ends, on the stream that is current there; one that ends where
the next begins shares it. Between two steps the thread that steps asks which have completed and reads the time between
them. Events come from a pool for each device: when it is empty, because the device is far behind, a phase is not
timed, and that is counted. Nothing is recorded while a CUDA graph is captured: it would become a part of the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["POOL_EVENTS", "DeviceTimes", "Events", "Span", "TorchEvents"]

POOL_EVENTS = 256
"""For each device."""
_cuda: Any = torch.cuda  # its hints differ from version to version
MAX_FAULTS = 3


class Events(Protocol):
    """What a device's events can do."""

    def capturing(self) -> bool:
        """Whether what is queued now is captured into a graph."""

    def make(self) -> Any:
        """A new event, of no device until it is recorded."""

    def record(self, event: Any, device: int) -> None:
        """Queue it on the device's current stream."""

    def done(self, event: Any) -> bool:
        """Whether the device has come to it; does not wait."""

    def between_ms(self, first: Any, last: Any) -> float:
        """The time between two that are done."""


class TorchEvents:
    """torch.cuda's."""

    def capturing(self) -> bool:
        """Of this thread's current stream."""
        return bool(_cuda.is_current_stream_capturing())

    def make(self) -> Any:
        """An event that keeps time; CUDA makes it when it is first recorded."""
        return _cuda.Event(enable_timing=True)

    def record(self, event: Any, device: int) -> None:
        """On the stream that is current in this thread."""
        event.record(_cuda.current_stream(device))

    def done(self, event: Any) -> bool:
        """cudaEventQuery."""
        return bool(event.query())

    def between_ms(self, first: Any, last: Any) -> float:
        """cudaEventElapsedTime."""
        return float(first.elapsed_time(last))


class _Mark:
    """A recorded event, and how many spans still need it."""

    __slots__ = ("event", "users")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.users = 1


class Span:
    """One phase on one device, from its begin until its time is read."""

    __slots__ = ("device", "first", "key", "last")

    def __init__(self, key: Hashable, device: int, first: _Mark) -> None:
        self.key = key
        self.device = device
        self.first = first
        self.last: _Mark | None = None


class Time(NamedTuple):
    """What was read of one phase: its key, the device, ms."""

    key: Hashable
    device: int
    ms: float


class DeviceTimes:
    """The phases that devices are at work on. Any thread may begin and end; one thread, between steps, collects."""

    def __init__(self, events: Events, fault: Callable[[BaseException], None], pool_events: int = POOL_EVENTS) -> None:
        """`fault` takes what goes wrong; after MAX_FAULTS nothing more is timed."""
        self._events = events
        self._fault = fault
        self._limit = pool_events
        self._free: dict[int, list[Any]] = {}
        self._made: dict[int, Iterator[int]] = {}
        self._pending: dict[int, deque[Span]] = {}
        self._faults = 0
        self.untimed = 0
        """Phases that found no event free."""

    @property
    def off(self) -> bool:
        """Whether it has given up."""
        return self._faults >= MAX_FAULTS

    def begin(self, key: Hashable, device: int) -> Span | None:
        """A phase begins on a device; None if it is not timed."""
        if self.off:
            return None
        mark = self._mark(device)
        return None if mark is None else Span(key, device, mark)

    def end(self, span: Span | None) -> None:
        """It ends there."""
        if span is None:
            return
        mark = self._mark(span.device)
        if mark is None:
            self._release(span.device, span.first)
        else:
            self._close(span, mark)

    def next(self, span: Span | None, key: Hashable, device: int) -> Span | None:
        """It ends where another begins: on the same device one event does for both."""
        if span is None or span.device != device:
            self.end(span)
            return self.begin(key, device)
        mark = self._mark(device)
        if mark is None:
            self._release(device, span.first)
            return None
        mark.users += 1
        self._close(span, mark)
        return Span(key, device, mark)

    def abandon(self, span: Span | None) -> None:
        """Its work has failed: there is nothing to be timed."""
        if span is not None:
            self._release(span.device, span.first)

    def collect(self) -> Iterator[Time]:
        """What the devices have finished since the last time, in their order; never waits for them."""
        for device, pending in list(self._pending.items()):
            while pending:
                span = pending[0]
                last = span.last
                assert last is not None
                try:
                    # The first may be on another stream, where it is behind.
                    if not (self._events.done(last.event) and self._events.done(span.first.event)):
                        break
                    took = self._events.between_ms(span.first.event, last.event)
                except Exception as error:  # noqa: BLE001 - a time is lost, the training is not
                    self._failed(error)
                    took = -1.0
                pending.popleft()
                self._release(device, span.first)
                self._release(device, last)
                if took >= 0:  # two streams may have passed each other
                    yield Time(span.key, device, took)

    def waiting(self) -> int:
        """Phases whose times have not been read."""
        return sum(len(pending) for pending in self._pending.values())

    def _close(self, span: Span, mark: _Mark) -> None:
        span.last = mark
        self._pending.setdefault(span.device, deque()).append(span)

    def _mark(self, device: int) -> _Mark | None:
        """An event recorded now; None while a graph is captured, or if none is free."""
        event = None
        try:
            if self._events.capturing():
                return None
            event = self._take(device)
            if event is None:
                self.untimed += 1
                return None
            self._events.record(event, device)
        except Exception as error:  # noqa: BLE001 - it is not timed
            if event is not None:
                self._free.setdefault(device, []).append(event)
            self._failed(error)
            return None
        return _Mark(event)

    def _take(self, device: int) -> Any:
        free = self._free.setdefault(device, [])
        try:
            return free.pop()
        except IndexError:  # other threads take from it too
            pass
        # A counter that threads may share: each number is given out once.
        if next(self._made.setdefault(device, count())) >= self._limit:
            return None
        return self._events.make()

    def _release(self, device: int, mark: _Mark) -> None:
        mark.users -= 1
        if mark.users == 0:
            self._free.setdefault(device, []).append(mark.event)

    def _failed(self, error: BaseException) -> None:
        self._faults += 1
        self._fault(error)

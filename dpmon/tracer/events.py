"""How long a device works on a phase, by events on the streams that do the work; the device is never waited for.

An event is recorded where a phase begins and where it ends, on the stream that is current there; one that begins where
another ends shares it. Between two steps the thread that steps asks which have completed and reads the time between
them. Events come from a pool for each device: when it is empty, because the device is far behind, a phase is not
timed, and that is counted. Nothing is recorded or asked while a CUDA graph is captured: what is recorded would become
a part of the graph, and a question would end the capture.

What is between two events of a stream is the device's work, and its idleness where the host was behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

import torch

from dpmon.record.wire import Untimed
from dpmon.tracer.captures import Captures

POOL_EVENTS = 256
"""For each device."""
_cuda: Any = torch.cuda  # its hints differ from version to version
MAX_FAULTS = 3
MAX_STREAMS = 256


class Events(Protocol):
    """What a device's events can do."""

    def capturing(self) -> bool:
        """Whether what is queued now may be captured into a graph, or a question may end a capture."""

    def make(self) -> Any:
        """A new event, of no device until it is recorded."""

    def record(self, event: Any, device: int) -> None:
        """Queue it on the device's current stream."""

    def done(self, event: Any) -> bool:
        """Whether the device has come to it; does not wait."""

    def between_ms(self, first: Any, last: Any) -> float:
        """The time between two that are done."""


_captures: Captures | None = None


def _watch_captures() -> None:
    """Once a process, when it has come to its first GPU: graphs that are captured already are not known of."""
    global _captures
    _captures = Captures()
    for kind in (_cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None)):
        with suppress(AttributeError):
            _captures.watch(kind)


class TorchEvents:
    """torch.cuda's."""

    def __init__(self) -> None:
        self._current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        """The current stream's handle, by device: a tenth of what the stream's object costs."""
        self._streams: dict[tuple[int, int], Any] = {}
        base = getattr(torch._C, "_CudaEventBase", None)
        kind: Any = base if isinstance(base, type) and issubclass(_cuda.Event, base) else _cuda.Event
        # Of the class that is torch's own in C: those above it only pass these on, at twice the cost.
        self._record, self._query, self._elapsed = kind.record, kind.query, kind.elapsed_time
        self._is_captured = (
            getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or _cuda.is_current_stream_capturing
        )
        if _captures is None:
            _watch_captures()

    def capturing(self) -> bool:
        """Of this thread's current stream, or anywhere in this process."""
        return bool(_captures) or bool(self._is_captured())

    def make(self) -> Any:
        """An event that keeps time; CUDA makes it when it is first recorded."""
        return _cuda.Event(enable_timing=True)

    def record(self, event: Any, device: int) -> None:
        """On the stream that is current in this thread."""
        if self._current is None:
            self._record(event, _cuda.current_stream(device))
            return
        key = device, self._current(device)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self._streams.clear()
            stream = self._streams[key] = _cuda.current_stream(device)
        self._record(event, stream)

    def done(self, event: Any) -> bool:
        """cudaEventQuery."""
        return bool(self._query(event))

    def between_ms(self, first: Any, last: Any) -> float:
        """cudaEventElapsedTime."""
        return float(self._elapsed(first, last))


class _Mark:
    """A recorded event, how many spans still need it, and whether it is known to have come."""

    __slots__ = ("come", "event", "users")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.users = 1
        self.come = False


class Span:
    """One phase on one device: its time once it is known, or why it never will be."""

    __slots__ = ("device", "first", "last", "ms", "why")

    def __init__(self, device: int) -> None:
        self.device = device
        self.first: _Mark | None = None
        self.last: _Mark | None = None
        self.ms: float | None = None
        self.why = Untimed.NONE

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be known of it."""
        return self.ms is not None or self.why != Untimed.NONE


class DeviceTimes:
    """The phases that devices are at work on. Any thread may begin and end; one thread, between steps, collects."""

    def __init__(self, events: Events, fault: Callable[[BaseException], None], pool_events: int = POOL_EVENTS) -> None:
        """`fault` takes what goes wrong; after MAX_FAULTS nothing more is timed."""
        self._events = events
        self._fault = fault
        self._limit = pool_events
        self._free: dict[int, list[Any]] = {}
        self._made: dict[int, Iterator[int]] = {}
        self._handed: dict[int, int] = {}
        """Events that were made, by device."""
        self._taken: dict[int, int] = {}
        """Events of the turn under way, by device."""
        self._needs: dict[int, int] = {}
        """The most that a turn has taken lately."""
        self._spares = False
        """Whether the turn under way is not timed."""
        self._pending: dict[int, deque[Span]] = {}
        self._faults = 0
        self.untimed = 0
        """Phases that found no event free."""

    @property
    def off(self) -> bool:
        """Whether it has given up."""
        return self._faults >= MAX_FAULTS

    def begin(self, device: int, after: Span | None = None) -> Span:
        """A phase begins on a device: now, or, where that is the same device, where `after` ended."""
        span = Span(device)
        shared = after.last if after is not None and after.device == device else None
        if shared is not None and not self.off:
            shared.users += 1
            span.first = shared
        else:
            span.first, span.why = self._mark(device)
        return span

    def end(self, span: Span) -> None:
        """It ends: here, or where its last lap did."""
        if span.first is None:
            return
        if span.last is None:
            span.last, span.why = self._mark(span.device)
            if span.last is None:
                self._release(span.device, span.first)
                span.first = None
                return
        pending = self._pending.get(span.device)
        if pending is None:
            pending = self._pending.setdefault(span.device, deque())
        pending.append(span)

    def lap(self, span: Span) -> None:
        """It may have ended here: this is taken for its end if no later lap is."""
        if span.first is None:
            return
        mark, why = self._mark(span.device)
        if span.last is not None:
            self._release(span.device, span.last)
        span.last = mark
        if mark is None:
            self.abandon(span, why)

    def abandon(self, span: Span, why: int = Untimed.RAISED) -> None:
        """It has not ended yet and never will: its work has failed, there is nothing to be timed."""
        for mark in (span.first, span.last):
            if mark is not None:
                self._release(span.device, mark)
        span.first = span.last = None
        span.why = span.why or why

    def collect(self) -> None:
        """Read what the devices have finished since the last time, in their order; never waits for them."""
        if not any(self._pending.values()):
            return
        try:
            if self._events.capturing():
                return
        except Exception as error:  # noqa: BLE001 - times are lost, the training is not
            self._failed(error)
        for pending in list(self._pending.values()):
            while pending and self._read(pending[0]):
                del pending[0]

    def _read(self, span: Span) -> bool:
        """Read one time; False if the device has not come to its end."""
        first, last = span.first, span.last
        assert first is not None
        assert last is not None
        try:
            # The first may be on another stream, where it is behind.
            if not (self._come(last) and self._come(first)):
                return False
            took = self._events.between_ms(first.event, last.event)
            if took >= 0:
                span.ms = took
            else:  # two streams that have passed each other
                span.why = Untimed.CROSSED
        except Exception as error:  # noqa: BLE001 - a time is lost, the training is not
            self._failed(error)
            span.why = Untimed.FAULT
        self._release(span.device, first)
        self._release(span.device, last)
        span.first = span.last = None
        return True

    def _come(self, mark: _Mark) -> bool:
        mark.come = mark.come or self._events.done(mark.event)  # one that ends a phase may begin the next
        return mark.come

    def waiting(self) -> int:
        """Phases whose times have not been read."""
        return sum(len(pending) for pending in self._pending.values())

    def _mark(self, device: int) -> tuple[_Mark | None, int]:
        """An event recorded now, or why there is none."""
        if self._faults >= MAX_FAULTS:
            return None, Untimed.FAULT
        if self._spares:
            self.untimed += 1
            return None, Untimed.NO_EVENT
        event = None
        try:
            events = self._events
            if events.capturing():
                return None, Untimed.CAPTURED
            event = self._take(device)
            if event is None:
                self.untimed += 1
                return None, Untimed.NO_EVENT
            events.record(event, device)
        except Exception as error:  # noqa: BLE001 - it is not timed
            if event is not None:
                self._free.setdefault(device, []).append(event)
            self._failed(error)
            return None, Untimed.FAULT
        return _Mark(event), Untimed.NONE

    def turn(self) -> None:
        """A turn of the loop is over. The next is timed as a whole or not at all: were it timed as far as the events
        last, the last phases of a device that is far behind would never be.
        """
        for device, taken in self._taken.items():
            before = self._needs.get(device, 0)
            self._needs[device] = max(taken, before - (before >> 3))  # a long evaluation is forgotten in some turns
        self._taken.clear()
        self._spares = any(
            len(self._free.get(device, ())) + self._limit - self._handed.get(device, 0) < min(need, self._limit)
            for device, need in self._needs.items()
        )

    def _take(self, device: int) -> Any:
        self._taken[device] = self._taken.get(device, 0) + 1
        free = self._free.get(device)
        if free is None:
            free = self._free.setdefault(device, [])
        try:
            return free.pop()
        except IndexError:  # other threads take from it too
            pass
        # A counter that threads may share: each number is given out once.
        number = next(self._made.setdefault(device, count()))
        if number >= self._limit:
            return None
        self._handed[device] = number + 1
        return self._events.make()

    def _release(self, device: int, mark: _Mark) -> None:
        mark.users -= 1
        if mark.users == 0:
            self._free.setdefault(device, []).append(mark.event)

    def _failed(self, error: BaseException) -> None:
        self._faults += 1
        self._fault(error)

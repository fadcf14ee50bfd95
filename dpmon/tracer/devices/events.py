"""Times phases on a device with events on its working streams. Never waits for the device.

An event is recorded on the current stream at the beginning and the end of a phase. A phase that begins at the end of
another phase shares its event. Between two steps, the training thread queries the events and reads the times between
them. Then the events are used again. While a device is far behind, no more phases are timed. During the capture of a
CUDA graph, no event is recorded or queried: an event would become a part of the graph, and a query would end the
capture.

The time between two events of a stream includes the time while the device waits for the host.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from dpmon.record.names import Untimed
from dpmon.tracer.core.frames import followed
from dpmon.tracer.core.session import raise_from_signal

MAX_PENDING = 256
"""Most phases of a device that wait for their times. No step begins to be timed while half of them wait."""
_cuda: Any = torch.cuda  # its type hints differ between versions of torch
MAX_FAULTS = 3
MAX_STREAMS = 256


class _SuppressedFaults(suppress):
    """Suppresses our faults, but no exception that a signal handler of the script raised."""

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if error is not None:
            raise_from_signal(error)
        return bool(super().__exit__(kind, error, traceback))


def watch_captures(kinds: Iterable[Any]) -> dict[int, weakref.ref[object]]:
    """Wrap the methods of classes such as torch.cuda.CUDAGraph; return the graphs that are being captured, by id.

    Any thread may begin and end a capture. During a capture in "global" mode, torch's usual mode, CUDA refuses
    cudaEventQuery and ends the capture, even if another thread or another stream queries the event. torch reports only
    the state of the current stream. A deleted graph no longer counts, even if its capture never ended.
    """
    graphs: dict[int, weakref.ref[object]] = {}
    guard = _SuppressedFaults(Exception)

    def begins(graph: object, *_: object, **__: object) -> None:
        key = id(graph)
        graphs[key] = weakref.ref(graph, lambda _: graphs.pop(key, None))

    def failed(error: object, graph: object, *_: object, **__: object) -> None:
        graphs.pop(id(graph), None)

    def ended(result: object, began: int, graph: object) -> None:
        graphs.pop(id(graph), None)

    for kind in kinds:
        with suppress(AttributeError):  # another version of torch
            begin, end = kind.capture_begin, kind.capture_end
            # Noted before the capture begins: a query in between would end it.
            kind.capture_begin = followed(begin, guard, lambda *_, **__: None, before=begins, failed=failed)
            kind.capture_end = followed(end, guard, ended, failed=failed)
    return graphs


@cache
def _captures() -> dict[int, weakref.ref[object]]:
    """Watch captures from the first call on, before the first timed phase; earlier captures are missed."""
    return watch_captures((_cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None)))


class TorchEvents:
    """Events of torch.cuda."""

    def __init__(self) -> None:
        self._current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        """Function that returns the handle of a device's current stream. A stream object costs ten times as much."""
        self._streams: dict[tuple[int, int], object] = {}
        base = getattr(torch._C, "_CudaEventBase", None)
        kind: Any = base if isinstance(base, type) and issubclass(_cuda.Event, base) else _cuda.Event
        # Methods of torch's C class, because those of the Python classes only forward the calls, at twice the cost.
        self._record, self._query, self._elapsed = kind.record, kind.query, kind.elapsed_time
        self._is_captured = (
            getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or _cuda.is_current_stream_capturing
        )
        self._captures = _captures()

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured, or any graph in this process."""
        return bool(self._captures) or bool(self._is_captured())

    def make(self) -> object:
        """An event with timing; CUDA creates it when it is first recorded."""
        return _cuda.Event(enable_timing=True)

    def record(self, event: object, device: int) -> None:
        """Record on this thread's current stream."""
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

    def done(self, event: object) -> bool:
        """Call cudaEventQuery."""
        return bool(self._query(event))

    def between_ms(self, first: object, last: object) -> float:
        """Call cudaEventElapsedTime."""
        return float(self._elapsed(first, last))


class _RecordedEvent:
    """A recorded event, the number of spans that still need it, and whether the device has reached it."""

    __slots__ = ("event", "reached", "users")

    def __init__(self, event: object) -> None:
        self.event = event
        self.users = 1
        self.reached = False


class DeviceSpan:
    """A phase on one device: its time once it is known, or the reason why it stays unknown."""

    __slots__ = ("device", "first", "last", "ms", "why")

    def __init__(self, device: int) -> None:
        self.device = device
        self.first: _RecordedEvent | None = None
        self.last: _RecordedEvent | None = None
        self.ms: float | None = None
        self.why = Untimed.NONE

    @property
    def settled(self) -> bool:
        """Whether its time is known, or will stay unknown."""
        return self.ms is not None or self.why != Untimed.NONE


class DeviceTimes:
    """Times phases on devices. Any thread may begin and end a phase; one thread collects the times between steps."""

    def __init__(
        self, events: TorchEvents, fault: Callable[[BaseException], None], max_pending: int = MAX_PENDING
    ) -> None:
        """`fault` is called with each error. After MAX_FAULTS errors, nothing more is timed."""
        self._events = events
        self._fault = fault
        self._limit = max_pending
        self._free: dict[int, list[object]] = {}
        """Events that may be used again, by device."""
        self._skips = False
        """Whether this step is not timed."""
        self._pending: dict[int, deque[DeviceSpan]] = {}
        """By device, the ended phases whose times are not known yet."""
        self._faults = 0

    @property
    def off(self) -> bool:
        """Whether timing has given up."""
        return self._faults >= MAX_FAULTS

    def begin(self, device: int, after: DeviceSpan | None = None) -> DeviceSpan:
        """Begin a phase on a device: at the end of `after` if that is on the same device, else now."""
        span = DeviceSpan(device)
        shared = after.last if after is not None and after.device == device else None
        if shared is not None and not self.off:
            shared.users += 1
            span.first = shared
        else:
            span.first, span.why = self._mark(device)
        return span

    def end(self, span: DeviceSpan) -> None:
        """End a phase at its last lap, or now if it has none."""
        if span.first is None:
            return
        if span.last is None:
            span.last, span.why = self._mark(span.device)
            if span.last is None:
                self._release(span.device, span.first)
                span.first = None
                return
        self._pending[span.device].append(span)

    def lap(self, span: DeviceSpan) -> None:
        """Mark a possible end of a phase; it counts if no later lap follows."""
        if span.first is None:
            return
        mark, why = self._mark(span.device)
        if span.last is not None:
            self._release(span.device, span.last)
        span.last = mark
        if mark is None:
            self.abandon(span, why)

    def abandon(self, span: DeviceSpan, why: int = Untimed.RAISED) -> None:
        """Abandon a phase that will never end, because its work failed."""
        for mark in (span.first, span.last):
            if mark is not None:
                self._release(span.device, mark)
        span.first = span.last = None
        span.why = span.why or why

    def collect(self) -> None:
        """Read the times of finished phases, in order; never waits for a device."""
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

    def _read(self, span: DeviceSpan) -> bool:
        """Read one time. Return False if the device has not reached the end of the phase."""
        first, last = span.first, span.last
        assert first is not None
        assert last is not None
        try:
            # The first event may be on another stream, which may be behind.
            if not (self._is_reached(last) and self._is_reached(first)):
                return False
            took = self._events.between_ms(first.event, last.event)
            if took >= 0:
                span.ms = took
            else:  # one stream has overtaken the other
                span.why = Untimed.CROSSED
        except Exception as error:  # noqa: BLE001 - a time is lost, the training is not
            self._failed(error)
            span.why = Untimed.FAULT
        self._release(span.device, first)
        self._release(span.device, last)
        span.first = span.last = None
        return True

    def _is_reached(self, mark: _RecordedEvent) -> bool:
        mark.reached = mark.reached or self._events.done(mark.event)  # consecutive phases share an event
        return mark.reached

    def waiting(self) -> int:
        """Number of phases with unread times."""
        return sum(len(pending) for pending in self._pending.values())

    def _mark(self, device: int) -> tuple[_RecordedEvent | None, int]:
        """Record an event now. Return it and Untimed.NONE, or None and the reason."""
        if self._faults >= MAX_FAULTS:
            return None, Untimed.FAULT
        pending = self._pending.get(device)
        if pending is None:
            pending = self._pending.setdefault(device, deque())
            self._free.setdefault(device, [])
        if self._skips or len(pending) >= self._limit:
            return None, Untimed.NO_EVENT
        event = None
        try:
            events = self._events
            if events.capturing():
                return None, Untimed.CAPTURED
            event = self._take(device)
            events.record(event, device)
        except Exception as error:  # noqa: BLE001 - it is not timed
            if event is not None:
                self._free[device].append(event)
            self._failed(error)
            return None, Untimed.FAULT
        return _RecordedEvent(event), Untimed.NONE

    def end_step(self) -> None:
        """End a step. The next step is timed as a whole or not at all.

        If a step were timed until the limit of pending phases, the last phases on a device that is far behind would
        never be timed.
        """
        self._skips = any(len(pending) >= self._limit // 2 for pending in self._pending.values())

    def _take(self, device: int) -> object:
        try:
            return self._free[device].pop()
        except IndexError:  # empty; a check before `pop` would race with other threads
            return self._events.make()

    def _release(self, device: int, mark: _RecordedEvent) -> None:
        mark.users -= 1
        if mark.users == 0:
            self._free[device].append(mark.event)

    def _failed(self, error: BaseException) -> None:
        self._faults += 1
        self._fault(error)

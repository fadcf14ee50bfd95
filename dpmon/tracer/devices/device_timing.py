"""Device times of the phases of a process that trains on GPUs, from events on the working streams.

A `DeviceTimer` exists only after a call runs on a GPU, so other processes pay nothing for it. An event is recorded on
the current stream at the beginning and the end of a phase. A phase that begins where another one ends shares its event.
The span of a phase is written when the host finishes the phase, with a flag that the phase is timed.

Between two steps, the training thread queries the events in the order of the phases, and never waits for a device. The
times that are known are written, one span per device, with the number of the phase's span. Then the events are used
again. While a device is far behind, no more phases are timed.

The time between two events of a stream includes the time while the device waits for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, Protocol

import torch

from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.cuda_events import TorchEvents

MAX_FAULTS = 3
MAX_WAITING = 256
"""Most phases for each GPU that wait for their times. No step begins to be timed while half of them wait."""
MAX_STEPS = 64
"""Longest wait for a device time, in steps."""
MAX_COPIES = 16
"""Most timed copies in one step, so that enough events are left for the phases."""
_TIMED, _UNTIMED = Flag.TIMED << FLAGS_AT, Flag.UNTIMED << FLAGS_AT
_COUNT_ANYWAY = frozenset((Kind.FETCH, Kind.CALL, Kind.WRAPPED, Kind.BACKWARD, Kind.COPY))
"""Phases that keep their device times even if they raise."""
_PRIMITIVES = frozenset((Kind.SCATTER, Kind.REPLICATE, Kind.PARALLEL_APPLY, Kind.GATHER))


def gpu_of(device: str) -> int:
    """The index in `cuda:1`, or in `cuda:1/0` (a virtual replica); -1 if it is not a GPU."""
    kind, _, rest = device.partition(":")
    index = rest.partition("/")[0]
    return int(index or 0) if kind == "cuda" and (not index or index.isdecimal()) else -1


def gpus_of(devices: Sequence[str]) -> tuple[int, ...]:
    """The GPUs among the devices, each once, in order."""
    return tuple(dict.fromkeys(index for index in map(gpu_of, devices) if index >= 0))


class SpanWriter(Protocol):
    """What this module needs of dpmon.tracer.steps.span_recorder.SpanRecorder, which imports it."""

    session: Session
    words: Any
    training_thread: Any
    put: Callable[[int, int, int, int], int]


class DeviceSpan:
    """A phase on one device: its time once it is known, or the reason why it stays unknown."""

    __slots__ = ("device", "first", "follows", "last", "ms", "taken", "why")

    def __init__(self, device: int) -> None:
        self.device = device
        self.first: Any = None
        self.last: Any = None
        """The events at its beginning and its end. Without `last`, `ms` is known, or `why` says why it is not."""
        self.follows = False
        """Whether `first` is the last event of the phase before."""
        self.taken = False
        """Whether `last` is also the first event of the next phase, which then frees it."""
        self.ms: float | None = None
        self.why = Untimed.NONE


class PhaseTimer:
    """The events around one phase, on each of its devices. Its methods never raise."""

    __slots__ = ("_kind", "_shares", "_timing", "late", "number", "spans", "step")

    def __init__(self, timing: DeviceTimer, kind: int, spans: list[DeviceSpan], shares: bool = False) -> None:
        """`spans`: empty in a step that is not timed. `shares`: the call's next phase may begin where this one ends."""
        self._timing = timing
        self._kind = kind
        self._shares = shares
        self.spans = spans
        self.number = -1
        """Number of the phase's span."""
        self.step = 0
        """Number of steps that had ended when the span was written."""
        self.late = False
        """Whether its times were written as unknown; its events are not free yet."""

    def end(self) -> int:
        """End the phase; return the flags for the head of its span."""
        timing = self._timing
        for span in self.spans:
            if span.last is None:
                timing.mark_possible_end(span)
            if self._shares:
                timing.last[span.device] = span
        return _TIMED if self.spans else _UNTIMED

    def mark_possible_end(self) -> None:
        """Mark a possible end of the phase; it counts if no later lap follows."""
        for span in self.spans:
            self._timing.mark_possible_end(span)

    def raised(self) -> int:
        """End a phase that raised; return the flags for the head of its span."""
        if self._kind in _COUNT_ANYWAY or not self.spans:
            return self.end()
        for span in self.spans:
            span.first = span.last = None
            span.why = span.why or Untimed.RAISED
        return 0 if self._kind in _PRIMITIVES else _TIMED

    def set_span_number(self, number: int) -> None:
        """Remember the number of the phase's written span; -1 if it was not written."""
        if number >= 0 and self.spans:
            self.number = number
            self._timing.wait_for(self)


class DeviceTimer:
    """Measures the device times of one process. Its methods never raise."""

    def __init__(self, recorder: SpanWriter, events: TorchEvents | None = None) -> None:
        self._recorder = recorder
        self._events = events or TorchEvents(recorder.session)
        self._free: dict[int, list[object]] = {}
        """Events that may be used again, by device."""
        self._faults = 0
        """Number of faults. After MAX_FAULTS, nothing more is timed."""
        self.gpus: tuple[int, ...] = ()
        """GPUs for the phases of this step: those of the last step's calls, and those of this step's calls so far."""
        self._used: tuple[int, ...] = ()
        """GPUs of the calls of this step so far."""
        self._called = False
        """Whether this step has a call."""
        self._skips = False
        """Whether this step is not timed, because only one step in several is."""
        self._behind = False
        """Whether this step is not timed, because a device is far behind. A step is timed as a whole or not at all:
        else its last phases would never be timed."""
        self.synced: Callable[[], int] | None = None
        """Returns the number of synchronized backward passes, so that all ranks time the same steps."""
        self._waiting: deque[PhaseTimer] = deque()
        """The phases with unread events."""
        self._steps = 0
        self._copies = 0
        self._not_timed = PhaseTimer(self, 0, [])
        self.last: dict[int, DeviceSpan] = {}
        """Per device: the last finished phase of the current call."""

    def _failed(self, error: BaseException) -> None:
        self._faults += 1
        self._recorder.session.count_error("time on a device", error, fatal=False)

    # ---------------------------------------------------------------- events

    def _span(self, device: int, after: DeviceSpan | None = None) -> DeviceSpan:
        """Begin a phase on a device: at the end of the phase `after`, or now."""
        span = DeviceSpan(device)
        if after is None or after.last is None or after.taken:
            span.first = self._record_event(span)
        else:
            span.first, span.follows, after.taken = after.last, True, True
        return span

    def mark_possible_end(self, span: DeviceSpan) -> None:
        """Record a possible end of a phase on its device; a later lap replaces it."""
        if span.first is not None:
            if span.last is not None:
                self._free[span.device].append(span.last)
            span.last = self._record_event(span)
            if span.last is None:
                span.first = None

    def _record_event(self, span: DeviceSpan) -> object:
        """Record an event on the device of a phase now; None, with the reason in `span`, if that is not possible."""
        if self._faults >= MAX_FAULTS:
            span.why = Untimed.FAULT
        elif self._behind:
            span.why = Untimed.NO_EVENT
        else:
            try:
                if not self._events.is_capturing():
                    event = self._free_event(span.device)
                    self._events.record(event, span.device)
                    return event
                span.why = Untimed.CAPTURED
            except Exception as error:  # noqa: BLE001 - it is not timed
                self._failed(error)
                span.why = Untimed.FAULT
        return None

    def _free_event(self, device: int) -> object:
        try:
            return self._free.setdefault(device, []).pop()
        except IndexError:  # empty; a check before `pop` would race with other threads
            return self._events.create_event()

    def _is_above_limit(self, share: int) -> bool:
        """Whether one part in `share` of the phases that may wait for their times do."""
        return len(self._waiting) * share >= MAX_WAITING * max(len(self.gpus), 1)

    # ---------------------------------------------------------------- phases

    def begin(
        self, me: object, kind: int, gpus: Sequence[int] | None = None, *, shares: bool = False
    ) -> PhaseTimer | None:
        """Begin a phase on these GPUs, or on all GPUs of the step.

        `shares`: it is a phase of a call, which begins on each GPU at the end of the previous phase.
        """
        if gpus is None:
            gpus = self.gpus
        if not gpus or me is not self._recorder.training_thread:
            return None
        if self._skips:
            return self._not_timed
        last = self.last if shares else {}
        return PhaseTimer(self, kind, [self._span(gpu, last.get(gpu)) for gpu in gpus], shares)

    def begin_call(self, me: object, gpus: tuple[int, ...]) -> PhaseTimer | None:
        """Begin a call on the GPUs of its model."""
        if me is not self._recorder.training_thread:
            return None
        if me.inside not in (Kind.CALL, Kind.WRAPPED):
            if not (self._called or gpus):
                self.gpus = ()  # the last step's GPUs may be idle in this step
            self._called = True
            if gpus != self._used:
                self._used = tuple(dict.fromkeys((*self._used, *gpus)))
                self.gpus = tuple(dict.fromkeys((*self.gpus, *gpus)))
        self.last.clear()
        return self.begin(me, Kind.CALL, gpus)

    def begin_replica(self, devices: Sequence[str], index: int) -> PhaseTimer | None:
        """Begin a replica, on its own thread and stream."""
        return self.begin_part(Kind.REPLICA, gpu_of(devices[index]) if index < len(devices) else -1)

    def begin_part(self, kind: int, gpu: int) -> PhaseTimer | None:
        """Begin a part of a call of the training thread, on one GPU (-1: none). Any thread may call this."""
        if gpu < 0:
            return None
        if self._skips:
            return self._not_timed
        return PhaseTimer(self, kind, [self._span(gpu)])

    def begin_copy(self, me: object, gpu: int) -> PhaseTimer | None:
        """Begin a copy to one GPU."""
        self._copies += 1
        return self.begin(me, Kind.COPY, (gpu,)) if self._copies <= MAX_COPIES or self._skips else None

    # ---------------------------------------------------------------- reading

    def wait_for(self, mark: PhaseTimer) -> None:
        """Write the times of a phase once they are known. The span of the phase has been written."""
        for span in mark.spans:
            if span.last is not None:
                mark.step = self._steps
                self._waiting.append(mark)
                self._behind = self._behind or self._is_above_limit(1)
                return
        self._write(mark, Untimed.NONE)  # it is not timed

    def end_step(self) -> None:
        """Write the known times, because a step may have ended."""
        self._copies = 0
        if self._called:
            self._steps += 1
            self.gpus = self._used
            self._used, self._called = (), False
            self._choose_next_step()
        self.write_known_times()

    def _choose_next_step(self) -> None:
        """Decide whether the next step is timed: one step in k, rounded up to a power of two, without a pattern.

        k is the number that a reader has requested; 0 and 1 time every step.
        Ranks with a larger k time a subset of the steps that other ranks time.
        """
        bits = max(self._recorder.words[HeaderWord.TIMED_ONE_IN] - 1, 0).bit_length()
        number = self._steps if self.synced is None else self.synced()
        self._skips = _hash_number(number) & (1 << bits) - 1 != 0

    def write_known_times(self, unread: int = Untimed.NONE) -> None:
        """Write the known times. `unread`: if not NONE, also write all other times as unknown, with this reason."""
        waiting = self._waiting
        try:
            if waiting and not self._is_capturing():
                while waiting and all(map(self._try_read_time, waiting[0].spans)):
                    if not waiting[0].late:
                        self._write(waiting[0], Untimed.NONE)
                    del waiting[0]  # an interrupt before this line repeats the one above; the reader drops duplicates
            for mark in list(waiting):
                late = Untimed.LATE if self._steps - mark.step > MAX_STEPS else unread
                if not late:
                    break
                if not mark.late:
                    self._write(mark, late)
                    mark.late = True
        except Exception as error:  # noqa: BLE001 - the training continues
            self._failed(error)
        self._behind = self._is_above_limit(2)

    def _is_capturing(self) -> bool:
        try:
            return self._events.is_capturing()
        except Exception as error:  # noqa: BLE001 - times are lost, the training is not
            self._failed(error)
            return False

    def _try_read_time(self, span: DeviceSpan) -> bool:
        """Read the time of a phase on one device. Return False if the device has not reached its end."""
        events, first, last = self._events, span.first, span.last
        if last is None:
            return True
        try:
            # The first event may be on another stream, which may be behind. A shared one was reached with its phase.
            if not (events.done(last) and (span.follows or events.done(first))):
                return False
            took = events.between_ms(first, last)
            if took >= 0:
                span.ms = took
            else:  # one stream has overtaken the other
                span.why = Untimed.CROSSED
            self._free[span.device] += [first] if span.taken else [first, last]
        except Exception as error:  # noqa: BLE001 - a time is lost, the training is not
            self._failed(error)
            span.why = Untimed.FAULT
        span.first = span.last = None
        return True

    def _write(self, mark: PhaseTimer, late: int) -> None:
        for span in mark.spans:
            why = Untimed.NONE if span.ms is not None else span.why or late
            site = span.device & 0xFF | min(len(mark.spans), 0xFF) << 8 | why << 16
            took = 0 if span.ms is None else int(span.ms * 1e6)
            self._recorder.put(Kind.DEVICE_TIME | site << SITE_AT, 0, took, mark.number)

    def at_exit(self) -> None:
        """Write all times at the end of the process; unfinished times stay unknown."""
        self.write_known_times(Untimed.ENDED)


def _hash_number(number: int) -> int:
    """Mix the bits of a number, the same way in every process (the finalizer of MurmurHash3)."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


cuda_starting = Event()
"""Set when CUDA is about to be initialized; another thread may then use CUDA before it counts as initialized."""


def cuda_may_be_used() -> bool:
    """Whether CUDA is initialized, or about to be."""
    return cuda_starting.is_set() or is_cuda_initialized()


def is_cuda_initialized() -> bool:
    """Whether CUDA is initialized in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

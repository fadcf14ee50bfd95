"""Measures the device times of the phases of a process that trains on GPUs, with events on the streams it uses.

A `DeviceTimer` exists only after a call has run on a GPU, so other processes pay nothing for it. An event is recorded
on the current stream at the start and at the end of a phase. A phase that starts where another one ends shares its
event. The span of a phase is written when the host finishes the phase, with a flag that the phase is timed.

Between two steps, the training thread queries the events in the order of the phases, and never waits for a device. The
known times are written, one span per device, with the number of the phase's span. Then the events are reused. While a
device is far behind, no more phases are timed.

The time between two events of a stream includes the time while the device waits for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.span_ring import HeaderWord
from dpmon.tracer.devices.cuda_events import TorchEvents

if TYPE_CHECKING:
    from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

MAX_FAULTS = 3
MAX_UNREAD_PHASES = 256
"""How many phases per GPU may have unread times. While half as many are unread, no further step is timed."""
MAX_WAIT_STEPS = 64
"""Longest wait for a device time, in steps."""
MAX_TIMED_COPIES = 16
"""How many copies are timed in one step, so that enough events are left for the phases."""
_TIMED, _UNTIMED = Flag.TIMED << FLAGS_AT, Flag.UNTIMED << FLAGS_AT


def gpu_of(device: str) -> int:
    """Return the index in `cuda:1`, or in `cuda:1/0` (a virtual replica); -1 if the device is not a GPU."""
    device_type, _, suffix = device.partition(":")
    index, _, _ = suffix.partition("/")
    return int(index or 0) if device_type == "cuda" and (not index or index.isdecimal()) else -1


def gpus_of(devices: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the GPUs among the devices, each once, in order."""
    return tuple(dict.fromkeys(index for index in map(gpu_of, devices) if index >= 0))


@dataclass(slots=True, eq=False)
class DeviceSpan:
    """A phase on one device: its time once it is known, or the reason why it stays unknown."""

    device: int
    start_event: Any = None
    end_event: Any = None
    """The events at its start and its end. Without `end_event`, `ms` is known, or `reason` says why it is not."""
    shares_start: bool = False
    """Whether `start_event` is the end event of the previous phase."""
    shares_end: bool = False
    """Whether `end_event` is also the start event of the next phase, which then frees it."""
    ms: float | None = None
    reason: int = Untimed.NONE


@dataclass(slots=True, eq=False)
class PhaseTimer:
    """The events around one phase, on each of its devices. Its methods never raise."""

    _timer: DeviceTimer
    spans: list[DeviceSpan]
    """Empty in an untimed step."""
    _is_call_phase: bool = False
    """Whether the call's next phase may begin where this one ends."""
    span_number: int = -1
    """Number of the phase's span."""
    step_number: int = 0
    """Number of steps that had ended when the span was written."""
    is_late: bool = False
    """Whether the times were written as unknown, although the events are not free yet."""

    def end(self) -> int:
        """End the phase; return the flags for its span's first word."""
        device_timer = self._timer
        for span in self.spans:
            if span.end_event is None:
                device_timer.mark_possible_end(span)
            if self._is_call_phase:
                device_timer.last_spans[span.device] = span
        return _TIMED if self.spans else _UNTIMED

    def mark_possible_end(self) -> None:
        """Mark a possible end of the phase; the last one counts."""
        for span in self.spans:
            self._timer.mark_possible_end(span)

    def set_span_number(self, number: int) -> None:
        """Set the number of the phase's written span; -1 if it was not written."""
        if number >= 0 and self.spans:
            self.span_number = number
            self._timer.add_phase(self)


class DeviceTimer:
    """The timer of one process's phases on its devices. Its methods never raise."""

    def __init__(self, recorder: SpanRecorder, events: TorchEvents | None = None) -> None:
        self._recorder = recorder
        self._events = events or TorchEvents(recorder.session)
        self._free_events: dict[int, list[object]] = {}
        """Events that may be used again, by device."""
        self._fault_count = 0
        """Number of our faults. After MAX_FAULTS, nothing more is timed."""
        self.step_gpus: tuple[int, ...] = ()
        """GPUs for the phases of this step: the GPUs of the last step's calls and of this step's calls so far."""
        self._called_gpus: tuple[int, ...] = ()
        """GPUs of the calls of this step so far."""
        self._has_call = False
        """Whether this step has a call."""
        self._skips_step = False
        """Whether this step is not timed, because only one step in several is."""
        self._is_behind = False
        """Whether this step is not timed, because a device is far behind. A step is timed as a whole or not at all.
        Otherwise, the last phases of steps would never be timed."""
        self.count_sync_passes: Callable[[], int] | None = None
        """Returns the number of sync passes so far, equal on all ranks, so that all ranks time the same steps."""
        self._unread_phases: deque[PhaseTimer] = deque()
        """The phases with unread events, oldest first."""
        self._step_count = 0
        self._copy_count = 0
        self._untimed_phase = PhaseTimer(self, [])
        self.last_spans: dict[int, DeviceSpan] = {}
        """Per device: the last finished phase of the current call."""

    def _count_fault(self, error: BaseException) -> None:
        self._fault_count += 1
        self._recorder.session.count_error("time on a device", error, fatal=False)

    # ---------------------------------------------------------------- events

    def _begin_span(self, device: int, previous_span: DeviceSpan | None = None) -> DeviceSpan:
        """Begin a phase on a device: at the end of the phase `previous_span`, or now."""
        span = DeviceSpan(device)
        if previous_span is None or previous_span.end_event is None or previous_span.shares_end:
            span.start_event = self._record_event(span)
        else:
            span.start_event, span.shares_start, previous_span.shares_end = previous_span.end_event, True, True
        return span

    def mark_possible_end(self, span: DeviceSpan) -> None:
        """Record a possible end of a phase on its device; it replaces an earlier one."""
        if span.start_event is not None:
            if span.end_event is not None:
                self._free_events[span.device].append(span.end_event)
            span.end_event = self._record_event(span)
            if span.end_event is None:
                span.start_event = None

    def _record_event(self, span: DeviceSpan) -> object:
        """Record and return an event on the device of a phase; None, with the reason in `span`, if not possible."""
        if self._fault_count >= MAX_FAULTS:
            span.reason = Untimed.FAULT
        elif self._is_behind:
            span.reason = Untimed.NO_EVENT
        else:
            try:
                if not self._events.is_capturing():
                    event = self._get_event(span.device)
                    self._events.record(event, span.device)
                    return event
                span.reason = Untimed.CAPTURED
            except Exception as error:  # noqa: BLE001 - it is not timed
                self._count_fault(error)
                span.reason = Untimed.FAULT
        return None

    def _get_event(self, device: int) -> object:
        """Return a free event of a device, or a new one."""
        try:
            return self._free_events.setdefault(device, []).pop()
        except IndexError:  # empty; a check before `pop` would race with other threads
            return self._events.create_event()

    def _is_above_limit(self, divisor: int) -> bool:
        """Return whether at least 1 in `divisor` of the allowed unread phases is unread."""
        return len(self._unread_phases) * divisor >= MAX_UNREAD_PHASES * max(len(self.step_gpus), 1)

    # ---------------------------------------------------------------- phases

    def begin(
        self, thread: ThreadState, gpus: Sequence[int] | None = None, *, is_call_phase: bool = False
    ) -> PhaseTimer | None:
        """Begin a phase on these GPUs, or on all GPUs of the step.

        `is_call_phase`: it is a phase of a call, which begins on each GPU at the end of the previous phase.
        """
        if gpus is None:
            gpus = self.step_gpus
        if not gpus or thread is not self._recorder.training_thread:
            return None
        if self._skips_step:
            return self._untimed_phase
        last_spans = self.last_spans if is_call_phase else {}
        return PhaseTimer(self, [self._begin_span(gpu, last_spans.get(gpu)) for gpu in gpus], is_call_phase)

    def begin_call(self, thread: ThreadState, gpus: tuple[int, ...]) -> PhaseTimer | None:
        """Begin a call on the GPUs of its model."""
        if thread is not self._recorder.training_thread:
            return None
        if thread.open_kind not in (Kind.CALL, Kind.WRAPPED):
            if not (self._has_call or gpus):
                self.step_gpus = ()  # the last step's GPUs may be idle in this step
            self._has_call = True
            if gpus != self._called_gpus:
                self._called_gpus = tuple(dict.fromkeys((*self._called_gpus, *gpus)))
                self.step_gpus = tuple(dict.fromkeys((*self.step_gpus, *gpus)))
        self.last_spans.clear()
        return self.begin(thread, gpus)

    def begin_part(self, gpu: int) -> PhaseTimer | None:
        """Begin a part of a call of the training thread, on one GPU (-1: none). Any thread may call this."""
        if gpu < 0:
            return None
        if self._skips_step:
            return self._untimed_phase
        return PhaseTimer(self, [self._begin_span(gpu)])

    def begin_copy(self, thread: ThreadState, gpu: int) -> PhaseTimer | None:
        """Begin a copy to one GPU."""
        self._copy_count += 1
        return self.begin(thread, (gpu,)) if self._copy_count <= MAX_TIMED_COPIES or self._skips_step else None

    # ---------------------------------------------------------------- reading

    def add_phase(self, phase_timer: PhaseTimer) -> None:
        """Write the times of a phase once they are known. Its span is already written."""
        for span in phase_timer.spans:
            if span.end_event is not None:
                phase_timer.step_number = self._step_count
                self._unread_phases.append(phase_timer)
                self._is_behind = self._is_behind or self._is_above_limit(1)
                return
        self._write_times(phase_timer, Untimed.NONE)  # none of its devices is timed

    def end_step(self) -> None:
        """Write the known times, because a step may have ended."""
        self._copy_count = 0
        if self._has_call:
            self._step_count += 1
            self.step_gpus = self._called_gpus
            self._called_gpus, self._has_call = (), False
            self._choose_next_step()
        self.write_known_times()

    def _choose_next_step(self) -> None:
        """Decide whether the next step is timed: one step in k, at irregular intervals.

        k is the number that a reader has requested, rounded up to a power of two; 0 and 1 time every step. Ranks with a
        larger k time a subset of the steps that other ranks time.
        """
        skip_bits = max(self._recorder.words[HeaderWord.TIMED_ONE_IN] - 1, 0).bit_length()
        number = self._step_count if self.count_sync_passes is None else self.count_sync_passes()
        self._skips_step = _hash_number(number) & (1 << skip_bits) - 1 != 0

    def write_known_times(self, unread_reason: int = Untimed.NONE) -> None:
        """Write the known times. `unread_reason`: if not NONE, write all other times as unknown, with this reason."""
        unread_phases = self._unread_phases
        try:
            if unread_phases and not self._events.is_capturing():
                while unread_phases and all(map(self._try_read_time, unread_phases[0].spans)):
                    if not unread_phases[0].is_late:
                        self._write_times(unread_phases[0], Untimed.NONE)
                    # After an interrupt here, the times are written again. The reader drops duplicates.
                    del unread_phases[0]
            for phase_timer in list(unread_phases):
                reason = Untimed.LATE if self._step_count - phase_timer.step_number > MAX_WAIT_STEPS else unread_reason
                if not reason:
                    break
                if not phase_timer.is_late:
                    self._write_times(phase_timer, reason)
                    phase_timer.is_late = True
        except Exception as error:  # noqa: BLE001 - the training continues
            self._count_fault(error)
        self._is_behind = self._is_above_limit(2)

    def _try_read_time(self, span: DeviceSpan) -> bool:
        """Read the time of a phase on one device. Return False if the device has not reached the phase's end."""
        events, start_event, end_event = self._events, span.start_event, span.end_event
        if end_event is None:
            return True
        try:
            # The start event may be on another stream, which may be behind. A shared one was reached by its own phase.
            if not (events.is_done(end_event) and (span.shares_start or events.is_done(start_event))):
                return False
            elapsed_ms = events.elapsed_ms(start_event, end_event)
            if elapsed_ms >= 0:
                span.ms = elapsed_ms
            else:  # one stream has overtaken the other
                span.reason = Untimed.CROSSED
            self._free_events[span.device] += [start_event] if span.shares_end else [start_event, end_event]
        except Exception as error:  # noqa: BLE001 - a time is lost, the training is not
            self._count_fault(error)
            span.reason = Untimed.FAULT
        span.start_event = span.end_event = None
        return True

    def _write_times(self, phase_timer: PhaseTimer, default_reason: int) -> None:
        """Write the times of a phase. `default_reason`: why a time is unknown that has no reason of its own."""
        device_count = min(len(phase_timer.spans), 0xFF)
        for span in phase_timer.spans:
            reason, duration_ns = Untimed.NONE, 0
            if span.ms is None:
                reason = span.reason or default_reason
            else:
                duration_ns = int(span.ms * 1e6)
            site = span.device & 0xFF | device_count << 8 | reason << 16
            self._recorder.put(Kind.DEVICE_TIME | site << SITE_AT, 0, duration_ns, phase_timer.span_number)

    def at_exit(self) -> None:
        """Write all times at the end of the process; unfinished times stay unknown."""
        self.write_known_times(Untimed.ENDED)


def _hash_number(number: int) -> int:
    """Return a hash of a number, the same in every process (the finalizer of MurmurHash3)."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def is_cuda_initialized() -> bool:
    """Return whether CUDA is initialized in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

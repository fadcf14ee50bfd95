"""Device time of a process that trains on GPUs: around the phases of its steps and calls, on every device of theirs.

There is a `Timing` once a call runs on a GPU, and not before: a process without has none of this on its way. From then
on calls and steps go the long ways of dpmon.tracer (see Steps.settle), which record events here; what they have written
waits in `Late` for what the events say.

Phases of a step are exclusive, on a device as on the host: what ran inside another one is taken off its time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from threading import Event, get_ident
from typing import TYPE_CHECKING

import torch

from dpmon.record.wire import CALL_PHASES, PLAIN_WORDS, Untimed
from dpmon.tracer.events import DeviceTimes, Events, Span, TorchEvents
from dpmon.tracer.late import Late, Slot

if TYPE_CHECKING:
    from dpmon.ring import Ring
    from dpmon.tracer.session import Session
    from dpmon.tracer.steps import Steps

__all__ = [
    "BACKWARD",
    "COPY",
    "DATA",
    "FORWARD",
    "OPTIMIZER",
    "CallTimes",
    "Timing",
    "coming",
    "gpu_of",
    "gpus_of",
    "may_be_used",
    "usable",
]

DATA, FORWARD, BACKWARD, OPTIMIZER, COPY = range(5)
MAX_COPIES = 16
"""Of one step: events are for its phases first."""
MAX_OPEN = 64
MAX_STRETCHES = 4096
"""Of one step: a turn may have any number of calls."""
_NOTHING: tuple[Span, ...] = ()
_PLAIN = struct.Struct(PLAIN_WORDS)


def gpu_of(device: str) -> int:
    """The index in `cuda:1`, or in `cuda:1/0`, a virtual replica on it; -1 for what is no GPU."""
    kind, _, rest = device.partition(":")
    index = rest.partition("/")[0]
    return int(index or 0) if kind == "cuda" and (not index or index.isdecimal()) else -1


def gpus_of(devices: Sequence[str]) -> tuple[int, ...]:
    """The GPUs among them, each once, in their order."""
    return tuple(dict.fromkeys(index for index in map(gpu_of, devices) if index >= 0))


class _Stretch:
    """One phase of the step, while it runs or after."""

    __slots__ = ("outer", "phase", "spans")

    def __init__(self, phase: int, outer: int, spans: list[Span]) -> None:
        self.phase = phase
        self.outer = outer
        """The phase it ran inside of, -1 for none."""
        self.spans = spans


class CallTimes:
    """The events of one call that is data parallel: around its phases, and around each replica's forward."""

    __slots__ = ("_last", "_open", "_times", "devices", "gpus", "phases", "whole")

    def __init__(self, times: DeviceTimes, devices: Sequence[str]) -> None:
        self._times = times
        self.whole: Sequence[Span] = _NOTHING
        """All of it."""
        self.devices = [gpu_of(device) for device in devices]
        """Of each replica."""
        self.gpus = gpus_of(devices)
        self.phases: list[list[tuple[Span, int]]] = [[] for _ in CALL_PHASES]
        self._open: list[Span] = []
        self._last: dict[int, Span] = {}

    def begin(self) -> None:
        """A call within another one begins: the whole of an outermost one is the step's forward."""
        self.whole = [self._times.begin(gpu) for gpu in self.gpus]

    def end(self) -> None:
        """It ends."""
        for span in self.whole:
            self._times.end(span)

    def begins(self) -> None:
        """A phase begins: on each device, where the one before it has ended."""
        last = self._last
        self._open = [self._times.begin(gpu, last.get(gpu)) for gpu in self.gpus]

    def ends(self, phase: int) -> None:
        """It ends."""
        opened, self._open = self._open, []
        for span in opened:
            self._times.end(span)
            self._last[span.device] = span
            self.phases[phase].append((span, 1))

    def begin_replica(self, index: int) -> Span | None:
        """A replica begins, on its own thread and stream; None if it is on no GPU."""
        gpu = self.devices[index] if index < len(self.devices) else -1
        return self._times.begin(gpu) if gpu >= 0 else None

    def end_replica(self, span: Span | None) -> None:
        """It ends."""
        if span is not None:
            self._times.end(span)

    def raised(self, replicas: Sequence[Span | None]) -> None:
        """What has not ended raised."""
        for span in (*self._open, *replicas):
            if span is not None and span.first is not None and span.last is None:
                self._times.abandon(span)
        self._open = []

    def again(self) -> CallTimes:
        """The same call from anew, but for its whole."""
        found = CallTimes(self._times, ())
        found.gpus, found.whole = self.gpus, self.whole
        return found

    def slots(self, replicas: Sequence[Span | None] | None) -> list[Slot]:
        """For the call's record; `replicas` None: there is one, which ran after the scatter, to the call's end."""
        rest: list[Slot]
        if replicas is None:
            scattered = [(span, -sign) for span, sign in self.phases[0]]
            rest = [[*((span, 1) for span in self.whole), *scattered]]
        else:
            rest = [() if span is None else ((span, 1),) for span in replicas]
        return [*self.phases, *rest]


class Timing:
    """The device time of one process. Nothing here raises; the training thread's, but for the calls of replicas."""

    def __init__(self, session: Session, steps: Steps, ring: Ring, events: Events | None = None) -> None:
        self._session = session
        self._steps = steps
        self.times = DeviceTimes(events or TorchEvents(), self._failed)
        self.late = Late(ring, self.times)
        self.gpus: tuple[int, ...] = ()
        """Where the phases of the step under way may run: where its calls did, before the first those of the last."""
        self._used: tuple[int, ...] = ()
        self._called = False
        """Whether the step under way has a call."""
        self._of_call: tuple[int, ...] = ()
        self._open: list[_Stretch] = []
        self._ended: list[_Stretch] = []
        self._dropped = False
        self._copies = 0
        self._mixed: set[int] = set()
        """Phases with copies inside that are not timed any more: what is theirs alone is not known."""
        self.call: Sequence[Span] = _NOTHING
        """The forward that ended last, on its devices."""

    def _failed(self, error: BaseException) -> None:
        self._session.fault("events", error, fatal=False)

    # ---------------------------------------------------------------- the step

    def runs_on(self, gpus: tuple[int, ...]) -> None:
        """The outermost call that begins now is on these."""
        self._of_call = gpus
        if not (self._called or gpus):
            self.gpus = ()  # the last step's do nothing in this one, as far as is known
        self._called = True
        if gpus != self._used:
            self._used = tuple(dict.fromkeys((*self._used, *gpus)))
            self.gpus = tuple(dict.fromkeys((*self.gpus, *gpus)))

    def copy_begins(self, gpu: int) -> None:
        """A copy to one GPU begins."""
        self._copies += 1
        timed = self._copies <= MAX_COPIES
        if not timed and self._open:
            self._mixed.add(self._open[-1].phase)
        self.begin(COPY, (gpu,) if timed else ())

    def begin(self, phase: int, where: tuple[int, ...] | None = None) -> None:
        """A phase of the step begins: a call on its own GPUs, any other on all of the step's, or only where it runs."""
        if get_ident() != self._steps.thread:
            return
        try:
            if len(self._open) >= MAX_OPEN:  # a script that leaves its optimizers by exceptions
                self._close_open()
            outer = self._open[-1].phase if self._open else -1
            if where is None:
                where = self._of_call if phase == FORWARD else self.gpus
            self._open.append(_Stretch(phase, outer, [self.times.begin(gpu) for gpu in where]))
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)

    def end(self, phase: int) -> None:
        """It ends; phases inside it that never said so have raised."""
        if get_ident() != self._steps.thread:
            return
        try:
            opened = self._open
            if not opened or opened[-1].phase != phase:
                if not any(one.phase == phase for one in opened):
                    return
                while opened[-1].phase != phase:
                    self._abandon(opened.pop())
            one = opened.pop()
            for span in one.spans:
                self.times.end(span)
            if phase == FORWARD:
                self.call = one.spans
            self._keep(one)
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)

    def _keep(self, one: _Stretch) -> None:
        if one.spans:
            if len(self._ended) < MAX_STRETCHES:
                self._ended.append(one)
            else:
                self._dropped = True

    def _abandon(self, one: _Stretch) -> None:
        for span in one.spans:
            self.times.abandon(span)
        self._keep(one)

    def _close_open(self) -> None:
        while self._open:
            self._abandon(self._open.pop())

    # ---------------------------------------------------------------- records

    def step(self, payload: bytes) -> None:
        """The turn is over: its record."""
        try:
            self._close_open()
            slots: list[list[tuple[Span, int]]] = [[] for _ in range(5 if self._copies else 4)]
            for one in self._ended:
                slots[one.phase] += [(span, 1) for span in one.spans]
                if one.outer >= 0:
                    slots[one.outer] += [(span, -1) for span in one.spans]
            why = Untimed.NONE
            if self._dropped:
                slots, why = [[] for _ in slots], Untimed.TOO_MANY
            elif self._copies > MAX_COPIES:
                why = Untimed.COPIES
                for phase in (COPY, *self._mixed):
                    slots[phase] = []
            self.late.add(payload, slots if why or any(slots) else None, why, least=DATA)
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._failed(error)
        self._forget()
        if self._called:
            self.gpus = self._used
        self._used, self._called = (), False
        self.late.turn += 1
        self.read()
        self.times.turn()

    def ran_before(self, spans: Sequence[Span]) -> None:
        """These belong to the forward of the step, too: parts of a call that is composed by hand."""
        self._keep(_Stretch(FORWARD, -1, list(spans)))

    def no_step(self) -> None:
        """What has run since the last one belongs to none."""
        self._close_open()
        self._forget()

    def _forget(self) -> None:
        self._ended, self._dropped, self._copies = [], False, 0
        self._mixed.clear()

    def call_begins(self, devices: Sequence[str], outermost: bool) -> CallTimes:
        """A call that is data parallel, or may be, is about to begin on the training thread."""
        found = CallTimes(self.times, devices)
        if not outermost:
            found.begin()
        return found

    def call_ends(self, call: CallTimes, outermost: bool, replicas: Sequence[Span | None]) -> None:
        """It is over; the step's forward has ended before, if it is outermost."""
        call.raised(replicas)
        if outermost:
            call.whole = self.call
        else:
            call.end()

    def add(self, payload: bytes, slots: Sequence[Slot] | None = None, why: int = Untimed.NONE) -> None:
        """A record of the training thread, and of which spans its times are (None: it has nothing of a GPU)."""
        self.late.add(payload, slots, why)
        if self.late.full:
            self.read()

    def plain(self, values: tuple[int, ...], gpus: tuple[int, ...]) -> None:
        """The record of a call without phases, as PLAIN_WORDS; its one replica took as long as the forward."""
        try:
            self.add(_PLAIN.pack(*values), [(), (), (), (), self.whole()] if gpus else None)
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._failed(error)

    def whole(self) -> Slot:
        """The forward that ended last, for a record."""
        return [(span, 1) for span in self.call]

    def in_order(self, payload: bytes) -> None:
        """An event that is not to overtake the steps and calls before it."""
        self.late.add(payload)
        if get_ident() == self._steps.thread:
            self.read()

    def read(self, last: int = Untimed.NONE) -> None:
        """Write what is complete; everything, if `last` says why no more is to be waited for."""
        session = self._session
        try:
            self.late.write(last)
            ring = session.ring
            if ring is not None and ring.head >= session.renew_at:
                session.renew()
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._failed(error)


coming = Event()
"""Set when CUDA is about to be up: another thread may come before it is."""


def may_be_used() -> bool:
    """Whether CUDA is up, or about to be."""
    return coming.is_set() or usable()


def usable() -> bool:
    """Whether CUDA is up in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

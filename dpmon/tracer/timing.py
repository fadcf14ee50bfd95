"""What devices take for the phases of a process that trains on GPUs, by events on the streams that do the work.

There is a `Timing` once a call runs on a GPU, and not before: a process without has none of this on its way. A phase's
span is written when the host is through with it, and says that it is timed; what the devices took is known some steps
later, and is written then, a span for each device that names the first one by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import torch

from dpmon.record.spans import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.record.wire import Untimed
from dpmon.tracer.events import DeviceTimes, Events, Span, TorchEvents
from dpmon.tracer.threads import Thread

__all__ = ["Mark", "Timing", "coming", "gpu_of", "gpus_of", "may_be_used", "usable"]

MAX_STEPS = 64
"""Steps after which a time is not waited for any longer."""
MAX_WAITING = 4096
"""Phases whose times are waited for: a step may have any number of calls."""
MAX_COPIES = 16
"""Of one step: events are for its phases first."""
_TIMED = Flag.TIMED << FLAGS_AT
_VERBS = frozenset((Kind.SCATTER, Kind.REPLICATE, Kind.PARALLEL_APPLY, Kind.GATHER))


def gpu_of(device: str) -> int:
    """The index in `cuda:1`, or in `cuda:1/0`, a virtual replica on it; -1 for what is no GPU."""
    kind, _, rest = device.partition(":")
    index = rest.partition("/")[0]
    return int(index or 0) if kind == "cuda" and (not index or index.isdecimal()) else -1


def gpus_of(devices: Sequence[str]) -> tuple[int, ...]:
    """The GPUs among them, each once, in their order."""
    return tuple(dict.fromkeys(index for index in map(gpu_of, devices) if index >= 0))


class Mark:
    """The events around one phase, on each of its devices."""

    __slots__ = ("_timing", "number", "spans", "step")

    def __init__(self, timing: Timing, spans: list[Span]) -> None:
        self._timing = timing
        self.spans = spans
        self.number = -1
        """Of the phase's span."""
        self.step = 0
        """Steps that had ended when it was written."""

    def end(self) -> int:
        """The phase ends; what its span says of it. Never raises."""
        self._timing.end(self.spans)
        return _TIMED

    def lap(self) -> None:
        """It may have ended here: this is taken for its end if no later lap is. Never raises."""
        self._timing.lap(self.spans)

    def abandon(self) -> int:
        """The phase raised: there is nothing to be timed. Never raises."""
        self._timing.abandon(self.spans)
        return 0

    def written(self, number: int) -> None:
        """Its span was written, with this number."""
        self.number = number
        self._timing.wait_for(self)


class Timing:
    """The device time of one process. Nothing here raises."""

    def __init__(
        self,
        write: Callable[[int, int, int, int], int],
        fault: Callable[..., None],
        events: Events | None = None,
    ) -> None:
        """`write` takes a span (SpanRing.put), `fault` what goes wrong (Session.fault)."""
        self._write_span = write
        self._fault = fault
        self.trains: Thread | None = None
        """The thread that trains."""
        self.times = DeviceTimes(events or TorchEvents(), self._failed)
        self.gpus: tuple[int, ...] = ()
        """Where the phases of the step under way may run: where its calls did, before the first those of the last."""
        self._used: tuple[int, ...] = ()
        self._called = False
        """Whether the step under way has a call."""
        self._waiting: deque[Mark] = deque()
        self._steps = 0
        self._copies = 0
        self._last: dict[int, Span] = {}
        """Of each device: the phase of a data-parallel call that ended last."""

    def _failed(self, error: BaseException) -> None:
        self._fault("events", error, fatal=False)

    # ---------------------------------------------------------------- phases

    def begin(self, me: Thread, kind: int) -> Mark | None:
        """A phase of the step begins, on all of the step's GPUs."""
        return self._begin(me, self.gpus)

    def call_begins(self, me: Thread, site: Any) -> Mark | None:
        """A call begins, on its own GPUs."""
        gpus: tuple[int, ...] = site.gpus
        if me is self.trains and me.inside not in (Kind.CALL, Kind.WRAPPED):
            if not (self._called or gpus):
                self.gpus = ()  # the last step's do nothing in this one, as far as is known
            self._called = True
            if gpus != self._used:
                self._used = tuple(dict.fromkeys((*self._used, *gpus)))
                self.gpus = tuple(dict.fromkeys((*self.gpus, *gpus)))
        self._last.clear()
        return self._begin(me, gpus)

    def verb_begins(self, me: Thread, site: Any, kind: int) -> Mark | None:
        """A phase of a call begins: on each device, where the one before it has ended."""
        return self._begin(me, self.gpus if site is None else site.gpus, self._last if site is not None else {})

    def replica_begins(self, site: Any, index: int) -> Mark | None:
        """A replica begins, on its own thread and stream."""
        devices = site.plan.devices
        return self.part_begins(gpu_of(devices[index]) if index < len(devices) else -1)

    def part_begins(self, gpu: int) -> Mark | None:
        """A part of a call begins on one GPU (-1: on none), on whichever thread."""
        if gpu < 0 or len(self._waiting) >= MAX_WAITING:
            return None
        try:
            return Mark(self, [self.times.begin(gpu)])
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)
            return None

    def copy_begins(self, me: Thread, gpu: int) -> Mark | None:
        """A copy to one GPU begins."""
        self._copies += 1
        return self._begin(me, (gpu,)) if self._copies <= MAX_COPIES else None

    def _begin(self, me: Thread, gpus: Sequence[int], last: dict[int, Span] | None = None) -> Mark | None:
        if not gpus or me is not self.trains or len(self._waiting) >= MAX_WAITING:
            return None
        try:
            begin = self.times.begin
            return Mark(self, [begin(gpu, None if last is None else last.get(gpu)) for gpu in gpus])
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)
            return None

    def end(self, spans: Sequence[Span]) -> None:
        """A phase ends on its devices."""
        try:
            for span in spans:
                self.times.end(span)
                self._last[span.device] = span
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)

    def lap(self, spans: Sequence[Span]) -> None:
        """A phase may have ended."""
        try:
            for span in spans:
                self.times.lap(span)
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)

    def abandon(self, spans: Sequence[Span]) -> None:
        """A phase has raised."""
        try:
            for span in spans:
                self.times.abandon(span)
        except Exception as error:  # noqa: BLE001 - it is not timed
            self._failed(error)

    # ---------------------------------------------------------------- what the devices say

    def wait_for(self, mark: Mark) -> None:
        """The span of a phase was written."""
        mark.step = self._steps
        self._waiting.append(mark)

    def step_ends(self) -> None:
        """A step may have ended: write what the devices have come to the end of."""
        self._steps += 1
        self._copies = 0
        if self._called:
            self.gpus = self._used
        self._used, self._called = (), False
        self.read()
        self.times.turn()

    def read(self, unread: int = Untimed.NONE) -> None:
        """Write the times that are known; of all others, if there is an `unread`, that they will not be."""
        try:
            self.times.collect()
            for _ in range(len(self._waiting)):
                mark = self._waiting.popleft()
                late = Untimed.LATE if self._steps - mark.step > MAX_STEPS else unread
                if late or all(span.settled for span in mark.spans):
                    self._write(mark, late)
                else:
                    self._waiting.append(mark)
        except Exception as error:  # noqa: BLE001 - the training goes on without
            self._failed(error)

    def _write(self, mark: Mark, late: int) -> None:
        for span in mark.spans:
            why = Untimed.NONE if span.ms is not None else span.why or late
            site = span.device & 0xFF | min(len(mark.spans), 0xFF) << 8 | why << 16
            took = 0 if span.ms is None else int(span.ms * 1e6)
            self._write_span(Kind.TIME | site << SITE_AT, 0, took, mark.number)

    def at_exit(self) -> None:
        """The process ends: what the devices have not come to the end of stays unknown."""
        self.read(Untimed.ENDED)


coming = Event()
"""Set when CUDA is about to be up: another thread may come before it is."""


def may_be_used() -> bool:
    """Whether CUDA is up, or about to be."""
    return coming.is_set() or usable()


def usable() -> bool:
    """Whether CUDA is up in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

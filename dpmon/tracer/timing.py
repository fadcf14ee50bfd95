"""What devices take for the phases of a process that trains on GPUs, by events on the streams that do the work.

There is a `Timing` once a call runs on a GPU, and not before: a process without has none of this on its way. A phase's
span is written when the host is through with it, and says that it is timed; what the devices took is known some steps
later, and is written then, a span for each device that names the first one by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from threading import Event

import torch

from dpmon.record.spans import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.record.wire import Untimed
from dpmon.tracer.events import DeviceTimes, Events, Span, TorchEvents
from dpmon.tracer.threads import Thread

MAX_STEPS = 64
"""Steps after which a time is not waited for any longer."""
MAX_COPIES = 16
"""Of one step: events are for its phases first."""
MAX_ONE_IN = 1024
_TIMED, _SKIPPED = Flag.TIMED << FLAGS_AT, Flag.SKIPPED << FLAGS_AT
_COUNT_ANYWAY = frozenset((Kind.FETCH, Kind.CALL, Kind.WRAPPED, Kind.BACKWARD, Kind.COPY))
"""Phases whose time counts also if they raise."""
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
    """The events around one phase, on each of its devices. Nothing here raises."""

    __slots__ = ("_kind", "_shares", "_timing", "number", "spans", "step")

    def __init__(self, timing: Timing, kind: int, spans: list[Span], shares: bool = False) -> None:
        """`shares`: the next phase of the call may begin at the event that ends this one."""
        self._timing = timing
        self._kind = kind
        self._shares = shares
        self.spans = spans
        self.number = -1
        """Of the phase's span."""
        self.step = 0
        """Steps that had ended when it was written."""

    def end(self) -> int:
        """The phase ends; returns what to add to the head of its span."""
        timing = self._timing
        for span in self.spans:
            timing.times.end(span)
            if self._shares:
                timing.last[span.device] = span
        return _TIMED

    def lap(self) -> None:
        """It may have ended here: this is taken for its end if no later lap is."""
        for span in self.spans:
            self._timing.times.lap(span)

    def raised(self) -> int:
        """The phase raised; returns what to add to the head of its span."""
        if self._kind in _COUNT_ANYWAY:
            return self.end()
        for span in self.spans:
            self._timing.times.abandon(span)
        return 0 if self._kind in _VERBS else _TIMED

    def written(self, number: int) -> None:
        """Its span was written, with this number (-1: it was not)."""
        if number >= 0:
            self.number = number
            self._timing.wait_for(self)


class _Skipped(Mark):
    """Stands for the events of a phase that is left out, with all of its step."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def end(self) -> int:
        return _SKIPPED

    def lap(self) -> None: ...

    def raised(self) -> int:
        return _SKIPPED

    def written(self, number: int) -> None: ...


_LEFT_OUT = _Skipped()


class Timing:
    """The device time of one process. Nothing here raises."""

    def __init__(
        self,
        write: Callable[[int, int, int, int], int],
        fault: Callable[..., None],
        one_in: Callable[[], int] = lambda: 0,
        events: Events | None = None,
    ) -> None:
        """`write` takes a span (SpanRing.put), `fault` what goes wrong (Session.fault).

        `one_in` returns the number of steps of which one is timed; all are if it is 0 or 1.
        """
        self._write_span = write
        self._fault = fault
        self._one_in = one_in
        self.trains: Thread | None = None
        """The thread that trains."""
        self.times = DeviceTimes(events or TorchEvents(), self._failed)
        self.gpus: tuple[int, ...] = ()
        """Where the phases of the step under way may run: where its calls did, before the first those of the last."""
        self._used: tuple[int, ...] = ()
        self._called = False
        """Whether the step under way has a call."""
        self._skips = False
        """Whether the step under way is not timed."""
        self.random = Random()  # the script's random numbers stay its own
        self._block = self._left = self._chosen = 0
        """Length of the block of steps of which one is timed, how many of it are left, and which of these it is."""
        self._waiting: deque[Mark] = deque()
        self._steps = 0
        self._copies = 0
        self.last: dict[int, Span] = {}
        """Of each device: the phase of the call under way that ended last."""

    def _failed(self, error: BaseException) -> None:
        self._fault("events", error, fatal=False)

    # ---------------------------------------------------------------- phases

    def begin(self, me: Thread, kind: int) -> Mark | None:
        """A phase of the step begins, on all of the step's GPUs."""
        return self._begin(me, kind, self.gpus)

    def call_begins(self, me: Thread, gpus: tuple[int, ...]) -> Mark | None:
        """A call begins, on its own GPUs."""
        if me is not self.trains:
            return None
        if me.inside not in (Kind.CALL, Kind.WRAPPED):
            if not (self._called or gpus):
                self.gpus = ()  # the last step's do nothing in this one, as far as is known
            self._called = True
            if gpus != self._used:
                self._used = tuple(dict.fromkeys((*self._used, *gpus)))
                self.gpus = tuple(dict.fromkeys((*self.gpus, *gpus)))
        self.last.clear()
        return self._begin(me, Kind.CALL, gpus)

    def verb_begins(self, me: Thread, gpus: tuple[int, ...], kind: int) -> Mark | None:
        """A phase of a call begins: on each device, where the one before it has ended."""
        return self._begin(me, kind, gpus, shares=True)

    def replica_begins(self, devices: Sequence[str], index: int) -> Mark | None:
        """A replica begins, on its own thread and stream."""
        return self.part_begins(Kind.REPLICA, gpu_of(devices[index]) if index < len(devices) else -1)

    def part_begins(self, kind: int, gpu: int) -> Mark | None:
        """A part of a call of the thread that trains begins on one GPU (-1: on none), on whichever thread."""
        if gpu < 0:
            return None
        if self._skips:
            return _LEFT_OUT
        return Mark(self, kind, [self.times.begin(gpu)])

    def copy_begins(self, me: Thread, gpu: int) -> Mark | None:
        """A copy to one GPU begins."""
        self._copies += 1
        return self._begin(me, Kind.COPY, (gpu,)) if self._copies <= MAX_COPIES or self._skips else None

    def _begin(self, me: Thread, kind: int, gpus: Sequence[int], shares: bool = False) -> Mark | None:
        if not gpus or me is not self.trains:
            return None
        if self._skips:
            return _LEFT_OUT
        begin = self.times.begin
        last = self.last if shares else {}
        return Mark(self, kind, [begin(gpu, last.get(gpu)) for gpu in gpus], shares)

    # ---------------------------------------------------------------- what the devices say

    def wait_for(self, mark: Mark) -> None:
        """The span of a phase was written."""
        if all(span.settled for span in mark.spans):  # it is not timed
            self._write(mark, Untimed.NONE)
            return
        mark.step = self._steps
        self._waiting.append(mark)

    def step_ends(self) -> None:
        """A step may have ended: write what the devices have come to the end of."""
        self._copies = 0
        if self._called:
            self._steps += 1
            self.gpus = self._used
            self._used, self._called = (), False
            self._draw()
        self.read()
        self.times.turn()

    def _draw(self) -> None:
        """Find out whether the step that begins is timed: one of each block is."""
        block = min(self._one_in(), MAX_ONE_IN)
        if block != self._block or self._left == 0:
            self._block = self._left = block
            self._chosen = self.random.randint(1, block) if block > 1 else 0
        self._skips = block > 1 and self._left != self._chosen
        self._left -= self._left > 0

    def read(self, unread: int = Untimed.NONE) -> None:
        """Write the times that are known; of all others, if there is an `unread`, that they will not be."""
        waiting = self._waiting
        try:
            self.times.collect()
            while waiting:
                mark = waiting[0]
                late = Untimed.LATE if self._steps - mark.step > MAX_STEPS else unread
                if not (late or all(span.settled for span in mark.spans)):
                    break
                self._write(mark, late)  # once more if an interrupt comes before the next line: the reader knows
                del waiting[0]
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

"""Writes what a process does into its ring: a span for each phase that has ended, by whichever thread.

The tracer draws no conclusions: where steps begin and end, and what belongs to them, is found out from the spans by the
supervisor. What has to be known here is what cannot wait: where the training may be paused or looked at, between two
steps as far as the process itself can tell: before a fetch, or after the optimizer that ends a turn of its loop.

A signal handler of the script may raise at any call of a function: what is to be put back stands in an `except` or
`finally`, and a span that may not have been written is written once more. Whoever reads drops the second one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from threading import get_ident
from time import monotonic_ns
from types import CodeType
from typing import Any

import torch

from dpmon.record.spans import FLAGS_AT, INSIDE_AT, Flag, Kind
from dpmon.ring_file import HEADER_BYTES
from dpmon.span_ring import THREADS, SpanRing, Word
from dpmon.tracer.frames import OF_CALLS, drop_frames, named_like, outwards
from dpmon.tracer.session import Session
from dpmon.tracer.threads import Thread
from dpmon.tracer.timing import Mark, Timing, usable


def _code_within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_within(constant)


MAX_EARLY = 256
"""Spans that are kept before the first call, which opens the ring: those of a loader's first batches."""
IDLE = 4
"""Fetches, or steps of an optimizer, without a call after which somebody should look where the calls are."""
_AROUND_STEPS = frozenset(
    code for code in _code_within(torch.optim.Optimizer.profile_hook_step.__code__) if code.co_name == "wrapper"
)
"""torch's function around every step of an optimizer, which calls the hooks."""
STALE = 64
"""Steps of the optimizer without a fetch, after which a loader no longer counts (a script that keeps one batch)."""
FEW_CALLS = 64
"""Calls without a fetch or a step of an optimizer after which a call may be where a step begins."""
PAUSE, PAUSED, TRAINS = Word.PAUSE, Word.PAUSED, Word.TRAINS


class Recorder:
    """The spans of one process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.threads: dict[int, Thread] = {}
        """By ident. The wrappers hold this very object."""
        self.timing: Timing | None = None
        """Once a call runs on a GPU: what devices take."""
        self.on_idle: Callable[[], None] = lambda: None
        self.on_loop_over: Callable[[], None] = lambda: None
        """Called when a loader has come to its end."""
        self.on_first_fetch: Callable[[Any], bool] = lambda iterator: False
        """Called with a loader's iterator that fetches before the first call; returns whether to report the end."""
        self.on_first_fetched: Callable[[BaseException | None], None] = lambda error: None
        self.on_pause: Callable[[], None] = lambda: None
        """Called between two steps, when a reader has asked for a pause or its end."""
        self.on_look: Callable[[int], int] = lambda now: 1 << 62
        """Called between two steps when `due` has come; returns when to call again (monotonic ns)."""
        self.on_backward: Callable[[], None] | None = None
        """Called when a backward pass is over."""
        self._parents: list[object] = []
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self.threads.clear()
        if self.timing is not None:
            self._parents.append(self.timing)  # its events are not this process's to give back to the driver
            self.timing = None
        self._numbers: Iterator[int] = count()
        self.ring: SpanRing | None = None
        self.words: Any = memoryview(bytearray(HEADER_BYTES)).cast("Q")
        """The ring's header, once there is a ring."""
        self.kinds: Any = memoryview(bytearray(THREADS))
        self._early: list[tuple[int, int, int, int]] = []
        self.trains: Thread | None = None
        """The thread that trains, as far as can be told here."""
        self.learns = False
        """Whether it has gone backward."""
        self.due = 0
        """When somebody wants to look between two steps (monotonic ns)."""
        self.idle = 0
        """Fetches and steps of optimizers since the last call."""
        self.loose = STALE
        """Steps of optimizers since the last fetch."""
        self.calls = 0
        """Calls since the last fetch or step of an optimizer."""
        self.patience = 0
        self.paused = 0
        """The last request for a pause that was acted upon."""
        self.put: Callable[[int, int, int, int], int] = self._keep
        """Writes a span: into the ring, once there is one."""

    def opened(self, ring: SpanRing) -> None:
        """There is a ring: write what was kept for it."""
        early, self._early = self._early, []
        for span in early:
            ring.put(*span)
        self.words, self.kinds, self.put = ring.words, ring.kinds, ring.put
        self.ring = ring

    def given_up(self) -> None:
        """Write no more."""
        self.put = lambda head, start, took, sizes: -1

    def times_devices(self) -> None:
        """A call is about to run on a GPU: time what devices do from now on."""
        if self.timing is None and usable():
            self.timing = Timing(self.write, self.session.fault, lambda: self.words[Word.ONE_IN])
            self.timing.trains = self.trains

    # ---------------------------------------------------------------- threads

    def thread(self) -> Thread:
        """This thread's, made if need be. Those beyond the ring's room share a number."""
        found = self.threads.get(get_ident())
        if found is None:
            found = self.threads[get_ident()] = Thread(min(next(self._numbers), THREADS - 1))
        return found

    def called(self, me: Thread) -> None:
        """A call begins on this thread: the first of all, or one at its top level after many without a step's end."""
        if self.trains is None:
            self._found(me)
        elif me is self.trains:
            if self.timing is not None:
                self.timing.step_ends()
            self.between(me)

    def _found(self, me: Thread) -> None:
        self.trains = me
        if self.timing is not None:
            self.timing.trains = me
        self.words[TRAINS] = me.number

    def heal(self) -> None:
        """Forget that this thread is in a call, if an interrupt has left that behind."""
        me = self.thread()
        if not any(frame.f_code.co_filename in OF_CALLS for frame in outwards(sys._getframe(1))):
            me.inside, me.split, me.root = 0, None, None

    # ---------------------------------------------------------------- writing

    def write(self, head: int, start: int, took: int, sizes: int = 0) -> int:
        """Write a span, or keep it for the ring; its number, -1 if it has none yet."""
        return self.put(head, start, took, sizes)

    def _keep(self, head: int, start: int, took: int, sizes: int) -> int:
        """Keep a span for the ring."""
        if not self.session.off:
            self._early.append((head, start, took, sizes))
            del self._early[:-MAX_EARLY]
        return -1

    def again(self, head: int, start: int, took: int, sizes: int, error: BaseException) -> bool:
        """Something went wrong, or a signal came, while a span was written: once more. Whether to raise the error."""
        for doing in (lambda: self.write(head, start, took, sizes), lambda: self._blame(error)):
            try:
                doing()
            except Exception as fault:  # noqa: BLE001 - ours, or a handler of the script's has raised it
                if fault is error or self._is_the_scripts(fault):
                    return True
            except BaseException:  # noqa: BLE001 - an interrupt: one is raised for both
                return True
        return not isinstance(error, Exception)

    def _blame(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.session.fault("span", error)

    def _is_the_scripts(self, fault: Exception) -> bool:
        try:
            self.session.fault("span", fault)
        except BaseException:  # noqa: BLE001 - that says so
            return True
        return False

    def failed(
        self, me: Thread, head: int, start: int, sizes: int, error: BaseException, mark: Mark | None = None
    ) -> None:
        """A phase ended by an exception; `mark`: its times on devices. Never raises."""
        flags = Flag.FAILED
        if isinstance(error, StopIteration):
            flags |= Flag.OVER
        try:
            now = monotonic_ns()
            self.kinds[me.number] = me.inside
            head |= flags << FLAGS_AT
            if mark is not None:
                head |= mark.raised()
            number = self.write(head, start, now - start, sizes)
            if mark is not None:
                mark.written(number)
        except Exception as fault:  # noqa: BLE001 - the script's exception goes first
            self._count_fault(fault)

    def _count_fault(self, fault: Exception) -> None:
        with suppress(BaseException):  # a second exception of the script's, while the first is on its way
            self.session.fault("span", fault)

    # ---------------------------------------------------------------- phases

    def within(
        self,
        me: Thread,
        head: int,
        mark: Mark | None,
        sizes: Callable[[Any], int] | None,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call a function within a span of its own, which begins here.

        `head`: the span's first word. `mark`: its times on devices. `sizes` finds what the span is to say of the
        result's sizes; None for nothing. The caller takes our frames out of a traceback.
        """
        inside, kind = me.inside, head & 0xFF
        began = monotonic_ns()
        self.words[me.word] = began
        self.kinds[me.number] = kind
        try:
            me.inside = kind
            result = original(*args, **kwargs)
        except BaseException as error:
            me.inside = inside
            self.failed(me, head, began, 0, error, mark)
            raise
        me.inside = inside
        took = 0
        try:
            took = monotonic_ns() - began
            self.kinds[me.number] = inside
            if mark is not None:
                head |= mark.end()
            number = self.put(head, began, took, 0 if sizes is None else sizes(result))
            if mark is not None:
                mark.written(number)
        except BaseException as error:
            if self.again(head, began, took or monotonic_ns() - began, 0, error):
                raise
        return result

    def phase(self, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of a function that is one phase: a fetch, or a backward pass."""
        session, threads, new = self.session, self.threads, self.thread
        is_compiling, clock, within = torch.compiler.is_dynamo_compiling, monotonic_ns, self.within
        fetch = kind == Kind.FETCH

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            me, inside = None, 0
            try:
                me = threads.get(get_ident()) or new()
                inside = me.inside
                if inside == Kind.OPTIMIZER:
                    inside = self.inside_of(me)
                if inside == Kind.BACKWARD:  # what is recomputed is a part of it
                    return original(*args, **kwargs)
                mark = None
                try:
                    if fetch:
                        self.idle = idle = 0 if self.calls else self.idle + 1
                        self.loose = self.calls = 0
                        if self.trains is not None:
                            self.patience = self.patience or FEW_CALLS
                        if (
                            idle == IDLE
                            or self.ring is None
                            or self.timing is not None
                            or self.words[PAUSE] != self.paused
                            or clock() >= self.due
                        ):
                            self._fetch_begins(me, args[0])
                    elif not self.learns:
                        self._goes_backward(me)
                    if self.timing is not None:
                        mark = self.timing.begin(me, kind)
                except Exception as error:  # noqa: BLE001 - ours must not reach the script
                    session.fault("phase", error)
                result = within(me, kind | inside << INSIDE_AT | me.head, mark, None, original, args, kwargs)
                try:
                    if me.noted:
                        self._first_fetched(me, None)
                    if not fetch and self.on_backward is not None and me is self.trains:
                        self.on_backward()
                except Exception as error:  # noqa: BLE001 - the phase is over, whatever we make of it
                    session.fault("phase", error)
                return result
            except BaseException as error:
                if me is not None:  # an interrupt may have come between any two lines
                    me.inside = inside
                    if fetch:
                        self._fetch_raised(me, error)
                drop_frames(error)
                args, kwargs, result = (), {}, None
                raise

        return named_like(wrapper, original)

    # ---------------------------------------------------------------- fetch

    def _fetch_begins(self, me: Thread, iterator: Any) -> None:
        if me is self.trains or self.trains is None:
            if self.idle == IDLE:
                self.on_idle()
            if self.timing is not None and me.inside == 0:
                self.timing.step_ends()
            self.between(me)
        if self.ring is None:
            me.noted = self.on_first_fetch(iterator)

    def _first_fetched(self, me: Thread, error: BaseException | None) -> None:
        me.noted = False
        self.on_first_fetched(error)

    def _fetch_raised(self, me: Thread, error: BaseException) -> None:
        """A fetch ended by an exception, which is on its way. Never raises."""
        try:
            if me.noted:
                self._first_fetched(me, error)
            if me.inside == 0 and (me is self.trains or self.trains is None):
                self.on_loop_over()
        except Exception as fault:  # noqa: BLE001 - the script's exception goes first
            self._count_fault(fault)

    # ---------------------------------------------------------------- backward

    def _goes_backward(self, me: Thread) -> None:
        """A backward pass begins, and the thread that trains is not known to have gone backward."""
        if self.trains is not None and torch._C._current_graph_task_id() == -1:
            self.learns = True
            if me is not self.trains:  # the thread that was taken for it never went backward
                self._found(me)

    def inside_of(self, me: Thread, fewer: int = 0) -> int:
        """What this thread is in, without the optimizers that have begun to step and raised.

        `fewer`: of the steps on the stack so many are not in `me.steps` yet.
        """
        try:
            around = sum(frame.f_code in _AROUND_STEPS for frame in outwards(sys._getframe(1))) - fewer
            while len(me.steps) > around:
                me.inside, _, _, mark, _ = me.steps.pop()
                if mark is not None:
                    mark.raised()
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            self.session.fault("optimizer", error)
        return me.inside

    # ---------------------------------------------------------------- between two steps

    def between(self, me: Thread) -> None:
        """Do what is asked for between two steps: pause, look. Raises what a signal handler raises in a pause."""
        if me.inside or (me is not self.trains and self.trains is not None):
            return
        words = self.words
        if words[PAUSE] != self.paused:
            try:
                self.on_pause()
            finally:
                self.paused = words[PAUSED]
        now = monotonic_ns()
        if now >= self.due:
            self.due = 1 << 62  # an exception must not bring it back at once
            self.due = self.on_look(now)

    def soon(self) -> None:
        """Let `on_look` be called when the next step has ended."""
        self.due = 0

    def at_exit(self) -> None:
        """The process ends: say so. Never raises."""
        try:
            if self.timing is not None:
                self.timing.at_exit()
            ring = self.ring
            if ring is not None:
                self.session.say(end=True, uncaught=getattr(sys, "last_type", None) is not None)
                self.words[Word.ENDED] = 1
        except Exception as error:  # noqa: BLE001 - the interpreter is ending
            self.session.fault("exit", error)

"""Writes a span into the process's ring for each phase that ends, on any thread.

The tracer draws no conclusions: the supervisor finds the steps and their contents from the spans. The tracer only has
to know when it may pause the training or measure something. It does so between two steps, as far as the process knows:
before a fetch, after the optimizer step that ends a training step, or, if there is neither for a while, before a call.

A signal handler of the script may raise at any function call. So state is restored in an `except` or `finally`, and a
span that may not have been written is written again. The reader drops the duplicate.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from threading import get_ident
from time import monotonic_ns
from types import CodeType
from typing import Any

import torch

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, THREAD_AT, Flag, Kind
from dpmon.span_ring import HEADER_BYTES, THREADS, HeaderWord, SpanRing
from dpmon.tracer.core.hidden_frames import (
    OF_CALLS,
    Function,
    copy_name_and_signature,
    drop_frames,
    iter_callers,
    uncounted,
)
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import DeviceTimer, PhaseTimer, is_cuda_initialized
from dpmon.tracer.steps.startup import StartupNotes


def _code_within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_within(constant)


MAX_EARLY = 256
"""Most spans that are kept until the first call opens the ring, such as fetches of a loader's first batches."""
IDLE = 4
"""`on_idle` is called after this many fetches or optimizer steps without a call."""
_AROUND_STEPS = frozenset(
    code for code in _code_within(torch.optim.Optimizer.profile_hook_step.__code__) if code.co_name == "wrapper"
)
"""torch's function around every optimizer step, which calls the hooks."""
STALE = 64
"""After this many optimizer steps without a fetch, steps no longer begin at a fetch (the script keeps one batch)."""
FEW_CALLS = 64
"""A step may begin at a call after this many calls without a fetch or optimizer step, if there was a fetch before."""
PAUSE, PAUSED, TRAINING_THREAD = HeaderWord.PAUSE, HeaderWord.PAUSED, HeaderWord.TRAINING_THREAD
TRAINING_TID, LAST_LOOP_END = HeaderWord.TRAINING_TID, HeaderWord.LAST_LOOP_END


class ThreadState:
    """The state of one thread."""

    __slots__ = ("head", "inside", "noted", "number", "offered", "root", "split", "steps", "tried", "word")

    def __init__(self, number: int) -> None:
        self.head = number << THREAD_AT
        """The number of the thread, as a part of a span's first word."""
        self.number = number
        self.word = HeaderWord.SPAN_START + number
        """Index in the ring's header of the start of the thread's current span."""
        self.inside = 0
        """Kind of the current span, 0 for none."""
        self.root: Any = None
        """The bare root that is being called."""
        self.split: Any = None
        """The call over several devices that this thread runs."""
        self.offered: tuple[str, ...] = ()
        """The devices that the script passed to scatter or replicate since the last composed call."""
        self.steps: list[tuple[int, int, int, Any, int]] = []
        """Unfinished optimizer steps: enclosing kind, first word of the span, start, device times, number."""
        self.tried: Any = None
        """The failed attempt at dp for the current call: see dpmon.tracer.modes.mode_decision."""
        self.noted = False
        """Whether the current fetch is noted in stages.log."""


class SpanRecorder:
    """Writes the spans of one process, and finds out which thread trains."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.startup = StartupNotes(session)
        self.threads: dict[int, ThreadState] = {}
        """By the ident of a thread. The wrappers refer to this dict: never replace it."""
        self.loops: dict[int, tuple[int, Callable[[object], int], object]] = {}
        """By the id of a loader's iterator: its loop, as a part of a span's first word; a function that returns the
        sizes for the span; a weak reference that removes the entry. The wrapper uses this dict: never replace it."""
        self.timing: DeviceTimer | None = None
        """Device timing, once a call runs on a GPU."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called after several fetches or optimizer steps without a call."""
        self.on_loop_over: Callable[[], None] = lambda: None
        """Called when a fetch raises, usually because the loader is exhausted."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called between two steps, when a reader has requested to pause or to resume."""
        self.on_look: Callable[[int], int] = lambda now: 1 << 62
        """Called between two steps when `due` has come; returns when to call again (monotonic ns)."""
        self.on_backward: Callable[[], None] | None = None
        """Called after a backward pass of the training thread."""
        self.on_gradients: Callable[[int, int, int], None] | None = None
        """Called at the end of a backward pass of the training thread, to write the spans inside the pass before the
        span of the pass. Arguments: the first word of these spans; start and end of the pass (monotonic ns)."""
        self.on_backward_begins: Callable[[ThreadState, object], None] | None = None
        """Called before a backward pass of the training thread, with the thread and the arguments of the pass."""
        self.loss_due = 1 << 62
        """When to call `on_loss` after a backward pass (monotonic ns)."""
        self.on_loss: Callable[[ThreadState, int, Any, Any], None] = lambda me, began, args, kwargs: None
        """Called with the thread, the start and the arguments of a backward pass."""
        self._parents: list[object] = []
        """Timings of the parent process, which a forked child must keep alive."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self.threads.clear()
        if self.timing is not None:
            self._parents.append(self.timing)  # this process must not return the parent's events to the driver
            self.timing = None
        self._numbers: Iterator[int] = count()
        self.ring: SpanRing | None = None
        self.words: Any = memoryview(bytearray(HEADER_BYTES)).cast("Q")
        """The ring's header, once there is a ring."""
        self.kinds: Any = memoryview(bytearray(THREADS))
        """By number of thread: the kind of its open span. In the ring, once there is a ring."""
        self._early: list[tuple[int, int, int, int]] = []
        self.training_thread: ThreadState | None = None
        """The training thread; None until it is known."""
        self.has_run_backward = False
        """Whether the training thread has run a backward pass."""
        self.due = 0
        """When to call `on_look` between two steps (monotonic ns)."""
        self.idle = 0
        """Number of fetches and optimizer steps of the training thread since the last call."""
        self.steps_since_fetch = STALE
        """Number of optimizer steps since the last fetch of the training thread; STALE before the first fetch."""
        self.calls = 0
        """Number of calls since the last fetch or optimizer step of the training thread."""
        self.calls_before_step = 0
        """If `calls` exceeds this number, a step may begin at a call."""
        self.stepped = 0
        """Number of optimizer steps."""
        self.backwards = 0
        """Number of backward passes that ended."""
        self.sample_at = 0
        """Number of the optimizer step after which `on_look` is called."""
        self.paused = 0
        """The last pause request acted upon."""
        self.put: Callable[[int, int, int, int], int] = self._keep_span
        """Writes a span into the ring, or keeps it until there is one. Arguments: first word, start, duration (ns) and
        sizes. Returns its number, or -1 if it was not written."""

    def attach_ring(self, ring: SpanRing) -> None:
        """Write the kept spans and the number of the training thread into the new ring."""
        while self._early:
            ring.put(*self._early[0])
            del self._early[:1]
        if self.training_thread is not None:
            ring.words[TRAINING_THREAD] = self.training_thread.number
            if self.threads.get(get_ident()) is self.training_thread:
                ring.words[TRAINING_TID] = threading.get_native_id()
        self.words, self.kinds, self.put = ring.words, ring.kinds, ring.put
        self.ring = ring

    def stop_writing(self) -> None:
        """Write no more spans."""
        self.put = lambda head, start, took, sizes: -1

    def start_device_timing(self) -> None:
        """Start device timing, because a call is about to run on a GPU."""
        if self.timing is None and is_cuda_initialized():
            self.timing = DeviceTimer(self)

    # ---------------------------------------------------------------- threads

    def current_thread_state(self) -> ThreadState:
        """Return this thread's state, created if necessary. Threads beyond the ring's limit share a number."""
        found = self.threads.get(get_ident())
        if found is None:
            found = self.threads[get_ident()] = ThreadState(min(next(self._numbers), THREADS - 1))
        return found

    def on_call(self, me: ThreadState) -> None:
        """Handle the first call, or a top-level call at which a step may begin."""
        if self.training_thread is None:
            self._set_training_thread(me)
        elif me is self.training_thread:
            if self.timing is not None:
                self.timing.end_step()
            self.at_step_boundary(me)

    def _set_training_thread(self, me: ThreadState) -> None:
        self.training_thread = me
        self.words[TRAINING_THREAD] = me.number
        self.words[TRAINING_TID] = threading.get_native_id()

    def reset_interrupted_call(self) -> None:
        """Reset this thread's state if an interrupt left a call in it that is no longer running."""
        me = self.current_thread_state()
        if not any(frame.f_code.co_filename.startswith(OF_CALLS) for frame in iter_callers(sys._getframe(1))):
            me.inside, me.split, me.root = 0, None, None

    # ---------------------------------------------------------------- writing

    def _keep_span(self, head: int, start: int, took: int, sizes: int) -> int:
        """Keep a span until there is a ring."""
        if not self.session.off:
            self._early.append((head, start, took, sizes))
            del self._early[:-MAX_EARLY]
        return -1

    def write_again(self, head: int, start: int, took: int, sizes: int, error: BaseException) -> None:
        """Write a span again after an error at its end. Raises the error, unless it is a fault of ours."""
        guard = self.session.guard("end of a phase")
        with guard:
            self.put(head, start, took, sizes)
        with guard:
            raise error

    def write_failed(
        self, me: ThreadState, head: int, start: int, sizes: int, error: BaseException, mark: PhaseTimer | None = None
    ) -> None:
        """Write the span of a phase that raised. `mark`: its device times. Never raises."""
        flags = Flag.FAILED
        if isinstance(error, StopIteration):
            flags |= Flag.EXHAUSTED
        try:
            now = monotonic_ns()
            self.kinds[me.number] = me.inside
            head |= flags << FLAGS_AT
            if mark is not None:
                head |= mark.raised()
            number = self.put(head, start, now - start, sizes)
            if mark is not None:
                mark.set_span_number(number)
        except Exception as fault:  # noqa: BLE001 - the script's exception must be raised
            self._count_fault(fault)

    def _count_fault(self, fault: Exception) -> None:
        with suppress(BaseException):  # an exception of a signal handler must not replace the script's exception
            self.session.count_error("end of a phase", fault)

    # ---------------------------------------------------------------- phases

    @uncounted
    def run_in_span(
        self,
        me: ThreadState,
        head: int,
        mark: PhaseTimer | None,
        sizes: Callable[[object], int] | None,
        original: Function,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call a function within a new span.

        `head`: the span's first word. `mark`: its device times. `sizes` returns the sizes for the span from the result;
        None for no sizes. The caller removes our frames from a traceback.
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
            self.write_failed(me, head, began, 0, error, mark)
            raise
        me.inside = inside
        took = 0
        try:
            took = monotonic_ns() - began
            self.kinds[me.number] = inside
            if mark is not None:
                head |= mark.end()
            if kind == Kind.BACKWARD:
                if self.on_gradients is not None and me is self.training_thread:
                    self.on_gradients(me.head | kind << INSIDE_AT, began, began + took)
                if began >= self.loss_due:
                    self.on_loss(me, began, args, kwargs)
            number = self.put(head, began, took, 0 if sizes is None else sizes(result))
            if mark is not None:
                mark.set_span_number(number)
        except BaseException as error:  # noqa: BLE001 - raised again if it is not a fault of ours
            self.write_again(head, began, took or monotonic_ns() - began, 0, error)
        return result

    def wrap_phase(self, kind: int, original: Function) -> Function:
        """The traced form of a function that is one phase: a fetch, or a backward pass."""
        session, threads, new = self.session, self.threads, self.current_thread_state
        is_compiling, within = torch.compiler.is_dynamo_compiling, self.run_in_span
        graph_task = torch._C._current_graph_task_id  # autograd also runs nested backward passes on its own threads
        fetch, loops = kind == Kind.FETCH, self.loops

        def wrapper(*args: object, **kwargs: object) -> object:
            if is_compiling():
                return original(*args, **kwargs)
            me, inside = None, 0
            try:
                me = threads.get(get_ident()) or new()
                inside = me.inside
                if inside == Kind.OPTIMIZER:
                    inside = self.current_open_kind(me)
                if inside == Kind.BACKWARD or (not fetch and graph_task() != -1):  # recomputation belongs to the pass
                    return original(*args, **kwargs)
                mark, sizes, head = None, None, kind | inside << INSIDE_AT | me.head
                try:
                    if fetch:
                        self._fetch_begins(me, args[0])
                        loop = loops.get(id(args[0]))
                        if loop is not None:
                            head |= loop[0]
                            sizes = loop[1]
                    elif not self.has_run_backward:
                        self._on_first_backward(me)
                    if self.timing is not None:
                        mark = self.timing.begin(me, kind)
                    if not fetch and me is self.training_thread and self.on_backward_begins is not None:
                        self.on_backward_begins(me, args)
                except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                    session.count_error("beginning of a phase", error)
                result = within(me, head, mark, sizes, original, args, kwargs)
                try:
                    if me.noted:
                        me.noted = False
                        self.startup.note_end(None)
                    if not fetch:
                        self.backwards += 1
                        if self.on_backward is not None and me is self.training_thread:
                            self.on_backward()
                except Exception as error:  # noqa: BLE001 - the phase is over anyway
                    session.count_error("beginning of a phase", error)
                return result
            except BaseException as error:
                if me is not None:  # an interrupt may have come between any two lines
                    me.inside = inside
                    if fetch:
                        self._fetch_raised(me, error)
                drop_frames(error)
                args, kwargs, result = (), {}, None
                raise

        return copy_name_and_signature(wrapper, original)

    # ---------------------------------------------------------------- fetch

    def _fetch_begins(self, me: ThreadState, iterator: object) -> None:
        """Handle the start of a fetch, and of a step, unless another thread fetches in advance."""
        training_thread = self.training_thread
        if me is training_thread or training_thread is None:
            self.idle = 0 if self.calls else self.idle + 1
            self.steps_since_fetch = self.calls = 0
            if training_thread is not None:
                self.calls_before_step = self.calls_before_step or FEW_CALLS
            if self.idle == IDLE:
                self.on_idle()
            if self.timing is not None and me.inside == 0:
                self.timing.end_step()
            self.at_step_boundary(me)
        if self.ring is None:
            me.noted = self.startup.fetch_begins(iterator)

    def _fetch_raised(self, me: ThreadState, error: BaseException) -> None:
        """Handle an exception that ended a fetch. Never raises."""
        try:
            if me.noted:
                me.noted = False
                self.startup.note_end(error)
            if me.inside == 0 and (me is self.training_thread or self.training_thread is None):
                self.words[LAST_LOOP_END] = monotonic_ns()
                self.on_loop_over()
        except Exception as fault:  # noqa: BLE001 - the script's exception must be raised
            self._count_fault(fault)

    # ---------------------------------------------------------------- backward

    def _on_first_backward(self, me: ThreadState) -> None:
        """Handle the start of a backward pass, if the training thread has not run one before."""
        if self.training_thread is not None:
            self.has_run_backward = True
            if me is not self.training_thread:  # the supposed training thread never ran a backward pass
                self._set_training_thread(me)

    def current_open_kind(self, me: ThreadState, fewer: int = 0) -> int:
        """Remove the optimizer steps that have raised, and return the kind of this thread's open span.

        `fewer`: number of optimizer steps on the stack that `me.steps` does not contain yet.
        """
        with self.session.guard("step of an optimizer"):
            around = sum(frame.f_code in _AROUND_STEPS for frame in iter_callers(sys._getframe(1))) - fewer
            while len(me.steps) > around:
                me.inside, _, _, mark, _ = me.steps.pop()
                if mark is not None:
                    mark.raised()
        return me.inside

    # ---------------------------------------------------------------- between two steps

    def at_step_boundary(self, me: ThreadState) -> None:
        """Pause or look between two steps, if it is time to. Raises only exceptions of signal handlers in a pause."""
        if me.inside or (me is not self.training_thread and self.training_thread is not None):
            return
        words = self.words
        if words[PAUSE] != self.paused:
            try:
                self.on_pause()
            finally:
                self.paused = words[PAUSED]
        now = monotonic_ns()
        if now >= self.due:
            self.due = 1 << 62  # if `on_look` raises, it is not repeated at once
            self.due = self.on_look(now)

    def schedule_poll(self) -> None:
        """Call `on_look` when the next step ends."""
        self.due = 0

    def at_exit(self) -> None:
        """Record the end of the process; mark the ring as ended unless another thread may still train. Never raises."""
        with self.session.guard("end of the process"):
            if self.timing is not None:
                self.timing.at_exit()
            if self.ring is not None:
                self.session.write_line(end=True, uncaught=_exits_by_exception())
                if not _waits_for_other_threads():
                    self.words[HeaderWord.ENDED] = 1


def _exits_by_exception() -> bool:
    """Whether an uncaught exception ends the process."""
    if getattr(sys, "last_type", None) is not None:
        return True
    # A child of multiprocessing ends within `_bootstrap`, which is still handling the exception.
    error = sys.exc_info()[1]
    if error is None or isinstance(error, SystemExit) or error.__traceback__ is None:
        return False
    return error.__traceback__.tb_frame.f_code.co_name == "_bootstrap"


def _waits_for_other_threads() -> bool:
    """Whether the process still waits for other threads, as a child of multiprocessing does after its finalizers."""
    me = threading.current_thread()
    return any(thread is not me and not thread.daemon for thread in threading.enumerate())

"""Writes a span into the process's ring for each phase that ends, on any thread.

The tracer draws no conclusions: the supervisor finds the steps and their contents from the spans. The tracer only needs
to know when it may pause the training or measure something. It does so at what looks like the boundary of two steps:
before a fetch, after the optimizer step that ends a training step, or, if there is neither for a while, before a call.

A signal handler of the script may raise at any function call. So state is restored in an `except` or `finally`, and a
span that may not have been written is written again. The reader drops the duplicate.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch
from torch._guards import TracingContext

from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, THREAD_AT, Flag, Kind
from dpmon.span_ring import HEADER_BYTES, THREADS, HeaderWord, SpanRing
from dpmon.tracer.core.hidden_frames import (
    Function,
    copy_name_and_signature,
    drop_frames,
    iter_callers,
    uncounted,
)
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import DeviceTimer, PhaseTimer, is_cuda_initialized
from dpmon.tracer.steps.startup import StartupNotes

MAX_KEPT_SPANS = 256
"""How many spans are kept until the first call opens the ring. For example, a loader's first batches come before it."""
IDLE_STEPS = 4
"""`on_idle` is called after this many fetches or optimizer steps without a call."""
_AROUND_STEPS = frozenset(
    constant
    for constant in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    if getattr(constant, "co_name", "") == "wrapper"
)
"""torch's function around every optimizer step, which calls the hooks."""
MAX_STEPS_WITHOUT_FETCH = 64
"""After this many optimizer steps without a fetch, steps no longer begin at a fetch: the script reuses its batch."""
POLL_RETRY_NS = 50_000_000
"""Time until `on_poll` is called again after a signal handler of the script has raised in it."""
MAX_CALLS_AFTER_FETCH = 64
"""A step may begin at a call after this many calls without a fetch or optimizer step, if there was a fetch before."""
PAUSE, PAUSED, TRAINING_THREAD = HeaderWord.PAUSE, HeaderWord.PAUSED, HeaderWord.TRAINING_THREAD
TRAINING_TID, LAST_LOOP_END = HeaderWord.TRAINING_TID, HeaderWord.LAST_LOOP_END


@dataclass(slots=True, eq=False)
class ThreadState:
    """The state of one thread."""

    number: int
    thread_bits: int
    """The number of the thread, shifted to its place in a span's first word."""
    start_word: int
    """Index of the word in the ring's header that holds the start of the thread's current span."""
    open_kind: int = 0
    """Kind of the current span, 0 for none."""
    root: Any = None
    """The `TracedModule` of the root module that is being called."""
    split_call: Any = None
    """The `SplitCall` that this thread runs."""
    passed_devices: tuple[str, ...] = ()
    """The devices that the script passed to scatter or replicate since the last composed call."""
    open_steps: list[tuple[int, int, int, Any, int]] = field(default_factory=list)
    """Unfinished optimizer steps: enclosing kind, first word of the span, start, phase timer, optimizer number."""
    dp_failure: Any = None
    """The warning about the failed dp of the current call, and the module: see `ModeDecider`."""
    has_fetch_note: bool = False
    """Whether the current fetch is noted in stages.log."""


class SpanRecorder:
    """The writer of one process's spans, which also finds out which thread trains."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.startup = StartupNotes(session)
        self.threads: dict[int, ThreadState] = {}
        """States by thread ident. The wrappers refer to this dict: never replace it."""
        self.loops: dict[int, tuple[int, Callable[[object], int], object]] = {}
        """By id of a loader's iterator: the loop's number, shifted to its place in a span's first word; a function that
        returns the sizes for the span; a weak reference that removes the entry. Never replace this dict: the wrapper
        refers to it."""
        self.device_timer: DeviceTimer | None = None
        """Device timing, once a call runs on a GPU."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called after several fetches or optimizer steps without a call."""
        self.on_loop_end: Callable[[], None] = lambda: None
        """Called when a fetch raises, usually because the loader is exhausted."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called between two steps if a reader has requested to pause or to resume."""
        self.on_poll: Callable[[int], int] = lambda now: 1 << 62
        """Called between two steps once `poll_due` has passed, with the time; returns the next `poll_due`."""
        self.after_backward: Callable[[], None] | None = None
        """Called after each backward pass of the training thread."""
        self.write_sync_spans: Callable[[int, int, int], None] | None = None
        """Called at the end of a backward pass of the training thread, to write the spans inside it, which must come
        before its own. Arguments: the first word of these spans; start and end of the pass (monotonic ns)."""
        self.before_backward: Callable[[ThreadState, object], None] | None = None
        """Called before each backward pass of the training thread, with the thread and the arguments of the pass."""
        self.on_loss: Callable[[ThreadState, int, Any, Any], None] = lambda thread, start_ns, args, kwargs: None
        """Called at the end of a backward pass, with its thread, start, and arguments."""
        self.on_update: Callable[[], None] = lambda: None
        """Called after each optimizer step."""
        self.on_inputs: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        """Called with the arguments of the training thread's next call."""
        self.has_optimizer = False
        """Whether an optimizer was made."""
        self._parent_timers: list[object] = []
        """Device timers of the parent process, which a forked child must keep alive."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self.threads.clear()
        if self.device_timer is not None:
            # This process must not return the parent's events to the driver.
            self._parent_timers.append(self.device_timer)
            self.device_timer = None
        self._thread_numbers: Iterator[int] = count()
        self.ring: SpanRing | None = None
        self.words: Any = memoryview(bytearray(HEADER_BYTES)).cast("Q")
        """The ring's header, once there is a ring."""
        self.open_kinds: Any = memoryview(bytearray(THREADS))
        """By thread number: the kind of the open span. Part of the ring, once there is a ring."""
        self._kept_spans: list[tuple[int, int, int, int]] = []
        self.training_thread: ThreadState | None = None
        """The training thread; None until it is known."""
        self.has_run_backward = False
        """Whether the training thread has run a backward pass."""
        self.poll_due = 0
        """When to call `on_poll` between two steps (monotonic ns); 0: when the next step ends."""
        self.steps_without_call = 0
        """Number of fetches and optimizer steps of the training thread since the last call."""
        self.steps_since_fetch = MAX_STEPS_WITHOUT_FETCH
        """Number of optimizer steps since the last fetch of the training thread; MAX_STEPS_WITHOUT_FETCH before the
        first fetch."""
        self.recent_calls = 0
        """Number of calls since the last fetch or optimizer step of the training thread."""
        self.max_recent_calls = 0
        """If `recent_calls` exceeds this number, a step may begin at a call."""
        self.is_between_steps = False
        """Whether no call has begun since the last boundary of two steps."""
        self.counting_mode: Any = None
        """The `FlopCounter` while it counts a step; else None."""
        self.profile: Any = None
        """The profile by torch.profiler while it is on; else None."""
        self.optimizer_steps = 0
        """Number of optimizer steps."""
        self.backward_passes = 0
        """Number of finished backward passes."""
        self.handled_pause = 0
        """The last pause request that was handled."""
        self.put: Callable[[int, int, int, int], int] = self._keep_span
        """Writes a span into the ring, or keeps it until there is a ring. Arguments: first word, start (monotonic ns),
        duration (ns), and sizes. Returns the number of the span, or -1 if it was not written."""

    def attach_ring(self, ring: SpanRing) -> None:
        """Write the kept spans and the number of the training thread into the new ring."""
        while self._kept_spans:
            ring.put(*self._kept_spans[0])
            del self._kept_spans[:1]
        if self.training_thread is not None:
            ring.words[TRAINING_THREAD] = self.training_thread.number
            if self.threads.get(get_ident()) is self.training_thread:
                ring.words[TRAINING_TID] = threading.get_native_id()
        self.words, self.open_kinds, self.put = ring.words, ring.kinds, ring.put
        self.ring = ring

    def stop_writing(self) -> None:
        """Write no more spans."""
        self.put = lambda first_word, start_ns, duration_ns, sizes: -1

    def start_device_timing(self) -> None:
        """Start device timing, because a call is about to run on a GPU."""
        if self.device_timer is None and is_cuda_initialized():
            self.device_timer = DeviceTimer(self)

    # ---------------------------------------------------------------- threads

    def current_thread_state(self) -> ThreadState:
        """Return the calling thread's state; create it if necessary. Threads beyond the ring's limit share a number."""
        thread = self.threads.get(get_ident())
        if thread is None:
            number = min(next(self._thread_numbers), THREADS - 1)
            thread = ThreadState(number, number << THREAD_AT, HeaderWord.SPAN_START + number)
            self.threads[get_ident()] = thread
        return thread

    def on_call(self, thread: ThreadState) -> None:
        """Handle the first call, or a top-level call at which a step may begin."""
        if self.training_thread is None:
            self._set_training_thread(thread)
        elif thread is self.training_thread:
            if self.device_timer is not None:
                self.device_timer.end_step()
            self.at_step_boundary(thread)

    def _set_training_thread(self, thread: ThreadState) -> None:
        """Note that the calling thread, whose state is `thread`, is the training thread."""
        self.training_thread = thread
        self.words[TRAINING_THREAD] = thread.number
        self.words[TRAINING_TID] = threading.get_native_id()

    # ---------------------------------------------------------------- writing

    def _keep_span(self, first_word: int, start_ns: int, duration_ns: int, sizes: int) -> int:
        """Keep a span until there is a ring."""
        if not self.session.is_off:
            self._kept_spans.append((first_word, start_ns, duration_ns, sizes))
            del self._kept_spans[:-MAX_KEPT_SPANS]
        return -1

    def rewrite_span(self, first_word: int, start_ns: int, duration_ns: int, sizes: int, error: BaseException) -> None:
        """Write a span again after an error at its end. Raise the error again if a signal handler raised it."""
        guard = self.session.guard("end of a phase")
        with guard:
            self.put(first_word, start_ns, duration_ns, sizes)
        with guard:
            raise error

    def write_failed(
        self,
        thread: ThreadState,
        first_word: int,
        start_ns: int,
        sizes: int,
        error: BaseException,
        timer: PhaseTimer | None,
    ) -> None:
        """Write the span of a phase that raised. `timer`: its device times. Never raises."""
        flags = Flag.FAILED
        if isinstance(error, StopIteration):
            flags |= Flag.EXHAUSTED
        elif self.counting_mode is not None:
            self.counting_mode.reason = "the step raised an exception"
        try:
            now = monotonic_ns()
            self.open_kinds[thread.number] = thread.open_kind
            first_word |= flags << FLAGS_AT
            if timer is not None:
                first_word |= timer.end()
            number = self.put(first_word, start_ns, now - start_ns, sizes)
            if timer is not None:
                timer.set_span_number(number)
        except Exception as own_error:  # noqa: BLE001 - the script's exception must be raised
            self._count_fault(own_error)

    def _count_fault(self, own_error: Exception) -> None:
        with suppress(BaseException):  # an exception of a signal handler must not replace the script's exception
            self.session.count_error("end of a phase", own_error)

    # ---------------------------------------------------------------- phases

    @uncounted
    def run_in_span(
        self,
        thread: ThreadState,
        first_word: int,
        phase_timer: PhaseTimer | None,
        sizes: Callable[[object], int] | None,
        original: Function,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call a function within a new span.

        `first_word`: the span's first word. `phase_timer`: its device times. `sizes`: a function that returns the sizes
        for the span from the result, or None for no sizes. The caller removes our frames from a traceback.
        """
        outer_kind, span_kind = thread.open_kind, first_word & 0xFF
        start_ns = monotonic_ns()
        self.words[thread.start_word] = start_ns
        self.open_kinds[thread.number] = span_kind
        try:
            thread.open_kind = span_kind
            result = original(*args, **kwargs)
        except BaseException as error:
            thread.open_kind = outer_kind
            self.write_failed(thread, first_word, start_ns, 0, error, phase_timer)
            raise
        thread.open_kind = outer_kind
        duration_ns = 0
        try:
            duration_ns = monotonic_ns() - start_ns
            self.open_kinds[thread.number] = outer_kind
            if phase_timer is not None:
                first_word |= phase_timer.end()
            if span_kind == Kind.BACKWARD:
                if self.write_sync_spans is not None and thread is self.training_thread:
                    self.write_sync_spans(thread.thread_bits | span_kind << INSIDE_AT, start_ns, start_ns + duration_ns)
                self.on_loss(thread, start_ns, args, kwargs)
            number = self.put(first_word, start_ns, duration_ns, 0 if sizes is None else sizes(result))
            if phase_timer is not None:
                phase_timer.set_span_number(number)
        except BaseException as error:  # noqa: BLE001 - raised again if it is not a fault of ours
            self.rewrite_span(first_word, start_ns, duration_ns or monotonic_ns() - start_ns, 0, error)
        return result

    def wrap_phase(self, span_kind: int, original: Function) -> Function:
        """Return the traced form of a function that is one phase: a fetch, or a backward pass."""
        session, threads, make_thread_state = self.session, self.threads, self.current_thread_state
        is_compiling, run_in_span = torch.compiler.is_dynamo_compiling, self.run_in_span
        graph_task = torch._C._current_graph_task_id  # autograd also runs nested backward passes on its own threads
        tracing_context = TracingContext.try_get
        is_fetch, loops = span_kind == Kind.FETCH, self.loops

        def wrapper(*args: object, **kwargs: object) -> object:
            if is_compiling():
                return original(*args, **kwargs)
            thread, outer_kind = None, 0
            try:
                thread = threads.get(get_ident()) or make_thread_state()
                outer_kind = thread.open_kind
                if outer_kind == Kind.OPTIMIZER:
                    outer_kind = self.current_open_kind(thread)
                # Recomputation belongs to the backward pass that needs it.
                if outer_kind == Kind.BACKWARD or (not is_fetch and graph_task() != -1):
                    return original(*args, **kwargs)
                if outer_kind and tracing_context() is not None:  # torch.compile traces a backward pass inside a call
                    return original(*args, **kwargs)
                phase_timer, sizes, first_word = None, None, span_kind | outer_kind << INSIDE_AT | thread.thread_bits
                try:
                    if is_fetch:
                        self._begin_fetch(thread, args[0])
                        loop = loops.get(id(args[0]))
                        if loop is not None:
                            loop_bits, sizes, _ = loop
                            first_word |= loop_bits
                    elif not self.has_run_backward:
                        self._on_first_backward(thread)
                    if self.device_timer is not None:
                        phase_timer = self.device_timer.begin(thread)
                    if not is_fetch and thread is self.training_thread and self.before_backward is not None:
                        self.before_backward(thread, args)
                except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                    session.count_error("beginning of a phase", error)
                result = run_in_span(thread, first_word, phase_timer, sizes, original, args, kwargs)
                try:
                    if thread.has_fetch_note:
                        thread.has_fetch_note = False
                        self.startup.note_end(None)
                    if not is_fetch:
                        self.backward_passes += 1
                        if self.after_backward is not None and thread is self.training_thread:
                            self.after_backward()
                except Exception as error:  # noqa: BLE001 - the phase is over anyway
                    session.count_error("beginning of a phase", error)
                return result
            except BaseException as error:
                if thread is not None:  # an interrupt may have come between any two lines
                    thread.open_kind = outer_kind
                    if is_fetch:
                        self._handle_fetch_error(thread, error)
                drop_frames(error)
                args, kwargs, result = (), {}, None
                raise

        return copy_name_and_signature(wrapper, original)

    # ---------------------------------------------------------------- fetch

    def _begin_fetch(self, thread: ThreadState, iterator: object) -> None:
        """Handle the start of a fetch. A step begins with it, unless the thread only prefetches."""
        training_thread = self.training_thread
        if thread is training_thread or training_thread is None:
            self.steps_without_call = 0 if self.recent_calls else self.steps_without_call + 1
            self.steps_since_fetch = self.recent_calls = 0
            if training_thread is not None:
                self.max_recent_calls = self.max_recent_calls or MAX_CALLS_AFTER_FETCH
            if self.steps_without_call == IDLE_STEPS:
                self.on_idle()
            if self.device_timer is not None and thread.open_kind == 0:
                self.device_timer.end_step()
            self.at_step_boundary(thread)
        if self.ring is None:
            thread.has_fetch_note = self.startup.note_fetch(iterator)

    def _handle_fetch_error(self, thread: ThreadState, error: BaseException) -> None:
        """Handle an exception that ended a fetch. Never raises."""
        try:
            if thread.has_fetch_note:
                thread.has_fetch_note = False
                self.startup.note_end(error)
            if thread.open_kind == 0 and (thread is self.training_thread or self.training_thread is None):
                self.words[LAST_LOOP_END] = monotonic_ns()
                self.on_loop_end()
        except Exception as own_error:  # noqa: BLE001 - the script's exception must be raised
            self._count_fault(own_error)

    # ---------------------------------------------------------------- backward

    def _on_first_backward(self, thread: ThreadState) -> None:
        """Handle the start of a backward pass if the training thread has not run one before."""
        if self.training_thread is not None:
            self.has_run_backward = True
            if thread is not self.training_thread:  # the supposed training thread never ran a backward pass
                self._set_training_thread(thread)

    def current_open_kind(self, thread: ThreadState, unlisted_steps: int = 0) -> int:
        """Discard optimizer steps that raised, and return the kind of this thread's innermost open span.

        `unlisted_steps`: number of optimizer steps on the stack that `thread.open_steps` does not contain yet.
        """
        with self.session.guard("step of an optimizer"):
            running_steps = sum(frame.f_code in _AROUND_STEPS for frame in iter_callers(sys._getframe(1)))
            while len(thread.open_steps) > running_steps - unlisted_steps:
                thread.open_kind, *_ = thread.open_steps[-1]
                thread.open_steps.pop()
        return thread.open_kind

    # ---------------------------------------------------------------- between two steps

    def at_step_boundary(self, thread: ThreadState) -> None:
        """Pause or poll between two steps if it is due. Raises only exceptions of signal handlers during a pause."""
        if thread.open_kind or (thread is not self.training_thread and self.training_thread is not None):
            return
        self.is_between_steps = True
        words = self.words
        if words[PAUSE] != self.handled_pause:
            try:
                self.on_pause()
            finally:
                self.handled_pause = words[PAUSED]
        now = monotonic_ns()
        if now >= self.poll_due:
            self.poll_due = now + POLL_RETRY_NS  # if an interrupt ends it
            self.poll_due = self.on_poll(now)

    def at_exit(self) -> None:
        """Record the end of the process; mark the ring as ended unless another thread may still train. Never raises."""
        with self.session.guard("end of the process"):
            if self.device_timer is not None:
                self.device_timer.at_exit()
            if self.ring is not None:
                self.session.write_line(end=True, uncaught=_exits_by_exception())
                if not _waits_for_other_threads():
                    self.words[HeaderWord.ENDED] = 1


def _exits_by_exception() -> bool:
    """Return whether an uncaught exception ends the process."""
    if getattr(sys, "last_type", None) is not None:
        return True
    # A child of multiprocessing ends within `_bootstrap`, which is still handling the exception.
    error = sys.exc_info()[1]
    if error is None or isinstance(error, SystemExit) or error.__traceback__ is None:
        return False
    return error.__traceback__.tb_frame.f_code.co_name == "_bootstrap"


def _waits_for_other_threads() -> bool:
    """Return whether the process waits for other threads, as a child of multiprocessing does after its finalizers."""
    current = threading.current_thread()
    return any(thread is not current and not thread.daemon for thread in threading.enumerate())

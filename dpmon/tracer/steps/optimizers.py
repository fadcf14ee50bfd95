"""Traces optimizer steps. In a loop without a loader, it also finds the optimizer that ends each training step."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, update_wrapper
from itertools import count
from threading import get_ident
from time import monotonic_ns
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from dpmon.record.span_format import INSIDE_AT, MAX_SITE, SITE_AT, Kind
from dpmon.tracer.core.hidden_frames import Function, drop_frames, uncounted
from dpmon.tracer.steps.span_recorder import IDLE_STEPS, MAX_STEPS_WITHOUT_FETCH, SpanRecorder, ThreadState

STEPS_BEFORE_WARNING = 3
"""`on_no_call` is called after this many optimizer steps without any call of a module."""
MAX_CALLS_AFTER_STEP = 4096
"""A step may begin at a call after this many calls without an optimizer step, if an optimizer has stepped before."""
_CLOSURE_TYPES = (FunctionType, MethodType, partial)
"""Types of the closures that are traced. An object of another type may have attributes that an optimizer reads."""


class PreHooks(OrderedDict[int, Function]):
    """The script's global hooks before each optimizer step, with ours before them.

    torch.compile does not see ours. On Python 3.13, it cannot break the graph in a step after a hook has run: it takes
    the `if` after the hook for the end of the `with` around the step.
    """

    def __init__(self, hook: Function, hooks: Mapping[int, Function]) -> None:
        super().__init__(hooks)
        self._hook = hook

    def values(self) -> Any:
        """Return the hooks that torch calls."""
        if is_dynamo_compiling():
            return super().values()
        return [self._hook, *super().values()]


class OptimizerTracer:
    """The tracer of one process's optimizer steps."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self.on_no_call: Callable[[], None] = lambda: None
        """Called when optimizers step but no call was seen."""
        self.on_new_optimizer: Callable[[], None] = lambda: None
        """Called after the first step of an optimizer, because the loop may have changed."""
        self.on_check: Callable[[object, int], int] = lambda optimizer, update: 1 << 62
        """Called after the step of an optimizer whose number is at least `check_due`; returns the next `check_due`."""
        self._optimizers: dict[int, tuple[Any, int]] = {}
        """By id: a weak reference to an optimizer, and its number. The hooks refer to this dict: never replace it."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._optimizers.clear()
        self._numbers = count(1)
        self.check_due = self._steps_without_ring = 0
        self._cycle: list[int] = []
        """Optimizers of the current cycle. It ends when one of them steps again; its last optimizer ends the step."""
        self._ending_number = self._highest_number = 0
        """Number of the optimizer that ends a step; highest number of an optimizer that has stepped."""
        self._sole_number = 0
        """Number of the optimizer that ends every step, if it is the only optimizer of the loop; else 0."""

    def hooks(self) -> tuple[Callable[..., Any], Callable[..., None]]:
        """Return the hooks that torch calls before and after every optimizer step.

        The first one may return other arguments for the step, in which the closure is traced.
        If a step raises, torch does not call the second hook; `current_open_kind` detects that. (A wrapper would see
        the exception, but torch.compile would compile it with the step.)
        """
        recorder, known_optimizers = self._recorder, self._optimizers
        threads, make_thread_state = recorder.threads, recorder.current_thread_state
        is_compiling, clock = torch.compiler.is_dynamo_compiling, monotonic_ns
        count_error, unknown = recorder.session.count_error, (weakref.ref(OptimizerTracer), 0)

        def wrap_closure(closure: Function) -> Function:
            return update_wrapper(partial(self._run_closure, closure), closure)

        def before(optimizer: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            if is_compiling():
                return None
            try:
                thread = threads.get(get_ident()) or make_thread_state()
                if thread.open_steps:
                    recorder.current_open_kind(thread, 1)
                outer_kind = thread.open_kind
                reference, number = known_optimizers.get(id(optimizer), unknown)
                if reference() is not optimizer:
                    number = self._assign_number(optimizer)
                first_word = Kind.OPTIMIZER | outer_kind << INSIDE_AT | thread.thread_bits | number << SITE_AT
                timer = recorder.device_timer
                phase_timer = None if timer is None else timer.begin(thread)
                start_ns = clock()
                recorder.words[thread.start_word] = start_ns
                recorder.open_kinds[thread.number] = Kind.OPTIMIZER
                thread.open_steps.append((outer_kind, first_word, start_ns, phase_timer, number))
                thread.open_kind = Kind.OPTIMIZER
                if len(args) > 1 and isinstance(args[1], _CLOSURE_TYPES):
                    return (args[0], wrap_closure(args[1]), *args[2:]), kwargs
                if kwargs and isinstance(closure := kwargs.get("closure"), _CLOSURE_TYPES):
                    return args, {**kwargs, "closure": wrap_closure(closure)}
            except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                count_error("step of an optimizer", error)
            return None

        def after(optimizer: object, args: object, kwargs: object) -> None:
            if is_compiling():
                return
            try:
                thread = threads.get(get_ident())
                if thread is None or not thread.open_steps:
                    return
                if len(thread.open_steps) > 1:
                    recorder.current_open_kind(thread)
                duration_ns = clock()
                outer_kind, first_word, start_ns, phase_timer, number = thread.open_steps[-1]
                thread.open_kind = outer_kind
                thread.open_steps.pop()  # last: after an interrupt, `current_open_kind` needs the entry
                duration_ns -= start_ns
                recorder.open_kinds[thread.number] = outer_kind
                if phase_timer is not None:
                    first_word |= phase_timer.end()
                span_number = recorder.put(first_word, start_ns, duration_ns, 0)
                if phase_timer is not None:
                    phase_timer.set_span_number(span_number)
                recorder.steps_since_fetch += 1
                recorder.optimizer_steps += 1
                if recorder.optimizer_steps >= self.check_due:
                    self.check_due = self.on_check(optimizer, recorder.optimizer_steps)
                recorder.on_update()
                if recorder.steps_since_fetch > MAX_STEPS_WITHOUT_FETCH or number != self._sole_number:
                    self._handle_step(thread, number)
            except Exception as error:  # noqa: BLE001 - the step is done anyway
                count_error("step of an optimizer", error)

        return before, after

    @uncounted
    def _run_closure(self, closure: Function, /, *args: object, **kwargs: object) -> object:
        """Call a closure within a span of its own: the script's code in it is no part of the optimizer phase."""
        recorder = self._recorder
        thread, timer = recorder.threads.get(get_ident()), recorder.device_timer
        if thread is None or thread.open_kind != Kind.OPTIMIZER:  # another thread, or the closure is traced twice
            return closure(*args, **kwargs)
        try:
            phase_timer = None if timer is None else timer.begin(thread)
            first_word = Kind.CLOSURE | Kind.OPTIMIZER << INSIDE_AT | thread.thread_bits
            return recorder.run_in_span(thread, first_word, phase_timer, None, closure, args, kwargs)
        except BaseException as error:
            thread.open_kind = Kind.OPTIMIZER  # an interrupt may have come between any two lines
            drop_frames(error)
            closure, args, kwargs = id, (), {}
            raise

    def _assign_number(self, optimizer: object) -> int:
        """Give an optimizer a number for its lifetime, and return the number."""
        recorder, optimizers = self._recorder, self._optimizers
        number, key = next(self._numbers) & MAX_SITE, id(optimizer)

        def on_freed(_: object) -> None:
            optimizers.pop(key, None)
            if number == self._sole_number:
                self._sole_number = 0
            with suppress(Exception):  # for example, when the interpreter ends
                first_word = Kind.OPTIMIZER_FREED | recorder.current_thread_state().thread_bits | number << SITE_AT
                recorder.put(first_word, monotonic_ns(), 0, 0)

        optimizers[key] = weakref.ref(optimizer, on_freed), number
        return number

    def _handle_step(self, thread: ThreadState, number: int) -> None:
        """Handle an optimizer step that may end a training step, or that shows which optimizers the loop has."""
        recorder = self._recorder
        if recorder.ring is None:
            self._steps_without_ring += 1
            if self._steps_without_ring == STEPS_BEFORE_WARNING:
                self.on_no_call()
        if thread.open_kind or thread is not recorder.training_thread:
            return
        recorder.max_recent_calls = MAX_CALLS_AFTER_STEP
        recorder.steps_without_call = 0 if recorder.recent_calls else recorder.steps_without_call + 1
        recorder.recent_calls = 0
        if recorder.steps_without_call == IDLE_STEPS:
            recorder.on_idle()
        self._ending_number = self._ending_number or number
        if number in self._cycle:
            self._ending_number = self._cycle[-1]
            self._sole_number = number if len(self._cycle) == 1 and recorder.ring is not None else 0
            self._cycle.clear()
        self._cycle.append(number)
        if recorder.steps_since_fetch > MAX_STEPS_WITHOUT_FETCH and number == self._ending_number:
            if recorder.device_timer is not None:
                recorder.device_timer.end_step()
            recorder.at_step_boundary(thread)
        if number > self._highest_number:
            self._highest_number = number
            self.on_new_optimizer()

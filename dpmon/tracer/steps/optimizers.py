"""Traces optimizer steps, and finds the optimizer that ends each training step of a loop without a loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.span_format import INSIDE_AT, MAX_SITE, SITE_AT, Kind
from dpmon.tracer.steps.span_recorder import IDLE, STALE, SpanRecorder, ThreadState

UNSEEN = 3
"""`on_unseen` is called after this many optimizer steps without any call of a module."""
MANY_CALLS = 4096
"""A step may begin at a call after this many calls without an optimizer step, if an optimizer has stepped before."""


class OptimizerTracer:
    """Traces the optimizer steps of one process."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self.on_unseen: Callable[[], None] = lambda: None
        """Called when optimizers step but no call was seen."""
        self.on_another: Callable[[], None] = lambda: None
        """Called after the first step of an optimizer, because the loop may have changed."""
        self._known: dict[int, tuple[Any, int]] = {}
        """By id of an optimizer: a weak reference to it, and its number. The hooks refer to this dict: never replace
        it."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._known.clear()
        self._numbers = count(1)
        self._unseen = 0
        self._cycle: list[int] = []
        """Optimizers of the current cycle. It ends when one of them steps again; its last optimizer ends the step."""
        self._boundary = self._newest = 0
        """Number of the optimizer that ends a step, and the highest number of an optimizer that has stepped."""
        self._only = 0
        """Number of the optimizer that ends every step, if it is the only optimizer of the loop; else 0."""

    def hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks that torch calls before and after every optimizer step.

        If a step raises, torch does not call the second hook; `current_open_kind` detects that. (A wrapper would see
        the exception, but torch.compile would compile it with the step.)
        """
        recorder, known_optimizers = self._recorder, self._known
        threads, new = recorder.threads, recorder.current_thread_state
        is_compiling, clock = torch.compiler.is_dynamo_compiling, monotonic_ns
        fault = recorder.session.count_error

        def before(optimizer: object, args: object, kwargs: object) -> None:
            if is_compiling():
                return
            try:
                me = threads.get(get_ident()) or new()
                if me.steps:
                    recorder.current_open_kind(me, 1)
                inside = me.inside
                known = known_optimizers.get(id(optimizer))
                if known is None or known[0]() is not optimizer:
                    known = self._assign_number(optimizer)
                head = Kind.OPTIMIZER | inside << INSIDE_AT | me.head | known[1] << SITE_AT
                mark = None if recorder.timing is None else recorder.timing.begin(me, Kind.OPTIMIZER)
                began = clock()
                recorder.words[me.word] = began
                recorder.kinds[me.number] = Kind.OPTIMIZER
                me.steps.append((inside, head, began, mark, known[1]))
                me.inside = Kind.OPTIMIZER
            except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                fault("step of an optimizer", error)

        def after(optimizer: object, args: object, kwargs: object) -> None:
            if is_compiling():
                return
            try:
                me = threads.get(get_ident())
                if me is None or not me.steps:
                    return
                if len(me.steps) > 1:
                    recorder.current_open_kind(me)
                took = clock()
                inside, head, began, mark, number = me.steps.pop()
                me.inside = inside
                took -= began
                recorder.kinds[me.number] = inside
                if mark is not None:
                    head |= mark.end()
                slot = recorder.put(head, began, took, 0)
                if mark is not None:
                    mark.set_span_number(slot)
                recorder.steps_since_fetch += 1
                recorder.stepped += 1
                if recorder.stepped == recorder.sample_at:
                    recorder.schedule_poll()
                if recorder.steps_since_fetch > STALE or number != self._only:
                    self._handle_step(me, number)
            except Exception as error:  # noqa: BLE001 - the step is done anyway
                fault("step of an optimizer", error)

        return before, after

    def _assign_number(self, optimizer: object) -> tuple[object, int]:
        """Give an optimizer a number for its lifetime; return a weak reference to the optimizer, and the number."""
        recorder, known = self._recorder, self._known
        number, key = next(self._numbers) & MAX_SITE, id(optimizer)

        def gone(_: object) -> None:
            known.pop(key, None)
            if number == self._only:
                self._only = 0
            with suppress(Exception):  # for example, when the interpreter ends
                recorder.put(
                    Kind.OPTIMIZER_FREED | recorder.current_thread_state().head | number << SITE_AT,
                    monotonic_ns(),
                    0,
                    0,
                )

        known[key] = weakref.ref(optimizer, gone), number
        return known[key]

    def _handle_step(self, me: ThreadState, number: int) -> None:
        """Handle an optimizer step that may end a training step, or that shows which optimizers the loop has."""
        recorder = self._recorder
        if recorder.ring is None:
            self._unseen += 1
            if self._unseen == UNSEEN:
                self.on_unseen()
        if me.inside or me is not recorder.training_thread:
            return
        recorder.calls_before_step = MANY_CALLS
        recorder.idle = 0 if recorder.calls else recorder.idle + 1
        recorder.calls = 0
        if recorder.idle == IDLE:
            recorder.on_idle()
        self._boundary = self._boundary or number
        if number in self._cycle:
            self._boundary = self._cycle[-1]
            self._only = number if len(self._cycle) == 1 and recorder.ring is not None else 0
            self._cycle.clear()
        self._cycle.append(number)
        if recorder.steps_since_fetch > STALE and number == self._boundary:
            if recorder.timing is not None:
                recorder.timing.end_step()
            recorder.at_step_boundary(me)
        if number > self._newest:
            self._newest = number
            self.on_another()

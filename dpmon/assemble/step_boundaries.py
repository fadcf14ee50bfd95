"""Decides where a step of the training loop begins and ends.

With a loader, a step runs from fetch to fetch. Without a loader, it runs from optimizer step to optimizer step. In a
loop without an optimizer, a step begins with the first call after a backward pass. Without backward passes, it begins
with a call of the module that began the previous step. The rule is unknown at first, so the blocks of the open step are
held, and are taken again when the rule changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dpmon.assemble.boundary_state import BoundaryTimeout, OpenStep, OptimizerCycle
from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.event_queue import QueuedEvent
from dpmon.assemble.nesting import EDGE, LEARNS, PHASE_OF, PRIMITIVES, Block
from dpmon.assemble.step_row_builder import Item, StepRowBuilder, end_without_overhead
from dpmon.record.span_format import Flag, Kind, Span

STALE_STEPS = 64
"""A loader no longer counts after more than this many steps of the loop's last optimizer without a fetch."""
MAX_HELD = 1 << 14
"""Most held blocks. A longer step is recorded in parts and cannot be taken again."""

BY_OPTIMIZER, BY_BACKWARD, BY_CALL = range(3)
_OPENS = (Kind.SCATTER, Kind.REPLICATE)
MAX_CALLS = 16
"""Under BY_CALL, a step with more calls than this ends at the next call of any module."""


class _Checkpoint(NamedTuple):
    """The state before the first held block, to take the blocks again."""

    opened: bool
    start: int
    last: int
    ends: int
    since: Sequence[int]


class StepBoundaryFinder:
    """Divides the blocks of one process into steps."""

    def __init__(
        self, known: KnownDefinitions, recorder: StepRowBuilder, closed: Callable[[list[Item], bool], None]
    ) -> None:
        """`closed(items, step)` is called after `items` are recorded. `step`: whether a step ended."""
        self._known = known
        self._recorder = recorder
        self._closed = closed
        self.held: list[Item] = []
        self._before = _Checkpoint(False, 0, 0, -1, ())
        self._cycle = OptimizerCycle()
        self.has_trained = False
        """Whether a backward pass or an optimizer step ran on the training thread."""
        self._open = False
        self._fetched = False
        """Whether the open step began with a fetch."""
        self._over = False
        """Whether the loader has ended, without a fetch since."""
        self._start = self._last = 0
        """Start of the open step, and end of its last phase."""
        self._rule = BY_OPTIMIZER
        self._since_fetch = 0
        self._patience = BoundaryTimeout()
        self._learned = frozenset[int]()
        """Modules with calls that train or record gradients."""
        self._restarts = 0
        """Number of calls of `_start_over` under way; meanwhile, blocks do not cause another one."""
        self._step = OpenStep()

    @property
    def open_calls(self) -> int:
        """Number of calls in the open step."""
        return self._step.calls

    def _hold(self, item: Item) -> None:
        if not self.held:
            cycle = self._cycle
            self._before = _Checkpoint(self._open, self._start, self._last, cycle.ends, tuple(cycle.since))
        self.held.append(item)

    # ------------------------------------------------------------------------------------------ input

    def add_training_block(self, block: Block) -> None:
        """Take a block of the training thread, or the block of a freed optimizer."""
        kind = block[0][1]
        if kind == Kind.FETCH:
            self._handle_fetch(block)
        elif self._open or block[1] or kind in _OPENS:
            self._handle_block(block)
        else:
            self._handle_outside_step(block)
        if len(self.held) > MAX_HELD:
            self._flush_oversized_step()

    def add_other_thread_block(self, block: Block) -> None:
        """Take calls of another thread. They are recorded with the open step."""
        if self._open:
            self._hold(block)
            if len(self.held) > MAX_HELD:
                self._flush_oversized_step()
        else:
            self._recorder.add_calls_outside_step(block)
            self._closed([block], False)

    def add_event(self, event: QueuedEvent) -> None:
        """Take an event that happened after all items taken so far."""
        if event.starts_pause and self._step.calls:
            self._settle()
            if self._step.calls:
                self._close(event.at)
                self._open = self._fetched = False
        if self.held and event.fill in ("next", "last"):
            self._hold(event)
            return
        self._recorder.place_event(event, self._recorder.number + bool(self.held or self._step.part))
        self._closed([], False)

    def fetch_began(self, since: int) -> None:
        """Take a fetch that has begun at the top level; its start ends the open step."""
        if self._open and self._step.calls and since >= self._last:
            self._close_at_fetch(since)

    def switch_training_thread(self, thread: int) -> None:
        """Switch to another training thread."""
        self._settle()
        if self._step.calls:
            self._close(self._last)
        self._drop_open()
        self._recorder.thread = thread

    def finish(self, cut_off: bool) -> None:
        """End the open step where its last phase ended, because no more items come.

        The step is dropped if its last call, backward pass or optimizer step raised an exception. `cut_off`: also drop
        it if it should learn but has no backward pass and no optimizer step.
        """
        self._settle()
        if not self._step.calls:
            self._drop_open()
            return
        items, self.held = self.held, []
        totals = self._recorder.record_items(items, self._step.part)
        if not totals.failed and not (cut_off and totals.is_missing_update):
            self._recorder.step(totals, self._start, self._last)
        self._closed([], True)
        self._step = OpenStep()
        self._open = False

    # ------------------------------------------------------------------------------------------ with a loader

    def _handle_fetch(self, block: Block) -> None:
        span = block[0]
        failed = span.flags & (Flag.FAILED | Flag.EXHAUSTED)
        if self._open and self._step.calls:
            self._close_at_fetch(span.start)
        self._recorder.fetches.add_fetch(span, failed != 0)
        if self._open and self._fetched and not failed:
            self._hold(block)
            self._recorder.unmatched_fetches += 1
        else:
            self._drop_open()
            if failed:
                self._over, self._fetched = True, False
                return
            self._hold(block)
            if self._over:
                self._recorder.unmatched_fetches = min(self._recorder.unmatched_fetches, 1)
            self._open = self._fetched = True
            self._over = False
            self._since_fetch = 0
            self._start = span.start
        self._last = span.start + span.took
        self._add_calls(block[1])

    def _close_at_fetch(self, start: int) -> None:
        """End the open step, because a fetch begins at `start`."""
        if self._fetched:
            self._close(end_without_overhead(self.held, start))
        else:
            self._settle()
            if self._step.calls:
                self._close(self._last)
        self._drop_open()

    def _drop_open(self) -> None:
        """Release the held items, which belong to no step."""
        self._open = self._fetched = False
        self._step = OpenStep()
        if not self.held:
            return
        items, self.held = self.held, []
        recorder = self._recorder
        for item in items:
            if isinstance(item, QueuedEvent):
                recorder.place_event(item, recorder.number)
            elif item[0].thread != recorder.thread:
                recorder.add_calls_outside_step(item)
            elif item[0].kind == Kind.MEMORY:
                recorder.note_memory_sample(item[0].site, recorder.number)
        self._closed(items, False)

    # ------------------------------------------------------------------------------------------ without a loader

    def _handle_outside_step(self, block: Block) -> None:
        """Take a block that belongs to no step."""
        span, _, stepped, inner = block
        if span.kind == Kind.MEMORY:
            self._recorder.note_memory_sample(span.site, self._recorder.number)
        elif span.kind == Kind.OPTIMIZER_FREED:
            self._cycle.forget_optimizer(span.site)
        if span.kind == Kind.BACKWARD or stepped or (inner is not None and inner.backward):
            self.has_trained = True

    def _handle_block(self, block: Block) -> None:
        span, calls, stepped, inner = block
        kind, start = span[1], span[6]
        if self._step.calls and calls and not self._fetched:
            self._before_call(block)
        if not self.held and kind in EDGE and not self._step.calls:
            self._start = max(self._start, start + span[7])
            self._handle_outside_step(block)
            return
        self._hold(block)
        if not self._open:
            self._open, self._start, self._last = True, start, start
        if PHASE_OF[kind] >= 0 and start + span[7] > self._last:
            self._last = start + span[7]
        if calls and self._add_calls(calls):
            return
        if kind == Kind.BACKWARD or (inner is not None and inner.backward):
            self._step.backward = self.has_trained = True
            self._step.only_evaluates = False
            if self._rule == BY_CALL:
                self._rule = BY_BACKWARD
        elif kind == Kind.OPTIMIZER_FREED:
            self._cycle.forget_optimizer(span.site)
        if stepped:
            self._handle_optimizer_steps(stepped, start + span[7])
        elif calls and not self._fetched and not self._restarts:
            self._check_timeout()

    def _add_calls(self, calls: Sequence[Span]) -> bool:
        """Add calls to the open step; return whether the step was taken again."""
        step, fresh = self._step, False
        for call in calls:
            module = self._known.module(call[5])
            if not step.add_call(call, module):
                continue
            if module not in self._learned:
                self._learned |= {module}
                fresh = fresh or module in step.evaluated
        if not fresh or self._fetched or self._restarts or self._step.part:
            return False
        self._start_over()
        return True

    def _before_call(self, block: Block) -> None:
        """End the open step, which has calls, if this block begins another step."""
        learns = any(call.flags & LEARNS for call in block[1])
        at, start = len(self.held), block[0].start
        if block[0].kind in PRIMITIVES:  # the scatters and replicates before it belong to the call
            while at and isinstance(item := self.held[at - 1], tuple) and item[0].kind in _OPENS:
                at -= 1
                start = item[0].start
        step, rule = self._step, self._rule
        trains_now = step.only_evaluates and learns
        if not (step.only_evaluates and step.last_evaluated in self._learned):
            if rule == BY_OPTIMIZER or (rule == BY_BACKWARD and not step.backward):
                return
            others = step.calls <= MAX_CALLS and self._known.module(block[1][0].site) != step.module
            if rule == BY_CALL and others and not trains_now:
                return
        rest = self.held[at:]
        del self.held[at:]
        self._close(self._last if trains_now else start)
        self._open, self._start, self._last = True, start, start
        self._replay(rest)

    def _handle_optimizer_steps(self, sites: Sequence[int], end: int) -> None:
        """Take the optimizer steps of a block that ended at `end`."""
        self._step.only_evaluates = False
        self.has_trained = True
        outcomes = [self._cycle.add_optimizer_step(site) for site in sites]
        changed = None in outcomes
        ended = changed or True in outcomes
        if self._fetched:
            self._since_fetch += ended
            if self._since_fetch > STALE_STEPS:
                self._fetched = False
                self._start_over()
            return
        self._rule = BY_OPTIMIZER
        if not ended or not self._step.calls:
            return
        if changed and not self._restarts and not self._step.part:
            self._start_over()
            return
        self._patience.add_optimizer_step(self._start, end, self._recorder.calls + self._step.calls)
        self._close(end)
        self._open, self._start, self._last = True, end, end

    # ------------------------------------------------------------------------------------------ taking items again

    def _start_over(self) -> None:
        """Take all held items again, from the state before the first, because the rule or the cycle has changed."""
        before = self._before
        if not self.held or self._step.part:
            return
        items, self.held = self.held, []
        self._open, self._start, self._last = before.opened, before.start, before.last
        if self._cycle.ends == before.ends:
            self._cycle.since = dict.fromkeys(before.since)
        self._step = OpenStep()
        self._restarts += 1
        self._replay(items)
        self._restarts -= 1

    def _replay(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, QueuedEvent):
                self.add_event(item)
            elif item[0].thread != self._recorder.thread and item[0].kind != Kind.OPTIMIZER_FREED:
                self.add_other_thread_block(item)
            else:
                self._handle_block(item)

    def _check_timeout(self) -> None:
        """Wait for an optimizer step. At the limit, look for another rule, or end the step if it has too many calls."""
        step, patience = self._step, self._patience
        made = bool(self._known.optimizers) or self._cycle.ends >= 0
        learns = not (step.only_evaluates or step.backward)  # a backward pass may follow
        too_many = patience.has_too_many_calls(step.calls, made or learns)
        if not too_many and not patience.has_waited_too_long(self._last - step.first_call, made):
            return
        if not self._look_for_another_rule() and too_many:
            self._close(self._last)
            self._open, self._start = True, self._last

    def _settle(self) -> None:
        """Choose the rule for the open step now, because later blocks cannot affect it."""
        if not self._step.calls or self._fetched:
            return
        if self._rule == BY_OPTIMIZER and self._cycle.ends < 0:
            self._look_for_another_rule()
        if self._rule != BY_CALL and self._step.only_evaluates:  # all its calls are of models that do not learn
            rule, self._rule = self._rule, BY_CALL
            self._start_over()
            self._rule = rule

    def _look_for_another_rule(self) -> bool:
        """Take the open step again under the rule that its blocks suggest; False if there is no other rule."""
        if self._rule == BY_OPTIMIZER:
            if not self._cycle.close_cycle():
                self._rule = BY_BACKWARD if self._step.backward else BY_CALL
        elif self._rule == BY_BACKWARD and not self._step.backward:
            self._rule = BY_CALL
        else:
            return False
        self._start_over()
        return True

    # ------------------------------------------------------------------------------------------ the end of a step

    def _close(self, end: int) -> None:
        items, self.held = self.held, []
        self._recorder.step(self._recorder.record_items(items, self._step.part), self._start, end)
        self._closed(items, True)
        self._step = OpenStep()

    def _flush_oversized_step(self) -> None:
        """Record the held items of a step that is too long."""
        items, self.held = self.held, []
        self._step.part = self._recorder.record_items(items, self._step.part)
        self._closed(items, False)

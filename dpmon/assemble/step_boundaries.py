"""Decides where a step of the training loop begins and ends.

With a loader, a step runs from fetch to fetch; before the first fetch of another loop, it ends with its last phase.
Without a loader, it runs from optimizer step to optimizer step. In a loop without an optimizer, a step begins with the
first call after a backward pass. Without backward passes, it begins with a call of the module that began the previous
step. The rule is unknown at first, so the blocks of the open step are held, and are replayed when the rule changes.

A step is one turn of a loop. Calls that train nothing and are not repeated belong to no loop: they get no step number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.assemble.boundary_state import BoundaryTimeout, OpenStep, OptimizerCycle, kind_of_call
from dpmon.assemble.event_queue import QueuedEvent
from dpmon.assemble.nesting import EDGE, LEARNS, PHASE_OF, Block
from dpmon.assemble.step_row_builder import Item, StepRowBuilder, end_without_overhead
from dpmon.assemble.step_totals import StepTotals
from dpmon.record.history_rows import Definitions
from dpmon.record.schema import EVALUATION, TRAINING
from dpmon.record.span_format import Flag, Kind, Span

STALE_STEPS = 64
"""After more than this many steps of the loop's last optimizer without a fetch, the loader no longer divides steps."""
MAX_HELD = 1 << 14
"""How many blocks are held. A longer step is divided."""

BY_OPTIMIZER, BY_BACKWARD, BY_CALL = range(3)
_CALL_STARTS = (Kind.SCATTER, Kind.REPLICATE, Kind.FLOPS, Kind.PROFILE)
MAX_CALLS = 16
"""Under BY_CALL, a step with more calls than this ends at the next call of any module."""


class _Checkpoint(NamedTuple):
    """The state before the first held block, from which the held blocks can be replayed."""

    is_open: bool
    start: int
    last_end: int
    ends: int
    """`ends` and `since`: see OptimizerCycle."""
    since: Sequence[int]


class StepBoundaryFinder:
    """Divides the blocks of one process into steps."""

    def __init__(self, definitions: Definitions, row_builder: StepRowBuilder) -> None:
        self._definitions = definitions
        self._row_builder = row_builder
        self.held: list[Item] = []
        """The blocks and events of the open step that are not recorded yet."""
        self._checkpoint = _Checkpoint(is_open=False, start=0, last_end=0, ends=-1, since=())
        self._cycle = OptimizerCycle()
        self.has_trained = False
        """Whether a backward pass or an optimizer step ran on the training thread."""
        self.has_optimizer = False
        """Whether the script has made an optimizer."""
        self._is_open = False
        self._began_with_fetch = False
        """Whether the open step began with a fetch."""
        self.lacks_start = False
        """Whether the next step to end may have begun before the first block, because a supervisor was killed."""
        self._start = self._last_end = 0
        """Start of the open step, and end of its last phase."""
        self._loop = self._new_loop_at = 0
        """The loop of the fetch that began the open step, and when the script last began to iterate over a loader."""
        self._rule = BY_OPTIMIZER
        self._steps_since_fetch = 0
        self._timeout = BoundaryTimeout()
        self._learning_modules = frozenset[int]()
        """Modules with calls that train or record gradients."""
        self._restarts = 0
        """How many calls of `_start_over` are active. Replayed blocks do not cause another one."""
        self._step = OpenStep()
        self._previous_kind = TRAINING
        """Kind of the step before the open one."""

    @property
    def open_calls(self) -> int:
        """The number of calls in the open step."""
        return self._step.calls

    def _hold_item(self, item: Item) -> None:
        if not self.held:
            cycle = self._cycle
            self._checkpoint = _Checkpoint(self._is_open, self._start, self._last_end, cycle.ends, tuple(cycle.since))
        self.held.append(item)

    # ------------------------------------------------------------------------------------------ input

    def add_training_block(self, block: Block) -> None:
        """Add a block of the training thread, or the block of a freed optimizer."""
        kind = block.span.kind
        if kind == Kind.FETCH:
            self._handle_fetch(block)
        elif self._is_open or block.calls or kind in _CALL_STARTS:
            self._handle_block(block)
        else:
            self._handle_outside_step(block)
        if len(self.held) > MAX_HELD:
            self._divide_oversized_step()

    def add_other_thread_block(self, block: Block) -> None:
        """Add calls of another thread. They are recorded with the open step."""
        if self._is_open:
            self._hold_item(block)
            if len(self.held) > MAX_HELD:
                self._divide_oversized_step()
        else:
            self._row_builder.add_calls_outside_step(block)

    def add_event(self, event: QueuedEvent) -> None:
        """Add an event that happened after all items added so far."""
        if event.starts_pause and self._step.calls:
            self._end_step(event.time_ns)
        if event.kind == "loader":
            self._new_loop_at = event.time_ns
        if self.held and event.fill is not None:
            self._hold_item(event)
            return
        self._row_builder.place_event(event, self._row_builder.number + bool(self.held))

    def fetch_began(self, start_ns: int, loop: int = 0) -> None:
        """Handle the start of a fetch at the top level, which ends the open step. `loop`: its loop; 0 if unknown."""
        if self._is_open and self._step.calls and start_ns >= self._last_end:
            self._close_at_fetch(start_ns, loop)

    def switch_training_thread(self, thread: int) -> None:
        """Make another thread the training thread. The open step ends."""
        self._end_step()
        self._row_builder.thread = thread

    def finish(self, is_cut_off: bool) -> None:
        """End the open step at the end of its last phase, because no more items will arrive.

        The step is dropped if its last call, backward pass or optimizer step raised an exception, or if its start is
        missing. `is_cut_off`: also drop it if it should learn but has no backward pass and no optimizer step.
        """
        step = self._step
        # A step of the training that was cut off has no more calls than the complete ones.
        has_few_calls = self._began_with_fetch or step.calls <= max(self._timeout.calls, 1)
        if is_cut_off and self.has_trained and step.could_train and has_few_calls:
            step.trains = True
        else:
            self._choose_final_rule()
        if not self._step.calls:
            self._drop_open_step()
            return
        totals = self._record_step()
        is_partial = self.lacks_start and totals.stepped
        if totals.failed or is_partial or (is_cut_off and totals.is_missing_update):
            self._row_builder.add_calls_alone(totals)
        else:
            self._row_builder.add_step(totals, self._start, self._last_end)
        self._step = OpenStep()
        self._is_open = False

    # ------------------------------------------------------------------------------------------ with a loader

    def _handle_fetch(self, block: Block) -> None:
        span = block.span
        has_failed = span.flags & (Flag.FAILED | Flag.EXHAUSTED)
        if self._is_open and self._step.calls:
            self._close_at_fetch(span.start, span.site)
        self._row_builder.fetches.add_fetch(span, has_failed != 0)
        if self._is_open and self._began_with_fetch:  # no call yet: this step uses all batches so far
            self._hold_item(block)
            if has_failed:  # the loader has no more batches, so no later fetch ends this step
                self._began_with_fetch = False
        else:
            self._drop_open_step()
            if has_failed:
                return
            self._hold_item(block)
            self._is_open = self._began_with_fetch = True
            self.lacks_start = False
            self._steps_since_fetch = 0
            self._start, self._loop = span.start, span.site
        self._last_end = span.end
        self._add_calls(block.calls)

    def _close_at_fetch(self, start: int, loop: int) -> None:
        """End the open step, because a fetch of `loop` (0: unknown) starts at `start`."""
        if self._began_with_fetch:
            is_new_loop = self._new_loop_at >= self._last_end or loop not in (0, self._loop)
            self._close_step(self._last_end if is_new_loop else end_without_overhead(self.held, start))
            self._drop_open_step()
        else:
            self._end_step()

    def _drop_open_step(self) -> None:
        """Release the held items, which belong to no step."""
        self._is_open = self._began_with_fetch = False
        self._step = OpenStep()
        if not self.held:
            return
        items, self.held = self.held, []
        row_builder = self._row_builder
        for item in items:
            if isinstance(item, QueuedEvent):
                row_builder.place_event(item, row_builder.number)
            elif item.span.thread != row_builder.thread:
                row_builder.add_calls_outside_step(item)

    # ------------------------------------------------------------------------------------------ without a loader

    def _handle_outside_step(self, block: Block) -> None:
        """Handle a block that belongs to no step."""
        span, _, optimizers, contents = block
        if span.kind == Kind.OPTIMIZER_FREED:
            self._cycle.forget_optimizer(span.site)
        if span.kind == Kind.BACKWARD or optimizers or (contents is not None and contents.backward):
            self.has_trained = True
        if optimizers:
            self.lacks_start = False

    def _handle_block(self, block: Block) -> None:
        """Handle a block of the training thread while a step is open, or a block that opens one."""
        span, calls, optimizers, contents = block
        kind, start, end = span.kind, span.start, span.end
        if self._step.calls and calls and not self._began_with_fetch:
            self._end_step_before_call(block)
        if not self.held and kind in EDGE and not self._step.calls:
            self._start = max(self._start, end)
            self._handle_outside_step(block)
            return
        self._hold_item(block)
        if not self._is_open:
            self._is_open, self._start, self._last_end = True, start, start
        if PHASE_OF[kind] >= 0 and end > self._last_end:
            self._last_end = end
        if calls and self._add_calls(calls):
            return
        if kind == Kind.BACKWARD or (contents is not None and contents.backward):
            self._step.backward = self._step.trains = self.has_trained = True
            if self._rule == BY_CALL:
                self._rule = BY_BACKWARD
        elif kind == Kind.OPTIMIZER_FREED:
            self._cycle.forget_optimizer(span.site)
        if optimizers:
            self._handle_optimizer_steps(optimizers, end)
        elif calls and not self._began_with_fetch and not self._restarts:
            self._check_timeout()

    def _add_calls(self, calls: Sequence[Span]) -> bool:
        """Add calls to the open step. Return whether the step was replayed."""
        step, is_new_learner = self._step, False
        for call in calls:
            module = self._definitions.module(call.site)
            if not step.add_call(call, module):
                continue
            if module not in self._learning_modules:
                self._learning_modules |= {module}
                is_new_learner = is_new_learner or module in step.evaluated
        if not is_new_learner or self._began_with_fetch or self._restarts:
            return False
        self._start_over()
        return True

    def _end_step_before_call(self, block: Block) -> None:
        """End the open step, which has calls, if this block begins another step."""
        has_learning_call = any(call.flags & LEARNS for call in block.calls)
        index, start = len(self.held), block.span.start
        # The scatters and replicates before it belong to the call.
        while index and isinstance(item := self.held[index - 1], Block) and item.span.kind in _CALL_STARTS:
            index -= 1
            start = item.span.start
        step, rule = self._step, self._rule
        starts_training = step.only_evaluates and has_learning_call
        if not (step.only_evaluates and step.last_evaluated in self._learning_modules):
            if rule == BY_OPTIMIZER or (rule == BY_BACKWARD and not step.backward):
                return
            first_module = self._definitions.module(block.calls[0].site)
            is_other_module = step.calls <= MAX_CALLS and first_module != step.module
            if rule == BY_CALL and is_other_module and not starts_training:
                return
        block_items = self.held[index:]
        del self.held[index:]
        first_call, kind = block.calls[0], step.kind
        is_repeated = kind_of_call(first_call) == kind and (
            kind == EVALUATION or self._definitions.module(first_call.site) == step.module
        )
        self._close_step(self._last_end if starts_training else start, is_repeated=is_repeated)
        self._is_open, self._start, self._last_end = True, start, start
        self._replay(block_items)

    def _handle_optimizer_steps(self, sites: Sequence[int], end: int) -> None:
        """Handle the optimizer steps of a block that ended at `end`."""
        self._step.trains = self.has_trained = True
        outcomes = [self._cycle.add_optimizer_step(site) for site in sites]
        cycle_changed = None in outcomes
        ends_step = cycle_changed or True in outcomes
        if self._began_with_fetch:
            self._steps_since_fetch += ends_step
            if self._steps_since_fetch > STALE_STEPS:
                self._began_with_fetch = False
                self._start_over()
            return
        self._rule = BY_OPTIMIZER
        if not ends_step or not self._step.calls:
            return
        if cycle_changed and not self._restarts:
            self._start_over()
            return
        self._timeout.add_optimizer_step(self._start, end, self._row_builder.calls + self._step.calls)
        self._close_step(end)
        self._is_open, self._start, self._last_end = True, end, end

    # ------------------------------------------------------------------------------------------ replay

    def _start_over(self) -> None:
        """Replay all held items from the checkpoint, because the rule or the optimizer cycle has changed."""
        checkpoint = self._checkpoint
        if not self.held:
            return
        items, self.held = self.held, []
        self._is_open, self._start, self._last_end = checkpoint.is_open, checkpoint.start, checkpoint.last_end
        if self._cycle.ends == checkpoint.ends:
            self._cycle.since = dict.fromkeys(checkpoint.since)
        self._step = OpenStep()
        self._restarts += 1
        self._replay(items)
        self._restarts -= 1

    def _replay(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, QueuedEvent):
                self.add_event(item)
            elif item.span.thread != self._row_builder.thread and item.span.kind != Kind.OPTIMIZER_FREED:
                self.add_other_thread_block(item)
            else:
                self._handle_block(item)

    def _check_timeout(self) -> None:
        """Try the next rule if the open step has waited too long for an optimizer step."""
        step = self._step
        has_optimizer = self.has_optimizer or self._cycle.ends >= 0
        may_learn = not (step.only_evaluates or step.backward)  # a backward pass may follow
        waited_ns = self._last_end - step.first_call
        if self._timeout.has_passed(step.calls, waited_ns, has_optimizer=has_optimizer, may_learn=may_learn):
            self._try_next_rule()

    def _choose_final_rule(self) -> None:
        """Choose the rule for the open step now, because no later block can affect it."""
        if not self._step.calls or self._began_with_fetch:
            return
        if self._rule == BY_OPTIMIZER and self._cycle.ends < 0:
            self._try_next_rule()
        if self._rule != BY_CALL and not self._step.trains:
            rule, self._rule = self._rule, BY_CALL
            self._start_over()
            self._rule = rule

    def _try_next_rule(self) -> None:
        """Replay the open step under the rule that its blocks suggest, if there is another one."""
        if self._rule == BY_OPTIMIZER:
            if not self._cycle.close_cycle():
                self._rule = BY_BACKWARD if self._step.backward else BY_CALL
        elif self._rule == BY_BACKWARD and not self._step.backward:
            self._rule = BY_CALL
        else:
            return
        self._start_over()

    # ------------------------------------------------------------------------------------------ the end of a step

    def _end_step(self, end: int | None = None) -> None:
        """End the open step at `end` (None: with its last phase), because no later block can belong to it."""
        self._choose_final_rule()
        if self._step.calls:
            self._close_step(self._last_end if end is None else end)
        self._drop_open_step()

    def _close_step(self, end: int, *, is_repeated: bool = False) -> None:
        """End the open step at `end`. See `_record_step`."""
        self._row_builder.add_step(self._record_step(is_repeated=is_repeated), self._start, end)
        self._step = OpenStep()
        self.lacks_start = False

    def _record_step(self, *, is_repeated: bool = False) -> StepTotals:
        """Record the held items, with which the open step ends. Return its totals.

        `is_repeated`: the next block begins another step like it.
        """
        items, self.held = self.held, []
        kind, previous_kind = self._step.kind, self._previous_kind
        self._previous_kind = kind
        is_turn = kind == TRAINING or self._began_with_fetch or is_repeated or previous_kind == kind
        return self._row_builder.record_items(items, kind, numbered=is_turn and not self.lacks_start)

    def _divide_oversized_step(self) -> None:
        """End the open step, because it has too many items."""
        if self._step.calls:
            self._close_step(self._last_end)
            self._start = self._last_end
        else:
            self._drop_open_step()

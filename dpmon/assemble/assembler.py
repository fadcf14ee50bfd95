"""Turns the spans and lines of one process into rows. Connects the other modules of this package."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpmon.assemble.device_times import RowQueue
from dpmon.assemble.event_queue import EventQueue, QueuedEvent
from dpmon.assemble.nesting import CALLS, PRIMITIVES, Block, make_block
from dpmon.assemble.sampled_collectives import SampledCollectives
from dpmon.assemble.step_boundaries import StepBoundaryFinder
from dpmon.assemble.step_row_builder import StepRowBuilder
from dpmon.record.history_rows import Definition, Definitions, Row, parse_definition
from dpmon.record.record_types import Event
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import Flag, Kind, Span

MAX_NESTED = 1 << 14
"""How many spans may wait for their enclosing span."""
MAX_EARLY_BLOCKS = 256
"""How many blocks are held before the first call."""
FULL_READ_SPANS = 4096
"""If a read returns fewer spans than this, it has reached the newest span."""
_NEVER_ENDED = (1 << 64) - 1
_CUT_OFF_WARNING = (
    "the process ended before it had finished a step of its loop. dpmon guessed where its steps end. The last step is"
    " incomplete"
)
_OUTSIDE_BLOCKS = (Kind.DEVICE_TIME, Kind.COLLECTIVE, Kind.LOSS, Kind.MASK)
_NESTED_KINDS = (Kind.REPLICA, Kind.STAGE, Kind.RESTARTED)


class Assembler:
    """Turns the spans of one process into steps and calls. Any span may be missing."""

    def __init__(self) -> None:
        self._dropped = 0
        self._definitions = Definitions()
        self._events = EventQueue()
        self._collectives = SampledCollectives(self._definitions)
        self._rows = RowQueue()
        self._row_builder = StepRowBuilder(self._definitions, self._collectives, self._rows)
        self._boundaries = StepBoundaryFinder(self._definitions, self._row_builder)
        self._earlier_event_count = 0
        """Number of events that earlier calls of `feed` received."""
        self._last_spans: dict[int, Span] = {}
        """By thread: its last span."""
        self._nested_spans: dict[int, list[Span]] = {}
        self._nested_count = 0
        """Number of spans in `_nested_spans`."""
        self._early_blocks: deque[Block] = deque(maxlen=MAX_EARLY_BLOCKS)
        self._ended_by_exception: bool | None = None
        """Whether an exception ended the process; None until the process reports its end."""

    @property
    def thread(self) -> int:
        """Number of the training thread; -1 while unknown."""
        return self._row_builder.thread

    @property
    def open_calls(self) -> int:
        """The number of calls so far; 0 once a step of the process has ended."""
        if any(self._row_builder.numbers.values()):
            return 0
        nested_calls = sum(span.kind in CALLS for spans in self._nested_spans.values() for span in spans)
        return self._boundaries.open_calls + nested_calls

    @property
    def timing_interval(self) -> int:
        """One step in this many should be timed on devices, to limit the cost of timing; 0 while unknown."""
        return self._row_builder.sampling.interval

    @property
    def dropped(self) -> int:
        """The number of spans that lack their context."""
        return self._dropped + self._row_builder.dropped

    # ------------------------------------------------------------------------------------------ input

    def resume(
        self, lines: Iterable[Mapping[str, Any]], event_count: int, last_steps: Mapping[int, int], last_call: int
    ) -> None:
        """Continue after the death of a supervisor. The step that was open is lost, and the loop is learned again.

        `lines`: all lines that it had read. `event_count`: how many of their events are in the history. `last_steps`:
        by kind, the number of the last step; `last_call`: that of the last call.
        """
        self._take_lines(lines)
        self._events.pop_numbered_below(event_count)
        self._row_builder.numbers |= last_steps
        self._row_builder.calls = last_call
        self._boundaries.lacks_start = True

    def feed(self, spans: Sequence[Span], lines: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Handle spans, in order of number, and the lines that were read after them. Return the new rows in order."""
        self._take_lines(lines)
        for span in spans:
            self._handle_span(span)
        if len(spans) < FULL_READ_SPANS:  # all spans before these events have been handled
            self._place_events(self._events.pop_numbered_below(self._earlier_event_count))
        self._earlier_event_count = self._events.count
        return self._pop_rows()

    def take_current_span(self, kind: int, since_ns: int) -> list[Row]:
        """Handle the training thread's unfinished span, given its kind and start. Return the new rows.

        The caller read it before the spans of the last `feed`.
        """
        if kind == Kind.FETCH:
            self._place_events(self._events.pop_until(since_ns - 1))
            self._boundaries.fetch_began(since_ns)
        return self._pop_rows()

    def finish(self) -> list[Row]:
        """Finish, because the process has exited and no more spans will arrive. Return the last rows."""
        self._place_events(self._events.pop_numbered_below(self._events.count))
        row_builder, has_no_step = self._row_builder, not self._row_builder.number
        self._release_closures()
        is_cut_off = self._ended_by_exception
        if is_cut_off is None:  # a killed process may have been in the middle of a training step
            is_cut_off = self._boundaries.has_trained
        self._boundaries.finish(is_cut_off)
        if (
            has_no_step
            and row_builder.number
            and self._boundaries.has_trained
            and self._ended_by_exception is not False
        ):
            self._rows.add(Event("warning", {"process": None, "t_s": None, "text": _CUT_OFF_WARNING}))
        row_builder.finish()
        self._collectives.finish()
        return self._pop_rows(Untimed.ENDED)

    def _release_closures(self) -> None:
        """Handle the calls inside an unfinished optimizer step, such as those in the closure of LBFGS."""
        nested_by_thread, self._nested_spans, self._nested_count = self._nested_spans, {}, 0
        for spans in nested_by_thread.values():
            inner: list[Span] = []
            for span in spans:
                if span.inside in (Kind.OPTIMIZER, Kind.CLOSURE) and span.kind not in _NESTED_KINDS:
                    self._route_block(
                        make_block(span, [inner_span for inner_span in inner if inner_span.start >= span.start])
                    )
                    inner = []
                else:
                    inner.append(span)

    def _take_lines(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            if "end" in line:
                self._ended_by_exception = line.get("uncaught") is True
            elif "optimizer" in line:
                self._boundaries.has_optimizer = True
            elif "define" in line:
                self._definitions.remember(line["define"], parse_definition(line["value"]))
                self._rows.add(Definition(line["define"], line["value"]))
            else:
                self._events.add(line)

    def _handle_span(self, span: Span) -> None:
        _, kind, flags, inside, thread, _, start_ns, duration_ns, _, _ = span
        if duration_ns == _NEVER_ENDED:  # a stage
            span = span._replace(took=0, flags=flags | Flag.FAILED)
        if kind in _OUTSIDE_BLOCKS:
            if kind == Kind.DEVICE_TIME:
                self._rows.add_device_time(span)
                self._row_builder.sampling.count_device_time()
            elif kind == Kind.MASK:
                self._row_builder.add_mask(span)
            elif not self._collectives.add_span(span):
                self._dropped += 1
            return
        previous = self._last_spans.get(thread)
        if previous is not None and previous.start == start_ns and previous[1:6] == span[1:6]:
            return  # a duplicate, written after an interrupt
        self._last_spans[thread] = span
        if inside or kind in _NESTED_KINDS:
            self._nest_span(span)
        else:
            self._route_block(make_block(span, self._pop_inner_spans(thread, start_ns) if self._nested_count else ()))

    def _nest_span(self, span: Span) -> None:
        if self._nested_count >= MAX_NESTED:
            self._dropped += self._nested_count
            self._nested_spans.clear()
            self._nested_count = 0
        self._nested_spans.setdefault(span.thread, []).append(span)
        self._nested_count += 1

    def _pop_inner_spans(self, thread: int, start: int) -> list[Span]:
        """Remove and return the waiting spans inside a span that began at `start`. Discard older spans."""
        waiting = self._nested_spans.pop(thread, None)
        if waiting is None:
            return []
        self._nested_count -= len(waiting)
        return [span for span in waiting if span.start >= start]

    def _route_block(self, block: Block) -> None:
        span, calls = block.span, block.calls
        thread, kind = span.thread, span.kind
        if span.end > self._events.due:
            self._place_events_before(span)
        if thread == self._row_builder.thread or (kind == Kind.OPTIMIZER_FREED and self._row_builder.thread >= 0):
            self._boundaries.add_training_block(block)
        elif self._row_builder.thread < 0:
            self._early_blocks.append(block)
            if calls:
                self._set_training_thread(thread)
        elif kind == Kind.BACKWARD and not self._boundaries.has_trained:
            self._boundaries.switch_training_thread(thread)
            self._boundaries.add_training_block(block)
        elif calls or kind in PRIMITIVES:
            self._boundaries.add_other_thread_block(block)

    def _set_training_thread(self, thread: int) -> None:
        """Make the thread of the first call the training thread."""
        self._row_builder.thread = thread
        early_blocks, self._early_blocks = list(self._early_blocks), deque(maxlen=MAX_EARLY_BLOCKS)
        for block in early_blocks:
            if block.span.thread == thread or block.span.kind == Kind.OPTIMIZER_FREED:
                self._route_block(block)

    def _place_events_before(self, span: Span) -> None:
        """Place the events that happened before the end of a block.

        If the block is a fetch, it ends the open step, so the events before its start are placed first.
        """
        if span.kind == Kind.FETCH and span.thread == self._row_builder.thread:
            self._place_events(self._events.pop_until(span.start - 1))
            self._boundaries.fetch_began(span.start, span.site)
        self._place_events(self._events.pop_until(span.end - 1))

    def _place_events(self, events: Iterable[QueuedEvent]) -> None:
        for event in events:
            self._boundaries.add_event(event)

    def _pop_rows(self, missing_reason: int = Untimed.NONE) -> list[Row]:
        return self._rows.pop_rows(missing_reason) + self._collectives.pop_rows()

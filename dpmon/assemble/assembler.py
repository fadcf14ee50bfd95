"""Connects the modules of this package: takes the spans and lines of one process, and returns rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.device_times import DeviceTimeQueue, PendingRow
from dpmon.assemble.event_queue import EventQueue, QueuedEvent
from dpmon.assemble.nesting import CALLS, PRIMITIVES, Block, make_block
from dpmon.assemble.sampled_collectives import SampledCollectives
from dpmon.assemble.step_boundaries import StepBoundaryFinder
from dpmon.assemble.step_row_builder import Item, StepRowBuilder
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import DOING, Flag, Kind, Span

MAX_NESTED = 1 << 14
"""Most spans that wait for their enclosing span."""
MAX_EARLY = 256
"""Most blocks held before the first call."""
CAUGHT_UP = 4096
"""A read that returns fewer spans than this has reached the newest span."""
_LATEST = 1 << 58
"""Longest plausible uptime of a machine (ns)."""
_NEVER_ENDED = (1 << 64) - 1
_CUT_OFF = (
    "the process ended before it had finished a step of its loop. dpmon guessed where its steps end. The last step is"
    " incomplete"
)
_INNER = (Kind.REPLICA, Kind.STAGE, Kind.RESTARTED)
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class Predecessor(NamedTuple):
    """What is in the history from an assembler whose supervisor was killed."""

    step: int
    call: int
    """Numbers of its last step and call."""
    thread: int
    position: int
    caught_up: int
    """Number of the first span that it was not fed."""
    pending: Collection[int]


class Assembler:
    """Turns the spans of one process into steps and calls. Damaged input is dropped and counted, and raises no error.

    When a supervisor takes over from another one, its assembler (the successor) begins with the step that was open, and
    learns the loop again.
    """

    def __init__(self) -> None:
        self._dropped = 0
        self._known = KnownDefinitions()
        self._events = EventQueue()
        self._communication = SampledCollectives(self._known)
        self._recorder = StepRowBuilder(self._known, self._communication)
        self._rules = StepBoundaryFinder(self._known, self._recorder, self._queue_recorded_rows)
        self._waits = DeviceTimeQueue()
        self._out: list[Row | QueuedEvent] = []
        self._next = 0
        """Number of the next span."""
        self._caught_up = 0
        """Number of the first span that was not fed to a predecessor."""
        self._events_before = 0
        """Number of events from earlier calls of `feed`."""
        self._seen: dict[int, Span] = {}
        """Per thread: the last span."""
        self._nested: dict[int, list[Span]] = {}
        self._waiting = 0
        """Number of spans in `_nested`."""
        self._early: deque[Block] = deque(maxlen=MAX_EARLY)
        self._uncaught: bool | None = None
        """Whether an exception ended the process; None until the process announces its end."""

    @property
    def thread(self) -> int:
        """Number of the training thread; -1 while unknown."""
        return self._recorder.thread

    @property
    def open_calls(self) -> int:
        """Calls so far, while no step of the process has ended."""
        if self._recorder.number:
            return 0
        waiting = (span.kind in CALLS for spans in self._nested.values() for span in spans)
        return self._rules.open_calls + sum(waiting)

    @property
    def timing_interval(self) -> int:
        """One step in `one_in` should be timed on devices, to limit the cost of timing; 0 while unknown."""
        return self._recorder.sampling.one_in

    @property
    def dropped(self) -> int:
        """Number of spans and lines that are damaged or have no context."""
        return self._dropped + self._recorder.dropped

    # ------------------------------------------------------------------------------------------ input

    def feed(self, spans: Sequence[Span], lines: Sequence[Mapping[str, object]]) -> list[Row]:
        """Take spans in order of number, and the lines read after them. Return rows in order."""
        self._take_lines(lines)
        for span in spans:
            try:
                self._handle_span(span)
            except _DAMAGE:
                self._dropped += 1
        if spans:
            self._next = spans[-1].number + 1
        if self._next >= self._caught_up:
            if len(spans) < CAUGHT_UP:  # all spans before these events have been taken
                self._place_events(self._events.pop_numbered_below(self._events_before))
            self._events_before = self._events.count
        return self._pop_ready_rows()

    def take_current_span(self, kind: int, since_ns: int) -> list[Row]:
        """Take kind and start of the training thread's unfinished span, read before the spans of the last `feed`.

        Return rows.
        """
        if kind == Kind.FETCH and self._next >= self._caught_up:
            self._place_events(self._events.pop_until(since_ns - 1))
            try:
                self._rules.fetch_began(since_ns)
            except _DAMAGE:
                self._dropped += 1
        return self._pop_ready_rows()

    def finish(self) -> list[Row]:
        """Finish, because the process is gone and no more spans come. Return the last rows."""
        self._place_events(self._events.pop_numbered_below(self._events.count))
        recorder, fresh = self._recorder, not self._recorder.number
        try:
            self._release_closures()
            # A killed process may have been in the middle of a training step.
            self._rules.finish(self._rules.has_trained if self._uncaught is None else self._uncaught)
            if fresh and recorder.number and self._rules.has_trained and self._uncaught is not False:
                recorder.out.append(Event("warning", {"process": None, "t_s": None, "text": _CUT_OFF}))
            recorder.finish()
            self._queue_recorded_rows([], False)
        except _DAMAGE:
            self._dropped += 1
        self._communication.finish()
        return self._pop_ready_rows(Untimed.ENDED)

    def _release_closures(self) -> None:
        """Take the calls in an optimizer step that has not ended, as LBFGS makes them in its closure."""
        nested, self._nested, self._waiting = self._nested, {}, 0
        for spans in nested.values():
            inner: list[Span] = []
            for span in spans:
                if span.inside == Kind.OPTIMIZER and span.kind not in _INNER:
                    self._route_block(make_block(span, [one for one in inner if one.start >= span.start]))
                    inner = []
                else:
                    inner.append(span)

    def _take_lines(self, lines: Iterable[Mapping[str, object]]) -> None:
        for line in lines:
            try:
                if "end" in line:
                    self._uncaught = line.get("uncaught") is True
                elif not (self._known.add(line) or self._events.add(line)):
                    self._dropped += 1
            except _DAMAGE:
                self._dropped += 1

    def _handle_span(self, span: Span) -> None:
        number, kind, flags, inside, thread, _, start, took, _, _ = span
        if number < self._caught_up and kind != Kind.DEVICE_TIME and thread != self.thread >= 0:
            return  # a predecessor may have used it
        if start + took > _LATEST:
            if kind != Kind.STAGE or took != _NEVER_ENDED or start > _LATEST:
                self._dropped += 1
                return
            span = span._replace(took=0, flags=flags | Flag.FAILED)
        if kind not in DOING or (inside and inside not in DOING):
            self._dropped += 1
            return
        if kind == Kind.DEVICE_TIME:
            self._waits.add_device_time(span)
            self._recorder.sampling.count_device_time()
            return
        if kind in (Kind.COLLECTIVE, Kind.LOSS):
            take = self._communication.add_span if kind == Kind.COLLECTIVE else self._communication.add_loss
            if number >= self._caught_up and not take(span):
                self._dropped += 1
            return
        before = self._seen.get(thread)
        if before is not None and before[6] == start and before[1:6] == span[1:6]:
            return  # a duplicate, written after an interrupt
        self._seen[thread] = span
        if inside or kind in _INNER:
            self._nest_span(span)
        else:
            self._route_block(make_block(span, self._pop_inner_spans(thread, start) if self._waiting else ()))

    def _nest_span(self, span: Span) -> None:
        if self._waiting >= MAX_NESTED:
            self._dropped += self._waiting
            self._nested.clear()
            self._waiting = 0
        self._nested.setdefault(span.thread, []).append(span)
        self._waiting += 1

    def _pop_inner_spans(self, thread: int, start: int) -> list[Span]:
        """Take the waiting spans inside a span that began at `start`. Discard older ones."""
        waiting = self._nested.pop(thread, None)
        if waiting is None:
            return []
        self._waiting -= len(waiting)
        return [span for span in waiting if span.start >= start]

    def _route_block(self, block: Block) -> None:
        span, calls = block[0], block[1]
        thread, kind = span[4], span[1]
        if span[6] + span[7] > self._events.due:
            self._place_events_before(span)
        if thread == self._recorder.thread or (kind == Kind.OPTIMIZER_FREED and self._recorder.thread >= 0):
            self._rules.add_training_block(block)
        elif self._recorder.thread < 0:
            self._early.append(block)
            if calls:
                self._set_training_thread(thread)
        elif kind == Kind.BACKWARD and not self._rules.has_trained:
            self._rules.switch_training_thread(thread)
            self._rules.add_training_block(block)
        elif calls or kind in PRIMITIVES:
            self._rules.add_other_thread_block(block)

    def _set_training_thread(self, thread: int) -> None:
        """Make the thread of the first call the training thread."""
        self._recorder.thread = thread
        early, self._early = list(self._early), deque(maxlen=MAX_EARLY)
        for block in early:
            if block[0].thread == thread or block[0].kind == Kind.OPTIMIZER_FREED:
                self._route_block(block)

    def _place_events_before(self, span: Span) -> None:
        """Place the events before the end of a block. A fetch ends a step, so events before its start come first."""
        if span.kind == Kind.FETCH and span.thread == self._recorder.thread:
            self._place_events(self._events.pop_until(span.start - 1))
            self._rules.fetch_began(span.start)
        self._place_events(self._events.pop_until(span.end - 1))

    def _place_events(self, events: Iterable[QueuedEvent]) -> None:
        for event in events:
            try:
                self._rules.add_event(event)
            except _DAMAGE:
                self._dropped += 1

    # ------------------------------------------------------------------------------------------ output

    def _queue_recorded_rows(self, items: list[Item], step: bool) -> None:
        """Take the rows recorded from `items`. `step`: whether a step ended with them."""
        out, self._recorder.out = self._recorder.out, []
        if out and not (self._waits.is_empty and PendingRow not in map(type, out)):
            self._waits.add(out, min(self._first_span_numbers(items), default=None), step)
            self._out += self._waits.pop_ready()
        else:
            self._out += out  # type: ignore[arg-type]  # nothing is pending

    def _pop_ready_rows(self, unread: int = Untimed.NONE) -> list[Row]:
        if not self._waits.is_empty:
            self._out += self._waits.pop_ready(unread)
        out, self._out = self._out, []
        rows: list[Row] = []
        for row in out:
            if isinstance(row, QueuedEvent):
                self._events.pending.discard(row.number)
                row = row.record
            rows.append(row)
        return rows + self._communication.pop_rows()

    # ------------------------------------------------------------------------------------------ resuming

    @property
    def position(self) -> int:
        """Number of the first span to feed to a successor: that of the open step, or of one that waits for times."""
        nested = [span.number for spans in self._nested.values() for span in spans if self.thread in (-1, span.thread)]
        held = self._first_span_numbers((*self._rules.held, *self._early))
        return min((*self._waits.first_span_numbers(), *held, *nested), default=self._next)

    @property
    def pending(self) -> list[int]:
        """Numbers of the events that are not returned yet."""
        return sorted(self._events.pending)

    def _first_span_numbers(self, items: Iterable[Item]) -> Iterator[int]:
        """Yield the first span of each block of the training thread; of each block while the thread is unknown."""
        for item in items:
            if not isinstance(item, QueuedEvent) and self.thread in (-1, item[0].thread):
                span, _, _, inner = item
                yield span.number if inner is None else inner.first

    @classmethod
    def resume_after(cls, lines: Iterable[Mapping[str, object]], before: Predecessor) -> Assembler:
        """Go on after an assembler whose supervisor was killed. `lines`: all lines that it was fed.

        Feed it the spans from `position` of the predecessor on. It learns the loop again, so it may divide the open
        step otherwise. It drops the spans of other threads that the predecessor has read, and the next sample of
        collectives.
        """
        found = cls()
        found._take_lines(lines)
        found._events.retain(before.pending)
        recorder = found._recorder
        recorder.number, recorder.calls, recorder.thread = before.step, before.call, before.thread
        found._next, found._caught_up = before.position, before.caught_up
        found._communication.skips = before.caught_up > 0
        return found

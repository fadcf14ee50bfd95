"""Queues the events among the lines. The assembler places them between spans and gives them step and call numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dpmon.record.record_types import Event

NEVER = 1 << 64
"""A time after the end of every span."""
_TEXTS = ("text", "reason")


class QueuedEvent(NamedTuple):
    """An event that waits for its place between the spans. Times in monotonic ns."""

    number: int
    time_ns: int
    fill: str | None
    """Whether it gets the step and call numbers of the "next" or the "last" call; None: of neither."""
    kind: str
    data: dict[str, Any]

    @property
    def starts_pause(self) -> bool:
        """Whether a pause of the training starts with it."""
        return self.kind == "pause" and self.data.get("paused") is True

    def record(self, step: int, call: int) -> Event:
        """Return its record, with the number of its step and of its call."""
        data = self.data
        if self.fill is not None:
            data.update((key, value) for key, value in (("step", step), ("call", call)) if key in data)
            for key in _TEXTS:
                if isinstance(text := data.get(key), str):
                    data[key] = text.replace("{step}", str(step)).replace("{call}", str(call))
        return Event(self.kind, data)


class EventQueue:
    """The events of one process, in the order of their lines."""

    def __init__(self) -> None:
        self._queue: deque[QueuedEvent] = deque()
        self._last_time_ns = 0
        self.count = 0
        """Number of events so far. They are numbered from 0."""
        self.due = NEVER
        """Time of the next event (monotonic ns)."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the event in a line."""
        data = dict(line)
        self._last_time_ns = max(self._last_time_ns, data.pop("at", 0))
        self._queue.append(QueuedEvent(self.count, self._last_time_ns, data.pop("fill", None), data.pop("kind"), data))
        self.count += 1
        self.due = self._queue[0].time_ns

    def pop_until(self, until_ns: int) -> list[QueuedEvent]:
        """Remove and return the events up to a time (monotonic ns)."""
        return self._pop_while(lambda event: event.time_ns <= until_ns)

    def pop_numbered_below(self, number: int) -> list[QueuedEvent]:
        """Remove and return the events with a number below `number`."""
        return self._pop_while(lambda event: event.number < number)

    def _pop_while(self, should_pop: Callable[[QueuedEvent], bool]) -> list[QueuedEvent]:
        popped = []
        while self._queue and should_pop(self._queue[0]):
            popped.append(self._queue.popleft())
        self.due = self._queue[0].time_ns if self._queue else NEVER
        return popped

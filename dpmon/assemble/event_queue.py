"""Queues the events among the lines. The assembler places them between spans and gives them step and call numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dpmon.record.record_types import Event

NEVER = 1 << 64
"""A time after the end of every span."""
_TEXTS = ("text", "reason")


class QueuedEvent:
    """An event that waits for its place between the spans."""

    __slots__ = ("data", "fill", "kind", "number", "time_ns")

    def __init__(self, number: int, time_ns: int, data: dict[str, object]) -> None:
        self.number = number
        self.time_ns = time_ns
        """Monotonic ns."""
        self.fill = data.pop("fill", None)
        """Whether it gets the step and call numbers of the "next" or the "last" call; None: of neither."""
        self.kind = str(data.pop("kind"))
        self.data = data

    @property
    def starts_pause(self) -> bool:
        """Whether a pause of the training starts with it."""
        return self.kind == "pause" and self.data.get("paused") is True

    def record(self, step: int, call: int, steps_by_sample: Mapping[int, int]) -> Event:
        """Return its record. `steps_by_sample`: for each memory sample, the last step that had started."""
        data = dict(self.data)
        if self.fill in ("next", "last"):
            data.update((key, value) for key, value in (("step", step), ("call", call)) if key in data)
            for key in _TEXTS:
                if isinstance(text := data.get(key), str):
                    data[key] = text.replace("{step}", str(step)).replace("{call}", str(call))
        data.pop("look", None)
        if isinstance(devices := data.get("devices"), list):
            data["devices"] = [_with_step(device, steps_by_sample) for device in devices]
        return Event(self.kind, data)

    def referenced_memory_samples(self) -> list[int]:
        """Return the numbers of the memory samples that it refers to."""
        devices = self.data.get("devices")
        device_list = devices if isinstance(devices, list) else []
        samples = [device.get("peak_after_look") for device in device_list if isinstance(device, dict)]
        return [sample for sample in (*samples, self.data.get("look")) if type(sample) is int]


def _with_step(device: object, steps_by_sample: Mapping[int, int]) -> object:
    if not isinstance(device, dict) or "peak_after_look" not in device:
        return device
    sample = device["peak_after_look"]
    step = steps_by_sample.get(sample) if type(sample) is int else None
    return {("peak_after_step" if key == "peak_after_look" else key): value for key, value in device.items()} | {
        "peak_after_step": step
    }


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
        self._queue.append(QueuedEvent(self.count, self._last_time_ns, data))
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

"""Queues the events among the lines. The assembler places them between spans and gives them step and call numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping

from dpmon.record.record_types import Event

NEVER = 1 << 64
"""A time after the end of every span."""
_TEXTS = ("text", "reason")


class QueuedEvent:
    """One event."""

    __slots__ = ("at", "data", "fill", "number", "record")

    def __init__(self, number: int, at: int, data: dict[str, object]) -> None:
        self.number = number
        self.at = at
        """Monotonic ns."""
        self.fill = data.pop("fill", None)
        """Whether it gets the step and call numbers of the "next" or the "last" call; None for neither."""
        self.data = data
        self.record = Event(str(data["kind"]), data)
        """Its record; final once it is placed."""

    @property
    def starts_pause(self) -> bool:
        """Whether the training pauses from here on."""
        return self.data["kind"] == "pause" and self.data.get("paused") is True

    def finalize(self, step: int, call: int, looks: Mapping[int, int]) -> None:
        """Make its record. `looks`: for each memory look, the last step that had begun."""
        data = dict(self.data)
        kind = str(data.pop("kind"))
        if self.fill in ("next", "last"):
            data.update((key, value) for key, value in (("step", step), ("call", call)) if key in data)
            for key in _TEXTS:
                if isinstance(text := data.get(key), str):
                    data[key] = text.replace("{step}", str(step)).replace("{call}", str(call))
        data.pop("look", None)
        if isinstance(devices := data.get("devices"), list):
            data["devices"] = [_with_step(device, looks) for device in devices]
        self.record = Event(kind, data)

    def referenced_memory_samples(self) -> list[int]:
        """Return the memory looks that it refers to."""
        devices = self.data.get("devices")
        listed = devices if isinstance(devices, list) else []
        named = [device.get("peak_after_look") for device in listed if isinstance(device, dict)]
        return [look for look in (*named, self.data.get("look")) if type(look) is int]


def _with_step(device: object, looks: Mapping[int, int]) -> object:
    if not isinstance(device, dict) or "peak_after_look" not in device:
        return device
    look = device["peak_after_look"]
    step = looks.get(look) if type(look) is int else None
    return {("peak_after_step" if key == "peak_after_look" else key): value for key, value in device.items()} | {
        "peak_after_step": step
    }


class EventQueue:
    """The events of one process, in the order of their lines."""

    def __init__(self) -> None:
        self._queue: deque[QueuedEvent] = deque()
        self._at = 0
        self.count = 0
        """Number of events so far; they are numbered from 0."""
        self.due = NEVER
        """Time of the next event."""
        self.pending: set[int] = set()
        """Numbers of the events that the assembler has not returned."""

    def add(self, line: Mapping[str, object]) -> bool:
        """Take a line; False if it is not an event."""
        if not isinstance(line.get("kind"), str):
            return False
        data = dict(line)
        at = data.pop("at", None)
        if type(at) is int and self._at < at < NEVER:
            self._at = at
        self._queue.append(QueuedEvent(self.count, self._at, data))
        self.pending.add(self.count)
        self.count += 1
        self.due = self._queue[0].at
        return True

    def pop_until(self, until: int) -> list[QueuedEvent]:
        """Take out and return the events up to this time."""
        return self._take_while(lambda event: event.at <= until)

    def pop_numbered_below(self, than: int) -> list[QueuedEvent]:
        """Take out and return the events with a number below `than`."""
        return self._take_while(lambda event: event.number < than)

    def _take_while(self, wanted: Callable[[QueuedEvent], bool]) -> list[QueuedEvent]:
        found = []
        while self._queue and wanted(self._queue[0]):
            found.append(self._queue.popleft())
        self.due = self._queue[0].at if self._queue else NEVER
        return found

    def retain(self, pending: Collection[int]) -> None:
        """Drop the events that are not in `pending`, because a predecessor has returned them."""
        self._queue = deque(event for event in self._queue if event.number in pending)
        self.pending.intersection_update(pending)
        self.due = self._queue[0].at if self._queue else NEVER

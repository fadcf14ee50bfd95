"""The tracer's state of each thread."""

from __future__ import annotations

from typing import Any

from dpmon.record.spans import THREAD_AT
from dpmon.span_ring import Word


class Thread:
    """The state of one thread."""

    __slots__ = ("head", "inside", "noted", "number", "offered", "root", "split", "steps", "tried", "word")

    def __init__(self, number: int) -> None:
        self.head = number << THREAD_AT
        """The number of the thread, as a part of a span's first word."""
        self.number = number
        self.word = Word.SPAN_START + number
        """Index in the ring's header of the start of the thread's current span."""
        self.inside = 0
        """Kind of the current span, 0 for none."""
        self.root: Any = None
        """The bare root that is being called."""
        self.split: Any = None
        """The call over several devices that this thread runs."""
        self.offered: tuple[str, ...] = ()
        """The devices that the script passed to scatter or replicate since the last composed call."""
        self.steps: list[tuple[int, int, int, Any, int]] = []
        """Unfinished optimizer steps: enclosing kind, first word of the span, start, device times, number."""
        self.tried: Any = None
        """The failed attempt at dp for the current call: see dpmon.tracer.modes.decision."""
        self.noted = False
        """Whether the current fetch is noted in stages.log."""

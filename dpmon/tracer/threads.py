"""What the tracer knows of each thread."""

from __future__ import annotations

from typing import Any

from dpmon.record.spans import THREAD_AT
from dpmon.span_ring import Word


class Thread:
    """What one thread is in."""

    __slots__ = ("hand", "head", "inside", "noted", "number", "root", "split", "steps", "tried", "word")

    def __init__(self, number: int) -> None:
        self.head = number << THREAD_AT
        self.number = number
        self.word = Word.UNDER_WAY + number
        self.inside = 0
        """The kind of the span that is under way, 0 for none."""
        self.root: Any = None
        """The bare root that is being called."""
        self.split: Any = None
        """The call whose phases it runs, where it is split over devices."""
        self.steps: list[tuple[int, int, int, Any, int]] = []
        """Optimizers that have begun to step: what each is within, its span's first word, when it began, its times on
        devices and its number."""
        self.hand: Any = None
        """The devices that the script has given to the primitives it calls itself: see dpmon.tracer.byhand."""
        self.tried: Any = None
        """What to say of the attempt at dp that has failed for the call under way: see dpmon.tracer.modes."""
        self.noted = False
        """Whether the fetch under way is noted in stages.log."""

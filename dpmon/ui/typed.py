"""Keys that were typed before their dialog opened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable

from textual import events

INTERRUPTS = frozenset(("ctrl+c", "ctrl+q"))
"""Keys that do not wait: they drop the keys typed before them, as a terminal does (termios(3): INTR)."""
_MOST = 1000
"""Most keys that may wait, which is some seconds of work; later ones are dropped."""
_LOST_S = 1.0
"""A key that the panels' screen has had for so long does not come back: the others wait no longer."""


class InOrder:
    """Hands keys on one after the other: of several at once the first may open a dialog that the others are meant for.

    A key for the panels goes to their screen, and comes back from there to the application, which does what it is bound
    to; a key for a dialog is the dialog's own affair.
    """

    def __init__(
        self,
        forward: Callable[[events.Key], Awaitable[None]],
        to_panels: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`forward`: hands a key to the screen that is on top; `to_panels`: whether that is theirs now."""
        self._forward = forward
        self._to_panels = to_panels
        self._clock = clock
        self._waiting: deque[events.Key] = deque()
        self._away: float | None = None
        """Since when a key is with the panels' screen."""

    async def came(self, event: events.Key) -> None:
        """A key was pressed."""
        if event.key in INTERRUPTS:
            self._waiting.clear()
        if len(self._waiting) < _MOST:
            self._waiting.append(event)
        await self._go_on()

    async def done(self) -> None:
        """What came back from the panels' screen has been done."""
        self._away = None
        await self._go_on()

    async def _go_on(self) -> None:
        while self._waiting and (self._away is None or self._clock() - self._away > _LOST_S):
            event, panels = self._waiting.popleft(), self._to_panels()
            self._away = None
            await self._forward(event)
            if panels and event.is_forwarded:  # else it was done at once
                self._away = self._clock()

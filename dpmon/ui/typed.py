"""Keys that were typed before their dialog opened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable

from textual import events

INTERRUPTS = frozenset(("ctrl+c", "ctrl+q"))
"""Keys that do not wait: they drop the keys typed before them, as a terminal does (termios(3): INTR)."""
_MOST = 1000
"""Most keys that may wait, enough for some seconds of typing; later ones are dropped."""
_LOST_S = 1.0
"""Seconds that the panels' screen may take for a key; after that the others stop waiting."""


class InOrder:
    """Passes keys on one by one, because the first may open a dialog and the others are meant for that dialog.

    A key for the panels goes to their screen, and comes back from there to the application, which runs its action; a
    dialog handles its own keys.
    """

    def __init__(
        self,
        forward: Callable[[events.Key], Awaitable[None]],
        to_panels: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`forward`: passes a key to the top screen; `to_panels`: whether that is the panels' screen now."""
        self._forward = forward
        self._to_panels = to_panels
        self._clock = clock
        self._waiting: deque[events.Key] = deque()
        self._away: float | None = None
        """Since when the panels' screen has had a key."""

    async def came(self, event: events.Key) -> None:
        """A key was pressed."""
        if event.key in INTERRUPTS:
            self._waiting.clear()
        if len(self._waiting) < _MOST:
            self._waiting.append(event)
        await self._go_on()

    async def done(self) -> None:
        """The application has handled the key that came back from the panels' screen."""
        self._away = None
        await self._go_on()

    async def _go_on(self) -> None:
        while self._waiting and (self._away is None or self._clock() - self._away > _LOST_S):
            event, panels = self._waiting.popleft(), self._to_panels()
            self._away = None
            await self._forward(event)
            if panels and event.is_forwarded:  # otherwise the key is handled already
                self._away = self._clock()

"""Delivers keys in order, so that keys typed ahead reach the dialog that an earlier key opens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable

from textual import events

INTERRUPTS = frozenset(("ctrl+c", "ctrl+q"))
"""Keys that drop all keys waiting before them, as in a terminal (termios(3): INTR)."""
_MOST = 1000
"""Most keys that may wait, enough for some seconds of typing; later ones are dropped."""
_LOST_S = 1.0
"""Seconds that the panels' screen may take for a key; after that the next keys are passed on."""


class KeyQueue:
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
        """`forward` passes a key to the top screen; `to_panels` returns whether the panels' screen is the top one."""
        self._forward = forward
        self._to_panels = to_panels
        self._clock = clock
        self._waiting: deque[events.Key] = deque()
        self._away: float | None = None
        """When the panels' screen got a key that has not come back; None without one."""

    async def add(self, event: events.Key) -> None:
        """Queue a pressed key; pass it on when the keys before it are handled."""
        if event.key in INTERRUPTS:
            self._waiting.clear()
        if len(self._waiting) < _MOST:
            self._waiting.append(event)
        await self._pass_on()

    async def release(self) -> None:
        """Pass on the next keys, because the application has handled the key from the panels' screen."""
        self._away = None
        await self._pass_on()

    async def _pass_on(self) -> None:
        while self._waiting and (self._away is None or self._clock() - self._away > _LOST_S):
            event, panels = self._waiting.popleft(), self._to_panels()
            self._away = None
            await self._forward(event)
            if panels and event.is_forwarded:  # otherwise the key is handled already
                self._away = self._clock()

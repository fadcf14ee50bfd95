"""What is typed fast: an escape with a key right behind it, and keys for a dialog that is not open yet.

Textual takes an escape and the character behind it for one key (alt and that key; for digits a sign that some keyboards
have there). Nothing here is bound to such keys, and who presses esc and then 2 within a tenth of a second means both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from textual import events
from textual._xterm_parser import XTermParser

__all__ = ["InOrder", "Parser", "install_parser"]

ESC = "\x1b"
_MOST = 10_000
_TO_THE_TRAINING = frozenset("dpx")
"""Keys that ask something of the training: held with alt they do nothing, whatever that may have been meant for."""
_LOST_S = 1.0
"""A key that the panels' screen has had for so long does not come back: the others wait no longer."""


class Parser(XTermParser):
    """Textual's parser, but for an escape with a letter or a digit behind it: most of these are two keys."""

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if alt and sequence not in _TO_THE_TRAINING:
            return [events.Key("escape", ESC), *super()._sequence_to_key_events(sequence)]
        usual = list(super()._sequence_to_key_events(sequence, alt))
        behind = sequence[1:] if len(sequence) == 2 and sequence[0] == ESC else ""
        if usual and behind.isalnum() and behind not in _TO_THE_TRAINING:
            return [events.Key("escape", ESC), *super()._sequence_to_key_events(behind)]
        return usual


def install_parser() -> None:
    """Have Textual's driver read keys with it; where that is not as it was in Textual 8.2, its own goes on."""
    from textual.drivers import linux_driver

    if getattr(linux_driver, "XTermParser", None) is XTermParser:
        linux_driver.XTermParser = Parser  # type: ignore[attr-defined]


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
        self._waiting: deque[events.Key] = deque(maxlen=_MOST)
        self._away: float | None = None
        """Since when a key is with the panels' screen."""

    async def came(self, event: events.Key) -> None:
        """A key was pressed."""
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

"""What is typed fast: an escape with a key right behind it.

Textual takes an escape and the character behind it for one key (alt and that key; for digits a sign that some keyboards
have there). Nothing here is bound to such keys, and who presses esc and then 2 within a tenth of a second means both.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual import events
from textual._xterm_parser import XTermParser

__all__ = ["Parser", "install_parser"]

ESC = "\x1b"


class Parser(XTermParser):
    """Textual's parser, but for an escape with a letter or a digit behind it: these are two keys."""

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if alt:
            return [events.Key("escape", ESC), *super()._sequence_to_key_events(sequence)]
        usual = list(super()._sequence_to_key_events(sequence))
        if usual and len(sequence) == 2 and sequence[0] == ESC and sequence[1].isalnum():
            return [events.Key("escape", ESC), *super()._sequence_to_key_events(sequence[1])]
        return usual


def install_parser() -> None:
    """Have Textual's driver read keys with it; where that is not as it was in Textual 8.2, its own goes on."""
    from textual.drivers import linux_driver

    if getattr(linux_driver, "XTermParser", None) is XTermParser:
        linux_driver.XTermParser = Parser  # type: ignore[attr-defined]

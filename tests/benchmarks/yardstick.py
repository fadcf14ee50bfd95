"""How fast this machine runs Python just now, so that figures of different machines, and hours, can be compared.

The piece is `total = 0` and `for number in range(10**7): total += number`, at the level of a module. What is scaled is
processor time, or time that consists of it: waiting does not get shorter on a faster machine.
"""

from __future__ import annotations

import time

__all__ = ["REFERENCE_S", "Yardstick"]

REFERENCE_S = 0.45
"""Processor time of the piece on the machine that the aims are for."""
_PARTS = 4
_PIECE = compile(f"for number in range({10**7 // _PARTS}): total += number", "yardstick", "exec")


def _took() -> float:
    """A quarter of the piece, four times as long."""
    names = {"total": 0}
    began = time.process_time()
    exec(_PIECE, names)
    return (time.process_time() - began) * _PARTS


class Yardstick:
    """Laid on before and after each measurement: a shared machine is not as fast from one minute to the next."""

    def __init__(self) -> None:
        self._last = self._ask()

    def _ask(self) -> float:
        return sorted(_took() for _ in range(3))[1]

    def since(self) -> float:
        """By how much this machine was slower than the reference since the last time this was asked."""
        before, self._last = self._last, self._ask()
        return (before + self._last) / 2 / REFERENCE_S

    def state(self) -> str:
        """A line about now."""
        return (
            f"yardstick: summing range(10**7) in a for loop takes {self._last:.2f} s of processor time here, "
            f"{REFERENCE_S} s on the reference: this machine is {self._last / REFERENCE_S:.1f} times as slow"
        )

"""Repeats runs that torch has aborted: gloo's processes sometimes abort at their end, without dpmon too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["unless_aborted"]

Ended = TypeVar("Ended")
TRIES = 4
ABORTED = "terminate called without an active exception"
"""What such a process prints."""


def unless_aborted(run: Callable[[int], Ended], output: Callable[[Ended], str]) -> Ended:
    """Return the first result of `run` whose `output` reports no abort; the last one after TRIES calls.

    `run` gets the number of the try, because the file in which ranks meet can be used only once.
    """
    for number in range(TRIES):
        ended = run(number)
        if ABORTED not in output(ended):
            break
        print(f"try {number + 1} was aborted at its end")
    return ended

"""Repeats runs in which torch has ended a process, as it sometimes does without dpmon too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Ended = TypeVar("Ended")
ABORTED = "terminate called without an active exception"
"""What a process of gloo prints if it aborts at its end."""


def unless_aborted(
    run: Callable[[int], Ended], output: Callable[[Ended], str], *, sign: str = ABORTED, tries: int = 6
) -> Ended:
    """Return the first result of `run` without `sign` in its `output`; the last one after all `tries`.

    `run` gets the number of the try, because the file in which ranks meet can be used only once.
    """
    for number in range(tries):
        ended = run(number)
        if sign not in output(ended):
            break
        print(f"try {number + 1} was ended by torch")
    return ended

"""What a record keeps of the time before the records that a late reader is given: data only, no code of ours above it.

`dpmon.run.past` reads it, `dpmon.model.past` folds it. Times are ns since the run's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpmon.rates import Pace
from dpmon.record.codec import Step

__all__ = ["DevicePast", "Drawn", "Past"]


Kept = tuple[Step, tuple[int, ...] | None]
"""A step, and what the phases of its calls took, in the order of CALL_PHASES (-1: did not run); None: unknown."""


class Past(NamedTuple):
    """The steps of one process in one mode that ended in one second, or minute: exact sums, and a few of them.

    With a width of 0 all that ended before its start, and of which it is not known any more when.
    """

    process: int
    rank: int | None
    mode: str
    start_s: int
    width_s: int
    steps: int
    calls: int
    pace: Pace
    last_step: int | None
    sums: Mapping[str, int]
    """By series (dpmon.run.rollup.SERIES), ns; those that did not run are missing."""
    ran: Mapping[str, int]
    drawn: tuple[Kept, ...]
    """Steps drawn evenly, of this mode in all or in the last minutes: here they may be none."""


class Drawn(NamedTuple):
    """Steps of one process in one mode, drawn evenly from all that the record still has in full."""

    process: int
    rank: int | None
    mode: str
    of: int
    """From how many steps they were drawn."""
    switches: tuple[int, ...]
    """Steps with which a mode began."""
    steps: tuple[Kept, ...]
    """In the order of the draw."""
    own_switches: tuple[int, ...] = ()
    """Of `switches` those to this mode."""


class DevicePast(NamedTuple):
    """The samples of one device in one minute, or the first part of it, of which only their mean is known."""

    device: int
    """-1: the host."""
    start_s: int
    samples: int
    """How many there were, a second each."""
    means: Mapping[str, float]
    """By the names of the samples' fields; those that were never known are missing."""

"""What is marked on a picture over time, by the screen and by a report: pauses, stalls and epochs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from dpmon.model.pauses import Paused, Span
from dpmon.model.progress import Epoch
from dpmon.model.state import StallSeen

EPOCH, PAUSED, STALLED, EVALUATION = "epoch", "paused", "stalled", "evaluation"
_EACH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""Every epoch is marked, or every second one, ..."""
_APART = 3
"""Fewest cells between two marked epochs."""


class TimeMark(NamedTuple):
    """An event, or (`end_ns`) a stretch of time. ns since the run's start."""

    begin_ns: int
    end_ns: int | None
    kind: str
    word: str


def pause_marks(pauses: Iterable[Paused], until_ns: int | None) -> list[TimeMark]:
    """The pauses. One that has not ended goes on until `until_ns`; None: leave it out."""
    spans = [span for pause in pauses if (span := pause.span(until_ns)) is not None]
    return [TimeMark(begin, end, PAUSED, PAUSED) for begin, end in spans if begin < end]


def stall_spans(stalls: Iterable[StallSeen], until_ns: int) -> list[Span]:
    """Begin and end of each stall; one that goes on ends at `until_ns`."""
    return [(one.since_ns, until_ns if one.end_ns is None else min(one.end_ns, until_ns)) for one in stalls]


def epoch_marks(epochs: Iterable[Epoch], cell: Callable[[int], int]) -> list[TimeMark]:
    """The starts of epochs, as many as can be told apart. `cell`: the place of a time, in widths of a letter."""
    begun = {epoch.epoch: epoch.begin_ns for epoch in epochs if epoch.epoch}
    for each in _EACH:
        shown = [TimeMark(at, None, EPOCH, f"e{number}") for number, at in begun.items() if number % each == 0]
        cells = [(cell(mark.begin_ns), len(mark.word)) for mark in shown]
        if all(after - before >= length + _APART for (before, length), (after, _) in pairwise(cells)):
            return shown
    return []

"""The marks on a time axis, on the screen and in a report: pauses, stalls, epochs and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from dpmon.model.epoch_progress import Epoch
from dpmon.model.pauses import Pause, Span
from dpmon.model.recorded_stalls import RecordedStall

EPOCH, PAUSED, STALLED, EVALUATION, SAVE = "epoch", "paused", "stalled", "evaluation", "save"
_EACH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""Every epoch (or save) is marked, or every second one, every fifth one, and so on."""
_APART = 3
"""Fewest cells between two marked epochs or saves."""


class TimeMark(NamedTuple):
    """An event, or an interval if it has an end (`end_ns`). ns since the run's start."""

    begin_ns: int
    end_ns: int | None
    kind: str
    word: str


def pause_marks(pauses: Iterable[Pause], until_ns: int | None) -> list[TimeMark]:
    """Return the pauses. A pause that has not ended lasts until `until_ns`; None: it is left out."""
    spans = [span for pause in pauses if (span := pause.interval(until_ns)) is not None]
    return [TimeMark(start, end, PAUSED, PAUSED) for start, end in spans if start < end]


def stall_spans(stalls: Iterable[RecordedStall], until_ns: int) -> list[Span]:
    """Return start and end of each stall. A stall that has not ended lasts until `until_ns`."""
    return [(stall.since_ns, until_ns if stall.end_ns is None else min(stall.end_ns, until_ns)) for stall in stalls]


def start_marks(epochs: Iterable[Epoch], saves: Iterable[Span], cell: Callable[[int], int]) -> list[TimeMark]:
    """Return the starts of epochs and saves that have room. `cell`: the place of a time, in widths of a letter."""
    epoch_starts = {epoch.epoch: TimeMark(epoch.begin_ns, None, EPOCH, f"e{epoch.epoch}") for epoch in epochs}
    save_starts = {number: TimeMark(start_ns, None, SAVE, SAVE) for number, (start_ns, _) in enumerate(saves, 1)}
    return [*_choose_marks(epoch_starts, cell), *_choose_marks(save_starts, cell)]


def _choose_marks(marks: Mapping[int, TimeMark], cell: Callable[[int], int]) -> list[TimeMark]:
    """Return every mark, or every second one, and so on. `marks`: by their number, from 1 on; 0 is left out."""
    for interval in _EACH:
        shown = [mark for number, mark in marks.items() if number and number % interval == 0]
        cells = [(cell(mark.begin_ns), len(mark.word)) for mark in shown]
        if all(after - before >= length + _APART for (before, length), (after, _) in pairwise(cells)):
            return shown
    return []

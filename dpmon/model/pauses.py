"""The pauses of a run: start, step before it, duration, and their totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from dpmon.model.run_events import PauseChange
from dpmon.record.schema import SECOND
from dpmon.store.time_accounting import union_of_intervals

_SLACK_NS = SECOND
"""Times closer than this (ns) belong together: the pauses of several processes at one request."""

Span = tuple[int, int]
"""Start and end in ns since the run's start."""


class Pause(NamedTuple):
    """A pause of the training between two steps, or a refused one; ns since the run's start."""

    process: int
    step: int | None
    """The step before the pause."""
    start_ns: int
    took_ns: int | None = None
    """Duration; None if the pause continues, was refused, or its end was not recorded."""
    end_ns: int | None = None
    """Its end; the latest possible end if the end was not recorded."""
    on: bool = False
    """Whether it had not ended at the end of the record."""
    reason: str | None = None
    """Why it resumed without a request."""
    refused: str | None = None

    def interval(self, open_ns: int | None) -> Span | None:
        """Return start and end, if known; `open_ns`: the end of a pause that had not ended."""
        if self.refused is not None or (self.on and open_ns is None):
            return None
        end = open_ns if self.on else self.end_ns
        return self.start_ns, self.start_ns if end is None else end


class PauseTotals(NamedTuple):
    """The totals of a run's pauses. Simultaneous pauses of several processes count as one."""

    times: int = 0
    ns: int = 0
    """Time in pauses with a known end."""
    unended: int = 0
    """Number of pauses that ended, but have no recorded end."""
    on: bool = False
    """Whether a process was in a pause when the record ended."""


def pause_totals(pauses: Iterable[Pause], end_ns: int | None = None) -> PauseTotals:
    """Return the totals of pauses; `end_ns`: the end of the run, and of pauses that had not ended."""
    times, unended, reach_ns, has_end, is_open = 0, 0, -1, True, False
    intervals: list[Span] = []
    placed = ((*span, pause) for pause in pauses if (span := pause.interval(1 << 63)) is not None)
    for start, end, pause in sorted(placed, key=itemgetter(0)):
        if start >= reach_ns:
            unended += not has_end
            times, reach_ns, has_end = times + 1, start, False
        reach_ns, has_end = max(reach_ns, end), has_end or pause.on or pause.took_ns is not None
        is_open = is_open or pause.on
        if pause.took_ns is not None:
            intervals.append((start, end))
        elif pause.on and end_ns is not None:
            intervals.append((start, end_ns))
    paused_ns = sum(end - start for start, end in union_of_intervals(intervals))
    return PauseTotals(times, paused_ns, unended + (not has_end), is_open)


def build_pauses(
    changes: Iterable[PauseChange], next_step_ns: Callable[[int, int], int | None], newest_ns: int = -1
) -> list[Pause]:
    """Return the pauses in `changes`, which must be in order of time for each process, and refused requests.

    A pause without a recorded end ended at the latest when its process began another step. `next_step_ns`: the start of
    a process's first step after a time; `newest_ns`: the start of the newest step of any process.
    """
    pauses: list[Pause] = []
    open_pauses: dict[int, int] = {}
    """By process, the place of its current pause."""
    for process, t_ns, step, paused, took_ns, reason, refused in changes:
        if refused is not None:
            pauses.append(Pause(process, step, t_ns, reason=reason, refused=refused))
        elif paused:
            if process in open_pauses:  # the record of its end was lost
                pauses[open_pauses[process]] = pauses[open_pauses[process]]._replace(on=False, end_ns=t_ns)
            open_pauses[process] = len(pauses)
            pauses.append(Pause(process, step, t_ns, on=True, reason=reason))
        elif process in open_pauses:
            index = open_pauses.pop(process)
            start_ns = pauses[index].start_ns
            took_ns = max(t_ns - start_ns, 0) if took_ns is None else took_ns
            pauses[index] = pauses[index]._replace(took_ns=took_ns, end_ns=start_ns + took_ns, on=False, reason=reason)
    ends = [next_step_ns(pause.process, pause.start_ns) if pause.on else None for pause in pauses]
    newest_ns = max([newest_ns, *(end for end in ends if end is not None)])
    # A remaining pause continues, unless another process began a step after its start. Then the paused process may have
    # been killed in the pause, at an unknown time.
    return [
        pause._replace(on=False, end_ns=end)
        if pause.on and (end is not None or pause.start_ns + _SLACK_NS < newest_ns)
        else pause
        for pause, end in zip(pauses, ends, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ several processes


def any_paused_intervals(pauses: Iterable[Pause], end_ns: int | None) -> list[Span]:
    """Return when any process was paused; a pause that has not ended lasts until `end_ns`."""
    return union_of_intervals(span for pause in pauses if (span := pause.interval(end_ns)) is not None)


def all_paused_intervals(pauses: Sequence[Pause], presence: Mapping[int, Span], end_ns: int | None) -> list[Span]:
    """Return when all present processes were paused. `presence`: by process, from when to when it was present."""
    paused: dict[int, list[Span]] = {}
    for pause in pauses:
        if (span := pause.interval(end_ns)) is not None:
            paused.setdefault(pause.process, []).append(span)
    busy = [
        span
        for process, present in presence.items()
        for span in _subtract_intervals([present], union_of_intervals(paused.get(process, ())))
    ]
    return _subtract_intervals(any_paused_intervals(pauses, end_ns), union_of_intervals(busy))


def _subtract_intervals(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` outside `others`; both must be sorted and disjoint, as from `union_of_intervals`."""
    remaining: list[Span] = []
    for start, end in spans:
        for other_start, other_end in others:
            if start < other_end and other_start < end:
                if start < other_start:
                    remaining.append((start, other_start))
                start = other_end
        if start < end:
            remaining.append((start, end))
    return remaining

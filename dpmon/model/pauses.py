"""The pauses of a run: start, step before it, duration, and their totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.model.run_snapshot import PauseChange
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
    """Duration; None if the pause goes on, was refused, or its end was not recorded."""
    end_ns: int | None = None
    """Its end; the latest possible end if the end was not recorded."""
    on: bool = False
    """Whether it had not ended at the end of the record."""
    reason: str | None = None
    """Why it resumed without a request."""
    refused: str | None = None

    def interval(self, open_ns: int | None) -> Span | None:
        """Start and end, if known; `open_ns`: the end of a pause that had not ended."""
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
    """The totals of pauses; `end_ns`: the end of the run, and of pauses that had not ended."""
    times, unended, reach, ended, on = 0, 0, -1, True, False
    known: list[Span] = []
    placed = ((span, one) for one in pauses if (span := one.interval(1 << 63)) is not None)
    for (start, end), one in sorted(placed, key=lambda each: each[0][0]):
        if start >= reach:
            unended += not ended
            times, reach, ended = times + 1, start, False
        reach, ended = max(reach, end), ended or one.on or one.took_ns is not None
        on = on or one.on
        if one.took_ns is not None:
            known.append((start, end))
        elif one.on and end_ns is not None:
            known.append((start, end_ns))
    return PauseTotals(times, sum(end - start for start, end in union_of_intervals(known)), unended + (not ended), on)


def build_pauses(
    changes: Iterable[PauseChange], next_step_ns: Callable[[int, int], int | None], newest_ns: int = -1
) -> list[Pause]:
    """The pauses in `changes`, which must be in order of time for each process, and refused requests.

    A pause without a recorded end ended at the latest when its process began another step. `next_step_ns`: the start of
    a process's first step after a time; `newest_ns`: the start of the newest step of any process.
    """
    found: list[Pause] = []
    opened: dict[int, int] = {}
    """By process, the place of its current pause."""
    for process, at, step, paused, took, reason, refused in changes:
        if refused is not None:
            found.append(Pause(process, step, at, reason=reason, refused=refused))
        elif paused:
            if process in opened:  # the record of its end was lost
                found[opened[process]] = found[opened[process]]._replace(on=False, end_ns=at)
            opened[process] = len(found)
            found.append(Pause(process, step, at, on=True, reason=reason))
        elif process in opened:
            place = opened.pop(process)
            began = found[place].start_ns
            took = max(at - began, 0) if took is None else took
            found[place] = found[place]._replace(took_ns=took, end_ns=began + took, on=False, reason=reason)
    ends = [next_step_ns(one.process, one.start_ns) if one.on else None for one in found]
    newest_ns = max([newest_ns, *(end for end in ends if end is not None)])
    # A remaining pause goes on, unless another process began a step after its start. Then the paused process may have
    # been killed in the pause, at an unknown time.
    return [
        one._replace(on=False, end_ns=end)
        if one.on and (end is not None or one.start_ns + _SLACK_NS < newest_ns)
        else one
        for one, end in zip(found, ends, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ several processes


def any_paused_intervals(pauses: Iterable[Pause], end_ns: int | None) -> list[Span]:
    """When any process was paused; a pause that has not ended goes on until `end_ns`."""
    return union_of_intervals(span for one in pauses if (span := one.interval(end_ns)) is not None)


def all_paused_intervals(pauses: Sequence[Pause], there: Mapping[int, Span], end_ns: int | None) -> list[Span]:
    """When all present processes were paused. `there`: by process, from when to when it was present."""
    paused: dict[int, list[Span]] = {}
    for one in pauses:
        if (span := one.interval(end_ns)) is not None:
            paused.setdefault(one.process, []).append(span)
    busy = [
        span
        for process, whole in there.items()
        for span in _subtract_intervals([whole], union_of_intervals(paused.get(process, ())))
    ]
    return _subtract_intervals(any_paused_intervals(pauses, end_ns), union_of_intervals(busy))


def _subtract_intervals(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of `spans` outside `others`; both must be sorted and disjoint, as `union_of_intervals` returns them."""
    found: list[Span] = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                found.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found

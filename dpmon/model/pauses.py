"""The pauses of a run: start, step before it, duration, and their totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.model.state import PauseChange
from dpmon.record.schema import SECOND
from dpmon.store.accounting import union

KEPT = 1000
"""Most rows, including refusals."""
_SLACK_NS = SECOND
"""Times closer than this (ns) belong together: an end and its pause, or the pauses of several processes at one
request."""

Span = tuple[int, int]
"""Start and end in ns since the run's start."""


class Paused(NamedTuple):
    """A pause of the training between two steps, or a refused one; ns since the run's start."""

    process: int
    step: int | None
    """The step before the pause."""
    start_ns: int | None
    took_ns: int | None
    """Duration; None if the pause goes on, was refused, or its end was not recorded."""
    end_ns: int | None
    """Its end; the latest possible end if the end was not recorded."""
    on: bool
    """Whether it had not ended at the end of the record."""
    reason: str | None
    """Why it resumed without a request."""
    refused: str | None

    def span(self, open_ns: int | None) -> Span | None:
        """Start and end, if known; `open_ns`: the end of a pause that had not ended."""
        if self.refused is not None or self.start_ns is None:
            return None
        if self.on:
            return None if open_ns is None else (self.start_ns, open_ns)
        end = self.end_ns if self.took_ns is None else self.start_ns + self.took_ns
        return self.start_ns, max(end or 0, self.start_ns)


class PauseTotals(NamedTuple):
    """The totals of a run's pauses. Simultaneous pauses of several processes count as one."""

    times: int = 0
    ns: int = 0
    """Time in pauses with a known end."""
    unended: int = 0
    """Number of pauses that ended, but have no recorded end."""
    on: bool = False
    """Whether a process was in a pause when the record ended."""
    unplaced: int = 0
    """Number of pauses without known bounds."""


class Pauses:
    """All pauses of a run, and refused requests, in the order of their records."""

    def __init__(self, every: Sequence[Paused] = ()) -> None:
        self.found = every[:KEPT]
        """The first ones, at most KEPT."""
        self.refusals_left_out = sum(one.refused is not None for one in every[KEPT:])
        self.left_out = len(every) - len(self.found) - self.refusals_left_out
        """Number of pauses beyond KEPT; `refusals_left_out`: number of refusals beyond KEPT."""
        self.every = [one for one in every if one.refused is None]
        """All pauses, without refusals."""

    def total(self, end_ns: int | None = None) -> PauseTotals:
        """The totals; `end_ns`: the end of the run, and of pauses that had not ended."""
        apart = [one for one in self.every if one.start_ns is None]
        times, unplaced = len(apart), len(apart)
        ns, unended = sum(one.took_ns or 0 for one in apart), sum(one.took_ns is None for one in apart)
        known: list[Span] = []
        reach, ended, on = -1, True, False
        placed = ((span, one) for one in self.every if (span := one.span(1 << 63)) is not None)
        for (start, end), one in sorted(placed, key=lambda each: each[0][0]):
            if start >= reach:
                unended += not ended
                times, reach, ended = times + 1, start, False
            reach, ended = max(reach, end), ended or one.on or one.took_ns is not None
            on = on or one.on
            unplaced += one.took_ns is None and end == start
            if one.took_ns is not None:
                known.append((start, end))
            elif one.on and end_ns is not None:
                known.append((start, end_ns))
        ns += sum(end - start for start, end in union(known))
        return PauseTotals(times, ns, unended + (not ended), on, unplaced)


def pauses_of(
    changes: Iterable[PauseChange], next_step_ns: Callable[[int, int], int | None], newest_ns: int = -1
) -> Pauses:
    """The pauses in `changes`, which must be in order of time for each process.

    A pause without a recorded end ended at the latest when its process began another step. `next_step_ns`: the start of
    a process's first step after a time; `newest_ns`: the start of the newest step of any process.
    """
    found: list[Paused] = []
    opened: dict[int, int] = {}
    """By process, the place of its current pause."""

    def over(process: int, at: int | None, reason: str | None = None) -> None:
        """End the process's pause, at this time at the latest (None: unknown)."""
        place = opened.pop(process)
        found[place] = found[place]._replace(end_ns=at, on=False, reason=reason)

    def stepped(process: int) -> int | None:
        began = found[opened[process]].start_ns
        return None if began is None else next_step_ns(process, began)

    for process, at, step, paused, took, reason, refused in changes:
        if refused is not None:
            found.append(Paused(process, step, at, None, None, False, reason, refused))
            continue
        if process in opened and paused:
            # The end was not recorded: it came before this record, and before the next step if there was one.
            seen = stepped(process)
            over(process, at if seen is None or (at is not None and at <= seen) else seen)
        elif process in opened and _is_of_another(found[opened[process]], at, took):
            over(process, (at or 0) - (took or 0))
        if paused:
            opened[process] = len(found)
            found.append(Paused(process, step, at, None, None, True, reason, None))
        elif process in opened:
            began = found[opened[process]].start_ns
            if took is None and at is not None and began is not None:
                took = max(at - began, 0)
            if took is None:
                over(process, None, reason)
            else:
                end = None if began is None else began + took
                place = opened.pop(process)
                found[place] = found[place]._replace(took_ns=took, end_ns=end, on=False, reason=reason)
        elif took is not None:  # its start was not recorded
            begin = None if at is None else max(at - took, 0)
            found.append(Paused(process, step, begin, took, at, False, reason, None))
    for process in list(opened):
        if (seen := stepped(process)) is not None:
            newest_ns = max(newest_ns, seen)
            over(process, seen)
    # A remaining pause goes on, unless another process began a step after its start. Then the paused process may have
    # been killed in the pause, at an unknown time.
    for process, place in list(opened.items()):
        began = found[place].start_ns
        if began is None or began + _SLACK_NS < newest_ns:
            over(process, None)
    return Pauses(found)


def _is_of_another(pause: Paused, at: int | None, took: int | None) -> bool:
    """Whether a pause that ended at `at` and lasted `took` is another one than `pause`."""
    known = at is not None and took is not None and pause.start_ns is not None
    return known and (at or 0) - (took or 0) > (pause.start_ns or 0) + _SLACK_NS


# ------------------------------------------------------------------------------------------------ several processes


def any_paused(pauses: Pauses, end_ns: int | None) -> list[Span]:
    """When any process was paused; a pause that has not ended goes on until `end_ns`."""
    return union(span for one in pauses.every if (span := one.span(end_ns)) is not None)


def all_paused(pauses: Pauses, there: Mapping[int, Span], end_ns: int | None) -> list[Span]:
    """When all present processes were paused. `there`: by process, from when to when it was present."""
    paused: dict[int, list[Span]] = {}
    for one in pauses.every:
        if (span := one.span(end_ns)) is not None:
            paused.setdefault(one.process, []).append(span)
    busy = [span for process, whole in there.items() for span in _without([whole], union(paused.get(process, ())))]
    return _without(any_paused(pauses, end_ns), union(busy))


def _without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of `spans` outside `others`; both must be sorted and disjoint, as `union` returns them."""
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

"""How the steps of a process went over time: columns of a second each, and of more for the whole run. Pure.

A column holds exact sums and, of its steps, a few drawn evenly at random (all of them where there are only a few), so
that medians over a range of time cost the same for ten steps and for a million.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from dpmon.model.state import (
    COLUMNS_KEPT,
    FULL_COLUMNS,
    LONG_KEPT,
    PHASES,
    SAMPLED,
    SAMPLED_LATER,
    WARM_STEPS,
    Column,
    Process,
    StepSample,
)
from dpmon.model.stats import Summary, middle, phase_figures, rank, summary

__all__ = ["Picture", "add_step", "columns_of", "figures", "pictured"]

_SECOND = 1_000_000_000
_FIGURED = 500
"""At most about so many steps go into medians."""
_NICE = (1, 2, 5, 10, 15, 30, 60)


# ------------------------------------------------------------------------------------------------ keeping


def add_step(process: Process, sample: StepSample, mode: str) -> None:
    """Count a step in the column of the second in which it ended; a new column begins where the mode changes."""
    second = sample.end_ns // _SECOND
    columns = process.columns
    column = columns[-1] if columns else None
    if column is None or column.mode != mode or second > column.second:
        if column is not None:
            _remember_long(process, column)
            track = process.modes.get(column.mode)
            if track is not None:
                settled = column.settled()
                track.settled.extend(settled)
                track.settled_count += len(settled)
        column = Column(process.columns_made, second, mode, warm=process.visit + WARM_STEPS - 1)
        process.columns_made += 1
        columns.append(column)
        if len(columns) > FULL_COLUMNS:
            del columns[-FULL_COLUMNS - 1].sampled[SAMPLED_LATER:]
    column.count += 1
    column.wall_ns += sample.wall_ns
    if sample.samples is None:
        column.unknown += 1
    else:
        column.samples += sample.samples
    phases = sample.phases
    column.phases = [total + took if took > 0 else total for total, took in zip(column.phases, phases, strict=True)]
    column.ran = [count + (took >= 0) for count, took in zip(column.ran, phases, strict=True)]
    if len(column.sampled) < SAMPLED:
        # In no order: whoever takes the first few must not get those that ended first, of which more are long ones.
        at = _chance(process, len(column.sampled) + 1)
        column.sampled.append(sample)
        column.sampled[at], column.sampled[-1] = sample, column.sampled[at]
    else:
        at = _chance(process, column.count)
        if at < SAMPLED:
            column.sampled[at] = sample


def _chance(process: Process, below: int) -> int:
    """A number from 0 to `below` - 1; the same records give the same numbers."""
    process.chance = (process.chance * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
    return (process.chance >> 33) % below


def _remember_long(process: Process, done: Column) -> None:
    """A finished column goes into the history of the whole run, whose columns double their span when there are many."""
    long = process.long
    last = long[-1] if long else None
    slot = done.second // process.long_s
    if last is not None and last.mode == done.mode and last.second // process.long_s == slot:
        _merge(process, last, done)
    else:
        long.append(done.copy(len(long)))
    if len(long) > LONG_KEPT:
        process.long_s *= 2
        halved: list[Column] = []
        for column in long:
            before = halved[-1] if halved else None
            slot = column.second // process.long_s
            if before is not None and before.mode == column.mode and before.second // process.long_s == slot:
                _merge(process, before, column)
            else:
                column.number = len(halved)
                halved.append(column)
        if len(halved) > LONG_KEPT:  # a mode that changes with every step: the oldest go
            halved = halved[-LONG_KEPT // 2 :]
        process.long[:] = halved


def _merge(process: Process, into: Column, other: Column) -> None:
    """Add `other` to `into`; of the steps drawn from both, each side keeps its share."""
    own, its = list(into.sampled), list(other.sampled)
    while len(own) + len(its) > SAMPLED:
        kept = len(own) + len(its)
        side = own if len(own) * (into.count + other.count) > into.count * kept else its
        del side[_chance(process, len(side))]
    into.sampled = own + its
    _sum(into, other)


def _sum(into: Column, other: Column) -> None:
    into.count += other.count
    into.wall_ns += other.wall_ns
    into.samples += other.samples
    into.unknown += other.unknown
    for index in range(len(PHASES)):
        into.phases[index] += other.phases[index]
        into.ran[index] += other.ran[index]


# ------------------------------------------------------------------------------------------------ asking


def columns_of(process: Process, span_s: int) -> list[Column]:
    """The columns of the last `span_s` seconds of steps, oldest first; of the whole run for 0."""
    columns = process.columns
    if not columns:
        return []
    if not span_s:
        if process.columns_made <= COLUMNS_KEPT:
            return list(columns)
        return [*process.long, columns[-1]]
    since = columns[-1].second - span_s
    return [column for column in columns if column.second > since]


class Picture(NamedTuple):
    """A history as it is drawn: columns of one mode each, oldest first, each so many cells wide."""

    columns: Sequence[Column]
    cells: int
    seconds: int
    """How much time one column is at least; one step that took longer has a column of its own."""


def pictured(process: Process, span_s: int, width: int) -> Picture:
    """The history for `width` cells: about the last `span_s` seconds, or the whole run for 0.

    Columns stay where they are until there is no room, then the oldest quarter goes: so a column is drawn once, not
    again and again one cell further left.
    """
    if width <= 0 or not process.columns:
        return Picture((), 1, 1)
    if not span_s:
        return _whole(process, width)
    seconds = next((n for n in _NICE if n * width >= span_s * 0.8), _NICE[-1])
    cells = max(width * seconds // span_s, 1)
    room = width // cells
    newest = process.columns[-1].number // seconds
    page = max(room // 4, 1)
    first = -(-(newest + 1 - room) // page) * page if newest >= room else 0
    found = [column for column in process.columns if column.number // seconds >= first]
    return Picture(_joined(found, [c.number // seconds for c in found])[-room:], cells, seconds)


def _whole(process: Process, width: int) -> Picture:
    found = columns_of(process, 0)
    seconds = process.long_s if process.columns_made > COLUMNS_KEPT else 1
    each = -(-len(found) // width)
    while len(joined := _joined(found, [i // each for i in range(len(found))])) > width and each < len(found):
        each += each // 2 or 1  # columns of two modes that share a place
    return Picture(joined[-width:], 1, each * seconds)


def _joined(columns: Sequence[Column], places: Sequence[int]) -> list[Column]:
    """Columns of one place and one mode in one, numbered by their places. Without their samples."""
    if len(set(places)) == len(places):
        return list(columns)
    found = []
    pairs = zip(places, columns, strict=True)
    for (place, mode), group in groupby(pairs, key=lambda pair: (pair[0], pair[1].mode)):
        (_, first), *others = group
        joined = Column(place, first.second, mode)
        _sum(joined, first)
        for _, column in others:
            _sum(joined, column)
        found.append(joined)
    return found


def figures(process: Process, mode: str, span_s: int) -> Summary:
    """Median and p95 of the steps of `mode` within the last `span_s` seconds of steps (0: the whole run), and shares.

    Counts, shares and speeds are of every step; medians and tails of `Summary.sampled` of them, evenly drawn.
    """
    columns = [column for column in columns_of(process, span_s) if column.mode == mode]
    count = sum(column.count for column in columns)
    if not count:
        return summary([])
    drawn = _drawn(columns)
    total = sum(column.wall_ns for column in columns)
    known = sum(column.samples for column in columns)
    walls = sorted(step.wall_ns for step in drawn)
    ran = [sum(each) for each in zip(*(column.ran for column in columns), strict=True)]
    sums = [sum(each) for each in zip(*(column.phases for column in columns), strict=True)]
    times = zip(*(step.phases for step in drawn), strict=True)
    phases = [
        phase_figures(name, count, took, spent / total if count and total else None)
        for name, count, spent, took in zip(PHASES, ran, sums, times, strict=True)
    ]
    return Summary(
        steps=count,
        span_ns=_span(columns, drawn),
        median_ns=middle(walls),
        p95_ns=rank(walls, 0.95),
        samples_per_s=known / total * 1e9 if total and not any(column.unknown for column in columns) else None,
        phases=tuple(phases),
        sampled=len(drawn),
    )


def _drawn(columns: Sequence[Column]) -> list[StepSample]:
    """Steps of all columns, of each as many as its share of the steps."""
    most = max(column.count for column in columns)
    kept = SAMPLED if len(columns) <= FULL_COLUMNS else SAMPLED_LATER
    quota = min(kept, most, max(_FIGURED // len(columns), 1))
    found: list[StepSample] = []
    owed = 0.0
    for column in columns:
        owed += column.count * quota / most
        take = min(int(owed + 1e-9), len(column.sampled))
        owed -= take
        found += column.sampled[:take]
    return found or columns[-1].sampled[-1:]


def _span(columns: Sequence[Column], drawn: Sequence[StepSample]) -> int:
    first = min(columns[0].sampled, key=lambda step: step.end_ns)
    last = max(columns[-1].sampled, key=lambda step: step.end_ns)
    return max(last.end_ns - (first.end_ns - first.wall_ns), max(step.wall_ns for step in drawn))

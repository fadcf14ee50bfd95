"""How the steps of a process went over time: columns of a second each, and of more for the whole run. Pure.

A column holds exact sums and, of its steps, a few drawn evenly at random (all of them where there are only a few), so
that medians over a range of time cost the same for ten steps and for a million.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dpmon.model.inputs import INPUT
from dpmon.model.ranks import FORWARD, forward_of
from dpmon.model.state import (
    COLUMNS_KEPT,
    FULL_COLUMNS,
    LONG_KEPT,
    NEWEST_COLUMNS,
    PHASES,
    SAMPLED,
    SAMPLED_LATER,
    SAMPLED_NEWEST,
    SETTLED_KEPT,
    WARM_STEPS,
    Column,
    ModeTrack,
    Process,
    StepSample,
)
from dpmon.model.stats import PhaseFigures, Summary, summary, weighed_middle, weighed_phase, weighed_rank
from dpmon.model.uneven import Uneven, uneven
from dpmon.rates import NO_GAP, Gap, Pace, Paces, Rate, rate_of
from dpmon.record.codec import is_evaluation

__all__ = ["Picture", "add_column", "add_settled", "add_step", "columns_of", "figures", "forward_figures", "pictured"]

_SECOND = 1_000_000_000
_FIGURED = 500
"""At most about so many steps go into medians."""
_LITTLE = 0.2
"""Of the time: a mean that has no more beyond the median is near it."""
_BACKWARD, _OPTIMIZER = PHASES.index("backward"), PHASES.index("optimizer")
_NICE = (1, 2, 5, 10, 15, 30, 60)


# ------------------------------------------------------------------------------------------------ keeping


def add_step(process: Process, sample: StepSample, mode: str, gap: Gap = NO_GAP) -> None:
    """Add a step and the time before it to the column of the second in which the step ended.

    A change of mode begins a new column.
    """
    second = sample.end_ns // _SECOND
    columns = process.columns
    column = columns[-1] if columns else None
    if column is None or column.mode != mode or second > column.second:
        if column is not None:
            _remember_long(process, column)
        column = Column(process.columns_made, second, mode, begin_ns=sample.end_ns - sample.wall_ns)
        process.columns_made += 1
        columns.append(column)
        _forget(process)
    column.count += 1
    column.wall_ns += sample.wall_ns
    phases = sample.phases
    evaluation = is_evaluation(phases[_BACKWARD], phases[_OPTIMIZER])
    column.pace.step(sample.end_ns - sample.wall_ns, sample.wall_ns, sample.samples, evaluation, gap)
    column.phases = [total + took if took > 0 else total for total, took in zip(column.phases, phases, strict=True)]
    column.ran = [count + (took >= 0) for count, took in zip(column.ran, phases, strict=True)]
    sampled = column.sampled
    if len(sampled) < SAMPLED_NEWEST:
        # At a place by chance: what is drawn of a column later are its first places.
        sampled.append(sample)
        at = _chance(process, len(sampled))
        sampled[-1], sampled[at] = sampled[at], sampled[-1]
    else:
        at = _chance(process, column.count)
        if at < SAMPLED_NEWEST:
            sampled[at] = sample


def _forget(process: Process) -> None:
    """A column has begun: those before it keep fewer of their steps as they grow old."""
    columns = process.columns
    for age, kept in ((NEWEST_COLUMNS, SAMPLED), (FULL_COLUMNS, SAMPLED_LATER)):
        if len(columns) > age:
            del columns[-age - 1].sampled[kept:]


def add_column(process: Process, column: Column, *, fine: bool) -> None:
    """Add a finished column, of one second (`fine`) or of a minute, later than all before it."""
    if fine:
        if process.columns:
            _remember_long(process, process.columns[-1])
        column.number = process.columns_made
        process.columns_made += 1
        process.columns.append(column)
        _forget(process)
    else:
        process.long_only = True
        process.long_s = max(process.long_s, 60)
        _remember_long(process, column)


def add_settled(process: Process, track: ModeTrack, sample: StepSample) -> None:
    """Let a step of `track` take its chance of being compared; those after a change of mode have none."""
    if sample.step < process.visit + WARM_STEPS:
        return
    track.settled_of += 1
    if len(track.settled) < SETTLED_KEPT:
        track.settled.append(sample)
    else:
        at = _chance(process, track.settled_of)
        if at >= len(track.settled):
            return
        track.settled[at] = sample
    track.settled_count += 1


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
        if len(long) > NEWEST_COLUMNS:
            del long[-NEWEST_COLUMNS - 1].sampled[SAMPLED:]
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
    """Add `other` to `into`; of the steps drawn from both, each step is as likely to stay as any other."""
    sides = [into.sampled[:], other.sampled[:]]
    left = [into.count, other.count]
    kept: list[StepSample] = []
    while len(kept) < SAMPLED and any(sides):
        # A side without drawn steps is past, whatever it counts; else by how many steps of it were not yet chosen.
        which = 1 if not sides[0] else 0 if not sides[1] else int(_chance(process, max(sum(left), 1)) >= left[0])
        kept.append(sides[which].pop(_chance(process, len(sides[which]))))
        left[which] = max(left[which] - 1, 0)
    into.sampled = kept
    _sum(into, other)


def _sum(into: Column, other: Column) -> None:
    into.count += other.count
    into.wall_ns += other.wall_ns
    into.begin_ns = min(into.begin_ns, other.begin_ns)
    into.pace.add(other.pace)
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
        if process.columns_made <= COLUMNS_KEPT and not process.long_only:
            return list(columns)
        return [*process.long, columns[-1]]
    since = columns[-1].second - span_s
    return [column for column in columns if column.second > since]


class Picture(NamedTuple):
    """A history as the screen draws it: columns of one mode and equal duration, oldest first, with their width.

    A column without steps (count 0) is a time without any step, ended or under way.
    """

    columns: Sequence[Column]
    cells: int
    seconds: int
    """Duration of one column."""


def pictured(process: Process, span_s: int, width: int, over: bool = False) -> Picture:
    """The history for `width` cells: about the last `span_s` seconds, or the whole run for 0.

    Columns stay where they are until there is no room, then the oldest quarter goes: so a column is drawn once, not
    again and again one cell further left. `over`: nothing will follow, so no room is kept for it.
    """
    if width <= 0 or not process.columns:
        return Picture((), 1, 1)
    if not span_s:
        return _whole(process, width)
    seconds = next((n for n in _NICE if n * width >= span_s * 0.8), _NICE[-1])
    cells = max(width * seconds // span_s, 1)
    room = width // cells
    origin = process.began_ns // _SECOND // seconds if process.began_ns >= 0 else process.columns[0].second // seconds
    # Not that of the last column: a damaged time may be later than all that follow.
    newest = max(column.second for column in process.columns) // seconds - origin
    page = 1 if over else max(room // 4, 1)
    first = -(-(newest + 1 - room) // page) * page if newest >= room else 0
    return Picture(_placed(process.columns, seconds, origin + first)[-room:], cells, seconds)


def _whole(process: Process, width: int) -> Picture:
    found = columns_of(process, 0)
    seconds = process.long_s if process.columns_made > COLUMNS_KEPT or process.long_only else 1
    first = _begin(found[0]) // seconds
    newest = max(column.second for column in found)
    seconds *= -(-(newest // seconds - first + 1) // width)
    return Picture(_placed(found, seconds, _begin(found[0]) // seconds)[-width:], 1, seconds)


def _begin(column: Column) -> int:
    """The second in which the column's first step began."""
    return min(column.begin_ns // _SECOND, column.second)


def _placed(columns: Iterable[Column], seconds: int, first: int) -> list[Column]:
    """One column per slot of `seconds`, starting at slot `first`.

    If a slot has steps of several modes, the column shows the mode that the previous one did not: every change of
    mode stays visible.
    """
    slots: dict[int, dict[str, list[Column]]] = {}
    for column in columns:
        slot = column.second // seconds
        if slot >= first:
            slots.setdefault(slot, {}).setdefault(column.mode, []).append(column)
    found: list[Column] = []
    for slot in sorted(slots):
        mode = found[-1].mode if found else ""
        drawn = _joined(next((same for name, same in slots[slot].items() if name != mode), slots[slot].get(mode, [])))
        while first + len(found) < slot:
            place = first + len(found)
            if (place + 1) * seconds * _SECOND > drawn.begin_ns:  # the column's first step was under way
                found.append(replace(drawn, number=place, second=place * seconds))
            else:
                found.append(Column(place, place * seconds, mode or drawn.mode))
        found.append(drawn)
    return found


def _joined(columns: Sequence[Column]) -> Column:
    """Merge columns of one slot and one mode."""
    if len(columns) == 1:
        return columns[0]
    joined = Column(columns[0].number, columns[0].second, columns[0].mode, begin_ns=columns[0].begin_ns)
    for column in columns:
        _sum(joined, column)
    return joined


def figures(process: Process, mode: str, span_s: int) -> Summary:
    """Median and p95 of the steps of `mode` within the last `span_s` seconds of steps (0: the whole run), and shares.

    Counts, shares, means and speeds are of every step; medians and tails of `Summary.sampled` of them, each of which
    weighs as much as the steps of its column that it stands for.
    """
    columns = [column for column in columns_of(process, span_s) if column.mode == mode]
    count = sum(column.count for column in columns)
    if not count:
        return summary([])
    drawn = _drawn(columns)
    total = sum(column.wall_ns for column in columns)
    walls = sorted((step.wall_ns, weight) for step, weight in drawn)
    ran = [sum(each) for each in zip(*(column.ran for column in columns), strict=True)]
    sums = [sum(each) for each in zip(*(column.phases for column in columns), strict=True)]
    weights = [weight for _, weight in drawn]
    times = zip(*(step.phases for step, _ in drawn), strict=True) if drawn else [()] * len(PHASES)
    phases = [
        weighed_phase(name, count, zip(took, weights, strict=True), spent / total if count and total else None)
        for name, count, spent, took in zip(PHASES, ran, sums, times, strict=True)
    ]
    middle = weighed_middle(walls)
    pace, waited = _without_waits(process, mode, span_s, columns)
    return Summary(
        steps=count,
        span_ns=_span(columns, drawn),
        median_ns=middle,
        p95_ns=weighed_rank(walls, 0.95),
        phases=tuple(phases),
        sampled=len(drawn),
        mean_ns=total / count,
        uneven=_waits_in_steps(waited, total, count, middle)
        or uneven(drawn, total / count, middle, tuple(process.inputs)),
        rate=_rate(process, mode, pace),
    )


class _Waited(NamedTuple):
    """The waits for input in the steps of a mode: their time, and how many there were."""

    ns: int = 0
    waits: int = 0


def _without_waits(process: Process, mode: str, span_s: int, own: Sequence[Column]) -> tuple[Pace, _Waited]:
    """The pace of the `own` columns of `mode` without waits for input, and what of these lay in steps."""
    if not process.inputs:
        whole = Pace()
        for column in own:
            whole.add(column.pace)
        return whole, _Waited()
    width = process.long_s if not span_s and (process.columns_made > COLUMNS_KEPT or process.long_only) else 1
    paces = Paces()
    for column in columns_of(process, span_s):
        begin = column.second // width * width
        paces.sums(column.mode, column.pace, begin * _SECOND, (begin + width) * _SECOND)
    pace = paces.of(mode)
    waited = waits = 0
    for wait in process.inputs:
        before = pace.training.step_ns + pace.evaluation.step_ns
        paces.wait(*wait)
        took = before - pace.training.step_ns - pace.evaluation.step_ns
        waited, waits = waited + took, waits + (took > 0)
    return pace, _Waited(waited, waits)


def _rate(process: Process, mode: str, pace: Pace) -> Rate | None:
    """The rate of `pace`; of evaluations only where nothing trains in the mode."""
    return rate_of([pace.training if process.paces.of(mode).training.steps else pace.counted()])


def _waits_in_steps(waited: _Waited, total: int, count: int, middle: float | None) -> Uneven | None:
    """Whether waits for input are what the mean has beyond the median: the few steps with them may not be drawn."""
    if not waited.waits or middle is None:
        return None
    beyond = total - middle * count
    if 2 * waited.ns <= beyond or beyond <= total * _LITTLE:
        return None
    return Uneven(waited.waits / count, min(waited.ns / total, 1.0), INPUT)


def forward_figures(process: Process, mode: str, span_s: int) -> PhaseFigures:
    """As `figures`, of the whole forward: what the phases of the calls took is in it."""
    columns = [column for column in columns_of(process, span_s) if column.mode == mode]
    times = [(forward_of(step), weight) for step, weight in _drawn(columns)] if columns else []
    total = sum(column.wall_ns for column in columns)
    spent = sum(column.phases[index] for column in columns for index in FORWARD)
    ran = max((sum(column.ran[index] for column in columns) for index in FORWARD), default=0)
    return weighed_phase("forward", ran, times, spent / total if ran and total else None)


def _drawn(columns: Sequence[Column]) -> list[tuple[StepSample, float]]:
    """Steps of all columns, about _FIGURED of them, of each more where it has more; and how many each stands for."""
    all_of_them = sum(column.count for column in columns)
    found: list[tuple[StepSample, float]] = []
    owed = 0.0
    for column in columns:
        owed += column.count
        wanted = round(max(_FIGURED, len(columns)) * column.count / all_of_them)
        sampled = column.sampled[: max(wanted, 1)] if all_of_them > _FIGURED else column.sampled
        if sampled:
            found += [(step, owed / len(sampled)) for step in sampled]
            owed = 0.0
    return found


def _span(columns: Sequence[Column], drawn: Sequence[tuple[StepSample, float]]) -> int:
    if not drawn:
        return 0
    first = min(step.end_ns - step.wall_ns for step, _ in drawn)
    first = min([first, *(step.end_ns - step.wall_ns for step in columns[0].sampled)])
    last = max([step.end_ns for step, _ in drawn] + [step.end_ns for step in columns[-1].sampled])
    return max(last - first, max(step.wall_ns for step, _ in drawn))

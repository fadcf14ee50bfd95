"""What the history says of the time before the records that a late reader is given: rollups, and drawn steps."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple

from dpmon.past import DevicePast, Drawn, Past
from dpmon.past import Kept as Drew
from dpmon.records import CALL_PHASES, RecordError, call_head
from dpmon.run.draws import Draws
from dpmon.run.kept import DISORDER, Kept
from dpmon.run.reader import RECENT_NS
from dpmon.run.rollup import SERIES, Gathered, Rollup
from dpmon.run.rows import step_columns

__all__ = ["Before", "deleted", "past_of"]

_SECOND = 1_000_000_000
_FINE_S = 660
"""So long before the loaded records seconds are given, before that minutes."""
_ROWS = 50
"""So many rows are taken in between two turns of somebody else."""
_MINUTES_KEPT = 20_000
"""Of a history that is asked again and again so many minutes are remembered, of a longer one none."""


def past_of(kept: Kept, first: int) -> Iterator[Past | Drawn | DevicePast | None]:
    """All that was over before the records with an id above `first`, oldest first; then the drawn steps.

    None in between: there is more to come, which takes a while.
    """
    yield from _devices(kept, first)
    yield from Before(kept).pieces(first)


def _devices(kept: Kept, first: int) -> Iterator[DevicePast]:
    """What devices did before the samples that are handed over in full, as far back as the charts go."""
    full = kept.first_sample(first, kept.last_ns() - RECENT_NS) if first > 0 else None
    if full is None:
        return
    end = full // _SECOND
    minutes: dict[tuple[int, int], tuple[int, dict[str, float]]] = {}
    for start, device, name, count, total, _, _ in kept.device_rollups(end - _FINE_S):
        if start < end and count > 0:
            most, means = minutes.setdefault((start, device), (0, {}))
            means[name] = total / count
            minutes[start, device] = max(most, count), means
    for (start, device), (count, means) in minutes.items():
        yield DevicePast(device, start, min(count, end - start, 60), means)


def deleted(kept: Kept) -> Iterator[tuple[int, Rollup]]:
    """What is left of the steps and calls that were deleted to bound the history: sums of so many seconds each."""
    if kept.pruned:
        yield from Before(kept).rollups(0)


class _Edge(NamedTuple):
    """Where what is told by sums ends, and what is given in full begins."""

    end_s: int
    """The last second in which something was before it."""
    fine: int
    """From this second on there are sums of seconds, before it of minutes."""
    coarse: int | None
    """The minute that the edge cuts in two, where the sums of its seconds were deleted."""
    given: bool
    """Whether anything is given in full."""

    @property
    def minutes_until(self) -> int:
        """Minutes that begin before this second are told whole."""
        return self.fine if self.coarse is None else self.coarse


class Before:
    """What was before any place in one history. With `again`, it is asked often and remembers what is dear."""

    def __init__(self, kept: Kept, *, again: bool = False) -> None:
        self._kept = kept
        self._again = again
        self._ranks = {ring.process: ring.rank for ring in kept.rings.values()}
        self._draws = Draws(kept, self._ranks, again=again)
        self._minutes: list[Past] | None = None
        self._switches: dict[int, list[int]] | None = None

    def of(self, first: int, until_ns: int | None = None) -> Iterator[Past | Drawn]:
        """All that was over before the records with an id above `first`, oldest first; then the drawn steps.

        `until_ns`: the records above `first` are given up to this time (None: all); nothing is told of what came later.
        """
        return (piece for piece in self.pieces(first, until_ns) if piece is not None)

    def pieces(self, first: int, until_ns: int | None = None) -> Iterator[Past | Drawn | None]:
        """The same, with None in between: there is more to come, which takes a while."""
        kept, first = self._kept, max(first, 0)
        if not kept.has_steps(first):
            return
        edge = self._edge(first, until_ns)
        drawn: list[Drawn] = []
        placed: dict[tuple[int, int, int, str], list[Drew]] = defaultdict(list)
        if self._switches is None:
            self._switches = _switches(kept)
        for drew in self._draws.until(first, kept.id_at(edge.fine * _SECOND)):
            if drew is None:
                yield None
                continue
            process, mode, count, steps, near = drew
            switches = tuple(self._switches.get(process, ()))
            drawn.append(Drawn(process, self._ranks.get(process), mode, count, switches, tuple(steps)))
            for width, found in ((60, steps), (1, near)):
                for step, inside in found:
                    second = (step.start_ns + step.wall_ns) // _SECOND
                    placed[width, second // width * width, process, mode].append((step, inside))
        for past in self._pasts(first, edge):
            if past is None:
                yield None
                continue
            yield past._replace(drawn=tuple(placed[past.width_s, past.start_s, past.process, past.mode]))
        yield from drawn

    def rollups(self, first: int) -> Iterator[tuple[int, Rollup]]:
        """Width and sums of all steps and calls that came before the ids above `first`, in order of time."""
        edge = self._edge(first, None)
        whole = takewhile(lambda rollup: rollup.start_s < edge.minutes_until, self._kept.rollups(60))
        for rollup in sorted_in_time(whole):
            yield 60, rollup
        yield from (each for each in self._cut(first, edge) if each is not None)

    def _pasts(self, first: int, edge: _Edge) -> Iterator[Past | None]:
        yield from self._minutes_until(edge.minutes_until)
        inside_of = _Inside()
        for each in self._cut(first, edge):
            if each is None:
                yield None
                continue
            width, rollup = each
            past = self._past(rollup, width, inside_of)
            if past.steps > 0:
                yield past

    def _cut(self, first: int, edge: _Edge) -> Iterator[tuple[int, Rollup] | None]:
        """What follows the whole minutes, without what is given in full."""
        loaded = yield from _loaded(self._kept, first, edge.end_s + 1 if edge.coarse is None else edge.coarse + 60)
        if edge.coarse is not None and edge.given:
            minute = self._kept.rollups(60, edge.coarse)
            for rollup in sorted_in_time(takewhile(lambda rollup: rollup.start_s == edge.coarse, minute)):
                _take_out(rollup, loaded, 60)
                yield 60, rollup
        seconds = self._kept.rollups(1, edge.fine)
        for rollup in sorted_in_time(takewhile(lambda rollup: rollup.start_s <= edge.end_s, seconds)):
            _take_out(rollup, loaded, 1)
            yield 1, rollup

    def _edge(self, first: int, until_ns: int | None) -> _Edge:
        kept = self._kept
        after = kept.time_from(first + 1, events=False)
        given = after is not None and (until_ns is None or after <= until_ns)
        if given or until_ns is None:
            oldest = (after or 0) // _SECOND if given else kept.newest_ns() // _SECOND + 1
            end_s = kept.newest_ns(first) // _SECOND if kept.holds(first) else oldest
            end_s = end_s if until_ns is None else min(end_s, until_ns // _SECOND)
        else:
            oldest = until_ns // _SECOND
            end_s = oldest - 1
        fine = max((oldest - _FINE_S) // 60 * 60, kept.seconds_from())
        return _Edge(end_s, fine, end_s // 60 * 60 if fine > end_s else None, given)

    def _minutes_until(self, end_s: int) -> Iterator[Past]:
        """Those that begin before `end_s`."""
        if self._minutes is not None:
            yield from takewhile(lambda past: past.start_s < end_s, self._minutes)
            return
        inside_of = _Inside()
        found: list[Past] = []
        for rollup in sorted_in_time(self._kept.rollups(60)):
            past = self._past(rollup, 60, inside_of)
            if rollup.start_s >= end_s and not (self._again and len(found) < _MINUTES_KEPT):
                return
            if rollup.start_s < end_s:
                yield past
            if self._again:
                found.append(past)
        if self._again and len(found) < _MINUTES_KEPT:
            self._minutes = found

    def _past(self, rollup: Rollup, width: int, inside_of: _Inside) -> Past:
        sums, ran = inside_of.of(rollup)
        return Past(
            rollup.process, self._ranks.get(rollup.process), rollup.mode, rollup.start_s, width, rollup.steps,
            rollup.calls, rollup.samples, rollup.unknown, rollup.last_step, sums, ran, (),
        )  # fmt: skip


def sorted_in_time(rollups: Iterator[Rollup]) -> Iterator[Rollup]:
    """Those of one second and process in the order of their steps: a mode has no place in time of its own."""
    same: list[Rollup] = []
    for rollup in rollups:
        if same and rollup.start_s != same[0].start_s:
            yield from sorted(same, key=lambda each: (each.process, each.last_step or 0))
            same = []
        same.append(rollup)
    yield from sorted(same, key=lambda each: (each.process, each.last_step or 0))


def _loaded(kept: Kept, first: int, end_s: int) -> Generator[None, None, dict[tuple[int, int, str], Gathered]]:
    """What is handed over in full and was over before the second `end_s`, by second, process and mode: it is in the
    rollups too.
    """
    found: dict[tuple[int, int, str], Gathered] = defaultdict(Gathered)
    last = kept.id_at(end_s * _SECOND) + DISORDER
    for number, row in enumerate(kept.rows_over(first, last, end_s * _SECOND)):
        if number % _ROWS == 0:
            yield
        with suppress(RecordError, ValueError, TypeError, struct.error, IndexError):
            if row[1] == "steps":
                process, _, mode, start, wall, _, _ = step_columns(row)
                found[(start + wall) // _SECOND, process, mode].steps.append(row[2:])
            else:
                _, _, _, process, _, _, mode, start, wall, _, payload = row
                found[(start + wall) // _SECOND, process, mode].calls.append(call_head(payload)[10:])
    return found


def _take_out(rollup: Rollup, loaded: dict[tuple[int, int, str], Gathered], width: int) -> None:
    for second in range(rollup.start_s, rollup.start_s + width):
        gathered = loaded.get((second, rollup.process, rollup.mode))
        if gathered is None:
            continue
        out = Rollup(second, rollup.process, rollup.mode)
        out.add(gathered)
        rollup.steps -= out.steps
        rollup.calls -= out.calls
        rollup.samples -= out.samples
        rollup.unknown -= out.unknown
        for index, value in enumerate(out.sums):
            if value is not None:
                rollup.sums[index] = (rollup.sums[index] or 0) - value
        for key, count in out.counts.items():
            rollup.counts[key] = rollup.counts.get(key, 0) - count
        if gathered.steps and rollup.last_step is not None:
            rollup.last_step = min(rollup.last_step, gathered.steps[0][2] - 1)


class _Inside:
    """What the phases of calls took; a call may end a second before its step: what is too much is the next's."""

    def __init__(self) -> None:
        self._over: dict[tuple[int, str], tuple[dict[str, int], dict[str, int]]] = {}

    def of(self, rollup: Rollup) -> tuple[dict[str, int], dict[str, int]]:
        """Sums and counts of all series, those of the calls no more than the steps have room for."""
        over = self._over.pop((rollup.process, rollup.mode), ({}, {}))
        sums = {name: took for name, took in zip(SERIES, rollup.sums, strict=True) if took is not None}
        ran: dict[str, int] = defaultdict(int)
        for key, count in rollup.counts.items():
            if key >> 16 < len(SERIES):
                ran[SERIES[key >> 16]] += count
        for name in CALL_PHASES:
            if name in sums or name in over[0]:
                sums[name] = sums.get(name, 0) + over[0].get(name, 0)
                ran[name] += over[1].get(name, 0)
        inside = sum(sums.get(name, 0) for name in CALL_PHASES)
        share = min(max(sums.get("forward", 0), 0) / inside, 1.0) if inside > 0 else 1.0
        left: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for name in CALL_PHASES:
            if name in sums:
                fits, runs = int(sums[name] * share), min(ran[name], rollup.steps)
                left[0][name], left[1][name] = sums[name] - fits, ran[name] - runs
                sums[name], ran[name] = fits, runs
        if any(left[0].values()) or any(left[1].values()):
            self._over[rollup.process, rollup.mode] = left
        return sums, {name: count for name, count in ran.items() if count > 0}


def _switches(kept: Kept) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for process, text in kept.modes():
        with suppress(ValueError, TypeError, AttributeError):
            data = json.loads(text)
            if data.get("refused") is None and type(data.get("step")) is int:
                found[process].append(data["step"])
    return found

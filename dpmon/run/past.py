"""What the history says of the time before the records that a late reader is given: rollups, and drawn steps."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile

from dpmon.past import Drawn, Past
from dpmon.past import Kept as Drew
from dpmon.records import CALL_PHASES, RecordError, call_head
from dpmon.run.draws import Draws
from dpmon.run.kept import Kept
from dpmon.run.rollup import SERIES, Gathered, Rollup
from dpmon.run.rows import step_columns

__all__ = ["Before", "past_of"]

_SECOND = 1_000_000_000
_FINE_S = 660
"""So long before the loaded records seconds are given, before that minutes."""
_DISORDER = 16_000
"""Rings are taken over in turn, so that rows do not lie in strict order of time: by so many ids at most."""
_MINUTES_KEPT = 20_000
"""Of a history that is asked again and again so many minutes are remembered, of a longer one none."""


def past_of(kept: Kept, first: int) -> Iterator[Past | Drawn]:
    """All that was over before the records with an id above `first`, oldest first; then the drawn steps."""
    return Before(kept).of(first)


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
        kept, first = self._kept, max(first, 0)
        if not kept.has_steps(first):
            return
        oldest, end_s = self._border(first, until_ns)
        fine = max((oldest - _FINE_S) // 60 * 60, kept.seconds_from())
        coarse = end_s // 60 * 60 if fine > end_s else None  # seconds were deleted: the last minute is cut in two
        loaded = _loaded(kept, first, end_s + 1 if coarse is None else coarse + 60)
        drawn: list[Drawn] = []
        placed: dict[tuple[int, int, int, str], list[Drew]] = defaultdict(list)
        if self._switches is None:
            self._switches = _switches(kept)
        for process, mode, count, steps, near in self._draws.until(first, kept.id_at(fine * _SECOND)):
            switches = tuple(self._switches.get(process, ()))
            drawn.append(Drawn(process, self._ranks.get(process), mode, count, switches, tuple(steps)))
            for width, found in ((60, steps), (1, near)):
                for step, inside in found:
                    second = (step.start_ns + step.wall_ns) // _SECOND
                    placed[width, second // width * width, process, mode].append((step, inside))
        for past in self._minutes_until(fine if coarse is None else coarse):
            yield past._replace(drawn=tuple(placed[60, past.start_s, past.process, past.mode]))
        inside_of = _Inside()
        if coarse is not None and oldest <= end_s:
            for rollup in sorted_in_time(kept.rollups(60, coarse)):
                if rollup.start_s > coarse:
                    break
                _take_out(rollup, loaded, 60)
                past = self._past(rollup, 60, inside_of)
                if past.steps > 0:
                    yield past._replace(drawn=tuple(placed[60, past.start_s, past.process, past.mode]))
        for rollup in sorted_in_time(kept.rollups(1, fine)):
            if rollup.start_s > end_s:
                break
            _take_out(rollup, loaded, 1)
            past = self._past(rollup, 1, inside_of)
            if past.steps > 0:
                yield past._replace(drawn=tuple(placed[1, past.start_s, past.process, past.mode]))
        yield from drawn

    def _border(self, first: int, until_ns: int | None) -> tuple[int, int]:
        """The second of the oldest call or step above `first`, and the last one in which something was before it."""
        after = self._kept.time_from(first + 1, events=False)
        if until_ns is not None and (after is None or after > until_ns):  # nothing of it is given in full
            oldest = until_ns // _SECOND
            return oldest, oldest - 1
        oldest = (after or 0) // _SECOND
        newest = self._kept.newest_ns(first) // _SECOND if self._kept.holds(first) else oldest
        return oldest, newest if until_ns is None else min(newest, until_ns // _SECOND)

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


def _loaded(kept: Kept, first: int, end_s: int) -> dict[tuple[int, int, str], Gathered]:
    """What is handed over in full and was over before the second `end_s`, by second, process and mode: it is in the
    rollups too.
    """
    found: dict[tuple[int, int, str], Gathered] = defaultdict(Gathered)
    last = kept.id_at(end_s * _SECOND) + _DISORDER
    for row in kept.rows_over(first, last, end_s * _SECOND):
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

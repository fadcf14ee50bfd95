"""What the history says of the time before the records that a late reader is given: rollups, and drawn steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

from dpmon.past import DevicePast, Drawn, Past
from dpmon.past import Kept as Drew
from dpmon.record.plainjson import load_json
from dpmon.record.wire import CALL_PHASES
from dpmon.run.draws import Draws
from dpmon.run.edges import Edges, Spans, last_given
from dpmon.run.kept import Kept
from dpmon.run.reader import RECENT_NS
from dpmon.run.rollup import SERIES, WHOLE, Rollup

__all__ = ["Before", "deleted", "past_of"]

_SECOND = 1_000_000_000
_FINE_S = 660
"""So far back samples of devices are told by the means of their minutes."""
_WARM_SPARE = 64
"""So many are drawn beyond what is wanted, since the first ones after a change of mode are left out then."""
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
    for start, device, name, count, total, _, _ in kept.device_rollups(max(end - _FINE_S, 0)):
        if start < end and count > 0:
            most, means = minutes.setdefault((start, device), (0, {}))
            means[name] = total / count
            minutes[start, device] = max(most, count), means
    for (start, device), (count, means) in minutes.items():
        yield DevicePast(device, start, min(count, end - start, 60), means)


def deleted(kept: Kept) -> Iterator[tuple[int, Rollup]]:
    """What is left of what was deleted to bound the history: sums of so many seconds each (WHOLE: of all before)."""
    if kept.pruned:
        yield from Before(kept).rollups(0)


class Before:
    """What was before any place in one history. With `again`, it is asked often and remembers what is dear."""

    def __init__(self, kept: Kept, *, again: bool = False) -> None:
        self._kept = kept
        self._again = again
        self._ranks = {ring.process: ring.rank for ring in kept.rings.values()}
        self._spans = Spans(kept)
        self._draws = Draws(kept, self._ranks, again=again)
        self._minutes: list[Past] | None = None
        self._switches: dict[int, list[tuple[int, str]]] | None = None

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
        edges = Edges(kept, self._spans, first, until_ns)
        drawn: list[Drawn] = []
        placed: dict[tuple[int, int, int, str], list[Drew]] = defaultdict(list)
        for drew in self._draws.until(first, kept.id_at(edges.fine * _SECOND)):
            if drew is None:
                yield None
                continue
            process, mode, count, steps, near = drew
            drawn.append(self._drawn(process, mode, count, steps))
            for width, found in ((60, steps), (1, near)):
                for step, inside in found:
                    second = (step.start_ns + step.wall_ns) // _SECOND
                    placed[width, second // width * width, process, mode].append((step, inside))
        for past in self._pasts(edges):
            if past is None:
                yield None
                continue
            yield past._replace(drawn=tuple(placed[past.width_s, past.start_s, past.process, past.mode]))
        yield from drawn

    def of_both(self, first: int) -> Iterator[Drawn | None]:
        """Of the processes that have trained in both modes as many steps of each as a report compares.

        From those with ids up to `first`. None in between: there is more to come, which takes a while.
        """
        for drew in self._draws.of_both(first, _WARM_SPARE):
            yield None if drew is None else self._drawn(*drew)

    def _drawn(self, process: int, mode: str, count: int, steps: Sequence[Drew]) -> Drawn:
        if self._switches is None:
            self._switches = _switches(self._kept)
        switches = self._switches.get(process, ())
        return Drawn(
            process,
            self._ranks.get(process),
            mode,
            count,
            tuple(step for step, _ in switches),
            tuple(steps),
            tuple({step for step, to in switches if to == mode}),
        )

    def given_until(self, first: int, until_ns: int) -> int:
        """The highest id of the calls and steps with ids above `first` that were over by then; `first` without one."""
        return last_given(self._kept, self._spans, first, until_ns)

    def rollups(self, first: int) -> Iterator[tuple[int, Rollup]]:
        """Width and sums of all steps and calls that came before the ids above `first`, in order of time."""
        edges = Edges(self._kept, self._spans, first, None)
        yield from ((WHOLE, rollup) for rollup in self._whole(edges))
        before = takewhile(lambda rollup: rollup.start_s < edges.fine, self._kept.rollups(60))
        for rollup in sorted_in_time(before):
            if edges.whole(rollup.process, rollup.start_s):
                yield 60, rollup
        yield from (each for each in self._cut(edges) if each is not None)

    def _whole(self, edges: Edges) -> Iterator[Rollup]:
        """All of it, wherever the edges are: none of it is there in full, and when it was is not known any more."""
        for rollup in sorted_in_time(self._kept.whole() if self._kept.pruned else iter(())):
            rollup.start_s = min(rollup.start_s, edges.until_s)
            yield rollup

    def _pasts(self, edges: Edges) -> Iterator[Past | None]:
        for rollup in self._whole(edges):
            yield self._past(rollup, WHOLE, _Inside())
        for past in self._minutes_until(edges.fine):
            if edges.whole(past.process, past.start_s):
                yield past
        inside_of = _Inside()
        for each in self._cut(edges):
            if each is None:
                yield None
                continue
            width, rollup = each
            past = self._past(rollup, width, inside_of)
            if past.steps > 0:
                yield past

    def _cut(self, edges: Edges) -> Iterator[tuple[int, Rollup] | None]:
        """What follows the whole minutes, without what is given in full."""
        yield from edges.look()
        for at in edges.cut_minutes():
            for rollup in sorted_in_time(_of_minute(self._kept.rollups(60, at), at)):
                if edges.tells(rollup, 60):
                    yield 60, rollup
        latest = edges.latest_s
        seconds = self._kept.rollups(1, edges.fine)
        for rollup in sorted_in_time(takewhile(lambda rollup: rollup.start_s <= latest, seconds)):
            if edges.tells(rollup, 1):
                yield 1, rollup

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
            rollup.calls, rollup.pace, rollup.last_step, sums, ran, (),
        )  # fmt: skip


def _of_minute(rollups: Iterator[Rollup], start_s: int) -> Iterator[Rollup]:
    return takewhile(lambda rollup: rollup.start_s == start_s, rollups)


def sorted_in_time(rollups: Iterator[Rollup]) -> Iterator[Rollup]:
    """Those of one second and process in the order of their steps: a mode has no place in time of its own."""
    same: list[Rollup] = []
    for rollup in rollups:
        if same and rollup.start_s != same[0].start_s:
            yield from sorted(same, key=lambda each: (each.process, each.last_step or 0))
            same = []
        same.append(rollup)
    yield from sorted(same, key=lambda each: (each.process, each.last_step or 0))


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


def _switches(kept: Kept) -> dict[int, list[tuple[int, str]]]:
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for process, text in kept.modes():
        with suppress(ValueError, TypeError, AttributeError):
            data = load_json(text)
            if data.get("refused") is None and type(data.get("step")) is int:
                found[process].append((data["step"], str(data.get("mode"))))
    return found

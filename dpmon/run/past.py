"""What the history says of the time before the records that a late reader is given: rollups, and drawn steps."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

from dpmon.past import Drawn, Past
from dpmon.past import Kept as Drew
from dpmon.records import CALL_PHASES, STEP_PHASES, RecordError, Step, call_head
from dpmon.run.kept import Kept
from dpmon.run.rollup import SERIES, Gathered, Rollup
from dpmon.run.rows import step_columns

__all__ = ["past_of"]

_SECOND = 1_000_000_000
_FINE_S = 660
"""So long before the loaded records seconds are given, before that minutes."""
_DRAWN = 512
"""Steps drawn of each mode: as many as are compared."""
_PAIRS = 16
"""Of so many processes and modes at most."""


def past_of(kept: Kept, first: int) -> Iterator[Past | Drawn]:
    """All that was over before the records with an id above `first`, oldest first; then the drawn steps."""
    if first <= 0 or not kept.has_steps(first):
        return
    ranks = {ring.process: ring.rank for ring in kept.rings.values()}
    loaded = _loaded(kept, first)
    oldest = min((second for second, _, _ in loaded), default=kept.newest_ns() // _SECOND)
    fine = max((oldest - _FINE_S) // 60 * 60, -(-kept.first_second() // 60) * 60)
    near = kept.id_at(fine * _SECOND)
    drawn: list[Drawn] = []
    placed: dict[tuple[int, int, int, str], list[Drew]] = defaultdict(list)
    switches = _switches(kept)
    for process, mode, count in kept.steps_by_mode(first)[:_PAIRS]:
        rank = ranks.get(process)
        steps = _steps(kept, (0, first), process, mode, rank)
        drawn.append(Drawn(process, rank, mode, count, tuple(switches[process]), tuple(steps)))
        for width, found in ((60, steps), (1, _steps(kept, (near, first), process, mode, rank))):
            for step, inside in found:
                second = (step.start_ns + step.wall_ns) // _SECOND
                placed[width, second // width * width, process, mode].append((step, inside))
    inside_of = _Inside()
    for width in (60, 1):
        for rollup in sorted_in_time(kept.rollups(width, fine if width == 1 else 0)):
            if width == 60 and rollup.start_s >= fine:
                break
            _take_out(rollup, loaded, width)
            sums, ran = inside_of.of(rollup)
            if rollup.steps > 0:
                yield Past(
                    rollup.process, ranks.get(rollup.process), rollup.mode, rollup.start_s, width, rollup.steps,
                    rollup.calls, rollup.samples, rollup.unknown, rollup.last_step, sums, ran,
                    tuple(placed[width, rollup.start_s, rollup.process, rollup.mode]),
                )  # fmt: skip
    yield from drawn


def sorted_in_time(rollups: Iterator[Rollup]) -> Iterator[Rollup]:
    """Those of one second and process in the order of their steps: a mode has no place in time of its own."""
    same: list[Rollup] = []
    for rollup in rollups:
        if same and rollup.start_s != same[0].start_s:
            yield from sorted(same, key=lambda each: (each.process, each.last_step or 0))
            same = []
        same.append(rollup)
    yield from sorted(same, key=lambda each: (each.process, each.last_step or 0))


def _loaded(kept: Kept, first: int) -> dict[tuple[int, int, str], Gathered]:
    """What is handed over in full, by second, process and mode: it is in the rollups too."""
    found: dict[tuple[int, int, str], Gathered] = defaultdict(Gathered)
    for row in kept.rows(first):
        with suppress(RecordError, ValueError, TypeError, struct.error, IndexError):
            if row[1] == "steps":
                process, _, mode, start, wall, _, _ = step_columns(row)
                found[(start + wall) // _SECOND, process, mode].steps.append(row[2:])
            elif row[1] == "calls":
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


def _steps(kept: Kept, ids: tuple[int, int], process: int, mode: str, rank: int | None) -> list[Drew]:
    """Steps of a mode drawn evenly from those whose ids are above the first and up to the second."""
    found: list[Drew] = []
    for row in kept.drawn_steps(*ids, process, mode, _DRAWN):
        with suppress(RecordError):
            _, number, _, start, wall, samples, phases = step_columns(row)
            known = {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None}
            step = Step(process, rank, number, mode, start, wall, samples, known)
            found.append((step, _inside(kept.calls_of(row[0], process, number))))
    return found


def _switches(kept: Kept) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for process, text in kept.modes():
        with suppress(ValueError, TypeError, AttributeError):
            data = json.loads(text)
            if data.get("refused") is None and type(data.get("step")) is int:
                found[process].append(data["step"])
    return found


def _inside(payloads: Iterator[bytes]) -> tuple[int, ...] | None:
    """What the phases of a step's calls took together; None if none of them ran, or nothing is known."""
    sums = [-1] * len(CALL_PHASES)
    for payload in payloads:
        with suppress(struct.error, IndexError, TypeError):
            phases = call_head(payload)[10:]
            for index in range(len(CALL_PHASES)):
                if phases[2 * index] >= 0 and phases[2 * index + 1] >= 0:
                    sums[index] = max(sums[index], 0) + phases[2 * index + 1]
    return tuple(sums) if max(sums) >= 0 else None

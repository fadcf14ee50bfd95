"""Steps drawn evenly from a history, up to any place in it."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dpmon.past import Kept as Drew
from dpmon.record.codec import RecordError, Step, call_head
from dpmon.record.wire import CALL_PHASES, STEP_PHASES
from dpmon.run.kept import Kept
from dpmon.run.rows import step_columns

__all__ = ["ALL_DRAWN", "Draws"]

_DRAWN = 512
"""Steps drawn of each mode: as many as are compared while the run goes on."""
ALL_DRAWN = 4096
"""As many as are compared once it is over, by screen and report alike."""
_PAIRS = 16
"""Of so many processes and modes at most."""
_REMEMBERED = 8 * _DRAWN
"""Of each mode so many ids are remembered: a place beyond the first eighth needs no look at every row."""
_ENOUGH = _DRAWN // 4
"""Fewer than these of the last minutes, and they are looked for anew."""
_DECODED = 20_000
_BLOCK = 1 << 16
_IDS, _AT_ONCE = 20_000, 50
"""So many ids are looked through, so many steps taken in, between two turns of somebody else."""


_Drawn = tuple[dict[tuple[int, str], int], dict[tuple[int, str], list[tuple[int, int]]]]
"""How many steps there are of each process and mode, and chances and ids of those that are drawn, in that order."""


class _Mode(NamedTuple):
    """What is remembered of one process in one mode."""

    ids: Sequence[tuple[int, int]]
    """Drawn from the whole history, in the order of the draw: chance and id."""
    blocks: Sequence[int]
    """Of ids, those in which it has steps; in order."""
    counts: Sequence[int]
    """Its steps in all blocks before each of these, and at last in all."""


class Draws:
    """Draws from one history. With `again`, it is asked often: then it looks at every row once, and remembers."""

    def __init__(self, kept: Kept, ranks: Mapping[int, int | None], *, again: bool = False) -> None:
        self._kept = kept
        self._ranks = ranks
        self._again = again
        self._modes: dict[tuple[int, str], _Mode] | None = None
        self._decoded: dict[int, Drew] = {}

    def until(self, first: int, near: int) -> Iterator[tuple[int, str, int, list[Drew], list[Drew]] | None]:
        """Process, mode, how many steps have ids up to `first`, some of these, and some of those with ids above `near`.

        What is drawn is the same at every time. None in between: there is more to come, which takes a while.
        """
        counts, drawn = self._remembered(first) if self._again else (yield from self._looked_up(0, first))
        close = {pair: [one for one in ids if near < one[1] <= first] for pair, ids in drawn.items()}
        if any(len(close[pair]) < _ENOUGH and len(drawn[pair]) < counts[pair] for pair in counts):
            _, close = yield from self._looked_up(near, first)
        for (process, mode), ids in drawn.items():
            here = yield from self._of(ids[:_DRAWN])
            last = yield from self._of(close.get((process, mode), ())[:_DRAWN])
            yield process, mode, counts[process, mode], here, last

    def of_both(self, first: int, spare: int) -> Iterator[tuple[int, str, int, list[Drew]] | None]:
        """ALL_DRAWN steps and `spare` more with ids up to `first`, of each mode of the processes that have several.

        Process, mode, how many steps there are of it, and the steps in the order of the draw. None in between.
        """
        most = ALL_DRAWN + spare
        counts, drawn = yield from self._looked_up(0, first, most)
        modes = Counter(process for process, _ in counts)
        for (process, mode), ids in drawn.items():
            if modes[process] > 1:
                yield process, mode, counts[process, mode], (yield from self._of(ids))

    def _looked_up(self, after: int, until: int, most: int = _DRAWN) -> Generator[None, None, _Drawn]:
        """Piece by piece, since nobody has looked at the rows before."""
        sums: dict[tuple[int, str], int] = defaultdict(int)
        for piece in _pieces(after, until):
            for process, mode, count in self._kept.steps_by_mode(*piece):
                sums[process, mode] += count
            yield
        counts = {pair: sums[pair] for pair in sorted(sums)[:_PAIRS]}
        drawn: dict[tuple[int, str], list[tuple[int, int]]] = {pair: [] for pair in counts}
        for piece in _pieces(after, until):
            for pair, ids in self._kept.drawn_ids(*piece, counts, most).items():
                if ids:
                    drawn[pair] = sorted((*drawn[pair], *ids))[:most]
            yield
        return counts, drawn

    def _remembered(self, first: int) -> _Drawn:
        """The same of all up to `first`, without looking at every row again; more ids than are wanted."""
        if self._modes is None:
            self._modes = self._remember()
        begun = self._kept.steps_by_mode(first // _BLOCK * _BLOCK - 1, first)
        in_block = {(process, mode): count for process, mode, count in begun}
        counts, drawn = {}, {}
        for pair, known in self._modes.items():
            count = known.counts[bisect_right(known.blocks, first // _BLOCK - 1)] + in_block.get(pair, 0)
            if count:
                counts[pair] = count
                drawn[pair] = [one for one in known.ids if one[1] <= first]
        short = [pair for pair, ids in drawn.items() if len(ids) < min(counts[pair], _DRAWN)]
        if short:
            drawn.update(self._kept.drawn_ids(0, first, {pair: counts[pair] for pair in short}, _DRAWN))
        return counts, drawn

    def _remember(self) -> dict[tuple[int, str], _Mode]:
        blocks: dict[tuple[int, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], [0]))
        for block, process, mode, count in self._kept.steps_by_block(_BLOCK):
            places, counts = blocks[process, mode]
            places.append(block)
            counts.append(counts[-1] + count)
        pairs = sorted(blocks)[:_PAIRS]
        counts_of = {pair: blocks[pair][1][-1] for pair in pairs}
        drawn = self._kept.drawn_ids(0, self._kept.last_id, counts_of, _REMEMBERED)
        return {pair: _Mode(drawn[pair], *blocks[pair]) for pair in pairs}

    def _of(self, ids: Sequence[tuple[int, int]]) -> Generator[None, None, list[Drew]]:
        if len(self._decoded) > _DECODED:
            self._decoded.clear()
        found = []
        for place, (_, number) in enumerate(ids, 1):
            if number not in self._decoded:
                for step in self._steps(self._kept.steps_at(number)):
                    self._decoded[number] = step
            if number in self._decoded:
                found.append(self._decoded[number])
            if place % _AT_ONCE == 0:
                yield
        return found

    def _steps(self, rows: Iterable[tuple[Any, ...]]) -> list[Drew]:
        found: list[Drew] = []
        for row in rows:
            with suppress(RecordError):
                process, number, mode, start, wall, samples, phases = step_columns(row)
                known = {name: took for name, took in zip(STEP_PHASES, phases, strict=True) if took is not None}
                step = Step(process, self._ranks.get(process), number, mode, start, wall, samples, known)
                found.append((step, _inside(self._kept.calls_of(row[0], process, number))))
        return found


def _pieces(after: int, until: int) -> Iterator[tuple[int, int]]:
    """The ids above `after` up to `until`, in pieces that take a moment each."""
    return ((low, min(low + _IDS, until)) for low in range(after, until, _IDS))


def _inside(payloads: Iterable[bytes] | None) -> tuple[int, ...] | None:
    """What the phases of a step's calls took together; None if none of them ran, or nothing is known."""
    if payloads is None:
        return None
    sums = [-1] * len(CALL_PHASES)
    for payload in payloads:
        with suppress(struct.error, IndexError, TypeError):
            phases = call_head(payload)[10:]
            for index in range(len(CALL_PHASES)):
                if phases[2 * index] >= 0 and phases[2 * index + 1] >= 0:
                    sums[index] = max(sums[index], 0) + phases[2 * index + 1]
    return tuple(sums) if max(sums) >= 0 else None

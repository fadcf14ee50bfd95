"""Steps drawn evenly from a history, up to any place in it."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from dpmon.past import Kept as Drew
from dpmon.records import CALL_PHASES, STEP_PHASES, RecordError, Step, call_head
from dpmon.run.kept import Kept, chance
from dpmon.run.rows import step_columns

__all__ = ["Draws"]

_DRAWN = 512
"""Steps drawn of each mode: as many as are compared."""
_PAIRS = 16
"""Of so many processes and modes at most."""
_REMEMBERED = 16 * _DRAWN
"""Of each mode so many ids are remembered: a place beyond the first sixteenth needs no look at every row."""
_ENOUGH = _DRAWN // 4
"""Fewer than these of the last minutes, and they are looked for anew."""
_DECODED = 20_000
_BLOCK = 1 << 16
_IDS, _AT_ONCE = 20_000, 50
"""So many ids are looked through, so many steps taken in, between two turns of somebody else."""


class _Mode(NamedTuple):
    """What is remembered of one process in one mode."""

    ids: Sequence[int]
    """Drawn from the whole history, in the order of the draw."""
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
        kept = self._kept
        if not self._again:
            yield from self._once(first, near)
            return
        if self._modes is None:
            self._modes = self._remember()
        in_block = {(process, mode): n for process, mode, n in kept.steps_by_mode(first // _BLOCK * _BLOCK - 1, first)}
        for (process, mode), known in self._modes.items():
            count = known.counts[bisect_right(known.blocks, first // _BLOCK - 1)] + in_block.get((process, mode), 0)
            if count:
                steps = self._of(known.ids, 0, first, process, mode, min(count, _DRAWN))
                yield process, mode, count, steps, self._of(known.ids, near, first, process, mode, _ENOUGH)

    def _once(self, first: int, near: int) -> Iterator[tuple[int, str, int, list[Drew], list[Drew]] | None]:
        """Piece by piece, since nobody has looked at the rows before."""
        counts: dict[tuple[int, str], int] = defaultdict(int)
        for piece in _pieces(0, first):
            for process, mode, count in self._kept.steps_by_mode(*piece):
                counts[process, mode] += count
            yield None
        for process, mode in sorted(counts)[:_PAIRS]:
            steps = yield from self._drawn(0, first, process, mode)
            last = yield from self._drawn(near, first, process, mode)
            yield process, mode, counts[process, mode], steps, last

    def _drawn(self, after: int, until: int, process: int, mode: str) -> Generator[None, None, list[Drew]]:
        lowest: list[tuple[Any, ...]] = []
        for piece in _pieces(after, until):
            below = chance(lowest[-1][0]) if len(lowest) == _DRAWN else 1 << 32
            more = self._kept.drawn_steps(*piece, process, mode, _DRAWN, below)
            lowest = sorted([*lowest, *more], key=lambda row: chance(row[0]))[:_DRAWN]
            yield
        found: list[Drew] = []
        for at in range(0, len(lowest), _AT_ONCE):
            found += self._steps(lowest[at : at + _AT_ONCE])
            yield
        return found

    def _remember(self) -> dict[tuple[int, str], _Mode]:
        blocks: dict[tuple[int, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], [0]))
        for block, process, mode, count in self._kept.steps_by_block(_BLOCK):
            places, counts = blocks[process, mode]
            places.append(block)
            counts.append(counts[-1] + count)
        return {
            (process, mode): _Mode(
                self._kept.drawn_ids(self._kept.last_id, process, mode, _REMEMBERED), *blocks[process, mode]
            )
            for process, mode in sorted(blocks)[:_PAIRS]
        }

    def _of(self, ids: Sequence[int], after: int, until: int, process: int, mode: str, least: int) -> list[Drew]:
        chosen = list(islice((number for number in ids if after < number <= until), _DRAWN))
        if len(chosen) < least and len(ids) >= _REMEMBERED:
            return self._steps(self._kept.drawn_steps(after, until, process, mode, _DRAWN))
        if len(self._decoded) > _DECODED:
            self._decoded.clear()
        for number in chosen:
            if number not in self._decoded:
                for found in self._steps(self._kept.steps_at(number)):
                    self._decoded[number] = found
        return [self._decoded[number] for number in chosen if number in self._decoded]

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

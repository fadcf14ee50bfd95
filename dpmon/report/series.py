"""Steps over time, in stretches whose width doubles as the run grows: at most BINS of them, whatever its length."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpmon.rates import Gap
from dpmon.record.wire import CALL_PHASES, STEP_PHASES
from dpmon.report.story import PARTS, Bin
from dpmon.run.rollup import SERIES, Rollup

__all__ = ["BINS", "Series"]

BINS = 400
_FIRST_NS = 125_000_000
_STEP_SLOTS = tuple(PARTS.index(name) for name in STEP_PHASES)
_CALL_SLOTS = tuple(PARTS.index(name) for name in CALL_PHASES)
_FORWARD = PARTS.index("forward")
_Kind = int
_STEP, _EVALUATION, _DELETED = range(3)
"""Of deleted steps evaluations cannot be told apart: they are of a kind of their own."""


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    wall_ns: int = 0
    elapsed_ns: int = 0
    """As in a Bin, without the gaps, which are stored separately."""
    longest_ns: int = 0
    samples: int = 0
    unknown: int = 0
    parts: list[int] = field(default_factory=lambda: [0] * len(PARTS))

    def add(self, other: _Sum) -> None:
        self.steps += other.steps
        self.wall_ns += other.wall_ns
        self.elapsed_ns += other.elapsed_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.samples += other.samples
        self.unknown += other.unknown
        self.parts = [a + b for a, b in zip(self.parts, other.parts, strict=True)]


class Series:
    """Takes steps and calls in any order."""

    def __init__(self) -> None:
        self._width = _FIRST_NS
        self._sums: dict[tuple[int, str, _Kind], _Sum] = {}
        self._gaps: dict[tuple[str, _Kind], array[int]] = {}
        """Begin and length of the times between steps, by mode and kind. `_place_gaps` adds them at the end."""
        self._waits: list[tuple[int, int]] = []

    def step(
        self, mode: str, evaluation: bool, start: int, wall: int, samples: int | None, phases: Sequence[int | None]
    ) -> None:
        """A step; `phases` as in STEP_PHASES."""
        found = self._sum(mode, _EVALUATION if evaluation else _STEP, start)
        found.steps += 1
        found.wall_ns += wall
        found.elapsed_ns += wall
        found.longest_ns = max(found.longest_ns, wall)
        if samples is None:
            found.unknown += 1
        else:
            found.samples += samples
        parts = found.parts
        for slot, took in zip(_STEP_SLOTS, phases, strict=True):
            if took is not None and took > 0:
                parts[slot] += took

    def gap(self, mode: str, start: int, gap: Gap) -> None:
        """The time before a step that began at `start`."""
        if gap.ns:
            kept = self._gaps.setdefault((mode, _EVALUATION if gap.evaluation else _STEP), array("q"))
            kept.extend((start - gap.ns, gap.ns))

    def wait(self, begin: int, end: int) -> None:
        """Note a wait for input, which training time leaves out."""
        self._waits.append((begin, end))

    def call(self, mode: str, evaluation: bool, start: int, phases: Sequence[int]) -> None:
        """A call; `phases`: offset (-1: did not run) and duration for each of CALL_PHASES."""
        if start < 0 or max(phases[::2]) < 0:
            return
        parts = self._sum(mode, _EVALUATION if evaluation else _STEP, start).parts
        for index, slot in enumerate(_CALL_SLOTS):
            if phases[2 * index] >= 0 and phases[2 * index + 1] > 0:
                parts[slot] += phases[2 * index + 1]

    def rollup(self, width_s: int, rollup: Rollup) -> None:
        """The sums of some seconds, which were deleted otherwise; no stretch is shorter then."""
        if rollup.steps <= 0 or rollup.start_s < 0:
            return
        while self._width < width_s * 1_000_000_000:
            self._halve()
        found = self._sum(rollup.mode, _DELETED, rollup.start_s * 1_000_000_000)
        found.steps += rollup.steps
        found.wall_ns += max(rollup.sums[0] or 0, 0)
        found.elapsed_ns += max(rollup.pace.training.elapsed_ns + rollup.pace.evaluation.elapsed_ns, 0)
        found.longest_ns = max(found.longest_ns, rollup.high_ns or 0)
        found.samples += rollup.samples
        found.unknown += rollup.unknown
        for name, took in zip(SERIES[1:], rollup.sums[1:], strict=True):
            found.parts[PARTS.index(name)] += max(took or 0, 0)

    def _sum(self, mode: str, kind: _Kind, start: int) -> _Sum:
        key = (start // self._width, mode, kind)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = _Sum()
            while len(self._sums) > BINS:
                self._halve()
                found = self._sums[start // self._width, mode, kind]
        return found

    def _halve(self) -> None:
        before, self._sums = self._sums, {}
        self._width *= 2
        for (index, mode, kind), part in before.items():
            self._sums.setdefault((index // 2, mode, kind), _Sum()).add(part)

    def result(self) -> tuple[int, tuple[Bin, ...]]:
        """The width in ns and the stretches in which steps began, in order.

        In a mode in which no step trains, none is an evaluation.
        """
        self._place_gaps()
        self._leave_out_waits()
        found = []
        trained = {mode for (_, mode, kind), part in self._sums.items() if part.steps and kind == _STEP}
        for (index, mode, kind), part in sorted(self._sums.items(), key=lambda item: item[0]):
            if not part.steps:
                continue
            parts = list(part.parts)
            inside = sum(parts[slot] for slot in _CALL_SLOTS)
            # Calls within a backward pass, or of a step that began before: more than the forward cannot be in it.
            parts[_FORWARD] = max(0, parts[_FORWARD] - inside)
            samples = None if part.unknown else part.samples
            counted = part.steps, part.wall_ns, part.longest_ns, samples, tuple(parts)
            found.append(
                Bin(
                    index * self._width, mode, *counted, kind == _EVALUATION and mode in trained, kind == _DELETED,
                    part.elapsed_ns,
                )
            )  # fmt: skip
        return self._width, tuple(found)

    def _place_gaps(self) -> None:
        """Add the time between steps to the stretches; time outside all of them is a gap in a plot."""
        gaps, self._gaps = self._gaps, {}
        for (mode, kind), spans in gaps.items():
            for begin, took in zip(spans[::2], spans[1::2], strict=True):
                for index in range(begin // self._width, (begin + took - 1) // self._width + 1):
                    part = self._sums.get((index, mode, kind))
                    if part is not None and part.steps:
                        first = index * self._width
                        part.elapsed_ns += min(begin + took, first + self._width) - max(begin, first)

    def _leave_out_waits(self) -> None:
        """Subtract each wait for input from the stretch that has the step or gap in which it began."""
        waits, self._waits = self._waits, []
        for begin, end in waits:
            before = [(key, part) for key, part in self._sums.items()
                      if key[0] <= begin // self._width and part.steps and part.elapsed_ns > end - begin]  # fmt: skip
            if before:
                _, part = max(before, key=lambda item: item[0][0])
                part.elapsed_ns -= end - begin

"""Makes tallies for `dpmon.model.compare` from steps that a test lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.model.compare import Comparison, compare_modes
from dpmon.model.state import PHASES
from dpmon.record.schema import EVALUATION, QUANTITIES, SETTLING, device_series
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.store.answers import LongRow, TimeRow
from dpmon.store.figures import Window
from dpmon.store.tables import STEP_COLUMNS
from dpmon.store.tally import NO_SAMPLES, Key, Tally

NOT_RUN = -1

_ROWS = 64
_CALLS = [PHASES.index(phase.shown) for phase in SCHEMA if phase.of_call]
_FORWARD = PHASES.index("forward")
_TRAINS = [PHASES.index(name) for name in ("backward", "optimizer")]


class StepSample(NamedTuple):
    """One step; `phases`: ns of each of PHASES, or NOT_RUN."""

    step: int
    end_ns: int
    wall_ns: int
    samples: int | None
    phases: tuple[int, ...]


class _Steps:
    """A source of a window, from steps by mode, oldest first; `seen`: number of all steps of each mode."""

    def __init__(self, process: int, steps: Mapping[str, Sequence[StepSample]], seen: Mapping[str, int]) -> None:
        self.processes = [process]
        self._rows: list[tuple[int, int, Key, Tally]] = []
        for mode, samples in steps.items():
            size = len(samples) // _ROWS + 1
            for first in range(0, len(samples), size):
                part = samples[first : first + size]
                for key in {self._key(mode, sample) for sample in part}:
                    tally = Tally()
                    same = [sample for sample in part if self._key(mode, sample) == key]
                    tally.add([_facts(sample).row(_start(sample)) for sample in same])
                    self._rows.append((0, 1, key, tally))
            left = seen.get(mode, 0) - len(samples)
            if left > 0:
                self._rows.append((0, 1, Key(process, mode, SETTLING, NO_SAMPLES), Tally(steps=left)))

    def _key(self, mode: str, sample: StepSample) -> Key:
        trains = any(sample.phases[at] >= 0 for at in _TRAINS)
        batch = NO_SAMPLES if sample.samples is None else sample.samples
        return Key(self.processes[0], mode, 0 if trains else EVALUATION, batch)

    def tally_rows(self, begin_s: int, end_s: int, *, process: int) -> Iterable[tuple[int, int, Key, Tally]]:
        return self._rows

    def tallies(self, begin_s: int, end_s: int, *, process: int | None = None) -> dict[Key, Tally]:
        found: dict[Key, Tally] = {}
        for _, _, key, tally in self._rows:
            found.setdefault(key, Tally()).merge(tally)
        return found

    def time_rows(self, begin_s: int, end_s: int, *, process: int | None = None) -> list[TimeRow]:
        return []

    def kinds(self) -> set[tuple[str, int]]:
        return {(key.mode, key.kind) for _, _, key, _ in self._rows}


class StepFacts(NamedTuple):
    """The facts of a step for a tally, ns."""

    number: int
    wall: int
    quantities: Sequence[int | None]
    phases: Sequence[int | None]
    rest: int | None = None
    calls: int = 0
    device: Mapping[str, int] = {}
    parts: Sequence[tuple[str, int]] = ()

    @property
    def series(self) -> list[tuple[str, int]]:
        """Values of further series."""
        return [*((device_series(name), took) for name, took in self.device.items()), *self.parts]

    def row(self, start: int, key: Key | None = None) -> tuple[Any, ...]:
        """Return its row of STEP_COLUMNS."""
        process, mode, kind, _ = key or Key(0, "dp", 0, 0)
        known = None, process, self.number, mode, start, self.wall, kind, self.calls
        row = *known, *self.quantities, *self.phases, self.rest
        return *row, *[None] * (len(STEP_COLUMNS) - len(row))


def _start(sample: StepSample) -> int:
    return sample.end_ns - sample.wall_ns


def _facts(sample: StepSample) -> StepFacts:
    took = [value if value >= 0 else None for value in sample.phases]
    rest = took[_FORWARD]
    if rest is not None:
        took[_FORWARD] = rest + sum(took[at] or 0 for at in _CALLS)
    return StepFacts(sample.step, sample.wall_ns, quantities(samples=sample.samples), took, rest)


def quantities(**known: int | None) -> tuple[int | None, ...]:
    """Return the quantities of a step in the order of the schema."""
    return tuple(known.get(quantity.name) for quantity in QUANTITIES)


def _long(process: int, mode: str, sample: StepSample) -> LongRow:
    facts = _facts(sample)
    phases = {phase.name: took for phase, took in zip(SCHEMA, facts.phases, strict=True) if took is not None}
    kind = 0 if any(sample.phases[at] >= 0 for at in _TRAINS) else EVALUATION
    return LongRow(process, sample.step, mode, kind, _start(sample), sample.wall_ns, phases)


def compare_steps(
    steps: Mapping[str, Sequence[StepSample]],
    *,
    seen: Mapping[str, int] | None = None,
    devices: Sequence[str] = (),
    virtual: bool = False,
    waits: Sequence[tuple[int, int]] = (),
) -> Comparison:
    """Compare the steps of "dp" with those of "single", as in `compare_modes`; `seen`: number of all steps by mode."""
    longest = [_long(0, mode, sample) for mode, samples in steps.items() for sample in samples]
    window = Window(_Steps(0, steps, seen or {}))
    return compare_modes(window, 0, devices=devices, virtual=virtual, longest=longest, waits=waits)

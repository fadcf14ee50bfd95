"""Makes tallies for `dpmon.model.mode_comparison` from steps that a test lists."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.model.mode_comparison import Comparison, compare_modes
from dpmon.model.run_snapshot import PHASES
from dpmon.record.schema import EVALUATION, QUANTITIES, WARM_UP, device_series
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.store.history_schema import STEP_COLUMNS
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.query_results import LongStepRow
from dpmon.store.step_stats import StatsWindow
from dpmon.store.store_queries import Store
from dpmon.store.tally import NO_SAMPLES, TallyKey
from dpmon.store.write_batch import WriteBatch

NOT_RUN = -1

_CALLS = [PHASES.index(phase.display_name) for phase in SCHEMA if phase.of_call]
_FORWARD = PHASES.index("forward")
_TRAINS = [PHASES.index(name) for name in ("backward", "optimizer")]


class StepSample(NamedTuple):
    """One step; `phases`: ns of each of PHASES, or NOT_RUN."""

    step: int
    end_ns: int
    wall_ns: int
    samples: int | None
    phases: tuple[int, ...]


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

    def row(self, start: int, key: TallyKey | None = None) -> tuple[Any, ...]:
        """Return its row of STEP_COLUMNS."""
        process, mode, kind, _ = key or TallyKey(0, "dp", 0, 0)
        known = None, process, self.number, mode, start, self.wall, kind, self.calls
        row = *known, *self.quantities, *self.phases, self.rest
        return *row, *[None] * (len(STEP_COLUMNS) - len(row))


def _facts(sample: StepSample) -> StepFacts:
    took = [value if value >= 0 else None for value in sample.phases]
    rest = took[_FORWARD]
    if rest is not None:
        took[_FORWARD] = rest + sum(took[at] or 0 for at in _CALLS)
    return StepFacts(sample.step, sample.wall_ns, quantities(samples=sample.samples), took, rest)


def quantities(**known: int | None) -> tuple[int | None, ...]:
    """Return the quantities of a step in the order of the schema."""
    return tuple(known.get(quantity.name) for quantity in QUANTITIES)


def compare_steps(
    steps: Mapping[str, Sequence[StepSample]],
    *,
    seen: Mapping[str, int] | None = None,
    devices: Sequence[str] = (),
    virtual: bool = False,
) -> Comparison:
    """Compare the steps of "dp" with those of "single", as in `compare_modes`; `seen`: number of all steps by mode."""
    history, batch, longest = HistoryWriter(sqlite3.connect(":memory:", isolation_level=None), {}), WriteBatch(), []
    for mode, samples in steps.items():
        for step in samples:
            facts, start = _facts(step), step.end_ns - step.wall_ns
            kind = 0 if any(step.phases[at] >= 0 for at in _TRAINS) else EVALUATION
            key = TallyKey(0, mode, kind, NO_SAMPLES if step.samples is None else step.samples)
            batch.add_step(key, step.end_ns, facts.row(start, key), ())
            phases = {phase.name: took for phase, took in zip(SCHEMA, facts.phases, strict=True) if took is not None}
            longest.append(LongStepRow(0, step.step, mode, kind, start, step.wall_ns, phases))
        for number in range(len(samples), (seen or {}).get(mode, 0)):
            key = TallyKey(0, mode, WARM_UP, NO_SAMPLES)
            batch.add_step(key, 1, StepFacts(number, 1, quantities(), [None] * len(SCHEMA)).row(0, key), ())
    history.write(batch)
    return compare_modes(
        StatsWindow(Store(history.checked_connection)), 0, devices=devices, virtual=virtual, longest=longest
    )

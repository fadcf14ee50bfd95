"""The longest training steps in a time range, and what was long in each of them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.announced import Announced
from dpmon.model.uneven import INPUT, waited_ns
from dpmon.record.schema import PHASES, REST, SECOND
from dpmon.store.figures import Window

if TYPE_CHECKING:
    from dpmon.store.queries import Store


class SlowStep(NamedTuple):
    """A long step; of a step of several ranks, the part of the rank that the others waited for."""

    process: int
    rank: int | None
    step: int
    start_ns: int
    wall_ns: int
    phase: str | None
    """The phase that exceeds its median most, by its name on the screen; INPUT if waits for input explain it."""
    excess_ns: float
    """How much longer that phase was than its median."""

    @property
    def end_ns(self) -> int:
        """Its end."""
        return self.start_ns + self.wall_ns


class SlowSteps(NamedTuple):
    """The longest steps of a time range, the longest first."""

    steps: tuple[SlowStep, ...]
    since_ns: int
    """The start of the range, or of the oldest step that is still in the record."""
    complete: bool
    """Whether no older steps of the range were deleted."""


def slow_steps(rows: Store, processes: Collection[int], begin_ns: int, most: int) -> SlowSteps:
    """At most `most` steps of processes that train together, from `begin_ns` to the time of `rows`.

    Steps that settle, just after the start or a change of mode, and evaluations do not count.
    """
    found = rows.slowest(most, processes, begin_ns)
    until_s = rows.until_s if rows.until_s is not None else 1 << 40
    window = Window(rows, max(begin_ns, 0) // SECOND, until_s)
    waits = Announced.read(rows).inputs
    medians: dict[str, dict[str, float]] = {}
    steps = []
    for row in found:
        if row.mode not in medians:
            figures = window.figures(row.mode)
            medians[row.mode] = {phase.name: phase.median_ns or 0.0 for phase in figures.phases if phase.ran}
        usual = medians[row.mode]
        of_call = sum(row.phases.get(phase.name, 0) for phase in PHASES if phase.of_call)
        times = {phase: took for phase, took in row.phases.items() if phase != "forward"}
        if "forward" in row.phases:
            times[REST] = row.phases["forward"] - of_call
        excess = {phase: took - usual.get(phase, 0.0) for phase, took in times.items()}
        name = max(excess, key=lambda phase: excess[phase], default=None)
        longer = 0.0 if name is None else excess[name]
        waited = waited_ns(
            [(a, b) for of, a, b in waits if of == row.process], row.start_ns, row.start_ns + row.wall_ns
        )
        if waited and 2 * waited > longer:
            name, longer = INPUT, float(waited)
        shown = {phase.name: phase.shown for phase in PHASES} | {REST: "forward"}
        phase = None if name is None or longer <= 0 else shown.get(name, name)
        steps.append(
            SlowStep(row.process, rows.ranks.get(row.process), row.step, row.start_ns, row.wall_ns, phase, longer)
        )
    oldest = rows.oldest_step_ns(processes)
    complete = not rows.pruned or oldest is None or oldest <= begin_ns
    return SlowSteps(tuple(steps), begin_ns if complete or oldest is None else oldest, complete)

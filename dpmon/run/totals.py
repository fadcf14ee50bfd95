"""What a run adds up to: by mode, by replica, by rank, by stage."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpmon.rates import Pace, Rate, Tally, rate_of
from dpmon.run.inputs import Inputs
from dpmon.run.pauses import Pauses
from dpmon.run.rollup import Rollup

__all__ = ["Deleted", "ModeTotals", "OnDevice", "RankLine", "ReplicaLine", "StageLine", "Totals", "why_untimed"]


@dataclass(slots=True)
class OnDevice:
    """What the device took for a part of calls or steps: ms of each of which it is known, and why not of how many."""

    ms: array[float] = field(default_factory=lambda: array("d"))
    why: Counter[str] = field(default_factory=Counter)

    def take(self, took: float | None, why: str) -> None:
        """Of one more; `why` it is not known, if it is not."""
        if took is None:
            self.why[why] += 1
        else:
            self.ms.append(took)

    def add(self, other: OnDevice, count: int, otherwise: str | None) -> None:
        """Add all of `other`, which is of so many; `otherwise`: why those that it does not have are not timed."""
        self.ms.extend(other.ms)
        self.why.update(other.why)
        left = count - len(other.ms) - other.why.total()
        if left > 0 and otherwise is not None:
            self.why[otherwise] += left

    @property
    def untimed(self) -> str | None:
        """Why nothing is known, most often; None if something is, or if the record does not say."""
        return None if self.ms or not self.why else self.why.most_common(1)[0][0]


def why_untimed(layout: Any) -> str | None:
    """Why the calls of a layout (a definition) have no times of devices, as far as their records have none."""
    absent = layout.get("absent") if isinstance(layout, dict) else None
    reason = absent.get("device_ms") if isinstance(absent, dict) else None
    return reason if isinstance(reason, str) else None


@dataclass
class ModeTotals:
    """All steps and calls of one mode; every duration in ns."""

    walls: array[int] = field(default_factory=lambda: array("q"))
    step_phases: dict[str, array[int]] = field(default_factory=dict)
    call_phases: dict[str, array[int]] = field(default_factory=dict)
    device_ms: dict[str, array[float]] = field(default_factory=dict)
    """By phase of steps and calls: what the slowest device took, where that is known."""
    steps: Counter[int] = field(default_factory=Counter)
    """By process."""
    tallies: dict[int, Tally] = field(default_factory=dict)
    """By process, the sums for its rate."""
    calls: int = 0

    def add(self, other: ModeTotals) -> None:
        """Add all of `other`."""
        self.walls.extend(other.walls)
        for ours, theirs in ((self.step_phases, other.step_phases), (self.call_phases, other.call_phases)):
            for name, times in theirs.items():
                ours.setdefault(name, array("q")).extend(times)
        for name, spent in other.device_ms.items():
            self.device_ms.setdefault(name, array("d")).extend(spent)
        self.steps.update(other.steps)
        self.calls += other.calls

    def rate(self) -> Rate | None:
        """The rate of all processes; None if there was no step."""
        return rate_of(self.tallies.values())


@dataclass
class Deleted:
    """Sums of the steps of one mode that are in the record no more; evaluations among them cannot be told apart."""

    sums: Rollup
    """Of the whole time: its start and its process mean nothing."""
    first_s: int
    last_s: int
    """They ended from the one second to the other."""
    paces: dict[int, Pace] = field(default_factory=dict)
    """By process."""

    def rate(self) -> Rate | None:
        """As in `ModeTotals`: the rate of training steps, or of evaluations if there are none."""
        trains = any(pace.training.steps for pace in self.paces.values())
        return rate_of(pace.training if trains else pace.counted() for pace in self.paces.values())


class ReplicaLine(NamedTuple):
    """What one replica got and gave, in how many calls; None: the sizes were not seen."""

    mode: str
    root: str
    replica: int
    device: str
    inputs: Any
    outputs: Any
    calls: int


class RankLine(NamedTuple):
    """One process of several: what its calls got and gave most often, and its steps; ns, None if unknown.

    Steps and samples are without evaluations, where those of their mode are kept apart; calls are all.
    """

    process: int
    rank: int | None
    world: int | None
    device: str
    inputs: Any
    outputs: Any
    calls: int
    steps: int
    walls: array[int]
    rate: Rate | None
    forward: OnDevice
    """What the slowest of its devices took for the forward of those steps."""


class StageLine(NamedTuple):
    """What one stage of a spread model got and gave, in how many calls; `walls` in ns of those that ended."""

    root: str
    stage: int
    device: str
    parts: tuple[str, ...]
    inputs: Any
    outputs: Any
    calls: int
    walls: array[int]
    on_device: OnDevice


@dataclass
class Totals:
    """One run, added up."""

    modes: dict[str, ModeTotals] = field(default_factory=dict)
    evaluations: dict[str, ModeTotals] = field(default_factory=dict)
    """Steps without a backward pass and an optimizer, of modes in which others have them: these are not in `modes`."""
    deleted: dict[str, Deleted] = field(default_factory=dict)
    """What is left, by mode, of the steps that were deleted to bound the history: they are in neither."""
    replicas: list[ReplicaLine] = field(default_factory=list)
    ranks: list[RankLine] = field(default_factory=list)
    """A line a process, if several have trained."""
    stages: list[StageLine] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)
    """The newest record of each process of what the devices' memory holds."""
    processes: int = 0
    pauses: Pauses = field(default_factory=Pauses)
    inputs: Inputs = field(default_factory=Inputs)
    virtual: bool = False
    distributed: bool = False
    """Whether a call was of a DistributedDataParallel: its ranks have no mode of their own."""
    reasons: list[str] = field(default_factory=list)
    """Why the run is in the mode it is in, as the training says, and what it warned of."""
    warnings: list[str] = field(default_factory=list)
    dropped: int = 0
    pruned: int = 0

"""A process as it is drawn: its steps, its calls and their figures at one time. Data only.

Times are ns since the run's start. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpmon.model.compare import Comparison
from dpmon.model.memory import Peak
from dpmon.model.uneven import Uneven
from dpmon.rates import Rate
from dpmon.record.kinds import Call, Step
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.store.figures import Figures, PhaseFigures

PHASES = tuple(phase.shown for phase in SCHEMA)
"""Phases of a step as shown: the phases of its calls take their part out of `forward`, which keeps the rest."""
NO_STEPS = tuple(PhaseFigures(name, 0, None, None, None, None) for name in PHASES)
"""The figures of phases that did not run."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the history: the steps of one mode that ended in a stretch of time. Sums in ns."""

    second: int
    """Start of the stretch."""
    mode: str
    count: int = 0
    """Steps; 0 if there were none."""
    wall_ns: int = 0
    begin_ns: int = 0
    """When its first step began."""
    phases: tuple[int, ...] = (0,) * len(PHASES)
    """In the order of PHASES."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The steps of one mode in a time range; `figures` None if there are none."""

    figures: Figures | None = None
    phases: tuple[PhaseFigures, ...] = NO_STEPS
    """As shown: `forward` is what the phases of the calls leave of it."""
    uneven: Uneven | None = None
    """Why the median says little of the speed, if it does."""

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.figures.steps if self.figures is not None else 0

    @property
    def mode(self) -> str:
        """Their mode; "" without steps."""
        return self.figures.mode if self.figures is not None else ""

    @property
    def evaluation(self) -> bool:
        """Whether they are the evaluation steps of a mode that also trains."""
        return self.figures is not None and self.figures.evaluation

    @property
    def median_ns(self) -> float | None:
        """Of a step."""
        return self.figures.median_ns if self.figures is not None else None

    @property
    def p95_ns(self) -> float | None:
        """Of a step."""
        return self.figures.p95_ns if self.figures is not None else None

    @property
    def mean_ns(self) -> float | None:
        """Of a step."""
        return self.figures.mean_ns if self.figures is not None else None

    @property
    def rate(self) -> Rate | None:
        """Steps and samples per elapsed time."""
        return self.figures.rate if self.figures is not None else None


class ModeTrack(NamedTuple):
    """What was seen of one process in one mode."""

    mode: str
    devices: tuple[str, ...] = ()
    virtual: bool = False
    peaks: Mapping[str, Peak] = {}
    """By device, how much memory was used while in this mode."""


class Spread(NamedTuple):
    """Times of one replica or stage in ns: the 5th percentile, the median, the 95th, of how many calls."""

    low: float
    middle: float
    high: float
    calls: int


@dataclass(frozen=True, slots=True)
class CallTrack:
    """The last call of one root, and how long each replica took in calls like it."""

    last: Call
    times: tuple[Spread | None, ...] = ()
    """By replica, or stage."""
    device_ns: Mapping[int, float] = field(default_factory=dict)
    """By replica or stage: the median of what its device took, where that is known."""
    parts: tuple[CallTrack, ...] = ()
    """Where a step calls this root several times: its first call in a step, its second, ..."""


class Refusal(NamedTuple):
    """A mode that a root was asked for (or was to start in) and cannot have."""

    mode: str
    reason: str


class Recent(NamedTuple):
    """The last ten seconds of training in the mode in force; `rate` None if there are too few steps."""

    rate: Rate | None = None
    """Of all ranks that train together."""
    last_ns: int | None = None
    """When the last training step ended."""
    step_ns: int = 0
    """The mean step."""


class RankFigures(NamedTuple):
    """Medians of one process of several in ns; None if unknown."""

    step_ns: float | None = None
    forward_ns: float | None = None
    backward_ns: float | None = None
    step_p95_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """One training process of the run. What follows `memory` is known only of those that train now, or of the first."""

    process: int
    rank: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    began_ns: int = -1
    """When the first of its steps and calls began."""
    resumed_ns: int = -1
    """When it took up work again after its last silence; when it began, if there was none."""
    seen_ns: int = -1
    """When its newest step or call ended."""
    last_step: Step | None = None
    mode: str = ""
    virtual: bool = False
    devices: tuple[str, ...] = ()
    mode_reason: str | None = None
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By root, as long as the last answer that it gave was a refusal."""
    paused_since_ns: int | None = None
    """None while it is not paused."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The newest record of what the devices' memory holds."""
    calls: Mapping[tuple[str, str | None], CallTrack] = field(default_factory=dict)
    """By root and what it was called through."""
    newest: tuple[str, str | None] | None = None
    """The root that was called last."""
    last_calls: tuple[Call, ...] = ()
    """Of its last step."""
    figures: RankFigures = field(default_factory=RankFigures)
    """If it is one of several that train."""
    recent: Recent = field(default_factory=Recent)
    modes: Mapping[str, ModeTrack] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    """The history in the time range, oldest first."""
    column_s: int = 1
    """Seconds of each."""
    ranged: Summary = field(default_factory=Summary)
    """The steps of the mode of the last step, in the time range."""
    whole: Summary = field(default_factory=Summary)
    """The same of the whole run, once it is over."""
    mean: Rate | None = None
    """Its rate in all modes, once the run is over; that of all processes if it is one of several ranks."""
    compared: Comparison | None = None
    """Its modes side by side."""

"""What a picture of a run is drawn from: data only, made anew for each picture by dpmon.model.snapshot.

Times are ns since the run's start. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.model.turns import standing_for, taking_turns
from dpmon.rates import Rate
from dpmon.record.codec import Call, Step
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.store.figures import Figures, PhaseFigures

if TYPE_CHECKING:
    from dpmon.model.compare import Comparison
    from dpmon.model.uneven import Uneven

__all__ = [
    "HOST",
    "MODES_COMPARED",
    "NO_STEPS",
    "PHASES",
    "CallTrack",
    "Column",
    "DeviceTrack",
    "ModeChange",
    "ModeTrack",
    "PauseChange",
    "Peak",
    "Process",
    "RankFigures",
    "Recent",
    "Refusal",
    "Spread",
    "State",
    "Summary",
    "WarningText",
]

PHASES = tuple(phase.shown for phase in SCHEMA)
"""Phases of a step as shown: the phases of its calls take their part out of `forward`, which keeps the rest."""
MODES_COMPARED = ("single", "dp")
NO_STEPS = tuple(PhaseFigures(name, 0, None, None, None, None) for name in PHASES)
"""The figures of phases that did not run."""
HOST = "host"
"""The key in a mode's peaks for the sampled memory of all processes of the run."""


class Peak(NamedTuple):
    """The most memory that was used in a mode; at most this much if not `exact` (the peak came before the mode did)."""

    bytes: int
    exact: bool


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


class ModeChange(NamedTuple):
    """An acknowledged answer to a request for a mode (or the mode at the start)."""

    process: int
    t_ns: int | None
    step: int | None
    mode: str
    requested_by: str
    devices: tuple[str, ...]
    virtual: bool
    reason: str | None
    refused: str | None
    root: str = ""


class Refusal(NamedTuple):
    """A mode that a root was asked for (or was to start in) and cannot have."""

    mode: str
    reason: str


class PauseChange(NamedTuple):
    """The training paused after a step, or went on."""

    process: int
    t_ns: int | None
    step: int | None
    paused: bool
    paused_ns: int | None
    """How long it was, where it goes on."""
    reason: str | None
    """Why it went on without having been asked to."""
    refused: str | None
    """Why it did not pause."""


class WarningText(NamedTuple):
    """A warning of ours, from the tracer (process) or from the supervisor (None)."""

    process: int | None
    t_ns: int | None
    text: str


class Recent(NamedTuple):
    """The last ten seconds of training in the mode in force; `rate` None if there are too few steps."""

    rate: Rate | None = None
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
    """Its rate in all modes, once the run is over."""
    compared: Comparison | None = None
    """Its modes side by side."""


class DeviceTrack(NamedTuple):
    """The newest sample of a GPU, or of the host, and its histories: a value a second, None where it is not known."""

    data: Mapping[str, Any] = {}
    t_ns: int | None = None
    second: int = -1
    """Of the newest value."""
    util: tuple[float | None, ...] = ()
    """Per cent."""
    mem: tuple[float | None, ...] = ()
    """Used memory, per cent of all."""
    power: tuple[float | None, ...] = ()
    """Watts."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is known of a run at one time."""

    processes: Mapping[int, Process] = field(default_factory=dict)
    devices: Mapping[int, DeviceTrack] = field(default_factory=dict)
    host: DeviceTrack = field(default_factory=DeviceTrack)
    mode_changes: tuple[ModeChange, ...] = ()
    """The newest, oldest first; as the other lists."""
    mode_change_count: int = 0
    """Of all."""
    pauses: tuple[PauseChange, ...] = ()
    warnings: tuple[WarningText, ...] = ()
    warning_count: int = 0
    missed: int = 0
    """Records that nobody will read."""
    newest_ns: int = -1
    """When the newest step or call ended."""
    ended: frozenset[int] = frozenset()
    """Processes that train no more, as far as a reader knows; no record says so."""
    over: bool = False
    """Whether the run is over."""
    samples_share: float | None = 1.0
    """Samples of all ranks that train, over those of the process that stands for the run; None if unknown."""

    def training(self) -> list[Process]:
        """Those that train now (`dpmon.model.turns`)."""
        return taking_turns(self)

    def focus(self) -> Process | None:
        """The process whose numbers stand for the run: the first of those that train now, by rank."""
        return standing_for(self)

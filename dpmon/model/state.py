"""What is known of a run, as far as a reader needs it: everything in bounded buffers, so memory is flat for ever.

Times are ns since the run's start. Unknown is None; a phase that did not run in a step is NOT_RUN in its sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpmon.model.turns import standing_for, taking_turns
from dpmon.rates import Pace, Paces
from dpmon.record import schema
from dpmon.record.codec import Call, Step

__all__ = [
    "MODES_COMPARED",
    "NOT_RUN",
    "PHASES",
    "SETTLED_KEPT",
    "SETTLED_MOST",
    "WARM_STEPS",
    "CallTrack",
    "Column",
    "DeviceTrack",
    "Mark",
    "ModeChange",
    "ModeTrack",
    "Peak",
    "Process",
    "Refusal",
    "State",
    "StepSample",
    "Timed",
    "WarningText",
]

PHASES = tuple(phase.shown for phase in schema.PHASES)
"""Phases of a step as shown: the phases of its calls take their part out of `forward`, which keeps the rest."""
NOT_RUN = -1

STEPS_KEPT = 1024
COLUMNS_KEPT = 640
LONG_KEPT = 256
SETTLED_KEPT, SETTLED_MOST = 512, 4096
"""Steps of each mode that are kept to be compared while a run goes on, and once it is over."""
WARM_STEPS = 5
"""Steps after a change of mode that are left out where modes are compared."""
MODES_COMPARED = ("single", "dp")
HOST = "host"
"""The key in a mode's peaks for the sampled memory of all processes of the run."""
SAMPLED_NEWEST = 256
NEWEST_COLUMNS = 8
"""Columns that keep SAMPLED_NEWEST of their steps: of a short run, or a mode that has just begun, all or nearly so."""
SAMPLED = 8
FULL_COLUMNS = 150
"""Columns that keep SAMPLED of their steps at least; older ones keep SAMPLED_LATER."""
SAMPLED_LATER = 2
CALLS_KEPT = 64
PARTS_KEPT = 8
CALLS_TIMED = 128
REPLICAS_TIMED = 256
MARKS_KEPT = 32
ROOTS_KEPT = 32
PROCESSES_KEPT = 1024
DEVICES_KEPT = 256
HISTORY_KEPT = 640
TEXTS_KEPT = 100
OPEN_STEPS_KEPT = 64


class StepSample(NamedTuple):
    """One step: its number, when it ended, how long it took, samples or None, ns for each of PHASES or NOT_RUN."""

    step: int
    end_ns: int
    wall_ns: int
    samples: int | None
    phases: tuple[int, ...]

    def __deepcopy__(self, memo: object) -> StepSample:
        """It never changes, so a frozen picture shares it."""
        return self


class Peak(NamedTuple):
    """The most memory that was used in a mode: `exact`, or at most so much (the peak came before the mode did)."""

    bytes: int
    exact: bool


class Mark(NamedTuple):
    """The progress of a process at one time, for rates over a window. The other fields are as in dpmon.rates.Tally."""

    end_ns: int
    steps: int
    samples: int
    unknown: int
    step_ns: int
    elapsed_ns: int


@dataclass(slots=True)
class Column:
    """One column of history: the steps of one mode that ended in one second, or in several from `second` on."""

    number: int
    second: int
    mode: str
    count: int = 0
    wall_ns: int = 0
    begin_ns: int = 0
    """When its first step began."""
    pace: Pace = field(default_factory=Pace)
    phases: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    """Sums in ns."""
    ran: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    """Steps in which each phase ran."""
    sampled: list[StepSample] = field(default_factory=list)
    """At most SAMPLED_NEWEST of its steps, drawn evenly; each stands for `count` divided by how many there are."""

    def __deepcopy__(self, memo: object) -> Column:
        """By hand, since there are hundreds and a picture is to freeze at once."""
        return self.copy(self.number)

    def copy(self, number: int) -> Column:
        """A column like this one, under a number of its own."""
        return Column(
            number, self.second, self.mode, self.count, self.wall_ns, self.begin_ns, self.pace.copy(),
            self.phases[:], self.ran[:], self.sampled[:],
        )  # fmt: skip


@dataclass(slots=True)
class ModeTrack:
    """What was seen of one process in one mode."""

    mode: str
    steps: deque[StepSample] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    count: int = 0
    settled: list[StepSample] = field(default_factory=list)
    """At most SETTLED_KEPT steps (SETTLED_MOST after the end): of those that did not follow a change of mode each is as
    likely as any other; unordered."""
    settled_of: int = 0
    """Of how many they were drawn."""
    settled_count: int = 0
    """How many were ever put there."""
    devices: tuple[str, ...] = ()
    virtual: bool = False
    peaks: dict[str, Peak] = field(default_factory=dict)
    """By device, how much memory was used while in this mode."""
    device_ms: dict[str, deque[float | None]] = field(default_factory=dict)
    """By phase (of PHASES): what the slowest device took in the newest steps, None where that is not known."""
    forward_ms: deque[float | None] = field(default_factory=lambda: deque(maxlen=CALLS_TIMED))
    """The same of the whole forward, the phases of the calls within."""


class Timed(NamedTuple):
    """The times of a CallTrack: of replicas, of stages, and on devices."""

    replica_ns: list[deque[int]]
    stage_ns: dict[tuple[int, str, tuple[str, ...]], deque[int]]
    device_ms: dict[int, deque[float | None]]


@dataclass(slots=True)
class CallTrack:
    """The last call of one root and how long each replica took in the calls before it that looked the same."""

    last: Call
    count: int = 0
    replica_ns: list[deque[int]] = field(default_factory=list)
    """A deque a replica, newest last; begun anew when mode, devices or the number of replicas change.

    Like the other times of calls that trained as the last one did, or of such as did not."""
    stage_ns: dict[tuple[int, str, tuple[str, ...]], deque[int]] = field(default_factory=dict)
    """The same for stages, by number, device and parts."""
    device_ms: dict[int, deque[float | None]] = field(default_factory=dict)
    """By replica or stage: what its device took in the newest calls, None where that is not known."""
    aside: Timed | None = None
    """The times of the calls in the other of training and evaluation, until there are such calls again."""
    parts: list[CallTrack] = field(default_factory=list)
    """Where a step calls this root several times: its first call in a step, its second, PARTS_KEPT at most."""


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


@dataclass(slots=True)
class Process:
    """One training process of the run."""

    process: int
    rank: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    mode: str = ""
    virtual: bool = False
    devices: tuple[str, ...] = ()
    mode_reason: str | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """By root, as long as the last answer that it gave was a refusal."""
    answered: int = 0
    """The last step in which a root answered to what somebody asked for."""
    dp_step: int = -2
    """The last step with a call under dp."""
    calls: dict[tuple[str, str | None], CallTrack] = field(default_factory=dict)
    newest: tuple[str, str | None] | None = None
    """The root that was called last."""
    calls_in_step: dict[tuple[str, str | None], int] = field(default_factory=dict)
    """How often each root was called in the step of the newest call so far."""
    call_count: int = 0
    step_count: int = 0
    last_step: StepSample | None = None
    began_ns: int = -1
    """When the first of its steps and calls that were seen began."""
    resumed_ns: int = -1
    """When it took up work again after its last silence; when it began, where there was none."""
    seen_ns: int = -1
    """When its newest step or call ended."""
    modes: dict[str, ModeTrack] = field(default_factory=dict)
    columns: deque[Column] = field(default_factory=lambda: deque(maxlen=COLUMNS_KEPT))
    columns_made: int = 0
    long: list[Column] = field(default_factory=list)
    """The whole run but the newest column, in columns of `long_s` seconds."""
    long_s: int = 1
    long_only: bool = False
    """The beginning of the run is in `long` only: it was read from what a record keeps of every minute."""
    chance: int = 1
    """Where the even draw of steps stands."""
    calls_kept: deque[Call] = field(default_factory=lambda: deque(maxlen=CALLS_KEPT))
    """The newest calls, oldest first."""
    turn: Step | None = None
    """The newest step, as it was recorded."""
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS_KEPT))
    """Of the mode in force only: a speed never mixes two modes."""
    marks_mode: str = ""
    paused_since_ns: int | None = None
    """None while it is not paused."""
    paused_ns: int = 0
    """In all pauses that are over: time that is in no step."""
    inputs: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=TEXTS_KEPT))
    """Begin and end of each wait for a line of input. Step times include that time, rates do not."""
    paces: Paces = field(default_factory=Paces)
    """The sums from which its rates are computed."""
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What was worked out of the rest, with what it depends on."""
    visit: int = 0
    """The number of the first step since the mode changed last."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The newest record of what the devices' memory holds."""
    open_steps: dict[int, list[int]] = field(default_factory=dict)
    """Phases of the calls of steps that have not ended: ns in the order of CALL_PHASES."""
    open_device: tuple[int, dict[str, float | None]] = (-1, {})
    """Of the newest call's step: what the devices took for the phases of its calls so far, ms; None: not known."""

    def settled_of(self, mode: str) -> list[StepSample]:
        """Steps of `mode`, drawn evenly from those that did not follow a change of mode; oldest first."""
        track = self.modes.get(mode)
        return sorted(track.settled) if track is not None else []


@dataclass(slots=True)
class DeviceTrack:
    """The newest sample of a GPU, or of the host, and its histories (None: that sample did not have it)."""

    data: Mapping[str, Any] = field(default_factory=dict)
    t_ns: int | None = None
    count: int = 0
    """Samples so far."""
    util: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY_KEPT))
    """Per cent."""
    mem: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY_KEPT))
    """Used memory, per cent of all."""
    power: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY_KEPT))
    """Watts."""


@dataclass(slots=True)
class State:
    """Everything that was folded so far."""

    processes: dict[int, Process] = field(default_factory=dict)
    devices: dict[int, DeviceTrack] = field(default_factory=dict)
    host: DeviceTrack = field(default_factory=DeviceTrack)
    mode_changes: deque[ModeChange] = field(default_factory=lambda: deque(maxlen=TEXTS_KEPT))
    mode_change_count: int = 0
    pauses: deque[PauseChange] = field(default_factory=lambda: deque(maxlen=TEXTS_KEPT))
    pause_count: int = 0
    """Of them all, also of those that are no longer kept."""
    warnings: deque[WarningText] = field(default_factory=lambda: deque(maxlen=TEXTS_KEPT))
    warning_count: int = 0
    dropped: int = 0
    """Records that the record itself says were dropped."""
    ignored: int = 0
    """Records that made no sense (negative durations, fields of the wrong type) or were beyond what is kept."""
    exit: Mapping[str, Any] | None = None
    newest_ns: int = -1

    ended: frozenset[int] = frozenset()
    """Processes that train no more, as far as a reader knows; no record says so."""

    def training(self) -> list[Process]:
        """Those that train now (`dpmon.model.turns`)."""
        return taking_turns(self)

    def focus(self) -> Process | None:
        """The process whose numbers stand for the run: the first of those that train now, by rank."""
        return standing_for(self)

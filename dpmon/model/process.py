"""A process as the screen draws it: its steps, its calls and their figures at one time. Data only.

Times are ns since the run's start; unknown values are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.compare import Comparison, Peak
from dpmon.model.uneven import Uneven
from dpmon.record.kinds import Call, Step
from dpmon.record.schema import PHASES as SCHEMA
from dpmon.record.schema import SECOND
from dpmon.store.figures import Figures, Rate, figures
from dpmon.store.tally import Tally

if TYPE_CHECKING:
    from dpmon.store.store_at import StoreAt

PHASES = tuple(phase.shown for phase in SCHEMA)
"""Shown phases of a step: `forward` is the part outside the phases of its calls."""
NO_STEPS = figures("", False, Tally(), None)
"""The figures of a time range without steps."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the history: the steps of one mode that ended in a stretch of time. Sums in ns."""

    second: int
    """Start of the stretch."""
    mode: str
    count: int = 0
    """Number of steps; 0 if there were none."""
    wall_ns: int = 0
    begin_ns: int = 0
    """Start of its first step."""
    phases: tuple[int, ...] = (0,) * len(PHASES)
    """Sums in the order of PHASES."""
    evaluation: bool = False
    """Whether its steps are evaluations, in a mode that also trains."""


class ModeTrack(NamedTuple):
    """One mode of a process: its devices and memory."""

    mode: str
    devices: tuple[str, ...] = ()
    virtual: bool = False
    peaks: Mapping[str, Peak] = {}
    """Peak memory in this mode, by device."""


class Spread(NamedTuple):
    """Times of one replica or stage in ns: 5th percentile, median, 95th percentile, and the number of calls."""

    low: float
    middle: float
    high: float
    calls: int


@dataclass(frozen=True, slots=True)
class CallTrack:
    """The last call of one root, and its replicas' times in similar calls."""

    last: Call
    times: tuple[Spread | None, ...] = ()
    """Host times, by replica or stage."""
    device_ns: Mapping[int, float] = field(default_factory=dict)
    """Median device time (ns) by replica or stage, if known."""
    parts: tuple[CallTrack, ...] = ()
    """If a step calls this root several times: its first call in a step, its second, ..."""


class ProcessFacts(NamedTuple):
    """The facts that a training process reported; None for a fact that it did not report."""

    process: int
    rank: int | None = None
    world: int | None = None
    pid: int | None = None
    python: str | None = None
    torch: str | None = None


class Refusal(NamedTuple):
    """A mode that a root refused, on request or at its start."""

    mode: str
    reason: str


class Recent(NamedTuple):
    """The last ten seconds of training in the current mode; `rate` is None if there are too few steps."""

    rate: Rate | None = None
    """The rate of all ranks that train together."""
    last_ns: int | None = None
    """The end of the last training step."""
    step_ns: int = 0
    """The mean step."""


@dataclass(frozen=True, slots=True)
class Process:
    """One training process of the run. The fields after `memory` are known only if the picture shows the process."""

    process: int
    rank: int | None = None
    info: ProcessFacts = field(default_factory=lambda: ProcessFacts(-1))
    began_ns: int = -1
    """Start of its first step or call."""
    seen_ns: int = -1
    """End of its newest step or call."""
    last_step: Step | None = None
    mode: str = ""
    virtual: bool = False
    devices: tuple[str, ...] = ()
    mode_reason: str | None = None
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By root, for the roots that refused in their last answer."""
    paused_since_ns: int | None = None
    """Start of its pause; None if it is not paused."""
    memory: Mapping[str, object] = field(default_factory=dict)
    """The newest record of the devices' memory."""
    calls: Mapping[tuple[str, str | None], CallTrack] = field(default_factory=dict)
    """By root and its wrapper."""
    newest: tuple[str, str | None] | None = None
    """The root called last."""
    last_calls: tuple[Call, ...] = ()
    """The calls of its last step."""
    figures: Figures = NO_STEPS
    """Its last one to two minutes, if several processes train; only step, forward and backward."""
    recent: Recent = field(default_factory=Recent)
    modes: Mapping[str, ModeTrack] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    """The history in the time range, oldest first."""
    column_s: int = 1
    """Seconds per column."""
    ranged: Figures = NO_STEPS
    """The steps of the current mode in the time range; of the last step's mode if there are none."""
    uneven: Uneven | None = None
    """How uneven these steps are, if the median does not represent their speed."""
    whole: Figures = NO_STEPS
    """The steps of the whole run, once it is over."""
    mean: Rate | None = None
    """The rate in all modes, once the run is over; of all processes together if it is one of several ranks."""
    compared: Comparison | None = None
    """Its dp steps against its single steps."""


def figures_end_s(rows: StoreAt, process: Process) -> int:
    """The second before which the figures of a process end; they include its newest step.

    As of a time in the past, they include only whole seconds, unless the process has none yet.
    """
    assert process.last_step is not None
    end_s = (process.last_step.start_ns + process.last_step.wall_ns) // SECOND + 1
    whole_s = rows.until_s
    return end_s if whole_s is None or whole_s <= process.began_ns // SECOND + 1 else min(end_s, whole_s)

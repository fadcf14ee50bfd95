"""Everything that a report says of a run, in one object. Times in ns since the run's start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dpmon.model.evidence import DeviceFacts, Evidence, ModeFacts
from dpmon.model.findings import Finding
from dpmon.model.layouts import ReplicaSizes, StageSizes
from dpmon.model.state import ModeChange
from dpmon.model.stragglers import RankTimes
from dpmon.rates import Rate
from dpmon.record.schema import STEP_PHASES
from dpmon.record.wire import CALL_PHASES
from dpmon.report.pauses import Paused, PauseTotals
from dpmon.run.rundir import ExitInfo, RunInfo

PARTS = (*(name for name in STEP_PHASES if name != "forward"), *CALL_PHASES, "forward")
"""What a step's time is stacked from: here `forward` is what is left of it beside the phases of its calls."""


class Bin(NamedTuple):
    """The steps of one mode that ended within one stretch of time."""

    start_ns: int
    """It reaches back over the time in which a step of it was under way and no other ended."""
    end_ns: int
    mode: str
    steps: int
    wall_ns: int
    longest_ns: int
    samples: int | None
    """None where a step did not know its samples."""
    parts: tuple[int, ...]
    """Time in each of PARTS, ns."""
    evaluation: bool = False
    """They had no backward pass and no optimizer, which others of their mode have."""
    elapsed_ns: int = 0
    """Time within these steps, and between them inside this stretch; of several processes the sum."""


@dataclass(frozen=True, slots=True)
class DevicePoint:
    """A GPU (or the host: index -1) over one stretch of time: means; None where nothing was known."""

    t_ns: int
    index: int
    util_pct: float | None
    mem_bytes: float | None


class ProcessFacts(NamedTuple):
    """What a training process said of itself; None where it did not."""

    process: int
    rank: int | None
    world: int | None
    pid: int | None
    python: str | None
    torch: str | None


class RankLine(NamedTuple):
    """One process of several: what its calls got and gave most often, and its steps; None if unknown.

    Steps are without evaluations, where those of their mode are kept apart; calls are all.
    """

    process: int
    rank: int | None
    world: int | None
    device: str
    inputs: str | None
    outputs: str | None
    calls: int
    steps: int
    median_ns: float | None
    rate: Rate | None
    forward_ns: float | None
    """Median of what the slowest of its devices took for the forward of those steps."""
    untimed: str | None
    """Why that is not known, if the record says."""
    times: RankTimes | None = None
    """Mean times of its training steps without the first ones; of all processes of its rank. None without a rank."""


@dataclass
class Story:
    """One run; `dpmon.report.collect` fills it, and from then on it is only read."""

    directory: str
    info: RunInfo
    exit: ExitInfo | None = None
    state: str = ""
    """As `dpmon.run.condition.run_state` says."""
    evidence: Evidence = field(default_factory=Evidence)
    findings: Sequence[Finding] = ()
    evaluations: list[ModeFacts] = field(default_factory=list)
    """Of modes whose other steps train: steps without a backward pass and an optimizer; not in the evidence."""
    steps: int = 0
    calls: int = 0
    """Those that were deleted too, and calls that are in no step."""
    bin_ns: int = 0
    """The width of a stretch, if a step of it does not take longer."""
    bins: Sequence[Bin] = ()
    points: Sequence[DevicePoint] = ()
    processes: Sequence[ProcessFacts] = ()
    changes: list[ModeChange] = field(default_factory=list)
    pauses: Sequence[Paused] = ()
    pauses_left_out: int = 0
    """So many more there were, which are in `paused`."""
    refusals_left_out: int = 0
    paused: PauseTotals = field(default_factory=PauseTotals)
    paused_alone_ns: int = 0
    """When a process was paused while another was there and was not: the figures of devices have that time."""
    replicas: Sequence[ReplicaSizes] = ()
    ranks: Sequence[RankLine] = ()
    stages: Sequence[StageSizes] = ()
    warnings: list[str] = field(default_factory=list)
    last_output: Sequence[str] = ()
    """The last lines of what the script printed (of its stderr in a headless run), if it failed."""
    raised: str | None = None
    """The line of its last traceback that names the exception, if it failed and there is one."""
    host: DeviceFacts | None = None
    """The host in the terms of a device: use of its processors, its memory."""
    gpu_absent: str | None = None
    """Why there are no GPUs to tell of."""
    distributed: str | None = None
    """How the ranks train one model together: a key of RANK_MODES."""
    dropped: int = 0
    pruned: int = 0
    standing: str | None = None
    """For how long nothing has moved, and where each process is; None if something moves."""
    nothing: str | None = None
    """Why there is no step and no call."""

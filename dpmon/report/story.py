"""All facts of a report on a run, in one object. Times in ns since the run's start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpmon.model.devices import DevicePoint
from dpmon.model.evidence import DeviceFacts, Evidence, ModeFacts
from dpmon.model.findings import Finding
from dpmon.model.history import Bin
from dpmon.model.layouts import ReplicaSizes, StageSizes
from dpmon.model.pauses import Paused, PauseTotals
from dpmon.model.process import ProcessFacts
from dpmon.model.run_facts import RankLine
from dpmon.model.state import ModeChange
from dpmon.run.rundir import ExitInfo, RunInfo


@dataclass
class Story:
    """One run. `dpmon.report.collect` fills it, and nothing changes it afterwards."""

    directory: str
    info: RunInfo
    exit: ExitInfo | None = None
    state: str = ""
    """A state of `dpmon.run.condition.run_state`."""
    evidence: Evidence = field(default_factory=Evidence)
    findings: Sequence[Finding] = ()
    evaluations: list[ModeFacts] = field(default_factory=list)
    """Figures of evaluations, in modes that otherwise train. The evidence does not include them."""
    steps: int = 0
    calls: int = 0
    """Both numbers include deleted records; `calls` also includes calls outside steps."""
    open_calls: int = 0
    """The part of `calls` that is not divided into steps yet, in processes without a step."""
    bin_ns: int = 0
    """Width of a stretch. A stretch is wider if a step in it takes longer."""
    bins: Sequence[Bin] = ()
    points: Sequence[DevicePoint] = ()
    processes: Sequence[ProcessFacts] = ()
    changes: list[ModeChange] = field(default_factory=list)
    pauses: Sequence[Paused] = ()
    pauses_left_out: int = 0
    """Number of pauses that are not in `pauses`; `paused` includes them."""
    refusals_left_out: int = 0
    """Number of refused requests that are not in `pauses`."""
    paused: PauseTotals = field(default_factory=PauseTotals)
    paused_alone_ns: int = 0
    """Time in which one process was paused and another was not. The figures of devices include it."""
    replicas: Sequence[ReplicaSizes] = ()
    ranks: Sequence[RankLine] = ()
    stages: Sequence[StageSizes] = ()
    warnings: list[str] = field(default_factory=list)
    last_output: Sequence[str] = ()
    """The last lines of the script's output (of its stderr in a headless run), if it failed."""
    raised: str | None = None
    """The line that names the exception in the last traceback; None if the script did not fail with one."""
    host: DeviceFacts | None = None
    """The host as a device: use of its processors, its memory."""
    gpu_absent: str | None = None
    """Why there are no GPUs in the report."""
    distributed: str | None = None
    """How the ranks train one model together: a key of RANK_MODES."""
    dropped: int = 0
    pruned: int = 0
    standing: str | None = None
    """How long no process has made progress, and where each one is; None if one makes progress."""
    nothing: str | None = None
    """Why there is no step and no call."""

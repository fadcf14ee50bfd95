"""The metrics of one mode of a run, and of one of several processes, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

from dpmon.model.layouts import format_sizes
from dpmon.model.stragglers import RankTimes
from dpmon.record.shared_names import CALL_PHASES, node_suffix
from dpmon.store.step_stats import PhaseStats, Rate, StepStats
from dpmon.store.tally import Tally


@dataclass(frozen=True)
class ModeStats(StepStats):
    """The steps of one process in one mode; `rate` is that of all."""

    phases: tuple[PhaseStats, ...] = ()
    """The phases that ran, with those of calls last."""
    virtual: bool = False
    distributed: str | None = None
    """How ranks called one model together in these steps (a key of RANK_MODES); None if they did not."""
    process: int = 0
    process_name: str | None = None
    """The name of the process, such as "rank 0"; None if it is the only one."""
    other_kind: str = ""
    """Word for the kind of its steps if it is not the main kind of the run."""
    early: Tally | None = None
    """The first third of the steps; None with too few steps."""
    late: Tally | None = None
    """The last third."""
    settled: ModeStats | None = None
    """The metrics without warm-up steps; None if they are not separate."""
    warm_up_steps: int = 0
    """In `settled`: the number of steps that are left out."""

    @property
    def settled_stats(self) -> ModeStats:
        """The metrics without warm-up steps if they are known, or else these metrics."""
        return self.settled or self

    def phase_share(self, *names: str) -> float:
        """Return the share of all step time (0 to 1) that these phases took together."""
        return sum(phase.share or 0.0 for phase in self.phases if phase.name in names)

    def nested_phases(self) -> list[tuple[int, PhaseStats]]:
        """Return (depth, phase) pairs: the phases of calls have depth 1, below forward if it ran; others 0."""
        calls = [phase for phase in self.phases if phase.name in CALL_PHASES]
        rows: list[tuple[int, PhaseStats]] = []
        for phase in self.phases:
            if phase.name not in CALL_PHASES:
                rows.append((0, phase))
                rows += [(1, part) for part in calls if phase.name == "forward"]
        return rows if any(depth for depth, _ in rows) else [*rows, *((0, part) for part in calls)]


class RankSummary(NamedTuple):
    """One process of several: the most frequent inputs and outputs of its calls, and its steps; None if unknown.

    Calls and steps are those of the main kind.
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
    """Median device time of the forward of a step, on the slowest device."""
    untimed: str | None
    """Why `forward_ns` is unknown, if the record has a reason."""
    times: RankTimes | None = None
    """Mean times of the training steps of all processes of its rank, without warm-up steps; None without a rank."""
    node: str | None = None
    """Its node; None on one machine."""

    @property
    def label(self) -> str:
        """Its rank, or its process: "rank 0 of 2", "process 1", "rank 11 of 16 (gpu-1)"."""
        name = f"process {self.process}" if self.rank is None else f"rank {self.rank} of {self.world or '?'}"
        return name + node_suffix(self.node)

    @property
    def flow(self) -> str:
        """The sizes received and returned."""
        return format_sizes(self.inputs, self.outputs)


def slowest_first(ranks: Sequence[RankSummary], limit: int) -> list[RankSummary]:
    """Return all ranks, first the `limit` ranks that were the slowest most often; both parts keep their order."""
    slowest = nlargest(limit, ranks, key=lambda line: 0 if line.times is None else line.times.slowest)
    first_processes = {rank.process for rank in slowest}
    return sorted(ranks, key=lambda line: line.process not in first_processes)

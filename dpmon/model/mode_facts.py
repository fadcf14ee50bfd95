"""The figures of one process in one mode, for report, summary and findings."""

from __future__ import annotations

from dataclasses import dataclass

from dpmon.record.names import CALL_PHASES
from dpmon.store.figures import Figures, PhaseFigures
from dpmon.store.tally import Tally


@dataclass(frozen=True)
class ModeFacts(Figures):
    """The steps of one process in one mode. `phases`: those that ran, with those of calls last; `rate`: of all."""

    virtual: bool = False
    distributed: str | None = None
    """How its ranks trained one model together (a key of RANK_MODES), which is neither dp nor single."""
    process: int = 0
    who: str | None = None
    """The name of the process, such as "rank 0"; None if it is the only one."""
    other_steps: int = 0
    """Number of steps of the other processes in this mode."""
    early: Tally | None = None
    """The first third of the steps; None with too few steps."""
    late: Tally | None = None
    """The last third."""

    @property
    def all_steps(self) -> int:
        """Number of steps of all processes in this mode."""
        return self.steps + self.other_steps

    def share(self, *names: str) -> float:
        """The share of all step time that phases took together (0 to 1)."""
        return sum(phase.share or 0.0 for phase in self.phases if phase.name in names)

    def nested_phases(self) -> list[tuple[int, PhaseFigures]]:
        """The phases with their depth: those of the calls are one deeper, below forward, if it ran."""
        calls = [phase for phase in self.phases if phase.name in CALL_PHASES]
        rows: list[tuple[int, PhaseFigures]] = []
        for phase in self.phases:
            if phase.name not in CALL_PHASES:
                rows.append((0, phase))
                rows += [(1, part) for part in calls if phase.name == "forward"]
        return rows if any(depth for depth, _ in rows) else [*rows, *((0, part) for part in calls)]

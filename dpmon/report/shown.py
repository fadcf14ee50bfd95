"""The process whose times stand for a mode in the summary and the report: the one that the screen shows.

Medians over several processes describe none of them, so times are those of one process. Counts of steps and rates cover
all processes.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from dpmon.model.active_processes import ended_of
from dpmon.model.snapshot import processes_in
from dpmon.run.reader import RunReader
from dpmon.store.figures import Figures
from dpmon.store.queries import Store
from dpmon.store.store_at import StoreAt
from dpmon.store.window import Window


class Shown:
    """The shown process of each mode, its figures and its name."""

    def __init__(self, store: Store, window: Window, directory: Path) -> None:
        self._store, self._window = store, window
        with closing(RunReader(directory)) as reader:
            ended = ended_of(reader.activities())
        state = processes_in(StoreAt(store), ended)
        self._ranks = {number: process.rank for number, process in state.processes.items()}
        found = state.focus()
        self._first = 0 if found is None else found.process
        there = store.processes
        self.names = {process: self._name(process) for process in there} if len(there) > 1 else {}
        """The names of the processes with steps; empty if there is only one."""

    def process(self, mode: str, evaluation: bool) -> int:
        """The process that represents the run; if it has no such step, the lowest rank that has one."""
        there = [self._first, *sorted(self._store.processes, key=self._order)]
        return next((each for each in there if self._window.tally(mode, evaluation, each).steps), self._first)

    def _order(self, process: int) -> tuple[bool, int, int]:
        rank = self.rank(process)
        return rank is None, rank or 0, process

    def rank(self, process: int) -> int | None:
        """The rank of a process; None if it has none."""
        return self._ranks.get(process)

    def figures(self, mode: str, evaluation: bool) -> Figures:
        """The steps of the shown process in a mode; the rate is that of all processes."""
        found = self._window.figures(mode, evaluation, self.process(mode, evaluation))
        return found._replace(rate=self._window.rate(mode, evaluation))

    def name(self, process: int) -> str | None:
        """The name of a process, such as "rank 0"; None if it is the only process with steps."""
        return self.names.get(process)

    def _name(self, process: int) -> str:
        rank = self.rank(process)
        if rank is None:
            return f"process {process}"
        again = sum(self.rank(each) == rank for each in self._store.processes) > 1
        return f"rank {rank} (process {process})" if again else f"rank {rank}"

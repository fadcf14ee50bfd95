"""The accounts of time of all processes of a run, and the synchronized passes of its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpmon.record.schema import EVALUATION
from dpmon.store.history_schema import LASTING
from dpmon.store.query_results import event_from_row
from dpmon.store.sync_passes import SyncPassMatcher
from dpmon.store.time_accounting import LATEST_NS, TimeAccount
from dpmon.store.write_batch import WriteBatch

if TYPE_CHECKING:
    from dpmon.store.history_writer import HistoryWriter

_STALLS = 8
"""Most records of stalls to keep: the step in which a stall was noticed comes soon after it."""


@dataclass
class ProcessAccounts:
    """The accounts of all processes of a run. Waits for input name a process by its pid."""

    by_process: dict[int, TimeAccount] = field(default_factory=dict)
    rounds: SyncPassMatcher = field(default_factory=SyncPassMatcher)
    """The synchronized passes of all ranks."""
    stalls: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_STALLS))
    """The newest records of stalls: when the stall began, and a later time in it."""
    _processes: dict[int, int] = field(default_factory=dict)
    """Processes by pid."""
    _early: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=1000))
    """Waits by pids that no known process has yet: pid, begin, end."""

    def account(self, process: int) -> TimeAccount:
        """The account of a process; a new one begins with the run."""
        found = self.by_process.get(process)
        if found is None:
            found = self.by_process[process] = TimeAccount(0, process, self.stalls)
        return found

    def handle_event(
        self, batch: WriteBatch, process: int | None, kind: str, data: Mapping[str, Any], at_ns: int | None
    ) -> None:
        """Account for an event. `process`: None for an event of the supervisor."""
        if process is not None:
            if kind in ("process", "pause"):
                self._note_process(process, data, at_ns)
            if kind in ("process", "ddp"):
                self.rounds.handle_event(process, kind, data)
            if kind == "process" and type(data.get("pid")) is int:
                self._apply_early_waits(batch, data["pid"])
        elif at_ns is not None and kind == "input":
            took, pid = seconds_to_ns(data.get("waited_s")), data.get("pid")
            if took is not None and type(pid) is int:
                self._add_input_wait(batch, pid, at_ns, at_ns + took)
        elif at_ns is not None and kind == "stall" and "lasted_s" not in data:
            since = seconds_to_ns(data.get("since_s"))
            if since is not None:
                self.stalls.append((since, at_ns))
        elif at_ns is not None and kind == "exit":
            self._close_all(batch, at_ns)

    def resume(self, history: HistoryWriter) -> None:
        """Go on after the events in a history and the last step of each process."""
        query = (
            f"SELECT ifnull(process, -1), t_ns, json FROM events WHERE {LASTING}"
            " AND kind IN ('process', 'pause', 'input', 'stall', 'ddp', 'exit') ORDER BY id"
        )
        nowhere, ends = WriteBatch(), []
        for process, at, *text in history.rows(query):
            event = event_from_row(text)
            if event.kind == "exit":
                ends.append(at)
            else:
                self.handle_event(nowhere, process if process >= 0 else None, event.kind, event.data, at)
        for ring in history.rings().values():
            for number, mode, start, wall, kind in history.last_step(ring):
                self.account(ring.process).resume(number, mode, start, wall, bool(kind & EVALUATION))
        for at in ends:  # the pauses before it are in the history, also those after the last step
            self.handle_event(nowhere, None, "exit", {}, at)

    def _note_process(self, process: int, data: Mapping[str, Any], at_ns: int | None) -> None:
        """Note that a process began to record, paused or resumed."""
        if type(data.get("pid")) is int:
            self._processes[data["pid"]] = process
            if process not in self.by_process:
                self.by_process[process] = TimeAccount(at_ns or 0, process, self.stalls)
        elif isinstance(data.get("paused"), bool) and data.get("refused") is None:
            self.account(process).pause(data["paused"], at_ns, seconds_to_ns(data.get("paused_s")))

    def _apply_early_waits(self, batch: WriteBatch, pid: int) -> None:
        """Account for the earlier waits of a process that began to record."""
        for early in [wait for wait in self._early if wait[0] == pid]:
            self._early.remove(early)
            self._add_input_wait(batch, *early)

    def _add_input_wait(self, batch: WriteBatch, pid: int, begin: int, end: int) -> None:
        """Account for a wait for input of the process with this pid."""
        process = self._processes.get(pid)
        if process is None:
            self._early.append((pid, begin, end))
        else:
            batch.add_activity_time(process, self.account(process).wait(begin, end))

    def _close_all(self, batch: WriteBatch, end_ns: int) -> None:
        """End all accounts with the run."""
        for process, account in self.by_process.items():
            batch.add_activity_time(process, account.finish(end_ns))


def seconds_to_ns(seconds: object) -> int | None:
    """Return an event's seconds in ns; None for an impossible time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) < LATEST_NS / 1e9:
        return None
    return int(seconds * 1e9)

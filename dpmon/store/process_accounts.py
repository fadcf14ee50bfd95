"""The time accounts of all processes of a run, and the process groups of its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpmon.record.safe_json import ns_member
from dpmon.record.schema import step_kind
from dpmon.store.events import EVENTS, LASTING
from dpmon.store.history_writer import WriteBatch
from dpmon.store.rings import read_rings
from dpmon.store.steps import read_last_step
from dpmon.store.sync_passes import RankGroups
from dpmon.store.time_accounting import TimeAccount

if TYPE_CHECKING:
    from dpmon.store.database import HistoryConnection

_MAX_STALLS = 8
"""How many stall events are remembered. The step in which a stall was noticed arrives soon after the event."""


@dataclass
class ProcessAccounts:
    """The accounts of all processes of a run. Events of input waits name a process by its pid."""

    by_process: dict[int, TimeAccount] = field(default_factory=dict)
    rank_groups: RankGroups = field(default_factory=RankGroups)
    stalls: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MAX_STALLS))
    """The newest stalls: the start of each, and a later time in it."""
    _processes: dict[int, int] = field(default_factory=dict)
    """Processes by pid."""
    _early_waits: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=1000))
    """Input waits of pids that no process has reported yet, as (pid, start, end)."""

    def get_account(self, process: int) -> TimeAccount:
        """Return the account of a process. A new account starts with the run."""
        account = self.by_process.get(process)
        if account is None:
            account = self.by_process[process] = TimeAccount(0, process, self.stalls)
        return account

    def handle_event(
        self, batch: WriteBatch, process: int | None, kind: str, data: Mapping[str, Any], time_ns: int | None
    ) -> None:
        """Account for an event. `process`: None for an event of the supervisor. `time_ns`: None if unknown."""
        if process is not None:
            if kind in ("process", "pause"):
                self._note_process(process, data, time_ns)
            if kind in ("process", "ddp"):
                self.rank_groups.handle_event(process, kind, data)
            if kind == "process" and type(data.get("pid")) is int:
                self._apply_early_waits(batch, data["pid"])
        elif time_ns is not None and kind == "input":
            waited_ns, pid = ns_member(data, "waited_s"), data.get("pid")
            if waited_ns is not None and type(pid) is int:
                self._add_input_wait(batch, pid, time_ns, time_ns + waited_ns)
        elif time_ns is not None and kind == "stall" and "lasted_s" not in data:
            since_ns = ns_member(data, "since_s")
            if since_ns is not None:
                self.stalls.append((since_ns, time_ns))
        elif time_ns is not None and kind == "exit":
            for number, account in self.by_process.items():  # the run has ended
                batch.add_activity_time(number, account.finish(time_ns))

    def resume(self, connection: HistoryConnection) -> None:
        """Continue after the events in a history and the last step of each process. Raises HistoryError."""
        condition = f"WHERE {LASTING} AND kind IN ('process', 'pause', 'input', 'stall', 'ddp') ORDER BY id"
        discarded_batch = WriteBatch()
        for row in EVENTS.select(connection, condition):
            self.handle_event(discarded_batch, row.process, row.kind, row.event.data, row.t_ns)
        for ring in read_rings(connection).values():
            step = read_last_step(connection, ring)
            if step is not None:
                account = self.get_account(ring.process)
                account.resume(ring.last_steps, step_kind(step.kind), step.mode, step.start_ns, step.wall_ns)

    def _note_process(self, process: int, data: Mapping[str, Any], time_ns: int | None) -> None:
        """Note that a process started to record, paused or resumed."""
        if type(data.get("pid")) is int:
            self._processes[data["pid"]] = process
            if process not in self.by_process:
                self.by_process[process] = TimeAccount(time_ns or 0, process, self.stalls)
        elif isinstance(data.get("paused"), bool) and data.get("refused") is None:
            self.get_account(process).note_pause(data["paused"], time_ns, ns_member(data, "paused_s"))

    def _apply_early_waits(self, batch: WriteBatch, pid: int) -> None:
        """Account for the earlier input waits of a process that started to record."""
        for early_wait in list(self._early_waits):
            waiting_pid, start_ns, end_ns = early_wait
            if waiting_pid == pid:
                self._early_waits.remove(early_wait)
                self._add_input_wait(batch, pid, start_ns, end_ns)

    def _add_input_wait(self, batch: WriteBatch, pid: int, start_ns: int, end_ns: int) -> None:
        """Account for an input wait of the process with this pid."""
        process = self._processes.get(pid)
        if process is None:
            self._early_waits.append((pid, start_ns, end_ns))
        else:
            batch.add_activity_time(process, self.get_account(process).add_input_wait(start_ns, end_ns))

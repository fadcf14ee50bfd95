"""The accounts of time of all processes of a run, and the synchronised passes of its ranks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dpmon.record.schema import EVALUATION
from dpmon.store.accounting import LATEST_NS, Account
from dpmon.store.answers import event_in, numbers_in
from dpmon.store.batch import Batch
from dpmon.store.rounds import Joined, Rounds, SyncStep, device_tail
from dpmon.store.tables import LASTING
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, Key

if TYPE_CHECKING:
    from dpmon.store.writer import History

_RECENT = 10_000
"""Number of recent steps that a late wait for input may overlap, or that may wait for other ranks."""


@dataclass
class Accounts:
    """The accounts of all processes of a run. Waits for input name a process by its pid."""

    by_process: dict[int, Account] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=Rounds)
    """The synchronised passes of all ranks."""
    _processes: dict[int, int] = field(default_factory=dict)
    """Processes by pid."""
    _early: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=1000))
    """Waits by pids that no known process has yet: pid, begin, end."""

    def account(self, process: int) -> Account:
        """The account of a process; a new one begins with the run."""
        found = self.by_process.get(process)
        if found is None:
            found = self.by_process[process] = Account(process=process)
        return found

    def event(self, batch: Batch, process: int | None, kind: str, data: Mapping[str, Any], at_ns: int | None) -> None:
        """Account for an event. `process`: None for an event of the supervisor."""
        if process is not None:
            if kind in ("process", "pause"):
                self._note_process(process, data, at_ns)
            if kind in ("process", "ddp"):
                self.rounds.take_event(process, kind, data)
            if kind == "process" and type(data.get("pid")) is int:
                self._began(batch, data["pid"])
        elif at_ns is not None and kind == "input":
            took, pid = ns_of(data.get("waited_s")), data.get("pid")
            if took is not None and type(pid) is int:
                self._wait(batch, pid, at_ns, at_ns + took)
        elif at_ns is not None and kind == "exit":
            self._finish(batch, at_ns)

    def resume(self, history: History) -> list[Joined]:
        """Account again for the recent steps of a history, and all its events that an account uses, in their order.

        Return the steps that are now complete: they waited for other ranks.
        """
        rings = [ring for ring in history.rings().values() if ring.steps]
        steps = [step for ring in rings for step in history.last_steps(ring, _RECENT // len(rings) + 1)]
        recent = Counter(process for _, process, *_ in steps)
        older = {ring.process for ring in rings if ring.steps > recent[ring.process]}
        """Processes with steps before the recent ones."""
        query = (
            f"SELECT id, ifnull(process, -1), t_ns, json FROM events WHERE {LASTING}"
            " AND kind IN ('process', 'pause', 'input', 'exit', 'ddp')"
        )
        nowhere = Batch()
        for _, process, *row in sorted([*steps, *history.rows(query)], key=itemgetter(0)):
            if len(row) == 2:
                at, event = row[0], event_in(row[1:])
                self.event(nowhere, process if process >= 0 else None, event.kind, event.data, at)
                continue
            number, mode, start, wall, kind = row
            account = self.account(process)
            (account.resume if process in older else account.step)(number, mode, start, wall, bool(kind & EVALUATION))
            older.discard(process)
        return self._resume_rounds(history)

    def _resume_rounds(self, history: History) -> list[Joined]:
        recent = "id > (SELECT max(id) FROM steps) - ? AND sync_number IS NOT NULL"
        query = f"SELECT process, max(sync_number) FROM steps WHERE {recent} GROUP BY process"
        for process, number in history.rows(query, (_RECENT,)):
            self.rounds.resume(process, number)
        keys = {Key(*row) for row in history.rows("SELECT process, mode, kind, batch FROM keys")}
        columns = "id, process, mode, kind, samples, start_ns + wall_ns AS end_ns, sync_ns, device, synced, sync_number"
        query = f"SELECT {columns} FROM steps WHERE {recent} AND wait_ns IS NULL ORDER BY id"
        found = []
        for number, process, mode, kind, samples, end, tail, device, passes, last in history.rows(query, (_RECENT,)):
            tail = tail if device is None else device_tail(numbers_in(device)[1:])
            key = Key(process, mode, kind, NO_SAMPLES if samples is None else samples)
            key = key if key in keys else key._replace(batch=OTHER_SIZES)
            if tail is not None:
                found += self.rounds.step(process, SyncStep(number, key, end // 1_000_000_000, last, passes or 0, tail))
        return found

    def _note_process(self, process: int, data: Mapping[str, Any], at_ns: int | None) -> None:
        """Note that a process began to record, paused or resumed."""
        if type(data.get("pid")) is int:
            self._processes[data["pid"]] = process
            if process not in self.by_process:
                self.by_process[process] = Account(at_ns or 0, process)
        elif isinstance(data.get("paused"), bool) and data.get("refused") is None:
            self.account(process).pause(data["paused"], at_ns, ns_of(data.get("paused_s")))

    def _began(self, batch: Batch, pid: int) -> None:
        """Account for the earlier waits of a process that began to record."""
        for early in [wait for wait in self._early if wait[0] == pid]:
            self._early.remove(early)
            self._wait(batch, *early)

    def _wait(self, batch: Batch, pid: int, begin: int, end: int) -> None:
        """Account for a wait for input of the process with this pid."""
        process = self._processes.get(pid)
        if process is None:
            self._early.append((pid, begin, end))
        else:
            batch.spend(process, self.account(process).wait(begin, end))

    def _finish(self, batch: Batch, end_ns: int) -> None:
        """End all accounts with the run."""
        for process, account in self.by_process.items():
            batch.spend(process, account.finish(end_ns))


def ns_of(seconds: object) -> int | None:
    """Return an event's seconds in ns; None for an impossible time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) < LATEST_NS / 1e9:
        return None
    return int(seconds * 1e9)

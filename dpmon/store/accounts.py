"""What all processes of a run spend their time on, and what their ranks do together."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpmon.store.accounting import LATEST_NS, Account
from dpmon.store.batch import Batch
from dpmon.store.rounds import Rounds


@dataclass
class Accounts:
    """The accounts of all processes of a run: a process is known by the pid, too, that waits for input."""

    of: dict[int, Account] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=Rounds)
    """The synchronised passes of all ranks."""
    _processes: dict[int, int] = field(default_factory=dict)
    """By pid."""
    _early: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=1000))
    """Waits of pids that are not known to train: pid, begin, end."""

    def account(self, process: int) -> Account:
        """The account of a process; a new one begins with the run."""
        found = self.of.get(process)
        if found is None:
            found = self.of[process] = Account()
        return found

    def event(self, batch: Batch, process: int | None, kind: str, data: Mapping[str, Any], at_ns: int | None) -> None:
        """Account for what an event says; `process` None: it is the supervisor's."""
        if process is not None:
            if kind in ("process", "pause"):
                self._heard(process, data, at_ns)
            if kind in ("process", "ddp"):
                self.rounds.heard(process, kind, data)
            if kind == "process" and type(data.get("pid")) is int:
                self._began(batch, data["pid"])
        elif at_ns is not None and kind == "input":
            took, pid = ns_of(data.get("waited_s")), data.get("pid")
            if took is not None and type(pid) is int:
                self._wait(batch, pid, at_ns, at_ns + took)
        elif at_ns is not None and kind == "exit":
            self._finish(batch, at_ns)

    def _heard(self, process: int, data: Mapping[str, Any], at_ns: int | None) -> None:
        """A process began to record, or paused, or goes on."""
        if type(data.get("pid")) is int:
            self._processes[data["pid"]] = process
            if process not in self.of:
                self.of[process] = Account(at_ns or 0)
        elif isinstance(data.get("paused"), bool) and data.get("refused") is None:
            self.account(process).pause(data["paused"], at_ns, ns_of(data.get("paused_s")))

    def _began(self, batch: Batch, pid: int) -> None:
        """A process began to record: account for the waits that were reported before."""
        for early in [one for one in self._early if one[0] == pid]:
            self._early.remove(early)
            self._wait(batch, *early)

    def _wait(self, batch: Batch, pid: int, begin: int, end: int) -> None:
        """The process with this pid waited for input."""
        process = self._processes.get(pid)
        if process is None:
            self._early.append((pid, begin, end))
        else:
            batch.spend(process, self.account(process).wait(begin, end))

    def _finish(self, batch: Batch, end_ns: int) -> None:
        """The run ended."""
        for process, account in self.of.items():
            batch.spend(process, account.finish(end_ns))


def ns_of(seconds: object) -> int | None:
    """Seconds of an event in ns; None for what can be no time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not abs(seconds) < LATEST_NS / 1e9:
        return None
    return int(seconds * 1e9)

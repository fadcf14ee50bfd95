"""Samples the CPU and memory use of the machine and of the run's processes, with psutil."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from dpmon.gpu.proportional import ProportionalMemory

_SCAN_SHARE = 0.01
"""Largest share of one core for finding new processes, which reads all processes of the machine."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """The machine at one instant. An unknown field is None, and `absent` has the reason by field name.

    `cpu_pct`: share of all cores in use, 0..100. `run_cpu_pct`: use by the run's processes, 100 for one core.
    `mem_used_bytes`: memory not available to a new program. `run_mem_bytes`: memory of the run's processes; a shared
    page is divided among its processes (see `proportional`). `cpus`: processors of the machine. `load_1m`: mean number
    of runnable threads over a minute.
    """

    cpu_pct: float | None = None
    mem_used_bytes: int | None = None
    mem_total_bytes: int | None = None
    run_cpu_pct: float | None = None
    run_mem_bytes: int | None = None
    cpus: int | None = None
    load_1m: float | None = None
    absent: dict[str, str] = field(default_factory=dict)


class HostSampler:
    """Samples the machine and the processes that descend from the run's command; for one thread only."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, proportional: ProportionalMemory | None = None
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._proportional = proportional or ProportionalMemory(clock)
        self._machine: tuple[float, float] | None = None  # busy and total CPU seconds
        self._cpu: dict[psutil.Process, float] = {}  # the run's processes: CPU seconds used
        self._at: float | None = None
        self._scan_due = 0.0

    def pids(self) -> frozenset[int]:
        """Process ids of the run, as of the last sample."""
        return frozenset(process.pid for process in self._cpu)

    def sample(self, root_pid: int | None) -> HostSample:
        """Take a sample. `root_pid`: the run's command; None before its start."""
        absent: dict[str, str] = {}
        cpu_pct = self._machine_cpu(absent)
        used, total = self._memory(absent)
        run_cpu, run_mem = self._run(root_pid, absent)
        return HostSample(cpu_pct, used, total, run_cpu, run_mem, os.cpu_count(), self._load(absent), absent)

    def _load(self, absent: dict[str, str]) -> float | None:
        try:
            return round(os.getloadavg()[0], 2)
        except OSError as error:
            absent["load_1m"] = f"the system does not report it: {error}"
            return None

    def _machine_cpu(self, absent: dict[str, str]) -> float | None:
        try:
            times = psutil.cpu_times()
        except (OSError, psutil.Error, RuntimeError) as error:
            self._machine = None
            absent["cpu_pct"] = f"the system does not report it: {error}"
            return None
        # User time already includes the time of guests.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        before, self._machine = self._machine, (busy, total)
        if before is None or total <= before[1]:
            absent["cpu_pct"] = "needs two samples"
            return None
        return round(min(100.0, max(0.0, 100 * (busy - before[0]) / (total - before[1]))), 1)

    def _memory(self, absent: dict[str, str]) -> tuple[int | None, int | None]:
        try:
            memory = psutil.virtual_memory()
        except (OSError, psutil.Error, RuntimeError) as error:
            absent["mem_used_bytes"] = absent["mem_total_bytes"] = f"the system does not report it: {error}"
            return None, None
        return int(memory.total - memory.available), int(memory.total)

    def _run(self, root_pid: int | None, absent: dict[str, str]) -> tuple[float | None, int | None]:
        now = self._clock()
        if now >= self._scan_due:
            self._find(root_pid)
            took = self._clock() - now
            self._scan_due = now + took / _SCAN_SHARE
        used = 0.0
        resident: dict[tuple[int, float], int] = {}
        parents: dict[tuple[int, float], int] = {}
        alive: dict[psutil.Process, float] = {}
        for process, before in self._cpu.items():
            try:
                if not process.is_running():  # its number may belong to another process by now
                    continue
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    times = process.cpu_times()
                    key = process.pid, process.create_time()
                    resident[key], parents[key] = process.memory_info().rss, process.ppid()
            except psutil.Error:
                continue
            alive[process] = times.user + times.system
            used += max(0.0, alive[process] - before)
        self._cpu = alive
        before_at, self._at = self._at, now
        if not alive:
            reason = "the command has not started" if root_pid is None else "no process of the run is left"
            absent.update(run_cpu_pct=reason, run_mem_bytes=reason)
            self._at = None
            return None, None
        memory, why = self._proportional.total(resident, parents)
        if why is not None:
            absent["run_mem_bytes"] = why
        if before_at is None or now <= before_at:
            absent["run_cpu_pct"] = "needs two samples"
            return None, memory
        return round(100 * used / (now - before_at), 1), memory

    def _find(self, root_pid: int | None) -> None:
        """Add descendants of the command and of known processes; a known process may have lost its parent."""
        if root_pid is not None:
            with contextlib.suppress(psutil.Error):
                self._follow(psutil.Process(root_pid))
        covered: set[psutil.Process] = set()
        for process in list(self._cpu):
            if process in covered:  # each search for children reads the whole process table
                continue
            try:
                children = process.children(recursive=True)
            except psutil.Error:
                continue
            covered.update(children)
            for child in children:
                self._follow(child)

    def _follow(self, process: psutil.Process) -> None:
        """Count the CPU time of a process from now on; its earlier CPU time belongs to no sample."""
        if process not in self._cpu:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu[process] = times.user + times.system
